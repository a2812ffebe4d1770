"""Helpers of all tests: polling instead of sleeping, and what a metric says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from motet.shared.clock import now_s


def reading(metric: Any) -> float:
    """The present value of a counter or gauge, summed over its labels, or of one child of it."""
    return sum(one.value for family in metric.collect() for one in family.samples if not one.name.endswith("_created"))


async def eventually(condition: Callable[[], Any | Awaitable[Any]], *, within_s: float = 10.0, every_s: float = 0.02) -> Any:
    """Poll `condition` (plain or async) until it is truthy and return that value; fail with its last value otherwise.

    An AssertionError inside `condition` counts as "not yet".
    """
    deadline = now_s() + within_s
    last: Any = None
    while True:
        try:
            last = condition()
            if isinstance(last, Awaitable):
                last = await last
            if last:
                return last
        except AssertionError as error:
            last = error
        if now_s() > deadline:
            raise AssertionError(f"not so within {within_s:g} s; last seen: {last!r}")
        await asyncio.sleep(every_s)  # time: between two looks


def until(
    condition: Callable[[], Any], *, within_s: float = 10.0, every_s: float = 0.02, else_say: Callable[[], str] = str
) -> Any:
    """As `eventually`, without an event loop: for threads and processes. `else_say` adds to the error."""
    deadline = now_s() + within_s
    while not (found := condition()):
        assert now_s() < deadline, f"not so within {within_s:g} s; last seen: {found!r} {else_say()}"
        time.sleep(every_s)  # time: between two looks
    return found
