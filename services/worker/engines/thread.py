"""The engine in a thread of its own, between a command queue and the event loop.

    loop   --add, cancel, load, unload, abort-->  deque + event  --between steps-->  engine thread
    loop   <--one call_soon_threadsafe per step: StepReport-----------------------  engine thread

Rules:
- the engine never waits for the network: a report is handed over when the loop *takes* it, not when it is sent.
- the engine waits while the loop is `MAX_AHEAD` reports behind. Tokens are never dropped here, so the number of waiting reports
  must be bounded. The pause is counted (`motet_worker_engine_paused_seconds`).
- the loop never waits for the engine: commands only append.
- while there is nothing to do the thread sleeps on the event; while all requests wait for an adapter's copy, with a timeout.
- no exception ends the thread. A failed command is answered for its request; when a step fails as a whole, its
  requests end with an error. `StepReport.failures` counts failing steps since the last good one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from motet.services.worker import metrics
from motet.services.worker.engines.request import EngineRequest, StepOutput, StepReport
from motet.shared.clock import now_s
from motet.shared.errors import MotetError, Overloaded
from motet.shared.model import Capability
from motet.shared.telemetry import logger

if TYPE_CHECKING:
    from motet.services.worker.engines.adapter_weights import HostAdapter

T = TypeVar("T")
log = logger("motet.worker.engine")
MAX_AHEAD = 32  # reports
MAX_COMMANDS = 16_384
STOP_S = 10.0


class SteppedEngine(Protocol):
    """An engine that computes one step at a time, in one thread. `native.engine.Engine` is one."""

    pause_s: float
    """How long `step` will find nothing to do unless a command comes first."""

    @property
    def serves(self) -> frozenset[Capability]: ...

    @property
    def kv_blocks_free(self) -> int: ...

    @property
    def adapter_bytes_free(self) -> int: ...

    def take_prefixes(self) -> Mapping[int, bool] | None:
        """What became of cached KV blocks since the last call (`worker_events.Stepped.prefixes`)."""

    def has_work(self) -> bool:
        """Whether `step` would compute or report anything, now or after `pause_s`."""

    def step(self, now_s: float) -> StepOutput:
        """Compute a step, and report what happened since the last one."""

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request. Raises an error if it cannot be served."""

    def cancel(self, request_id: str, epoch: int) -> bool: ...

    def load_adapter(self, adapter: HostAdapter, over: Collection[str] | None = None) -> bool: ...

    def pin_adapters(self, digests: Collection[str]) -> None: ...

    def unload_adapter(self, digest: str) -> bool: ...

    def reject_adapter(self, digest: str, error: MotetError) -> None: ...

    def abort_all(self, error: MotetError) -> StepOutput:
        """End every request. Returns their last items."""

    def check(self) -> None: ...

    def close(self) -> None: ...


E = TypeVar("E", bound=SteppedEngine)
E_co = TypeVar("E_co", bound=SteppedEngine, covariant=True)


class Assembled(Protocol[E_co]):
    """A built engine: the facts about it (`opening.Facts`), and itself."""

    @property
    def engine(self) -> E_co: ...


class Building(Generic[E]):
    """Builds an engine when it is called, in the thread that will run it, and then has its facts.

    `assemble` imports torch.
    """

    facts: Any

    def __init__(self, assemble: Callable[[], Assembled[E]]) -> None:
        self._assemble = assemble

    def __call__(self) -> E:
        # OpenMP threads spin at barriers unless told not to before torch is loaded. Beside a gateway, or anything else,
        # on the same cores a spinning thread waits for one that cannot run: steps were six to ten times longer.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self.facts = made = self._assemble()
        return made.engine


class EngineThread(Generic[E]):
    """An `EngineProtocol`: owns the engine from `start` to `stop`. `deliver(report)` runs in the event loop, in step order.

    `has_kv`: the engine has `kv`, blocks that other workers may read.
    """

    def __init__(
        self,
        build: Callable[[], E],
        deliver: Callable[[StepReport], None],
        *,
        has_kv: bool = True,
    ) -> None:
        self._build, self._deliver = build, deliver
        self._serves: frozenset[Capability] = frozenset()
        self._has_kv = has_kv
        self._commands: deque[Callable[[E], StepOutput | None]] = deque()
        self._wake = threading.Event()
        self._credits = threading.Semaphore(MAX_AHEAD)
        self._stopping = False
        self._busy_since: float | None = None
        self._failures = 0
        self._step = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- the loop's side (`engines.protocol`)

    @property
    def serves(self) -> frozenset[Capability]:
        """The optional capabilities of the engine; none before it has started."""
        return self._serves

    @property
    def kv(self) -> ThreadKv | None:
        """The engine's KV blocks, for moves; None for an engine without."""
        return ThreadKv(self) if self._has_kv else None

    async def start(self) -> None:
        """Build the engine in its thread. Raises what `build` raises."""
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._built

    def add(self, request: EngineRequest) -> None:
        """Queue a request. If the engine refuses it, its error comes as an item. Raises Overloaded when the queue is full."""
        if len(self._commands) >= MAX_COMMANDS:
            raise Overloaded("the engine is not taking commands", retry_after_s=1.0)
        self._post(lambda engine: _add(engine, request))

    def cancel(self, request_id: str, epoch: int) -> None:
        self._post(lambda engine: _ignore(engine.cancel(request_id, epoch)))

    def load_adapter(self, adapter: HostAdapter, over: Collection[str] | None = None) -> None:
        self._post(lambda engine: _ignore(engine.load_adapter(adapter, over)))

    def pin_adapters(self, digests: Collection[str]) -> None:
        self._post(lambda engine: engine.pin_adapters(digests))

    def unload_adapter(self, digest: str) -> None:
        self._post(lambda engine: _ignore(engine.unload_adapter(digest)))

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        self._post(lambda engine: engine.reject_adapter(digest, error))

    def abort_all(self, error: MotetError) -> None:
        self._post(lambda engine: engine.abort_all(error))

    def busy_s(self) -> float:
        since = self._busy_since
        return now_s() - since if since is not None else 0.0

    async def check(self) -> None:
        """Check the ledgers of an idle engine in its thread. Raises what its check raises."""
        await self.ask(_check)

    async def stop(self) -> None:
        """End the thread after its present step; waits at most `STOP_S`."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)

    def ask(self, question: Callable[[E], T]) -> asyncio.Future[T]:
        """Call `question(engine)` in the engine's thread between two steps. The future gets its result."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def command(engine: E) -> None:
            try:
                found = question(engine)
            except Exception as error:
                self._on_loop(_fail, answer, error)
            else:
                self._on_loop(_answer, answer, found)

        self._post(command)
        return answer

    def _post(self, command: Callable[[E], StepOutput | None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _take(self, report: StepReport) -> None:
        self._credits.release()
        self._deliver(report)

    # ---- the engine's side

    def _run(self) -> None:
        try:
            engine = self._build()
            engine.take_prefixes()  # what its warm-up cached is nobody's
            self._serves = engine.serves
        except BaseException as error:
            self._on_loop(_fail, self._built, error)
            return
        self._on_loop(_answer, self._built, None)
        while not self._stopping:
            self._apply(engine)
            if engine.has_work():
                self._advance(engine)
                if engine.pause_s:
                    self._wake.wait(engine.pause_s)
                    self._wake.clear()
            else:
                self._wake.wait()
                self._wake.clear()
        engine.close()

    def _apply(self, engine: E) -> None:
        while self._commands:
            command = self._commands.popleft()
            try:
                output = command(engine)
            except Exception:
                log.exception("engine command failed")
                continue
            if output is not None:
                self._report(engine, output, now_s())

    def _advance(self, engine: SteppedEngine) -> None:
        began = self._busy_since = now_s()
        try:
            output = engine.step(began)
        except Exception as error:
            log.exception("engine step failed")
            output = self._abort(engine, error)
        else:
            if output.failure is not None:
                log.error("forward pass failed", exc_info=output.failure)
        self._busy_since = None
        if output.empty:
            return
        self._step += 1
        if output.failure is not None:
            self._failures += 1
            metrics.STEP_FAILURES.inc()
        elif output.stats.sampled:
            self._failures = 0
        output.stats.time_ms = (now_s() - began - output.stats.merge_s - output.stats.probe_s) * 1000
        self._report(engine, output, began)

    def _abort(self, engine: SteppedEngine, error: Exception) -> StepOutput:
        """End all requests after an exception that left the engine in an unknown state."""
        try:
            output = engine.abort_all(MotetError(f"the engine failed: {error!r}"))
        except Exception:
            log.exception("engine cannot be cleared")
            output = StepOutput()
        output.failure = error
        return output

    def _report(self, engine: SteppedEngine, output: StepOutput, began_s: float) -> None:
        if not self._credits.acquire(blocking=False):
            waited_since_s = now_s()
            while not self._credits.acquire(timeout=0.1):
                if self._stopping:
                    return
            metrics.LOOP_LAG_S.inc(now_s() - waited_since_s)
        self._on_loop(
            self._take,
            StepReport(
                step=self._step,
                began_s=began_s,
                output=output,
                failures=self._failures,
                kv_blocks_free=engine.kv_blocks_free,
                adapter_bytes_free=engine.adapter_bytes_free,
                prefixes=engine.take_prefixes(),
            ),
        )

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed
            self._stopping = True


class ThreadKv:
    """`engines.protocol.KvAccess`, carried out in the engine's thread."""

    def __init__(self, thread: EngineThread[Any]) -> None:
        self._ask = thread.ask

    def hold(self, name: str, request_id: str, epoch: int) -> asyncio.Future[list[bytes]]:
        return self._ask(lambda engine: engine.kv.hold(name, request_id, epoch))

    def find(self, name: str, keys: Sequence[bytes]) -> asyncio.Future[int]:
        return self._ask(lambda engine: engine.kv.find(name, keys))

    def read(self, name: str, first: int, count: int) -> asyncio.Future[np.ndarray | None]:
        return self._ask(lambda engine: engine.kv.read(name, first, count))

    def land(self, name: str, keys: Sequence[bytes], content: bytearray) -> asyncio.Future[bool]:
        return self._ask(lambda engine: engine.kv.land(name, keys, content))

    def drop(self, name: str) -> None:
        self._ask(lambda engine: engine.kv.drop(name))


def _answer(future: asyncio.Future[T], found: T) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _ignore(_: object) -> None:
    """The result of a command is not needed: the next step reports its effect."""


def _check(engine: SteppedEngine) -> None:
    if not engine.has_work():
        engine.check()


def _add(engine: SteppedEngine, request: EngineRequest) -> StepOutput | None:
    try:
        engine.add(request, now_s())
        return None
    except MotetError as error:
        refused = error
    except Exception as error:
        log.exception("request not added", extra={"request_id": request.request_id})
        refused = MotetError(f"the engine failed: {error!r}")
    return StepOutput(items={request.gateway_id: [request.item(request.output_tokens, "error", error=refused)]})
