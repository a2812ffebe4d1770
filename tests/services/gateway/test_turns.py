"""Promise: however many large bodies arrive at once, a round of the event loop reads only some of them."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from motet.services.gateway.edge.turns import LARGE_BYTES, PARTS_PER_ROUND, Turns

LARGE = {"type": "http.request", "body": bytes(LARGE_BYTES), "more_body": True}
SMALL = {"type": "http.request", "body": b"{}", "more_body": False}


def received(message: Message, turns: Turns) -> asyncio.Task[Message]:
    async def receive() -> Message:
        return message

    return asyncio.ensure_future(turns.applied_to(receive)())


async def rounds_until_done(tasks: list[asyncio.Task[Message]]) -> list[int]:
    """How many were done after each round of the loop."""
    done = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        done.append(sum(task.done() for task in tasks))
    return done


async def test_each_round_lets_so_many_large_parts_through_and_the_rest_wait_in_order() -> None:
    turns = Turns()
    tasks = [received(LARGE, turns) for _ in range(3 * PARTS_PER_ROUND)]
    done = await rounds_until_done(tasks)
    steps = [after - before for before, after in zip([0, *done], done, strict=False)]
    assert max(steps) == PARTS_PER_ROUND and done[-1] == len(tasks)
    assert [task.result() for task in tasks] == [LARGE] * len(tasks)


async def test_a_small_part_waits_for_nobody() -> None:
    turns = Turns()
    tasks = [received(LARGE, turns) for _ in range(3 * PARTS_PER_ROUND)]
    small = received(SMALL, turns)
    await asyncio.sleep(0)
    assert small.done() and not any(task.done() for task in tasks)
    await asyncio.gather(*tasks)


async def test_requests_that_end_while_they_wait_take_nobodys_turn() -> None:
    turns = Turns()
    gone = [received(LARGE, turns) for _ in range(PARTS_PER_ROUND)]
    await asyncio.sleep(0)
    last = received(LARGE, turns)
    for task in gone:
        task.cancel()
    async with asyncio.timeout(5):
        assert await last == LARGE
    with pytest.raises(asyncio.CancelledError):
        await gone[0]


async def test_turns_begin_again_after_a_pause() -> None:
    turns = Turns()
    async with asyncio.timeout(5):
        assert await received(LARGE, turns) == LARGE
        await asyncio.sleep(0.01)  # time: a pause
        assert await received(LARGE, turns) == LARGE
