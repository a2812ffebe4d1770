"""An event loop whose clock jumps to the next timer instead of waiting: minutes of timeouts take milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual seconds since its creation."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 1000.0
        self._look = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def _jump(self, timeout: float | None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing is ready and no timer is set: this would wait for ever")
        self._virtual_s += timeout
        return self._look(0)

    def time(self) -> float:
        return self._virtual_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in virtual time, which `shared.clock` uses too."""
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time_ns=lambda: int(loop.time() * 1e9))
    try:
        with mock.patch("motet.shared.clock.time", clock):
            return loop.run_until_complete(work)
    finally:
        loop.close()
