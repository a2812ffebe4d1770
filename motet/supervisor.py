"""Keeps a set of children alive: ordered start, restart with back-off, drain in order, nothing left behind.

    waiting -> starting -> ready -> [exit] -> back-off -> starting ...
                  |                                        stop(): signal rank by rank, wait, then kill
                  +-- exits again and again before it was ever ready: StartFailed, with its last log lines

A child that has been ready once is restarted for ever; the pause doubles with every quick death and is short again
after a stable minute.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Literal, Protocol

from motet.nats_server import NatsStartError
from motet.process import NO_ANSWER, Child, tail
from shared.clock import now_s

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped"]

POLL_S = 0.05
READY_POLL_S = 0.1
FIRST_BACKOFF_S = 0.25
LAST_BACKOFF_S = 15.0
STABLE_S = 60.0
START_ATTEMPTS = 3
CONFIG_ERROR_EXIT = 2  # a service that says so will not change its mind
HURRY_S = 2.0


class StartFailed(Exception):
    """A child never became ready; the message says which, how it ended and what it said last."""


class Watcher(Protocol):
    """Hears what happens to the children."""

    def changed(self, name: str, state: State, note: str) -> None:
        """`note` is a short reason for people: what is waited for, how the child ended."""


class Supervisor:
    """Runs `children`. Use: `await start()`, then `await failed()` or wait for a signal, then `await stop(...)`."""

    def __init__(self, children: Sequence[Child], watcher: Watcher) -> None:
        self._children = list(children)
        self._watcher = watcher
        self._ready = {child.name: asyncio.Event() for child in children}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._hurry = asyncio.Event()
        self.restarts = {child.name: 0 for child in children}

    async def start(self) -> None:
        """Start everything and return when all children are ready. Raises StartFailed; call `stop` also then."""
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self._children]
        all_ready = asyncio.create_task(self._all_ready())
        try:
            done, _ = await asyncio.wait({all_ready, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task  # a child's task only ends by failing
        finally:
            all_ready.cancel()

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def failed(self) -> None:
        """Wait as long as all children are looked after; raises what ended the supervision."""
        await asyncio.gather(*self._tasks)

    async def _keep(self, child: Child) -> None:
        for name in child.after:
            await self._ready[name].wait()
        backoff_s, attempts = FIRST_BACKOFF_S, 0
        while not self._stopping:
            began = now_s()
            ended = await self._run_once(child)
            if self._stopping:
                return
            attempts += 1
            never_ready = not self._ready[child.name].is_set()
            if never_ready and (attempts >= START_ATTEMPTS or child.exit_code() == CONFIG_ERROR_EXIT):
                raise StartFailed(f"{child.name} cannot start: {ended}\n{_last_words(child)}")
            if now_s() - began > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            self.restarts[child.name] += 1
            self._watcher.changed(child.name, "restarting", f"{ended}; again in {backoff_s:g} s, log: {child.log_path}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(LAST_BACKOFF_S, 2 * backoff_s)

    async def _run_once(self, child: Child) -> str:
        """Start a child, follow it until it ends; returns how it ended."""
        self._watcher.changed(child.name, "starting", "")
        try:
            await child.launch()
        except (OSError, NatsStartError) as error:
            return str(error).splitlines()[0]
        said = [NO_ANSWER]
        while child.exit_code() is None:
            reasons = await child.not_ready()
            if not reasons:
                self._ready[child.name].set()
                self._watcher.changed(child.name, "ready", "")
                break
            if reasons != said:
                said = reasons
                self._watcher.changed(child.name, "starting", ", ".join(reasons))
            await asyncio.sleep(READY_POLL_S)
        while child.exit_code() is None:  # noqa: ASYNC110 - processes have no event to wait for everywhere
            await asyncio.sleep(POLL_S)
        return _how(child.exit_code())

    def hurry(self) -> None:
        """Cut the drain short: children get a second signal and two seconds."""
        self._hurry.set()

    async def stop(self, *, drain_s: float) -> None:
        """Stop all children, lowest `stop_rank` first; each rank has `drain_s` before it is killed. Never raises."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in sorted({child.stop_rank for child in self._children}):
            await self._stop_rank([child for child in self._children if child.stop_rank == rank], drain_s)
        for child in self._children:
            child.close()

    async def _stop_rank(self, group: list[Child], drain_s: float) -> None:
        running = [child for child in group if _running(child)]
        for child in running:
            self._watcher.changed(child.name, "stopping", "")
            child.signal(signal.SIGTERM)
        deadline, hurried = now_s() + drain_s, False
        while running:
            if self._hurry.is_set() and not hurried:
                hurried, deadline = True, min(deadline, now_s() + HURRY_S)
                for child in running:
                    child.signal(signal.SIGTERM)
            if now_s() > deadline:
                for child in running:
                    child.signal(signal.SIGKILL)
            for child in [child for child in running if not _running(child)]:
                running.remove(child)
                self._watcher.changed(child.name, "stopped", _how(child.exit_code()))
            await asyncio.sleep(POLL_S)


def _running(child: Child) -> bool:
    return child.pid != 0 and child.exit_code() is None


def _how(code: int | None) -> str:
    if code is None or code == 0:
        return "ended"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _last_words(child: Child) -> str:
    return "\n".join(f"  | {line}" for line in tail(child.log_path).splitlines())
