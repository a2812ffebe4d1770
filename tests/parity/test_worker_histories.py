"""The live worker's core and engine, and the twin's worker, get the same requests and have the same history, event by event.

Live is everything but the bus and the files: `WorkerCore` and an engine that runs a tiny model. Loads take as long as the
twin's links say, and a step takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import msgspec
import pytest

from motet.policies.memory.host_tier import Evict, Forget, HostTier, Load
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import Action, Assign, Event, Loaded, Start, Stepped, Stop
from motet.policies.worker.worker_view import View
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import EngineRequest, StepOutput
from motet.services.worker.native.engine import Engine
from motet.shared.model import AdapterRef, RequestBrief, SamplingParams
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.link import SHORTEST_WAIT_MS, LinkModel
from motet.twin.steps import Link
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Workload
from tests.parity.test_engine_and_twin import QUICK, Recorder, scripted
from tests.services.worker.support_engine import BLOCK_SIZE, PacedRunner, make_engine
from tests.support_models import MAX_LEN
from tests.support_worker import worker_limits

STEP_S = 1e-3
DISK_MS, STORE_MS = 1.7137, 4.2391  # loads end between two steps
Record = tuple[str, ...]


class Told:
    """A worker core that records its events and actions, one record per fact.

    The live engine reports a step when the step ends; the twin reports admissions when the step begins. So when a request is
    admitted and ends in the same step, only the twin reports it as running. That record is left out.
    """

    def __init__(self, core: WorkerCore[Any], names: dict[str, str]) -> None:
        self.history: list[Record] = []
        self._ran_s: dict[str, float] = {}  # when each request came in last
        self._names, self._on = names, core.on
        core.on = self.on  # type: ignore[method-assign]

    def on(self, event: Event[Any], now_s: float) -> list[Action[Any]]:
        if isinstance(event, Stepped):
            self._ran_s |= {brief.request_id: now_s for brief in event.moved if brief.phase == "running"}
            for request_id, _ in event.ended:
                if now_s - self._ran_s.get(request_id, -inf) < 1.5 * STEP_S:
                    last = self.history[::-1].index(("running", request_id))
                    del self.history[-1 - last]
        self.history += self._facts(event)
        actions = self._on(event, now_s)
        for action in actions:
            match action:
                case Start(entry):
                    self.history.append(("start", entry.brief.request_id))
                case Load(adapter, source):
                    self.history.append(("load", self._name(adapter.digest), source))
                case Evict(digest, tier):
                    self.history.append(("evict", self._name(digest), tier))
                case Forget() | Stop():
                    raise AssertionError(f"unexpected action {action}")
        return actions

    def _facts(self, event: Event[Any]) -> Iterable[Record]:
        match event:
            case Assign(brief):
                yield "assign", brief.request_id, self._name(brief.adapter_digest)
            case Loaded(digest):
                yield "loaded", self._name(digest)
            case Stepped(moved, ended, device):
                yield from sorted(("device" if there else "left", self._name(digest)) for digest, there in device)
                yield from sorted((brief.phase, brief.request_id) for brief in moved)
                yield from sorted(("end", request_id) for request_id, _ in ended)

    def _name(self, digest: str) -> str:
        return self._names.get(digest, "")


@dataclass
class Live:
    """Core and engine side by side, with one millisecond per step."""

    engine: Engine
    core: WorkerCore[EngineRequest]
    adapters: dict[str, HostAdapter]
    told: Told
    due: list[tuple[float, int, Event[EngineRequest]]] = field(default_factory=list)  # (ms, order, event)
    orders: Any = field(default_factory=count)
    preempted: int = 0

    def serve(self, requests: list[tuple[float, Assign[EngineRequest]]]) -> None:
        """Serve all assignments, each at its millisecond."""
        for at_ms, assign in requests:
            heappush(self.due, (at_ms, next(self.orders), assign))
        now_ms = 0.0
        while self.core.book or self.due:
            assert now_ms < inf, "requests are waiting for nothing"
            out = self.engine.step(now_ms / 1e3)
            assert out.failure is None, out.failure
            self.preempted += out.stats.preempted
            device = [(change.digest, change.tier == "device") for change in out.residency]
            running = {entry.brief.request_id for entry in self.core if entry.phase == "running"}
            moved = [one for one in out.changed if one.phase == "running" or one.request_id in running]
            if moved or device:
                self.core.on(Stepped(moved=moved, device=device), now_ms / 1e3)
            ran = bool(out.stats.decode_rows or out.stats.prefill_requests)
            began_ms, now_ms = now_ms, now_ms + 1.0 if ran else self._joins_ms(now_ms)
            now_ms = self._until(now_ms, idle=not ran)
            ended = self._ended(out)
            if ended:
                self._perform(self.core.on(Stepped(ended=ended), now_ms / 1e3), now_ms)
            if isinstance(self.engine.runner, PacedRunner):
                self.engine.runner.elapse((now_ms - began_ms) / 1e3)
            self.core.check()
            self.engine.check()

    def _joins_ms(self, now_ms: float) -> float:
        """When a copy has come so far that a request waiting in an idle engine may join."""
        if not self.engine.pause_s:
            return inf
        runner = self.engine.runner
        assert isinstance(runner, PacedRunner), "only copies beside the steps let an engine wait"
        whole_ms = 1e3 * next(left for _, left in runner.queue.values()) / runner.bytes_per_s
        return now_ms + min(max(self.engine.core.wait_ms, SHORTEST_WAIT_MS), whole_ms)

    @staticmethod
    def _ended(out: StepOutput) -> list[tuple[str, int]]:
        return [(item.request_id, item.epoch) for items in out.items.values() for item in items if item.finish is not None]

    def _until(self, now_ms: float, *, idle: bool = False) -> float:
        """Process the events that are due before then; in an idle engine only the first one, because it begins at once."""
        while self.due and self.due[0][0] < now_ms - 1e-6:
            at_ms, _, event = heappop(self.due)
            self._perform(self.core.on(event, at_ms / 1e3), at_ms)
            if idle:
                return at_ms
        return now_ms

    def _perform(self, actions: list[Action[EngineRequest]], now_ms: float) -> None:
        for action in actions:
            if isinstance(action, Start):
                request = action.entry.payload
                if action.entry.adapters:
                    request = msgspec.structs.replace(request, weights=self.adapters[action.entry.adapters[0].digest])
                self.engine.add(request, now_ms / 1e3)
            elif isinstance(action, Load):
                size, took_ms = action.adapter.size_bytes, DISK_MS if action.source == "disk" else STORE_MS
                heappush(self.due, (now_ms + took_ms, next(self.orders), Loaded(action.adapter.digest, size, size)))


def assignments(
    workload: Workload, prompts: list[list[int]], adapters: list[HostAdapter]
) -> list[tuple[float, Assign[EngineRequest]]]:
    """The workload in the form in which a worker gets it."""
    made = []
    for i, prompt in enumerate(prompts):
        at_ms, which = float(workload.arrival_s[i]) * 1e3, int(workload.adapter[i])
        ref = None
        if which >= 0:
            digest, size = adapters[which].digest, int(workload.adapter_bytes[which])
            ref = AdapterRef(name=digest, digest=digest, rank=adapters[which].rank, size_bytes=size)
        brief = RequestBrief(
            str(i), 0, ref.digest if ref else "", ref.rank if ref else 0, len(prompt), 0, 1, "waiting", 200.0, 2000.0
        )
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=int(workload.output_tokens[i]))
        request = EngineRequest.local(str(i), prompt, sampling, gateway_id="g", arrival_s=at_ms / 1e3)
        made.append((at_ms, Assign(brief, "g", (ref,) if ref is not None else (), request)))
    return made


@dataclass(frozen=True)
class Setting:
    """What differs between the histories."""

    copies: str = "between the steps"
    kv_blocks: int = 600
    max_loras: int = 16
    prefix_cache: bool = True
    busy: bool = True  # some request runs nearly all the time; else the engine waits for adapters now and then


def served(checkpoint: Any, setting: Setting, seed: int) -> tuple[Live, Workload, WorkerSpec]:
    """The live history of a workload, and what the twin needs to produce the same one."""
    model_dir, adapters = checkpoint
    decides: dict[str, Any] = {"max_loras": setting.max_loras, "prefix_cache": setting.prefix_cache, "max_step_tokens": 48}
    decides["foresight"] = "off"  # ticks are no part of the histories
    options: dict[str, Any] = {}
    link = None
    if setting.copies != "between the steps":
        decides["cold_start"] = setting.copies
        options = {"perf": lambda: QUICK, "runner": PacedRunner}
        link = LinkModel(bytes_per_s=50e6, layers=3)
    engine = make_engine(model_dir, max_running=12, kv_blocks=setting.kv_blocks, **decides, **options)
    if isinstance(engine.runner, PacedRunner):
        engine.runner.bytes_per_s = 50e6
    workload, prompts = scripted(seed, engine, adapters)
    workload = workload.faster(1 / 2.9173)  # nearly three steps between two arrivals: adapters leave and come back
    if setting.busy:
        workload.adapter[0], workload.output_tokens[0] = -1, 240
    sizes = sorted(int(size) for size in workload.adapter_bytes)
    storage = StorageModel(
        host_bytes=sizes[-1] + sizes[-2], disk_bytes=sum(sizes) - 1, disk=Link(DISK_MS, 0.0), store=Link(STORE_MS, 0.0)
    )
    limits = worker_limits(
        max_model_len=MAX_LEN,
        max_running=12,
        max_waiting=1000,
        block_size=BLOCK_SIZE,
        kv_blocks_total=setting.kv_blocks,
        adapter_bytes_total=engine.runner.lora_bytes_total,
        kv_token_bytes=engine.runner.kv_block_bytes // BLOCK_SIZE,
    )
    core: WorkerCore[EngineRequest] = WorkerCore(View("w1", "", limits), HostTier(storage.host_bytes, storage.disk_bytes), 1012)
    told = Told(core, {adapter.digest: f"adapter {i}" for i, adapter in enumerate(adapters)})
    live = Live(engine, core, {adapter.digest: adapter for adapter in adapters}, told)
    live.serve(assignments(workload, prompts, adapters))
    spec = WorkerSpec(
        limits=limits,
        perf=QUICK,
        steps=Recorder(),
        storage=storage,
        link=link,
        options=WorkerOptions(**decides),
    )
    return live, workload, spec


def simulated(workload: Workload, spec: WorkerSpec) -> tuple[list[Record], int]:
    """The twin's history of the workload, and how often it preempted."""
    cluster = Cluster(workload, [spec], None)
    worker = cluster.workers[0]
    worker.engine.max_run = 1
    told = Told(worker.core, {adapter.digest: f"adapter {i}" for i, adapter in enumerate(workload.adapters)})
    cluster.run()
    return told.history, cluster.metrics.preemptions


COPIES = pytest.mark.parametrize("copies", ["between the steps", "blocking", "auto"])
SETTINGS = pytest.mark.parametrize(
    ("kv_blocks", "max_loras", "prefix_cache", "busy", "seed"),
    [
        (600, 16, True, True, 0),
        (60, 3, True, True, 0),
        (56, 3, False, False, 0),
        (44, 2, True, True, 0),
        (40, 2, True, True, 0),
        (40, 2, False, True, 0),
        (40, 2, False, False, 0),
        (40, 1, True, False, 1),
    ],
)


@COPIES
@SETTINGS
def test_live_and_simulated_histories_are_equal_event_by_event(
    checkpoint: Any, copies: str, kv_blocks: int, max_loras: int, prefix_cache: bool, busy: bool, seed: int
) -> None:
    live, workload, spec = served(checkpoint, Setting(copies, kv_blocks, max_loras, prefix_cache, busy), seed)
    history = live.told.history
    assert (history, live.preempted) == simulated(workload, spec)

    happened = {record[0] for record in history}
    assert {"assign", "load", "loaded", "start", "device", "running", "end"} <= happened
    assert {record[2] for record in history if record[0] == "load"} == {"disk", "store"}
    assert {record[2] for record in history if record[0] == "evict"} == {"host", "disk"}
    assert ("left" in happened) == (max_loras < len(workload.ranks)), "adapters leave the device for lack of slots alone"
    if kv_blocks <= 44:
        assert live.preempted and "waiting" in happened


@pytest.mark.thorough
@COPIES
@SETTINGS
def test_histories_of_other_requests_are_equal_too(
    checkpoint: Any, copies: str, kv_blocks: int, max_loras: int, prefix_cache: bool, busy: bool, seed: int
) -> None:
    for other in range(seed + 1, seed + 3):
        live, workload, spec = served(checkpoint, Setting(copies, kv_blocks, max_loras, prefix_cache, busy), other)
        assert (live.told.history, live.preempted) == simulated(workload, spec), f"seed {other}"
