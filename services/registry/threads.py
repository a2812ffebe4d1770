"""Blocking work in threads. The processes that unpack archives import `files`, but not this."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from motet.services.registry.files import PeftFiles

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work()` in a thread that does not keep the process alive, since a download may hang at shutdown."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            if isinstance(value, PeftFiles):
                value.weights.close()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def body() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = work()
        except BaseException as caught:  # handed to the caller
            error = caught
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=body, daemon=True, name="registry-work").start()
    return await done
