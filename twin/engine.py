"""A simulated engine: what services/worker/native does from one step to the next, under the virtual clock.

    decide ─> one step, or a run of equal ones ─> advance, draw tokens, end sequences ─> decide ...

A run is one event (`twin.run`). `policies.step.batch_core` decides. What takes time are steps (`twin.steps`), copies to the
device (`twin.link`), and changes of the weights (`twin.merged_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import StepPlan, advance, advance_steady, extend_keys, steady_steps
from motet.policies.step.plan_numbers import count_plan
from motet.policies.worker.assemble import DeviceMemory, batch_core
from motet.policies.worker.worker_events import Stepped
from motet.shared.model import AdapterRef
from motet.twin.events import STEP, Events, to_ps
from motet.twin.link import Copies
from motet.twin.merged_steps import MergedSteps
from motet.twin.metrics import Metrics
from motet.twin.run import AnyLive, Live, Run
from motet.twin.steps import Batch
from motet.twin.worker_spec import WorkerSpec

FOREVER = 1 << 40


class Shell(Protocol):
    """The worker around an engine. The engine calls it as follows."""

    @property
    def busy(self) -> bool:
        """Whether the worker has requests, in the engine or on their way to it."""

    def report(self, stepped: Stepped) -> None:
        """Something happened between two steps."""

    def drew(self, lives: Sequence[AnyLive]) -> None:
        """These requests have drawn a token in each step of the run."""

    def ended(self, lives: Sequence[AnyLive]) -> None:
        """These requests have drawn their last token."""

    def between_steps(self) -> None:
        """A run is over and the next one is not decided yet."""

    def announce(self) -> None:
        """An engine that waited for copies has decided again."""

    def announce_changes(self) -> None:
        """The run after another one is decided."""


class Engine:
    """The engine of one worker. Commands take effect between two steps; `wake` follows them."""

    max_run = FOREVER  # steps advanced in one go; 1 simulates every step

    def __init__(self, spec: WorkerSpec, events: Events, metrics: Metrics, shell: Shell, *, seed: int) -> None:
        self._spec, self._events, self._metrics, self._shell = spec, events, metrics, shell
        link = spec.link
        self._copies = Copies(link, spec.perf) if link is not None else None
        self.batches: BatchCore[Live] = batch_core(
            DeviceMemory.of(spec.limits),
            spec.engine_options,
            max_running=spec.limits.max_running,
            perf=spec.perf,
            layers=link.layers if link is not None else None,
            merging=spec.merging,
            modes=spec.in_place.policy(spec.in_place.costs) if spec.in_place is not None else None,
        )
        modes = self.batches.modes
        self._merging = MergedSteps(spec, self.batches, modes, metrics) if modes is not None else None
        if self.batches.boundary is not None:
            self.batches.boundary.costs.perf = spec.perf
        self.dead = False
        """Killed: nothing that was under way has an effect."""
        self.busy_ps = 0
        self._chance = np.random.default_rng(seed)  # drawn from once per step with prefills, which is never split
        self._state = self.batches.state
        self._state.kv.news = {}
        self._run: Run | None = None
        self._serial = 0
        self._added = False  # a request, since the last decision or `wake`
        self._coming: list[tuple[AdapterRef, Collection[str] | None]] = []  # to be looked at between two steps
        self._brought: list[int] = []  # bytes of adapters that came since the last step, where steps wait for copies
        self._leaving: list[tuple[Live, Callable[[Live], None]]] = []  # requests that are handed over after the present step
        self._note_free()

    # ---- commands

    @property
    def idle(self) -> bool:
        """Whether no step is running."""
        return self._run is None

    def add(self, live: Live) -> None:
        """A request begins to wait."""
        self.batches.start(live, self._events.now_s)
        self._added = True

    def load(self, adapter: AdapterRef, over: Collection[str] | None) -> None:
        """Copy an adapter to the device, as `worker_events.CopyIn` says."""
        self._coming.append((adapter, over))

    def pin(self, digests: Collection[str]) -> None:
        """These adapters, and no others, are evicted after all others."""
        self.batches.slots.pinned = digests

    def preload(self, adapter: AdapterRef) -> None:
        """Put an adapter on the device at once, if there is room without evicting."""
        if self.batches.load(adapter.digest, adapter.size_bytes) is None:
            return
        if self._copies is not None:
            self.batches.slots.arrived(adapter.digest)
        self._shell.report(Stepped(device=[(adapter.digest, True)]))

    def stop(self, request_id: str, epoch: int, then: Callable[[Live], None] = lambda live: None) -> None:
        """A request of this epoch or an older one leaves after the present step, and `then` gets it unless it has ended."""
        for live in (*self._state.running, *self._state.waiting):
            brief = live.brief
            if (
                brief.request_id == request_id
                and brief.epoch <= epoch
                and live not in [leaving for leaving, _ in self._leaving]
            ):
                self._leaving.append((live, then))
        if self._run is None:
            self._hand_over()
        else:
            self.shorten()

    def take_in(self, lives: list[tuple[Live, int]], start: Callable[[], None]) -> None:
        """Write the KV blocks that were fetched for these requests, so many of each, and hold them while `start` adds the
        requests."""
        kv, held = self._state.kv, self.batches.travelling
        for live, full in lives:
            extend_keys(kv, live, full)
            keys = live.keys[held.hold(live.brief.request_id, live.keys[:full]) : full]
            if keys and held.grow(live.brief.request_id, len(keys)) is not None:
                held.publish(live.brief.request_id, keys)
                self._metrics.kv_travels += 1
                self._metrics.kv_blocks_moved += len(keys)
        start()
        for live, _ in lives:
            held.drop(live.brief.request_id)

    def wake(self) -> None:
        """Look at what the last commands brought: now, or when the present step has ended."""
        if not self._added and not self._coming:
            return
        self._added = False
        if self._run is None:
            self._begin()
        else:
            self.shorten()

    def shorten(self) -> None:
        """Something has arrived, so the run ends with its present step."""
        run = self._run
        if run is None or run.steps == 1:
            return
        steps = run.ended_by(self._events.now_ps) + 1
        if steps < run.steps:
            run.steps = steps
            self._serial += 1
            run.serial = self._serial
            self._events.at(run.began_ps + run.took_ps(steps), STEP, self._end, run.serial)

    def step_end_ps(self) -> int:
        """When the present step ends; now without one."""
        run, now_ps = self._run, self._events.now_ps
        if run is None:
            return now_ps
        return run.began_ps + run.took_ps(min(run.steps, run.ended_by(now_ps) + 1))

    def progress(self) -> Stepped:
        """Free memory and the output tokens of all running requests, after the steps that have ended by now."""
        self._settle()
        if self._run is None:
            self._note_free()
        progress = [(live.brief.request_id, live.length - live.brief.prompt_tokens) for live in self._state.running]
        return Stepped(free=self._free, progress=progress, prefixes=self._state.kv.take_news())

    # ---- before a step

    def _begin(self) -> None:
        """Decide the next step, or a run of equal steps, and schedule its end."""
        if self.dead or not (self._shell.busy or self._coming):
            return
        now_ps = self._events.now_ps
        copies = self._copies
        if copies is not None:
            self._look(copies)
        if self._coming:
            self._bring(copies)
            if copies is not None:
                self._look(copies)  # the decision needs to know of copies that have just begun
        if not self._shell.busy:
            return
        merging = self._merging
        slice_ps = merging.slice_ps() if merging is not None else 0
        plan = self._decided(now_ps)
        if not plan.tokens:
            if copies is not None and (wait_ps := copies.wait_ps(self.batches)):
                self._serial += 1
                self._events.at(now_ps + wait_ps, STEP, self._resume, self._serial)
            return  # all that is here is still loading
        left = min([live.end_length - live.length for live in plan.decodes]) if plan.decodes else 0
        most = min(self.max_run, left)
        if merging is not None:
            merging.rest(plan, now_ps)
            most = min(most, merging.steady(plan))
        batch = self._batch(plan)
        steps = 1 if batch.loads else steady_steps(self._state, plan, most)
        first_ps, growth_ps = self._step_ps(plan, batch)
        if copies is not None:
            first_ps = copies.step_ps(self.batches, plan.decodes + plan.prefills, first_ps)
        if merging is not None:
            first_ps += merging.switch_ps(plan) + slice_ps
        self._serial += 1
        self._run = run = Run(plan, batch, slice_ps, now_ps, first_ps, growth_ps, steps, left, self._serial)
        if steps > 1 and (until_s := self.batches.order_holds_s(self._events.now_s)) < inf:
            run.steps = steps = min(steps, run.ended_by(to_ps(1e3 * until_s) - 1) + 1)
        self._events.at(now_ps + run.took_ps(steps), STEP, self._end, self._serial)

    def _resume(self, serial: int) -> None:
        """A waiting request may join, or a copy is complete."""
        if serial == self._serial and self._run is None:
            self._begin()
            self._shell.announce()

    def _look(self, copies: Copies) -> None:
        """Take in the copies that have ended by now."""
        copies.link.advance(self._events.now_ps)
        if arrived := self.batches.look(copies):
            self._shell.report(Stepped(device=[(digest, True) for digest in arrived]))

    def _landed(self) -> None:
        if self._run is None and self._copies is not None:
            self._look(self._copies)

    def _bring(self, copies: Copies | None) -> None:
        """Begin the copies that no request has asked for yet: of pinned adapters, and of those that may be requested soon."""
        coming, self._coming = self._coming, []
        now_ps, batches = self._events.now_ps, self.batches
        for adapter, over in coming:
            digest, size_bytes = adapter.digest, adapter.size_bytes
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
                self._shell.report(Stepped(device=changes))
            self._metrics.foreseen += over is not None
            self._metrics.brought += over is None
        if batches.boundary is not None:
            batches.boundary.settle()

    def _decided(self, now_ps: int) -> StepPlan[Live]:
        """The plan of the next step, carried out but for the step itself."""
        plan = self.batches.decide(self._events.now_s)
        if self.batches.boundary is not None:
            self.batches.boundary.settle()  # there is no memory to divide
        if self._merging is not None:
            self._merging.decided(plan)
        if plan.admitted or plan.preempted or plan.loads or plan.prefetched or plan.evictions:
            self._moved(plan, now_ps)
        return plan

    def _moved(self, plan: StepPlan[Live], now_ps: int) -> None:
        """Requests and adapters come to the batch and the device, and leave them."""
        metrics, copies = self._metrics, self._copies
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
        device = [(digest, False) for digest, _ in plan.evictions]
        if copies is None:
            device += [(live.adapter, True) for live in plan.loads]
        else:
            for digest, _ in plan.evictions:
                copies.link.cancel(digest)
            for live in (*plan.loads, *[live for live, _ in plan.prefetched]):
                copies.link.begin(live.adapter, live.adapter_bytes, now_ps)
        self._shell.report(Stepped([live.brief for live in plan.preempted + plan.admitted], device=device))
        metrics.prefetches += len(plan.prefetched)
        metrics.preemptions += len(plan.preempted)
        metrics.device_loads += len(plan.loads)
        metrics.evictions += len(plan.evictions)

    def _batch(self, plan: StepPlan[Live]) -> Batch:
        batch = Batch(waiting=len(self._state.waiting))
        count_plan(batch, plan.decodes, plan.prefills, adapters=self._spec.steps.reads_adapters)
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

    def _step_ps(self, plan: StepPlan[Live], batch: Batch) -> tuple[int, int]:
        """The time of the step, and how much longer each next one is while nothing else changes."""
        model = self._spec.steps
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

    # ---- after a step

    def _end(self, serial: int) -> None:
        """The run is over: draw tokens, end sequences, and begin the next step."""
        run = self._run
        if run is None or run.serial != serial or self.dead:
            return  # it was shortened
        now_ps, plan, shell = self._events.now_ps, run.plan, self._shell
        if plan.prefills:
            drew = self._draw(run, now_ps)
        else:
            drew = plan.decodes
            self._book(run, run.steps)
        shell.drew(drew)
        ended = [live for live in plan.decodes if live.length >= live.end_length] if run.left == run.steps else []
        if plan.prefills:
            ended += [live for live in plan.prefills if live.length >= live.end_length]
        if ended:
            for live in ended:
                self.batches.end(live)
                self._metrics.ended(live.request.index, now_ps, live.end_length - live.request.prompt_tokens)
            shell.ended(ended)
        self._note_free()
        self._run = None
        if self._leaving:
            self._hand_over()
        shell.between_steps()
        if self._run is None:
            self._begin()
        shell.announce_changes()

    def _draw(self, run: Run, now_ps: int) -> list[Live]:
        """Book a step with prefill chunks. Returns the requests that have drawn a token."""
        plan, metrics = run.plan, self._metrics
        if self._merging is not None:
            self._merging.ran(run, 1)
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

    def _book(self, run: Run, steps: int) -> None:
        """Book `steps` steps of a steady run. None of them, or only the last one, ends a sequence."""
        advance_steady(self._state, run.plan, steps)
        self._metrics.gaps(run.first_ps, run.growth_ps, steps, len(run.plan.decodes))
        if self._merging is not None:
            self._merging.ran(run, steps)
        self.busy_ps += run.took_ps(steps)

    def _settle(self) -> None:
        """Book the steps that have ended by now."""
        run = self._run
        if run is None or run.steps == 1:
            return
        steps = min(run.steps - 1, run.ended_by(self._events.now_ps))
        if steps:
            self._book(run, steps)
            self._note_free()
            run.booked(steps)

    def _hand_over(self) -> None:
        """Requests leave the engine between two steps."""
        leaving, self._leaving = self._leaving, []
        for live, then in leaving:
            if live.length >= live.end_length:
                continue  # it ended in this step
            if live.decoding:
                live.last_token_ps = self._events.now_ps
            self.batches.end(live)
            self._shell.report(Stepped(ended=[(live.brief.request_id, live.brief.epoch)]))
            then(live)
        self._note_free()

    def _note_free(self) -> None:
        self._free = self.batches.kv_blocks_free, self.batches.adapter_bytes_free
