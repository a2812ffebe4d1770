"""Waits for a condition: a bench measures nothing before what it needs is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from motet.shared.clock import now_s

T = TypeVar("T")


def until(condition: Callable[[], T], else_say: Callable[[], str], *, within_s: float, every_s: float = 0.1) -> T:
    """Call `condition` until it returns something true, and return that.

    Raises RuntimeError after `within_s`; `else_say` gives its text.
    """
    deadline_s = now_s() + within_s
    while not (found := condition()):
        if now_s() > deadline_s:
            raise RuntimeError(else_say())
        time.sleep(every_s)
    return found
