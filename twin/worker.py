"""A simulated Motet worker: what services/worker does between two network messages, under the virtual clock.

    assign ─> WorkerCore ─> refused, or (adapter to host memory) ─> started ─┐
    ┌────────────────────────────────────────────────────────────────────────┘
    └─> decide ─> one step, or a run of equal ones ─> advance, draw tokens, end sequences ─> decide ...

A *run* is a number of decode steps that `policies.step.batch_state.steady_steps` says are all alike. It is one event. An
arrival in the middle shortens it to the end of the step it falls into, where the live engine would see it; a report in the
middle books the steps that have ended by then:

    step      |  1  |  2  |  3  |  4  |  5  |  6  |     planned
    report                   ^                          1 and 2 are booked, the run is now 3 to 6
    arrival                   ^                         the run ends after 3
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace

from motet.policies.memory.host_tier import Load
from motet.policies.memory.kv_travel import travel
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan, advance, advance_steady, due_s, extend_keys, steady_steps
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging, Modes
from motet.policies.step.merged_copy import MERGE, CopySlices
from motet.policies.step.plan_numbers import count_plan
from motet.policies.times.perf_model import MIB
from motet.policies.worker.assemble import DeviceMemory, batch_core, worker_core
from motet.policies.worker.request_life import Entry
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import (
    Action,
    Answer,
    Assign,
    CancelRequest,
    CopyIn,
    Fetch,
    Fetched,
    Loaded,
    PinAdapters,
    Pinned,
    Refuse,
    Registered,
    Start,
    Stepped,
    Stop,
    Tick,
)
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef, PerfModel, RequestBrief, WorkerLimits
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot
from motet.shared.worker_options import DEFAULTS, WorkerOptions
from motet.twin.events import MESSAGE, PS_PER_MS, PS_PER_S, STEP, Events, to_ps
from motet.twin.link import Copies, LinkModel
from motet.twin.metrics import Metrics
from motet.twin.steps import Batch, StepModel, elapsed_ps, steps_within
from motet.twin.storage import EVERYTHING_IN_HOST, Storage, StorageModel
from motet.twin.workload import Request

FOREVER = 1 << 40
TICK_PS = PS_PER_S // 2
NO_CONTENT = array("i")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedCopyModel:
    """The merged copy of an engine's weights: its size, and the time in which an engine makes a MiB of it."""

    size_bytes: int
    mib_ms: float

    @property
    def make_ps(self) -> int:
        """The time to make the copy."""
        return to_ps(self.mib_ms * self.size_bytes / MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInPlace:
    """An engine that stops to merge an adapter into its only weights, as in the paper: for comparisons."""

    costs: MergeCosts
    policy: Callable[[MergeCosts], Modes] = Merging
    """Makes the policy of one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """The limits and durations of a worker, and the step-time model that it reports to schedulers."""

    limits: WorkerLimits
    perf: PerfModel  # as reported; schedulers decide with it
    steps: StepModel  # as it is
    storage: StorageModel = EVERYTHING_IN_HOST
    link: LinkModel | None = None  # None: an adapter is copied to the device before a step, and the step takes longer
    options: WorkerOptions = DEFAULTS
    merged_copy: MergedCopyModel | None = None  # for `options.merge`
    merging: MergeConfig = MERGE  # its constants
    in_place: MergeInPlace | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Live(Sequence):
    """A request inside the engine."""

    request: Request
    end_length: int  # prompt and output tokens, when it ends
    brief: RequestBrief  # as the view shows it
    decoding: bool = False
    last_token_ps: int = -1  # of the first token, and of the last one before a preemption or a move
    rested_ps: int = -1  # when it began to rest, since another adapter is merged


class _Run(msgspec.Struct, eq=False):
    """Running steps. `began_ps`: the start of the first step that is not booked yet."""

    plan: StepPlan[Live]
    batch: Batch
    slice_ps: int  # of its first step, before which a slice of the merged copy is made
    began_ps: int
    first_ps: int
    growth_ps: int
    steps: int
    left: int  # steps until the first of its decodes ends
    serial: int


class Worker:
    """One engine in one cluster. `adapters`: all adapters of the workload, by digest.

    `on_change` is called when there is news for schedulers, `on_end` when a request has ended, and `on_tokens` after each step
    with the requests that have drawn a token; then no two steps are made in one go.
    """

    max_run = FOREVER  # steps advanced in one go; 1 simulates every step

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        events: Events,
        metrics: Metrics,
        adapters: Mapping[str, AdapterRef],
        *,
        on_change: Callable[[Worker], None],
        on_end: Callable[[Worker, Live], None],
        on_tokens: Callable[[Worker, list[Live]], None] | None = None,
        incarnation: str = "",
    ) -> None:
        limits = spec.limits
        self.index, self.spec, self.worker_id = index, spec, f"worker-{index:04d}"
        self._events, self._metrics, self._on_change, self._on_end = events, metrics, on_change, on_end
        self._on_tokens = on_tokens
        if on_tokens is not None:
            self.max_run = 1
        self.dead = False
        """Killed: nothing that was under way has an effect."""
        options, link = spec.options, spec.link
        self._copies = Copies(link, spec.perf) if link is not None else None
        self.batches: BatchCore[Live] = batch_core(
            DeviceMemory.of(limits),
            options,
            max_running=limits.max_running,
            perf=spec.perf,
            layers=link.layers if link is not None else None,
            merging=spec.merging,
            modes=spec.in_place.policy(spec.in_place.costs) if spec.in_place is not None else None,
        )
        self._slices: CopySlices | None = None
        self._copied_ps, self._last_ps = 0, 0  # of the copy that is made; how long the last step took
        if self.batches.copy is not None:
            if spec.merged_copy is None:
                raise ValueError(
                    "merge: the worker's profile does not say how large a merged copy is; measure it with --merge on"
                )
            self._slices = CopySlices(self.batches.copy, ms=1 / PS_PER_MS)
        self._modes = self.batches.modes
        if self.batches.boundary is not None:
            self.batches.boundary.costs.perf = spec.perf
        self.state = self.batches.state
        self.view = View(self.worker_id, incarnation, limits)
        self.core: WorkerCore[Live] = worker_core(
            self.view, options, host_bytes=spec.storage.host_bytes, disk_bytes=spec.storage.disk_bytes
        )
        self.storage = Storage(spec.storage, events, self._loaded)
        self.busy_ps = 0
        self._note_free()
        self._adapters = adapters
        self.core.on(Registered(adapters), 0.0)
        self._max_length = min(limits.max_model_len, limits.kv_blocks_total * limits.block_size)
        self._chance = np.random.default_rng(index)  # drawn from once per step with prefills, which is never split
        self._run: _Run | None = None
        self._serial = 0
        self._coming: list[CopyIn] = []  # to be looked at between two steps
        self._brought: list[int] = []  # bytes of adapters that came since the last step, where steps wait for copies
        self._ticks = False
        self._leaving: list[tuple[Live, Callable[[Live], None]]] = []  # requests that are handed over after the present step
        self._landing: list[Entry[Live]] = []  # requests whose KV blocks have come
        if options.foresight:
            self._tick(TICK_PS)

    # ---- requests

    def assign(self, request: Request, brief: RequestBrief, before: Live | None = None, *, fetch: bool = False) -> bool:
        """Accept a request, or refuse it for lack of room: in the queue, or for so many tokens at all.

        `before`: the state in which another worker handed it over. Its tokens so far are computed again, or with `fetch` their
        KV blocks are fetched from there.
        """
        if request.prompt_tokens >= self._max_length:
            return False
        now_s, adapter = self._events.now_s, request.adapter
        length = request.prompt_tokens + brief.output_tokens
        end_length = min(request.prompt_tokens + request.output_tokens, self._max_length)
        live = Live(
            order=0,
            due_s=due_s(now_s, brief.ttft_slo_ms) if before is None else before.due_s,
            tokens=_content(request, end_length) if self.spec.options.prefix_cache else NO_CONTENT,
            length=length,
            last_token_ps=before.last_token_ps if before is not None else -1,
            expected_length=request.prompt_tokens + brief.predicted_tokens,
            rank=adapter.rank,
            adapter=adapter.digest,
            adapter_bytes=adapter.size_bytes,
            merged_bytes=self.spec.merged_copy.size_bytes if self.spec.merged_copy is not None and adapter.digest else 0,
            request=request,
            end_length=end_length,
            brief=brief,
        )
        actions = self.core.on(Assign(brief, "", adapter if adapter.digest else None, live, fetch), now_s)
        first = actions[0] if actions else None
        if isinstance(first, Refuse):
            return False
        self._metrics.host_misses += not isinstance(first, Start)
        self._perform(actions)
        return True

    def bring(self, digest: str, over: Collection[str]) -> None:
        """Copy an adapter to the device before a request asks for it, as `CopyIn` says."""
        self._perform([CopyIn(digest, over)])

    def pin(self, digests: Iterable[str]) -> None:
        """Keep these adapters loaded, and no others."""
        self._perform(self.core.on(Pinned([self._adapters[digest] for digest in digests]), self._events.now_s))
        if not self._ticks:
            self._tick()

    def cancel(self, request_id: str, epoch: int) -> None:
        """Stop a request of this epoch or an older one; an unknown one is ignored."""
        self._perform(self.core.on(CancelRequest(request_id, epoch), self._events.now_s))

    def give(self, request_id: str, then: Callable[[Live], None]) -> None:
        """Hand a request over, after the present step if it is in the engine.

        Ignored when it is not here or is leaving already.
        """
        entry = self.core.book.get(request_id)
        if entry is None or entry.phase == "leaving":
            return
        actions = self.core.on(CancelRequest(request_id, entry.brief.epoch), self._events.now_s)
        self._leaving += [(entry.payload, then) for action in actions if isinstance(action, Stop)]
        if self._run is None:
            self._hand_over()
        else:
            self._shorten(self._run)
        self._perform(actions)
        for action in actions:
            if isinstance(action, Answer):  # it was still waiting for its adapter
                then(action.entry.payload)

    def _stop_one(self, stop: Stop) -> None:
        """The core wants a request out of the engine; it leaves after the present step."""
        for live in (*self.state.running, *self.state.waiting):
            brief = live.brief
            if (
                brief.request_id == stop.request_id
                and brief.epoch <= stop.epoch
                and live not in [one for one, _ in self._leaving]
            ):
                self._leaving.append((live, lambda live: None))
        if self._run is None:
            self._hand_over()
        else:
            self._shorten(self._run)

    def _hand_over(self) -> None:
        """Requests leave the engine between two steps."""
        leaving, self._leaving = self._leaving, []
        for live, then in leaving:
            if live.length >= live.end_length:
                continue  # it ended in this step
            if live.decoding:
                live.last_token_ps = self._events.now_ps
            self.batches.end(live)
            self._tell_core(Stepped(ended=[(live.brief.request_id, live.brief.epoch)]))
            then(live)
        self._note_free()

    def preload(self, digests: Iterable[str]) -> None:
        """Put adapters on the device before the run begins, as far as there is room without evicting."""
        for digest in digests:
            if self.batches.load(digest, self._adapters[digest].size_bytes) is None:
                continue
            if self._copies is not None:
                self.batches.slots.arrived(digest)
            self._tell_core(Stepped(device=[(digest, True)]))

    def _perform(self, actions: list[Action[Live]]) -> None:
        """Carry out the core's actions: requests go to the batches and loads to their links. Nothing else takes time."""
        if self.dead:
            return
        if self.view.changed:
            self._on_change(self)
        started = False
        for action in actions:
            if isinstance(action, Start):
                self.batches.start(action.entry.payload, self._events.now_s)
                started = True
            elif isinstance(action, Fetch):
                self._fetch(action.entry)
            elif isinstance(action, Load):
                self.storage.load(action)
            elif isinstance(action, CopyIn):
                self._coming.append(action)
            elif isinstance(action, Stop):
                self._stop_one(action)
            elif isinstance(action, PinAdapters):
                self.batches.slots.pinned = action.digests
        if self._coming and not started:
            if self._run is None:
                self._begin()
            else:
                self._shorten(self._run)
        if started:  # all that one event starts is there when the next step is decided
            if self._run is None:
                self._begin()
            else:
                self._shorten(self._run)

    def _tell_core(self, stepped: Stepped) -> None:
        """Report something between two steps. Nothing starts because of it, but room for a load may have come free."""
        for action in self.core.on(stepped, self._events.now_s):
            if isinstance(action, Load):
                self.storage.load(action)
            elif isinstance(action, CopyIn):
                self._coming.append(action)

    def _fetch(self, entry: Entry[Live]) -> None:
        """Begin to fetch the KV blocks of a moved request."""
        live = entry.payload
        trip = travel(self.spec.perf, tokens=live.length, rank=live.rank, token_bytes=self.spec.limits.kv_token_bytes)
        self._events.at(self._events.now_ps + to_ps(trip.copy_ms), MESSAGE, self._fetched, entry)

    def _fetched(self, entry: Entry[Live]) -> None:
        self._landing.append(entry)
        if self._run is None:
            self._land()
        else:
            self._shorten(self._run)

    def _land(self) -> None:
        """Write fetched KV blocks between two steps, then start their requests."""
        landing, self._landing = [one for one in self._landing if self.core.entry(one.key) is one], []
        kv, held = self.state.kv, self.batches.travelling
        for live in [entry.payload for entry in landing]:
            full = (live.length - 1) // kv.block_size
            extend_keys(kv, live, full)
            keys = live.keys[held.hold(live.brief.request_id, live.keys[:full]) : full]
            if held.grow(live.brief.request_id, len(keys)) is not None:
                held.publish(live.brief.request_id, keys)
                self._metrics.kv_travels += 1
        self._perform([action for entry in landing for action in self.core.on(Fetched(entry.key), self._events.now_s)])
        for entry in landing:
            held.drop(entry.brief.request_id)

    def _tick(self, first_ps: int = 0) -> None:
        self._ticks = True
        self._events.at(self._events.now_ps + (first_ps or TICK_PS), STEP, self._tick)
        if not first_ps:
            self._perform(self.core.on(Tick(), self._events.now_s))

    def _loaded(self, adapter: AdapterRef) -> None:
        size_bytes = adapter.size_bytes
        self._perform(self.core.on(Loaded(adapter.digest, size_bytes, size_bytes), self._events.now_s))

    def _end(self, ended: list[Live], now_ps: int) -> None:
        for live in ended:
            self.batches.end(live)
            self._metrics.ended(live.request.index, now_ps, live.end_length - live.request.prompt_tokens)
            self._on_end(self, live)
        if actions := self.core.on(
            Stepped(ended=[(live.brief.request_id, live.brief.epoch) for live in ended]), self._events.now_s
        ):
            self._perform(actions)

    # ---- steps

    def _begin(self) -> None:
        """Decide the next step, or a run of equal steps, and schedule its end."""
        if self.dead or (not self.core.book and not self._coming):
            return
        now_ps = self._events.now_ps
        copies = self._copies
        if copies is not None:
            self._look(copies)
        if self._coming:
            self._bring(copies)
        if not self.core.book:
            return
        slice_ps = self._work_on_copy() if self._slices is not None else 0
        plan = self._decided(now_ps)
        if not plan.tokens:
            if copies is not None and (wait_ps := copies.wait_ps(self.batches)):
                self._serial += 1
                self._events.at(now_ps + wait_ps, STEP, self._resume, self._serial)
            return  # all that is here is still loading
        left = min([live.end_length - live.length for live in plan.decodes]) if plan.decodes else 0
        if self._modes is not None:
            self._rest(plan, now_ps)
        steps = 1 if plan.prefills else steady_steps(self.state, plan, self._most(plan, left))
        batch = self._batch(plan)
        first_ps, growth_ps = self._step_ps(plan, batch)
        if copies is not None:
            first_ps = copies.step_ps(self.batches, plan.decodes + plan.prefills, first_ps)
        if plan.switched:
            first_ps += self._switch_ps()
        first_ps += slice_ps
        self._serial += 1
        self._run = _Run(plan, batch, slice_ps, now_ps, first_ps, growth_ps, steps, left, self._serial)
        self._events.at(now_ps + elapsed_ps(first_ps, growth_ps, steps), STEP, self._stop, self._serial)

    def _decided(self, now_ps: int) -> StepPlan[Live]:
        """The plan of the next step, carried out but for the step itself."""
        plan = self.batches.decide(self._events.now_s)
        if self.batches.boundary is not None:
            self.batches.boundary.settle()  # there is no memory to divide
        if self._slices is not None:
            self._slices.dropped(plan)
            if self._slices.begun(plan):
                self._copied_ps = 0
        if plan.admitted or plan.preempted or plan.loads or plan.prefetched or plan.evictions:
            self._moved(plan, now_ps)
        return plan

    def _most(self, plan: StepPlan[Live], left: int) -> int:
        """How many steps may be made in one go, of which the first decode has `left` to its end."""
        most = min(self.max_run, left)
        if self._modes is None:
            return most
        if plan.switched or plan.copy_started:
            return 1
        most = min(most, self._modes.steady())
        return most if self.batches.copy is None else min(most, self.batches.copy.steady)

    def _step_ps(self, plan: StepPlan[Live], batch: Batch) -> tuple[int, int]:
        """The time of the step, and how much longer each next one is while nothing else changes."""
        model = self.spec.steps
        first_ps = model.fixed_ps(batch)
        growth_ps = 0
        each_ps, longest_ps = model.context_token_ps, model.longest_token_ps
        if each_ps or longest_ps:
            contexts = [live.length for live in plan.decodes]
            if plan.prefills:
                contexts += [live.computed + live.scheduled for live in plan.prefills]
            first_ps += each_ps * sum(contexts)
            if longest_ps:
                first_ps += longest_ps * max(contexts)
            growth_ps = each_ps * len(contexts) + longest_ps if not plan.prefills else 0
        return first_ps, growth_ps

    def _look(self, copies: Copies) -> None:
        """Take in the copies that have ended by now."""
        copies.link.advance(self._events.now_ps)
        if arrived := self.batches.look(copies):
            self._tell_core(Stepped(device=[(digest, True) for digest in arrived]))

    def _bring(self, copies: Copies | None) -> None:
        """Begin the copies that no request has asked for yet: of pinned adapters, and of those that may be requested soon."""
        coming, self._coming = self._coming, []
        now_ps, batches = self._events.now_ps, self.batches
        for digest, over in [(action.digest, action.over) for action in coming]:
            size_bytes = self._adapters[digest].size_bytes
            grant = batches.load(digest, size_bytes) if over is None else batches.foresee(digest, size_bytes, over)
            if grant is None:
                continue
            changes = [(evicted, False) for evicted, _ in grant.evicted]
            if copies is not None:
                for evicted, _ in grant.evicted:
                    copies.link.cancel(evicted)
                copies.link.begin(digest, size_bytes, now_ps)
                self._events.at(now_ps + copies.link.queued_ps, STEP, self._landed)
            else:  # the next step waits for it
                changes.append((digest, True))
                self._brought.append(size_bytes)
            if changes:
                self._tell_core(Stepped(device=changes))
            self._metrics.foreseen += over is not None
        if self.batches.boundary is not None:
            self.batches.boundary.settle()

    def _landed(self) -> None:
        if self._run is None and self._copies is not None:
            self._look(self._copies)

    def _resume(self, serial: int) -> None:
        """A waiting request may join, or a copy is complete."""
        if serial == self._serial and self._run is None:
            self._begin()
            self._on_change(self)

    def _moved(self, plan: StepPlan[Live], now_ps: int) -> None:
        metrics = self._metrics
        for live in plan.preempted:
            live.brief = replace(live.brief, phase="waiting")
            if live.decoding:
                live.decoding, live.last_token_ps = False, now_ps if live.rested_ps < 0 else live.rested_ps
                live.rested_ps = -1
        for live in plan.admitted:
            live.brief = replace(live.brief, phase="running")
            if live.last_token_ps < 0:
                metrics.admitted(live.request.index, now_ps)
            metrics.prefix_tokens += live.computed
            if live.cold is not None and live.last_token_ps < 0:
                metrics.cold_starts[live.cold.mode] = metrics.cold_starts.get(live.cold.mode, 0) + 1
            if live.adapter:
                metrics.adapter_admissions += 1
        moved = [live.brief for live in plan.preempted + plan.admitted]
        device = []
        for digest, _ in plan.evictions:
            device.append((digest, False))
            if self._copies is not None:
                self._copies.link.cancel(digest)
        for live in plan.loads:
            if self._copies is not None:
                self._copies.link.begin(live.adapter, live.adapter_bytes, now_ps)
            else:
                device.append((live.adapter, True))
        for live, _ in plan.prefetched:
            if self._copies is not None:
                self._copies.link.begin(live.adapter, live.adapter_bytes, now_ps)
        self._tell_core(Stepped(moved, device=device))
        metrics.prefetches += len(plan.prefetched)
        metrics.preemptions += len(plan.preempted)
        metrics.admissions += len(plan.admitted)
        metrics.device_loads += len(plan.loads)
        metrics.evictions += len(plan.evictions)

    def _batch(self, plan: StepPlan[Live]) -> Batch:
        batch = Batch(waiting=len(self.state.waiting))
        count_plan(batch, plan.decodes, plan.prefills, adapters=self.spec.steps.reads_adapters)
        if plan.merged:
            batch.without_lora()
        batch.sampled = batch.decode_rows
        if plan.prefills:
            batch.chance = self._chance.random()
            batch.sampled += sum([live.computed + live.scheduled == live.length for live in plan.prefills])
        if self._copies is None and (plan.loads or self._brought):
            batch.loads = (*self._brought, *[live.adapter_bytes for live in plan.loads])
            self._brought = []
        return batch

    def _rest(self, plan: StepPlan[Live], now_ps: int) -> None:
        """Record the time that a request rested as a gap between two of its tokens."""
        for live in plan.decodes:
            if live.rested_ps >= 0:
                self._metrics.gaps(now_ps - live.rested_ps, 0, 1, 1)
                live.rested_ps = -1
        if plan.resting:
            for live in self.state.running:
                if live.decoding and not live.scheduled and live.rested_ps < 0:
                    live.rested_ps = now_ps

    def _switch_ps(self) -> int:
        """The time to change the weights before a step; none where there is a merged copy."""
        switch_ps = to_ps(self.spec.in_place.costs.switch_ms) if self.spec.in_place is not None else 0
        self._metrics.switches += 1
        self._metrics.switch_ps += switch_ps
        return switch_ps

    def _work_on_copy(self) -> int:
        """The time of a slice of the merged copy before the next step."""
        assert self._slices is not None and self.spec.merged_copy is not None, "there is a copy to make"
        left_ps = self.spec.merged_copy.make_ps - self._copied_ps
        most_ps = round(self._slices.slice(self._last_ps))
        if not most_ps:
            return 0
        slice_ps = min(left_ps, most_ps)
        self._copied_ps += slice_ps
        self._slices.worked(slice_ps, whole=slice_ps == left_ps)
        return slice_ps

    def _ran(self, run: _Run, steps: int, modes: Modes) -> None:
        if (copy := self.batches.copy) is not None:
            for step in range(steps):
                self._last_ps = run.first_ps + step * run.growth_ps - run.slice_ps
                run.batch.time_ms = self._last_ps / PS_PER_MS
                copy.observe(run.batch)
        modes.ran(steps)
        if run.plan.merged:
            self._metrics.merged_steps += steps
        else:
            self._metrics.unmerged_steps += steps

    def _shorten(self, run: _Run) -> None:
        """Something has arrived, so the run ends with its present step."""
        if run.steps == 1:
            return
        steps = steps_within(run.first_ps, run.growth_ps, self._events.now_ps - run.began_ps) + 1
        if steps < run.steps:
            run.steps = steps
            self._serial += 1
            run.serial = self._serial
            end_ps = run.began_ps + elapsed_ps(run.first_ps, run.growth_ps, steps)
            self._events.at(end_ps, STEP, self._stop, run.serial)

    def settle(self) -> None:
        """Book the steps that have ended by now, so that `state`, `live` and `kv_blocks_free` are up to date."""
        run = self._run
        if run is None or run.steps == 1:
            return
        steps = min(run.steps - 1, steps_within(run.first_ps, run.growth_ps, self._events.now_ps - run.began_ps))
        if steps:
            self._book(run, steps)
            self._note_free()
            run.began_ps += elapsed_ps(run.first_ps, run.growth_ps, steps)
            run.first_ps += run.growth_ps * steps
            run.steps -= steps
            run.left -= steps

    def _book(self, run: _Run, steps: int) -> None:
        """Book `steps` steps of a steady run. None of them, or only the last one, ends a sequence."""
        decodes = run.plan.decodes
        advance_steady(self.state, run.plan, steps)
        self._metrics.gaps(run.first_ps, run.growth_ps, steps, len(decodes))
        if self._modes is not None:
            self._ran(run, steps, self._modes)
        self.busy_ps += elapsed_ps(run.first_ps, run.growth_ps, steps)

    def _stop(self, serial: int) -> None:
        """The run is over: draw tokens, end sequences, and begin the next step."""
        run = self._run
        if run is None or run.serial != serial or self.dead:
            return  # it was shortened
        now_ps = self._events.now_ps
        plan = run.plan
        if plan.prefills:
            drew = self._draw(run, now_ps)
        else:
            drew = plan.decodes
            self._book(run, run.steps)
        if self._on_tokens is not None:
            self._on_tokens(self, drew)
        ended = [live for live in plan.decodes if live.length >= live.end_length] if run.left == run.steps else []
        if plan.prefills:
            ended += [live for live in plan.prefills if live.length >= live.end_length]
        if ended:
            self._end(ended, now_ps)
        self._note_free()
        self._run = None
        if self._leaving:
            self._hand_over()
        if self._landing:
            self._land()
        if self._run is None:
            self._begin()
        if self.view.changed:
            self._on_change(self)

    def _draw(self, run: _Run, now_ps: int) -> list[Live]:
        """Book a step with prefill chunks. Returns the requests that have drawn a token."""
        plan, metrics = run.plan, self._metrics
        if self._modes is not None:
            self._ran(run, 1, self._modes)
        drew = advance(plan)
        for live in drew:
            live.length += 1
        if plan.decodes:
            metrics.gaps(run.first_ps, 0, 1, len(plan.decodes))
        for live in plan.prefills:
            if live.computed != live.length - 1 or live.decoding:
                continue  # chunks are left
            live.decoding = True
            if live.last_token_ps < 0:
                metrics.first_token(live.request.index, now_ps)
            else:
                metrics.gaps(now_ps - live.last_token_ps, 0, 1, 1)
            live.last_token_ps = now_ps
        self.busy_ps += run.first_ps
        return drew

    # ---- what schedulers hear

    def snapshot(self) -> WorkerSnapshot:
        """The whole state, as a message. It includes all pending changes."""
        self._tell()
        return self.view.snapshot(self.spec.perf)

    def delta(self) -> WorkerDelta:
        """The changes since the last message, as a message."""
        self._tell()
        return self.view.delta()

    def _note_free(self) -> None:
        self._free = self.batches.kv_blocks_free, self.batches.adapter_bytes_free

    def _tell(self) -> None:
        """Report the steps that have ended by now."""
        self.settle()
        if self._run is None:
            self._note_free()
        progress = [(live.brief.request_id, live.length - live.brief.prompt_tokens) for live in self.state.running]
        self._tell_core(Stepped(free=self._free, progress=progress))


def _content(request: Request, length: int) -> array[int]:
    """Token ids of prompt and output to come: equal prefix blocks have equal tokens, all other tokens are unique to the
    request.
    """
    tokens = array("i")
    for block_id in request.prefix:
        tokens.extend(array("i", (block_id,)) * request.prefix_tokens)
    del tokens[request.prompt_tokens :]
    return tokens + array("i", (~request.index,)) * (length - len(tokens))
