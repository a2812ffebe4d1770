"""The worker service: takes requests from schedulers, runs them in its engine, streams tokens to their gateways.

    assign ──> admission ──> core ──> (adapter to host memory) ──> engine thread ──> one frame per gateway per step
       │                      │                                      │
       │                      └─ refused: draining, full, ...        └─ state deltas, metrics, step-time fit
       └─ answered at once, before any of the slow parts

`policies.worker.worker_core` decides about each request and `shell.py` carries it out; this file turns messages into events and
implements the process's life cycle. Everything here runs on the event loop. It knows engines by their protocol only:
`engines/opening.py` opens the one that is configured, which imports torch after everything that can be checked without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from motet.policies.times.step_times import StepTimes
from motet.policies.worker.assemble import worker_core
from motet.policies.worker.request_life import Key
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import Assign, CancelRequest, Close, OwnerLost, Pinned, Registered, Stepped, Tick
from motet.policies.worker.worker_view import View
from motet.services.worker import admission
from motet.services.worker.adapter_files import AdapterFiles
from motet.services.worker.adapters import AdapterLoader
from motet.services.worker.catalog import Catalog
from motet.services.worker.config import MIB, WorkerConfig
from motet.services.worker.engines.opening import Opened, ProbedKind, Wiring, open_engine
from motet.services.worker.engines.request import EngineRequest, StepReport
from motet.services.worker.engines.start_perf import start_perf
from motet.services.worker.frames import FrameSender
from motet.services.worker.kv_transfer import KvTransfer, named
from motet.services.worker.observe import Observer
from motet.services.worker.probing import Device, Prober
from motet.services.worker.references import References
from motet.services.worker.reports import StateReporter
from motet.services.worker.shell import Shell
from motet.shared import subjects
from motet.shared.base_tensors import base_tensors
from motet.shared.bus import Bus
from motet.shared.checkpoint_digest import checkpoint_digest
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.errors import Conflict, MotetError, Overloaded, Unavailable, WorkerLost
from motet.shared.generation_config import notes
from motet.shared.hf_config import UnsupportedModel
from motet.shared.hub import resolve_model
from motet.shared.image_shapes import is_image_base
from motet.shared.json_files import FileError
from motet.shared.leases import LeaseHolder, LeaseWatch
from motet.shared.model import AdapterVersion, PerfModel
from motet.shared.profile import Profile, read_profile
from motet.shared.service import run
from motet.shared.telemetry import logger
from motet.shared.wire.request import Accepted, Cancel, Control, Drain, GenerateRequest, ListPrefixes
from motet.shared.wire.stream import StreamItem
from motet.shared.wire.worker_state import Ping, Pong, WorkerNotice

log = logger("motet.worker")
IMAGE_BYTES_MAX = 256 << 20  # of all requests here
MAX_FAILURES = 3  # failing steps in a row before the worker hands back its requests and ends
STALLED_S = 60.0  # one step longer than this makes the worker not ready
HAND_BACK_S = 3.0
NOTIFY_S = 1.0
TICK_S = 0.5
CHECK_S = 10.0  # between two checks of the ledgers of an idle worker
LAST_WORDS = 500  # characters


class WorkerService:
    """One engine on the bus. `leave` asks the process to stop, as SIGTERM would. `observe` gets each report of the engine.

    `link_bytes_per_s` is for tests and benches: adapter copies to the device take as long as over a link of that speed.
    """

    name = "worker"

    def __init__(
        self,
        config: WorkerConfig,
        leave: Callable[[], None] | None = None,
        observe: Callable[[StepReport], None] = lambda _: None,
        *,
        link_bytes_per_s: float = 0.0,
    ) -> None:
        self.config = config
        self._on_report, self._link_bytes_per_s = observe, link_bytes_per_s
        self._leave = leave or partial(signal.raise_signal, signal.SIGTERM)
        self.worker_id = config.process.identity("worker")
        self.incarnation = secrets.token_hex(8)
        self.unhealthy = ""
        """Why this worker ends before it is told to; "" if it does not."""
        self._times = StepTimes(_profiled(config))
        self.asked_s = 0.0
        """When the last assignment came."""
        self._draining = self._started = False
        self._loaded = 0.0
        self._exit = contextlib.AsyncExitStack()
        self.bus: Bus | None = None
        self.probes: Prober | None = None

    # ---- life

    async def start(self) -> None:
        """Load the model, then announce the worker. A failure is announced too."""
        try:
            self._model_dir = await asyncio.to_thread(resolve_model, self.config.base.model)
            for note in _notes(self._model_dir):
                log.warning(note)
            wiring = Wiring(self._on_step, self._times, loaded=self._on_loaded, link_bytes_per_s=self._link_bytes_per_s)
            opened = open_engine(self.config, self._model_dir, wiring)
            bus = await self._connect()
            await self._notify("starting")
            await self._start(bus, opened)
        except Exception as error:
            with contextlib.suppress(MotetError):
                if self.bus is None and isinstance(error, ConfigError):
                    await self._connect()
                await self._notify("failed", str(error) if isinstance(error, MotetError | ConfigError) else repr(error))
            raise

    def _on_loaded(self, share: float) -> None:
        self._loaded = share

    async def _connect(self) -> Bus:
        self.bus = bus = await Bus.connect(self.config.bus, f"worker-{self.worker_id}", inbox="worker")
        self._exit.push_async_callback(bus.close)
        return bus

    async def _start(self, bus: Bus, opened: Opened) -> None:
        config, self.engine = self.config, opened.engine
        self._exit.push_async_callback(self.engine.stop)
        _, tensors, digest = await asyncio.gather(
            self.engine.start(),
            asyncio.to_thread(base_tensors, self._model_dir),
            asyncio.to_thread(checkpoint_digest, self._model_dir),
        )
        self.facts, serves = opened.facts(), self.engine.serves
        limits = msgspec.structs.replace(
            self.facts.limits,
            engine=config.engine.engine,
            capabilities=tuple(sorted(serves)),
            base_digest=digest,
            base_tensors=tensors,
        )
        self._acceptable = admission.Acceptable(
            base_model=limits.base_model,
            vocab_size=self.facts.vocab_size,
            eos_token_ids=self.facts.eos_token_ids,
            max_model_len=limits.max_model_len,
            max_lora_rank=limits.max_lora_rank,
            serves=serves,
            share_prefix_cache=config.kv.share_prefix_cache,
            image=self.facts.image,
        )
        self.view = View(self.worker_id, self.incarnation, limits, self.facts.mechanisms)
        self.reporter = StateReporter(bus, self.view, self._times)
        self.frames = FrameSender(bus, self.worker_id, self._cancel)
        files = AdapterFiles(config.adapters.adapter_cache_dir)
        self.core: WorkerCore[EngineRequest] = worker_core(
            self.view,
            config.options,
            host_bytes=config.adapters.host_cache_mib * MIB,
            disk_bytes=config.adapters.disk_cache_mib * MIB,
            files=files.found,
        )
        self.observer = Observer(self.core, self._times)
        self.shell = Shell(self.core, self.engine, self.frames, self.reporter, self.observer)
        self.catalog = Catalog(
            bus,
            self.worker_id,
            on_change=self._on_versions,
            on_pinned=lambda pinned, homes: self.shell.on(Pinned(pinned, homes)),
            takes=limits.lora_targets,
        )
        parse = self.facts.parse_adapter
        if config.adapters.adapter_probe == "on" and self.facts.probed is not None:
            self.shell.probes = self.probes = self._prober(bus, self.facts.probed)
            parse = self.probes.parsed(parse)
        self.shell.store = AdapterLoader(bus, files, self.shell, parse=parse)
        self._exit.callback(self.shell.store.close)
        if self.engine.kv is not None and limits.kv_format:
            self.shell.travel = KvTransfer(bus, self.worker_id, self.engine.kv, limits, self._times)
            await self.shell.travel.start()
        await self.catalog.start()
        lease = LeaseHolder(bus, "worker", self.worker_id, self.incarnation)
        await LeaseWatch(bus, "gateway", lambda gateway_id: self.shell.on(OwnerLost(gateway_id)), lease).start()
        await bus.subscribe(subjects.control(self.worker_id), Control, self._on_control)
        await bus.serve("assign", subjects.assign(self.worker_id), GenerateRequest, self._assign, queue="worker")
        await bus.serve("ping", subjects.ping(self.worker_id), Ping, self._on_ping, queue="worker")
        self._exit.push_async_callback(lease.release)
        await lease.start()
        self._started = True
        self.reporter.start()
        bus.spawn(self._tick())
        bus.spawn(self._check_when_idle())
        told = {"model": config.base.name, "device": limits.device, "kv_blocks": limits.kv_blocks_total}
        log.info("serving", extra={"id": self.worker_id} | told)

    def _prober(self, bus: Bus, kind: ProbedKind) -> Prober:
        described = f"{self.config.engine.engine} {kind.dtype} on worker {self.worker_id}"
        return Prober(
            bus,
            References(bus, kind.quantization),
            Device(dtype=kind.dtype, quantization=kind.quantization, described=described),
            worker_id=self.worker_id,
            engine=self.engine,
            catalog=self.catalog,
            adapter_of=self._adapter_of,
            put=self.frames.put,
        )

    def _adapter_of(self, key: Key) -> str:
        entry = self.core.entry(key)
        return entry.brief.adapter_digest if entry is not None else ""

    def _on_versions(self, versions: Mapping[str, AdapterVersion]) -> None:
        if self.probes is not None:
            self.probes.keep(self.catalog.registered)
        self.shell.on(Registered(versions))

    def not_ready(self) -> list[str]:
        reasons = []
        if not self._started:
            reasons.append(self._progress())
        if self.bus is None or not self.bus.connected:
            reasons.append("NATS is not connected")
        else:
            reasons += self.bus.troubles()
        if self.unhealthy:
            reasons.append(self.unhealthy)
        elif self._draining:
            reasons.append("draining")
        if self._started and (busy_s := self.engine.busy_s()) > STALLED_S:
            reasons.append(f"the engine has been in one step for {busy_s:.0f} s")
        return reasons

    def _progress(self) -> str:
        """How far the start is, for people who wait."""
        if not self._loaded:
            return "the model is loading"
        if self._loaded == 1:
            return "the model is loading: its weights are in memory, the first steps run"
        files = self._model_dir.glob("*.safetensors")
        if not (total_gb := sum(path.stat().st_size for path in files) / 1e9):
            return "the model is loading"  # random weights have no files
        return f"the model is loading: {self._loaded * total_gb:.2f} of {total_gb:.2f} GB of weights read and packed"

    def failure(self) -> str:
        return self.bus.lost if self.bus is not None else ""

    async def drain(self) -> None:
        """Refuse new requests at once, and wait until the present ones have ended."""
        await self._stop_taking()
        await self.shell.idle.wait()

    async def stop(self) -> None:
        """Hand back the remaining requests, then stop: frames first, the lease last."""
        if self._started:
            await self._stop_taking()
            await self._hand_back(WorkerLost(f"worker {self.worker_id} is leaving"))
            await self.engine.stop()
            await self.frames.flush(HAND_BACK_S)
            await self._notify("failed" if self.unhealthy else "stopped", self.unhealthy)
        await self._exit.aclose()

    async def _notify(self, event: Literal["starting", "failed", "stopped"], reason: str = "") -> None:
        """Tell the gateways of a start, a failure or a stop. Best effort: losing the notice is harmless."""
        notice = WorkerNotice(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            base_model=self.config.base.name,
            event=event,
            reason=" ".join(reason.split())[:LAST_WORDS],
        )
        if self.bus is None:
            return
        with contextlib.suppress(MotetError, TimeoutError):
            await self.bus.publish(subjects.notice(self.worker_id), notice)
            await asyncio.wait_for(self.bus.flush(), NOTIFY_S)

    async def _stop_taking(self) -> None:
        self.shell.on(Close())
        if not self._draining:
            self._draining = True
            await self.reporter.snapshot()

    async def _hand_back(self, error: MotetError) -> None:
        """End every request with `error`. If that is WorkerLost, their gateways resubmit them elsewhere."""
        self.engine.abort_all(error)
        self.shell.on(Close(error))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.shell.idle.wait(), HAND_BACK_S)

    # ---- requests

    async def _assign(self, request: GenerateRequest) -> Accepted:
        """The `assign` endpoint. Raises an error to refuse."""
        try:
            for one in request.weighted:
                await self.catalog.check(one.ref, self.facts.image.family if self.facts.image is not None else "")
            self._take(request)
        except MotetError as error:
            self.observer.refused(error.code)
            raise
        return Accepted(worker_id=self.worker_id)

    async def _on_ping(self, _: Ping) -> Pong:
        return Pong()

    def _take(self, request: GenerateRequest) -> None:
        self.asked_s = now_s()
        taken = admission.admit(request, self._acceptable, self.asked_s)
        self._check_image_room(request)
        adapter = request.adapter
        if (offer := request.kv) is not None and self.shell.travel is not None:
            known, rank = request.prompt_tokens + request.output_tokens, adapter.rank if adapter is not None else 0
            wait_s = self.shell.travel.wait_s(offer, known, rank)
            taken = replace(taken, kv=named(offer), kv_wait_s=wait_s)
        brief = taken.brief(taken.output_tokens)
        adapters = tuple([one.ref for one in request.weighted])
        refusal = self.shell.on(Assign(brief, request.gateway_id, adapters, taken, taken.kv_wait_s > 0))
        if refusal is None:
            return
        match refusal.why:
            case "older":
                newest = refusal.newest
                raise Conflict(f"request {request.request_id} is here with epoch {newest}, newer than {request.epoch}")
            case "closed":
                raise Unavailable(self.unhealthy or f"worker {self.worker_id} is draining")
            case "full":
                raise Overloaded(f"worker {self.worker_id} has {len(self.core)} requests", retry_after_s=refusal.retry_after_s)

    def _check_image_room(self, request: GenerateRequest) -> None:
        """Raises Overloaded if the images of all requests here would exceed `IMAGE_BYTES_MAX`."""
        if request.images or request.image is not None:
            size_bytes = _image_bytes(request) + sum(_image_bytes(entry.payload) for entry in self.core)
            if size_bytes > IMAGE_BYTES_MAX:
                raise Overloaded(f"worker {self.worker_id} has no room for more images", retry_after_s=1.0)

    def _cancel(self, request_id: str, epoch: int) -> None:
        self.shell.on(CancelRequest(request_id, epoch))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.shell.on(Tick())

    # ---- what the engine did

    def _on_step(self, report: StepReport) -> None:
        self.shell.step = report.step
        items = [item for items in report.output.items.values() for item in items]
        passed = report.output.items if self.probes is None else self.probes.sift(report)
        self.observer.ending(item for item in items if item.finish is not None)
        self.shell.on(_stepped(report, items))
        for gateway_id, its_items in passed.items():
            self.frames.put(gateway_id, report.step, its_items)
        self.observer.stepped(report)
        if report.failures >= MAX_FAILURES:
            self._give_up(f"the engine failed {report.failures} steps in a row: {report.output.failure!r}")
        self._on_report(report)

    async def _check_when_idle(self) -> None:
        """Check every `CHECK_S` without a request that the ledgers add up. If they do not, what is here cannot be trusted."""
        while not self.unhealthy:
            await asyncio.sleep(CHECK_S)
            if self.shell.idle.is_set():
                try:
                    self.core.check()
                    await self.engine.check()
                except Exception as error:
                    self._give_up(f"the worker's ledgers do not add up: {error!r}")

    def _give_up(self, reason: str) -> None:
        """End the worker because of this. Its requests continue elsewhere."""
        if self.unhealthy:
            return
        self.unhealthy = reason
        log.error("giving up", extra={"reason": reason})
        assert self.bus is not None, "it has started"
        self.shell.on(Close())
        self.bus.spawn(self._leave_unhealthy())

    async def _leave_unhealthy(self) -> None:
        try:
            await self._stop_taking()
            await self._hand_back(WorkerLost(f"worker {self.worker_id}: {self.unhealthy}"))
        finally:
            self._leave()

    def _on_control(self, message: Control) -> None:
        match message:
            case Cancel(request_id=request_id, epoch=epoch, kv_token=token):
                if token and self.shell.travel is not None:
                    self.shell.travel.offer(token, request_id, epoch)
                self._cancel(request_id, epoch)
            case Drain():
                self._leave()
            case ListPrefixes():
                self.reporter.list_prefixes()


def _image_bytes(request: GenerateRequest) -> int:
    """Bytes of the images that the request brings, and of its checkpoint."""
    state = len(request.image.state) if request.image is not None else 0
    return state + sum([len(image.data) for image in request.images])


def _stepped(report: StepReport, items: Sequence[StreamItem]) -> Stepped:
    """The core's event for a report of the engine, which has these items."""
    output, merging = report.output, report.output.stats.merging
    return Stepped(
        moved=output.changed,
        ended=[(item.request_id, item.epoch) for item in items if item.finish is not None],
        device=[(change.digest, change.tier == "device") for change in output.residency],
        free=(report.kv_blocks_free, report.adapter_bytes_free),
        progress=[(item.request_id, item.index + len(item.tokens)) for item in items if item.finish is None],
        merged=merging.merged if merging is not None else None,
        prefixes=report.prefixes,
        mechanisms=output.stats.mechanisms,
    )


def _notes(model_dir: Path) -> list[str]:
    """What the log should tell about the model's files. Raises ConfigError."""
    if is_image_base(model_dir):
        return []  # an image engine opens these itself
    try:
        return notes(model_dir)
    except UnsupportedModel as error:
        raise ConfigError(f"--model: {error}") from None


def _profiled(config: WorkerConfig) -> PerfModel:
    """The step times to start from: the profile's, or a small model's on two cores. Raises ConfigError for a bad file and for
    a profile of another engine."""
    if not config.engine.profile:
        return start_perf(config.engine.engine)
    try:
        profile: Profile = read_profile(Path(config.engine.profile))
    except FileError as error:
        raise ConfigError(f"--profile: {error}") from None
    if (measured := profile.limits.engine) != config.engine.engine:
        path, engine = Path(config.engine.profile), config.engine.engine
        raise ConfigError(f"--profile: {path.name} was measured with --engine {measured}; this worker has --engine {engine}")
    return profile.perf


def main(config: WorkerConfig) -> int:
    """Run a worker until it is told to stop; the exit status is 1 when its engine failed, so that it is restarted."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every adapter in host memory is an open file
    service = WorkerService(config)
    status = run(service, config)
    return 1 if service.unhealthy else status
