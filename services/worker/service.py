"""The worker service: takes requests from schedulers, runs them in its engine, streams tokens to their gateways.

    assign ──> admit ──> (loading: adapter to host memory) ──> engine thread ──> one frame per gateway per step
       │         │                                                │
       │         └─ refused: draining, full, too long, unknown     └─ state deltas, metrics, step-time fit
       └─ answered at once, before any of the slow parts

Everything here runs on the event loop. A request is known by (request_id, epoch) from `_take` to the item with its
`finish`, whoever makes that item: the engine, or this file while the adapter is still loading. torch is imported in the
engine's thread, after what can be checked without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nats import errors as nats_errors

from policies.kv_blocks import cache_scope
from services.worker import admission, metrics
from services.worker.config import WorkerConfig
from services.worker.engine.request import CopyStats, EngineRequest, StepOutput
from services.worker.engine_thread import EngineThread, StepReport
from services.worker.frames import FrameSender
from services.worker.reports import StateReporter
from services.worker.residency import Adapters
from services.worker.state import START_PERF, StepTimes, WorkerView
from shared import subjects
from shared.bus import Bus
from shared.clock import now_s
from shared.config import ConfigError
from shared.errors import Conflict, MotetError, Overloaded, Unavailable, WorkerLost
from shared.hub import resolve_model
from shared.leases import LeaseHolder, LeaseWatch
from shared.messages import (
    Accepted,
    Cancel,
    Control,
    Drain,
    GenerateRequest,
    LoadAdapter,
    Ping,
    Pong,
    StreamItem,
    UnloadAdapter,
    WorkerNotice,
)
from shared.model import AdapterRef, FinishReason, PerfModel, Phase, RequestBrief
from shared.profile import FileError, read_profile
from shared.service import run
from shared.telemetry import logger

if TYPE_CHECKING:
    from services.worker.engine.engine import Engine

log = logger("motet.worker")
MAX_FAILURES = 3  # failing steps in a row before the worker gives its requests back and leaves
STALLED_S = 60.0  # one step longer than this makes the worker not ready
HAND_BACK_S = 3.0
NOTIFY_S = 1.0
LAST_WORDS = 500  # characters

Key = tuple[str, int]  # request id, epoch


@dataclass(slots=True)
class _Taken:
    """A request this worker has promised to answer. `loading` until the engine has it; `holds` a host copy."""

    request: EngineRequest
    adapter: AdapterRef | None
    loading: asyncio.Task[None] | None = None
    holds: bool = False


class WorkerService:
    """One engine on the bus. `leave` asks the process to stop, as SIGTERM would."""

    name = "worker"

    def __init__(self, config: WorkerConfig, leave: Callable[[], None] | None = None) -> None:
        self.config = config
        self._leave = leave or partial(signal.raise_signal, signal.SIGTERM)
        self.worker_id = config.identity("worker")
        self.incarnation = secrets.token_hex(8)
        self.engine = EngineThread(self._build, self._on_step)
        self.unhealthy = ""
        self._live: dict[Key, _Taken] = {}
        self._newest: dict[str, int] = {}  # request id -> epoch
        self._departures = admission.Departures()
        self._times = StepTimes(_profiled(config))
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._started = False
        self._step = 0
        self._exit = contextlib.AsyncExitStack()
        self.bus: Bus | None = None

    # ---- life

    def _build(self) -> Engine:
        """In the engine's thread."""
        # OpenMP threads spin at barriers unless told not to before torch is loaded. Beside a gateway, or anything else,
        # on the same cores a spinning thread waits for one that cannot run: steps were six to ten times longer.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from services.worker.assemble import assemble

        self._assembly = assemble(self.config, self._model_dir, self._times)
        return self._assembly.engine

    async def start(self) -> None:
        """Load the model, then tell everybody. A failure is told as well."""
        try:
            self._model_dir = await asyncio.to_thread(resolve_model, self.config.model)
            bus = await self._connect()
            await self._notify("starting")
            await self._start(bus)
        except Exception as error:
            with contextlib.suppress(MotetError):
                if self.bus is None and isinstance(error, ConfigError):
                    await self._connect()
                await self._notify("failed", str(error) if isinstance(error, MotetError | ConfigError) else repr(error))
            raise

    async def _connect(self) -> Bus:
        self.bus = bus = await Bus.connect(self.config, f"worker-{self.worker_id}", inbox="worker")
        self._exit.push_async_callback(bus.close)
        return bus

    async def _start(self, bus: Bus) -> None:
        config = self.config
        self._exit.push_async_callback(self.engine.stop)
        await self.engine.start()
        limits = self._assembly.limits
        self._acceptable = admission.Acceptable(
            base_model=limits.base_model,
            vocab_size=self._assembly.vocab_size,
            max_model_len=limits.max_model_len,
            max_lora_rank=limits.max_lora_rank,
        )
        self.view = WorkerView(self.worker_id, self.incarnation, limits)
        self.reporter = StateReporter(bus, self.view, self._times)
        self.frames = FrameSender(bus, self.worker_id, self._cancel)
        self.adapters = Adapters(bus, config, self.engine, self.reporter, self._assembly.parse_adapter)
        self._exit.callback(self.adapters.close)
        await self.adapters.start()
        lease = LeaseHolder(bus, "worker", self.worker_id, self.incarnation)
        await LeaseWatch(bus, "gateway", self._gateway_lost, lease).start()
        await bus.subscribe(subjects.control(self.worker_id), Control, self._on_control)
        await bus.serve("assign", subjects.assign(self.worker_id), GenerateRequest, self._assign, queue="worker")
        await bus.serve("ping", subjects.ping(self.worker_id), Ping, self._on_ping, queue="worker")
        self._exit.push_async_callback(lease.release)
        await lease.start()
        self._started = True
        self.reporter.start()
        log.info(
            "serving",
            extra={
                "id": self.worker_id,
                "model": config.base_model,
                "device": limits.device,
                "kv_blocks": limits.kv_blocks_total,
            },
        )

    def not_ready(self) -> list[str]:
        reasons = []
        if not self._started:
            reasons.append("the model is loading")
        if self.bus is None or not self.bus.connected:
            reasons.append("NATS is not connected")
        if self.unhealthy:
            reasons.append(self.unhealthy)
        elif self._draining:
            reasons.append("draining")
        if (busy_s := self.engine.busy_s()) > STALLED_S:
            reasons.append(f"the engine has been in one step for {busy_s:.0f} s")
        return reasons

    def failure(self) -> str:
        return self.bus.lost if self.bus is not None else ""

    async def drain(self) -> None:
        """Refuse new requests at once, and wait for the ones that are here."""
        await self._stop_taking()
        await self._idle.wait()

    async def stop(self) -> None:
        """Hand back what is left, then leave: frames first, the lease last."""
        if self._started:
            await self._stop_taking()
            await self._hand_back(WorkerLost(f"worker {self.worker_id} is leaving"))
            await self.engine.stop()
            await self.frames.flush(HAND_BACK_S)
            await self._notify("failed" if self.unhealthy else "stopped", self.unhealthy)
        await self._exit.aclose()

    async def _notify(self, event: Literal["starting", "failed", "stopped"], reason: str = "") -> None:
        """Tell the gateways what becomes of us; nobody has to hear it."""
        notice = WorkerNotice(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            base_model=self.config.base_model,
            event=event,
            reason=" ".join(reason.split())[:LAST_WORDS],
        )
        if self.bus is None:
            return
        with contextlib.suppress(MotetError, nats_errors.Error, TimeoutError):
            await self.bus.publish(subjects.notice(self.worker_id), notice)
            await asyncio.wait_for(self.bus.flush(), NOTIFY_S)

    async def _stop_taking(self) -> None:
        self._draining = True
        if not self.view.draining:
            self.view.draining = True
            await self.reporter.snapshot()

    async def _hand_back(self, error: MotetError) -> None:
        """End every request with `error`; their gateways resubmit them elsewhere when it is WorkerLost."""
        self.engine.abort_all(error)
        for key in list(self._live):
            self._end_loading(key, "error", error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), HAND_BACK_S)

    # ---- requests

    async def _assign(self, request: GenerateRequest) -> Accepted:
        """The `assign` endpoint. Raises what a Refused says."""
        try:
            if request.adapter is not None:
                await self.adapters.check(request.adapter)
            self._take(request)
        except MotetError as error:
            metrics.REFUSED.labels(error.code).inc()
            raise
        return Accepted(worker_id=self.worker_id)

    async def _on_ping(self, _: Ping) -> Pong:
        return Pong()

    def _take(self, request: GenerateRequest) -> None:
        key = (request.request_id, request.epoch)
        if key in self._live:
            return  # asked twice: the first answer was lost
        newest = self._newest.get(request.request_id)
        if newest is not None and newest > request.epoch:
            raise Conflict(f"request {request.request_id} is here with epoch {newest}, newer than {request.epoch}")
        if self.unhealthy or self._draining:
            raise Unavailable(self.unhealthy or f"worker {self.worker_id} is draining")
        prompt, output = admission.check(request, self._acceptable)
        if newest is not None:
            self._cancel(request.request_id, newest)
        if len(self._live) >= self.config.max_running + self.config.max_waiting:
            raise Overloaded(
                f"worker {self.worker_id} has {len(self._live)} requests", retry_after_s=self._departures.retry_after_s(now_s())
            )
        taken = _Taken(
            EngineRequest(
                request_id=request.request_id,
                gateway_id=request.gateway_id,
                prompt=prompt,
                sampling=request.sampling,
                arrival_s=now_s(),
                epoch=request.epoch,
                output=output,
                slo=request.slo,
                predicted_tokens=request.predicted_tokens,
                priority=request.priority,
                cache_scope=self._cache_scope(request),
                tenant=request.tenant,
                tenant_weight=request.tenant_weight,
            ),
            request.adapter,
        )
        self._live[key] = taken
        self._newest[request.request_id] = request.epoch
        self._idle.clear()
        if request.adapter is None:
            try:
                self._enqueue(taken)
            except MotetError:
                self._forget(key)
                raise
        else:
            self._show(taken, "loading")
            taken.loading = asyncio.get_running_loop().create_task(self._bring(key, taken, request.adapter))

    def _cache_scope(self, request: GenerateRequest) -> bytes:
        """Prompts of an adapter never leave their tenant's cache; those of the base model do if that was asked for."""
        shared = self.config.share_prefix_cache and request.adapter is None
        return cache_scope(request.tenant, request.cache_salt, shared=shared)

    async def _bring(self, key: Key, taken: _Taken, ref: AdapterRef) -> None:
        """Fetch the adapter for one request; a failure is that request's alone."""
        try:
            taken.request.adapter = await self.adapters.tiers.acquire(ref)
            taken.holds = True
            self._enqueue(taken)
        except MotetError as error:
            self._end_loading(key, "error", error)
        except Exception as error:
            log.exception("adapter load failed", extra={"digest": ref.digest})
            self._end_loading(key, "error", MotetError(f"adapter {ref.name!r} cannot be loaded: {error!r}"))
        else:
            taken.loading = None

    def _enqueue(self, taken: _Taken) -> None:
        self._show(taken, "waiting")
        self.engine.add(taken.request)

    def _cancel(self, request_id: str, epoch: int) -> None:
        """Stop a request of this epoch or an older one."""
        newest = self._newest.get(request_id)
        if newest is None or newest > epoch:
            return
        key = (request_id, newest)
        if not self._end_loading(key, "cancelled", None):
            self.engine.cancel(*key)

    def _end_loading(self, key: Key, finish: FinishReason, error: MotetError | None) -> bool:
        """End a request that the engine does not have yet; whether it was one."""
        taken = self._live.get(key)
        if taken is None or taken.loading is None:
            return False
        taken.loading.cancel()
        taken.loading = None
        request = taken.request
        info = error.info() if error is not None else None
        item = StreamItem(request.request_id, request.epoch, len(request.output), [], finish=finish, error=info)
        self._ended(item)
        self.frames.put(request.gateway_id, self._step, [item])
        return True

    def _ended(self, item: StreamItem) -> None:
        """An item with `finish` was made: the promise is kept."""
        if self._forget((item.request_id, item.epoch)):
            metrics.FINISHED.labels(item.finish).inc()
            self._departures.left(now_s())

    def _forget(self, key: Key) -> bool:
        """Let go of a request; whether it was here."""
        taken = self._live.pop(key, None)
        if taken is None:
            return False
        request_id, epoch = key
        if taken.holds and taken.adapter is not None:
            self.adapters.tiers.release(taken.adapter.digest)
        if self._newest.get(request_id) == epoch:
            del self._newest[request_id]
            self.view.remove(request_id)
            self.reporter.touch()
        if not self._live:
            self._idle.set()
        return True

    def _gateway_lost(self, gateway_id: str) -> None:
        for (request_id, epoch), taken in list(self._live.items()):
            if taken.request.gateway_id == gateway_id:
                self._cancel(request_id, epoch)

    # ---- what the engine did

    def _on_step(self, report: StepReport) -> None:
        output = report.output
        self._step = report.step
        view = self.view
        view.kv_blocks_free, view.adapter_bytes_free = report.kv_blocks_free, report.adapter_bytes_free
        view.prefill_tokens_waiting = report.prefill_tokens_waiting
        for change in output.residency:
            self.adapters.on_device(change.digest, change.tier == "device")
        for brief in output.changed:
            if self._newest.get(brief.request_id) == brief.epoch:
                view.put(brief)
        for gateway_id, items in output.items.items():
            for item in items:
                if item.finish is not None:
                    self._ended(item)
                else:
                    view.progress(item.request_id, item.index + len(item.tokens))
            self.frames.put(gateway_id, report.step, items)
        self.reporter.touch()
        self._measure(report, output)
        if report.failures >= MAX_FAILURES and not self.unhealthy:
            self.unhealthy = f"the engine failed {report.failures} steps in a row: {output.failure!r}"
            log.error("giving up", extra={"reason": self.unhealthy})
            assert self.bus is not None
            self.bus.spawn(self._give_up())

    async def _give_up(self) -> None:
        await self._stop_taking()
        await self._hand_back(WorkerLost(f"worker {self.worker_id}: {self.unhealthy}"))
        self._leave()

    def _measure(self, report: StepReport, output: StepOutput) -> None:
        stats, view = output.stats, self.view
        if report.step_s and (stats.prefill_tokens or stats.decode_rows):
            metrics.STEP_S.observe(report.step_s)
            metrics.BATCH_ROWS.observe(stats.prefill_requests + stats.decode_rows)
            metrics.TOKENS.labels("prefill").inc(stats.prefill_tokens)
            metrics.TOKENS.labels("decode").inc(stats.decode_rows)
            if output.failure is None:
                self._times.observe(report.step_s * 1000, stats)
                for kind, drift in self._times.drift.items():
                    metrics.STEP_DRIFT.labels(kind).set(drift)
        metrics.PREFIX_HIT_TOKENS.inc(stats.cached_tokens)
        metrics.PREEMPTIONS.inc(stats.preempted)
        metrics.REQUESTS.labels("running").set(stats.running)
        metrics.REQUESTS.labels("waiting").set(stats.waiting)
        metrics.REQUESTS.labels("loading").set(max(0, len(self._live) - stats.running - stats.waiting))
        for start in stats.cold_starts:
            metrics.COLD_STARTS.labels(*start).inc()
        for mode, error_ms in stats.cold_errors_ms:
            metrics.COLD_START_ERROR_S.labels(mode).observe(abs(error_ms) / 1000)
        metrics.COPIES.set(stats.copies.under_way if stats.copies is not None else 0)
        if stats.copies is not None:
            _measure_copies(stats.copies)
        metrics.KV_USAGE.set(1 - view.kv_blocks_free / view.limits.kv_blocks_total)

    def _on_control(self, message: Control) -> None:
        match message:
            case Cancel(request_id=request_id, epoch=epoch):
                self._cancel(request_id, epoch)
            case UnloadAdapter(digest=digest):
                self.adapters.drop(digest)
            case LoadAdapter(adapter=ref):
                self.adapters.prefetch(ref)
            case Drain():
                self._leave()

    # ---- what schedulers hear

    def _show(self, taken: _Taken, phase: Phase) -> None:
        request = taken.request
        self.view.put(
            RequestBrief(
                request_id=request.request_id,
                epoch=request.epoch,
                adapter_digest=taken.adapter.digest if taken.adapter else "",
                rank=taken.adapter.rank if taken.adapter else 0,
                prompt_tokens=len(request.prompt),
                output_tokens=len(request.output),
                predicted_tokens=request.predicted_tokens,
                phase=phase,
                tpot_slo_ms=request.slo.tpot_slo_ms,
                ttft_slo_ms=request.slo.ttft_slo_ms,
                tenant=request.tenant,
                tenant_weight=request.tenant_weight,
            )
        )
        self.reporter.touch()


def _measure_copies(copies: CopyStats) -> None:
    metrics.LINK_BYTES.inc(copies.link_bytes)
    metrics.LINK_BYTES_PER_S.set(copies.bytes_per_s)
    metrics.ASSIST_PROCESSES.set(copies.processes)
    for where, rows in copies.rows.items():
        metrics.ASSIST_ROWS.labels(where).inc(rows)
    for reason, count in copies.failures.items():
        metrics.ASSIST_FAILURES.labels(reason).inc(count)


def _profiled(config: WorkerConfig) -> PerfModel:
    """The step times to start from: the profile's, or a small model's on two cores. Raises ConfigError for a bad file."""
    if not config.profile:
        return START_PERF
    try:
        return read_profile(Path(config.profile)).perf
    except FileError as error:
        raise ConfigError(f"--profile: {error}") from None


def main(config: WorkerConfig) -> int:
    """Run a worker until it is told to stop; the exit status is 1 when its engine failed, so that it is restarted."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every adapter in host memory is an open file
    service = WorkerService(config)
    status = run(service, config)
    return 1 if service.unhealthy else status
