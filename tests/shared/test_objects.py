"""Promises of `shared.objects`: an object comes whole, also while JetStream's answers are lost for a moment."""

from __future__ import annotations

import asyncio
import io
import os
from typing import Any

import pytest

from motet.shared import objects, subjects
from motet.shared.bus import Bus
from motet.shared.errors import NotFound, Unavailable


class Deaf:
    """A store whose first answers are lost."""

    def __init__(self, store: Any, lost: int) -> None:
        self._store, self._lost = store, lost

    async def info(self, name: str) -> Any:
        if self._lost:
            self._lost -= 1
            await asyncio.Event().wait()
        return await self._store.info(name)


@pytest.fixture
async def stored(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, bytes]:
    """A store with the object "big", of three megabytes."""
    monkeypatch.setattr(objects, "ANSWER_S", 0.3)
    store = await objects.Objects.open(bus, subjects.UPLOADS)
    data = os.urandom(3 << 20)
    await store.put("big", data)
    return store, data


async def test_answers_that_are_lost_are_asked_for_again(bus: Bus, stored: tuple[Any, bytes]) -> None:
    store, data = stored
    sink = io.BytesIO()
    await objects.read_object(bus, Deaf(store, 3), "big", sink)
    assert sink.getvalue() == data


async def test_a_consumer_whose_answer_is_lost_does_not_send_a_second_copy(
    bus: Bus, stored: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = stored
    add, lost = bus.js.add_consumer, [True]

    async def made_and_not_told(*args: Any) -> Any:
        made = await add(*args)
        if lost.pop() if lost else False:
            await asyncio.Event().wait()
        return made

    monkeypatch.setattr(bus.js, "add_consumer", made_and_not_told)
    sink = io.BytesIO()
    await objects.read_object(bus, store, "big", sink)
    assert sink.getvalue() == data and not lost


async def test_a_store_that_never_answers_and_an_object_that_is_not_there_are_errors(
    bus: Bus, stored: tuple[Any, bytes]
) -> None:
    store, _ = stored
    with pytest.raises(Unavailable):
        await objects.read_object(bus, Deaf(store, objects.TRIES), "big", io.BytesIO())
    with pytest.raises(NotFound):
        await objects.read_object(bus, store, "small", io.BytesIO())
