"""Supervises child processes: ordered start, restart with back-off, ordered drain.

    waiting -> starting -> ready -> [exit] -> back-off -> starting ...
                  |                                        stop(): signal rank by rank, wait, then kill
                  +-- exits again and again before it was ever ready: StartFailed, with its last log lines

    replace(): the successor starts beside its predecessor; when it is ready, it takes over and the predecessor drains
    add(), remove(): one more child beside the others; it ends alone if it never becomes ready

A child that has been ready once is restarted without limit. The pause doubles with every quick exit and is short again after
a stable minute.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Sequence
from typing import Literal, Protocol

from motet.cli.nats_server import NatsStartError
from motet.cli.process import NO_ANSWER, Child, tail
from motet.shared.clock import now_s

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped"]

POLL_S = 0.05
READY_POLL_S = 0.1
FIRST_BACKOFF_S = 0.25
LAST_BACKOFF_S = 15.0
STABLE_S = 60.0
START_ATTEMPTS = 3
CONFIG_ERROR_EXIT = 2  # a service that says so will not change its mind
HURRY_S = 2.0
UNREADY_S = 0.5
KERNELS_HINT = " (if it is the compiled CPU kernels, MOTET_CPU_ISA=avx2 or portable avoids newer instructions)"
MARGIN_S = 5.0  # a service ends its own drain; this is for the rest of its shutdown


class StartFailed(Exception):
    """A child never became ready; the message names it, its exit status and its last log lines."""


class Watcher(Protocol):
    """Receives state changes of the children."""

    def changed(self, name: str, state: State, note: str) -> None:
        """`note` is a short reason for people, e.g. what the child waits for or how it ended."""


class Supervisor:
    """Runs `children`. Use: `await start()`, then `await failed()` or wait for a signal, then `await stop(...)`."""

    def __init__(self, children: Sequence[Child], watcher: Watcher) -> None:
        self._children = {child.name: child for child in children}
        self._watcher = watcher
        self._ready = {child.name: asyncio.Event() for child in children}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[Child, asyncio.Task[None]] = {}  # predecessors that still drain
        self._failed: asyncio.Future[None] | None = None
        self._stopping = False
        self._hurry = asyncio.Event()
        self.restarts = {child.name: 0 for child in children}

    @property
    def children(self) -> list[Child]:
        """One per name; after a `replace` the successor."""
        return list(self._children.values())

    @property
    def leaving(self) -> list[str]:
        """The names of children that were removed or replaced and still drain."""
        return [child.name for child in self._leaving]

    async def start(self) -> None:
        """Start everything and return when all children are ready. Raises StartFailed; call `stop` also then."""
        self._failed = asyncio.get_running_loop().create_future()
        for child in self.children:
            self._look_after(child)
        all_ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait({all_ready, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            all_ready.cancel()

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def failed(self) -> None:
        """Wait until a child's supervision fails; raises the reason."""
        assert self._failed is not None, "start() comes first"
        await asyncio.shield(self._failed)

    def _look_after(self, child: Child, *, running: bool = False) -> None:
        task = self._tasks[child.name] = asyncio.create_task(self._keep(child, running))
        task.add_done_callback(self._kept)

    def add(self, child: Child) -> None:
        """Start one more child and look after it. If it never becomes ready, it is removed, and the others go on."""
        self._children[child.name] = child
        self._ready[child.name] = asyncio.Event()
        self.restarts.setdefault(child.name, 0)
        task = self._tasks[child.name] = asyncio.create_task(self._keep(child, False))

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                return
            if self._ready[child.name].is_set():
                self._kept(task)
                return
            self._forget(child.name).close()
            self._watcher.changed(child.name, "stopped", str(error).splitlines()[0])

        task.add_done_callback(ended)

    async def remove(self, name: str, *, drain_s: float) -> None:
        """Look after a child no longer. It drains and ends in the background, at most for `drain_s`."""
        await self._cancel(name)
        if name not in self._children:  # it was given up meanwhile
            return
        child = self._forget(name)
        self._watcher.changed(name, "stopping", "")
        task = self._leaving[child] = asyncio.create_task(self._end(child, drain_s))

        def ended(task: asyncio.Task[None]) -> None:
            self._leaving.pop(child, None)
            if not task.cancelled():
                self._watcher.changed(name, "stopped", _how(child))

        task.add_done_callback(ended)

    async def _cancel(self, name: str) -> None:
        """Look no longer after the child of this name, if there is one."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _forget(self, name: str) -> Child:
        del self._tasks[name], self._ready[name]
        return self._children.pop(name)

    def _kept(self, task: asyncio.Task[None]) -> None:
        """A child's task only ends by failing or by being cancelled."""
        if not task.cancelled() and (error := task.exception()) and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _keep(self, child: Child, running: bool) -> None:
        for name in child.after:
            await self._ready[name].wait()
        backoff_s, attempts = FIRST_BACKOFF_S, 0
        while not self._stopping:
            began = now_s()
            ended = await self._run_once(child, running)
            running = False
            if self._stopping:
                return
            attempts += 1
            never_ready = not self._ready[child.name].is_set()
            if never_ready and (attempts >= START_ATTEMPTS or child.exit_code() == CONFIG_ERROR_EXIT):
                raise StartFailed(_why(child, ended))
            if now_s() - began > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            self.restarts[child.name] += 1
            pause_s = max(backoff_s, child.rest_s)
            self._watcher.changed(child.name, "restarting", f"{ended}; again in {pause_s:g} s, log: {child.log_path}")
            await asyncio.sleep(pause_s)
            backoff_s = min(LAST_BACKOFF_S, 2 * backoff_s)

    async def replace(self, successor: Child, *, ready_s: float, drain_s: float, wait: bool) -> None:
        """Start `successor`. Once it is ready, it replaces the child of its name, which then drains and ends.

        `wait`: wait for that end instead of draining in the background. Raises StartFailed when the successor is not ready
        within `ready_s`, or ends by itself `START_ATTEMPTS` times; then the old child stays. One that was killed starts again.
        """
        name, deadline, attempts = successor.name, now_s() + ready_s, 0
        while problem := await self._make_ready(successor, deadline):
            code = successor.exit_code()
            await self._end(successor, 0.0)
            attempts += code is not None and code >= 0
            if code in (None, CONFIG_ERROR_EXIT) or attempts >= START_ATTEMPTS or now_s() > deadline:
                raise StartFailed(f"the new {name} cannot start, the old one stays: {problem}\n{_last_words(successor)}")
            await asyncio.sleep(FIRST_BACKOFF_S)
        await self._cancel(name)
        predecessor = self._children.get(name)  # none where a further child was given up meanwhile
        self._children[name] = successor
        self._ready.setdefault(name, asyncio.Event())
        self._look_after(successor, running=True)
        if predecessor is None:
            return
        task = self._leaving[predecessor] = asyncio.create_task(self._end(predecessor, drain_s))
        task.add_done_callback(lambda _: self._leaving.pop(predecessor, None))
        if wait:
            await asyncio.wait({task})

    async def _make_ready(self, successor: Child, deadline_s: float) -> str:
        """Start a successor and wait until it is ready. Returns why it is not: it has ended, or the time is over."""
        try:
            await successor.launch()
        except OSError as error:
            return str(error)
        while reasons := await successor.not_ready():
            if successor.exit_code() is not None:
                return _how(successor)
            if now_s() > deadline_s:
                return ", ".join(reasons)
            await asyncio.sleep(READY_POLL_S)
        return ""

    async def bounce(self, name: str, *, ready_s: float) -> None:
        """Restart a child that can run only once, and wait until it is ready. Raises StartFailed.

        One that has just crashed is being started already, which is a restart as well.
        """
        child = self._children[name]
        before = child.pid
        child.signal(signal.SIGTERM)
        deadline = now_s() + ready_s
        while child.pid == before or child.exit_code() is not None or await child.not_ready():
            if now_s() > deadline:
                raise StartFailed(f"{name} did not come back within {ready_s:g} s\n{_last_words(child)}")
            await asyncio.sleep(POLL_S)

    async def _end(self, child: Child, drain_s: float) -> None:
        """SIGTERM, at most `drain_s` to drain, then SIGKILL."""
        child.signal(signal.SIGTERM)
        deadline = now_s() + drain_s
        while _running(child):
            if now_s() > deadline:
                child.signal(signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        child.close()

    async def _run_once(self, child: Child, running: bool) -> str:
        """Start a child unless it is `running`, and follow it until it ends; returns how it ended."""
        if not running:
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
        return _how(child)

    def hurry(self) -> None:
        """Shorten the drain: children get a second signal and two seconds."""
        self._hurry.set()

    async def stop(self, *, drain_s: float) -> None:
        """Stop all children, lowest `stop_rank` first. Never raises.

        After `drain_s` a rank is told to hurry, and `MARGIN_S` later it is killed; after `hurry`, both come sooner. Children
        that were never ready have nothing to drain: they go first and get `UNREADY_S`.
        """
        self._stopping = True
        leaving = dict(self._leaving)
        tasks = [*self._tasks.values(), *leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        everybody = [*self.children, *leaving]
        unready = [child for child in self.children if not self._ready[child.name].is_set()]
        await self._stop_rank(unready, 0.0, UNREADY_S)
        for rank in sorted({child.stop_rank for child in everybody}):
            await self._stop_rank([child for child in everybody if child.stop_rank == rank], drain_s)
        for child in everybody:
            child.close()

    async def _stop_rank(self, group: list[Child], drain_s: float, margin_s: float = MARGIN_S) -> None:
        running = [child for child in group if _running(child)]
        for child in running:
            self._watcher.changed(child.name, "stopping", "")
            child.signal(signal.SIGTERM)
        patience_until, killed_from = now_s() + drain_s, math.inf
        while running:
            hurried = self._hurry.is_set()
            if killed_from == math.inf and (hurried or now_s() > patience_until):
                killed_from = now_s() + (min(margin_s, HURRY_S) if hurried else margin_s)
                for child in running:
                    child.signal(signal.SIGTERM)
            elif hurried:
                killed_from = min(killed_from, now_s() + HURRY_S)
            if now_s() > killed_from:
                for child in running:
                    child.signal(signal.SIGKILL)
            for child in [child for child in running if not _running(child)]:
                running.remove(child)
                self._watcher.changed(child.name, "stopped", _how(child))
            await asyncio.sleep(POLL_S)


def _running(child: Child) -> bool:
    return child.pid != 0 and child.exit_code() is None


def _how(child: Child) -> str:
    code = child.exit_code()
    if code is None or code >= 0:
        return f"exit status {code}" if code else "ended"
    kernels = child.name.startswith("worker") and -code in (signal.SIGILL, signal.SIGSEGV)
    return f"killed by {signal.Signals(-code).name}" + (KERNELS_HINT if kernels else "")


def _why(child: Child, ended: str) -> str:
    """Why a child cannot start: the line with which it refused its configuration, else its last log lines."""
    if child.exit_code() == CONFIG_ERROR_EXIT:
        for line in reversed(tail(child.log_path, since=child.log_from).splitlines()):
            if line.startswith("motet "):
                return f"{child.name} cannot start: {line.partition(': ')[2]}"
    return f"{child.name} cannot start: {ended}\n{_last_words(child)}"


def _last_words(child: Child) -> str:
    return "\n".join(f"  | {line}" for line in tail(child.log_path, since=child.log_from).splitlines())
