"""The engine: schedule, run, postprocess.

    schedule      policies/step/batch_admission decides who computes how many tokens; adapters are brought to the device
    run           seats -> StepBatch -> Backend.forward -> Sampler: one token for every sequence that is up to date
    postprocess   append tokens, end sequences, write items for the gateways and briefs for the schedulers

Single-threaded: every method is called from the engine's thread and waits for the device only. Where the backend supports it,
adapters are copied to the device beside the steps: their requests wait with a slot, or join before the copy is complete
(policies/step/cold_start), while other requests run. If all requests for a copy end before it does, it continues until its slot
is needed. An error of one request or adapter ends that request only. A forward pass that fails ends the requests in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import StepPlan, advance, cache_keys, due_s
from motet.policies.step.cold_start import ColdStartName
from motet.policies.step.merge_decision import MergeConfig
from motet.policies.step.merged_copy import MERGE, MergedCopy
from motet.policies.step.plan_numbers import count_plan
from motet.policies.worker.assemble import DeviceMemory, batch_core
from motet.policies.worker.probe import Reading
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.protocol import NATIVE
from motet.services.worker.engines.request import EngineLimits, EngineRequest, MergeStats, StepOutput, StepStats
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.backend import Backend
from motet.services.worker.native.copies import DeviceAdapters
from motet.services.worker.native.grammars import Matcher, grammars_for
from motet.services.worker.native.kv_io import KvIo
from motet.services.worker.native.merging import CopyMaker
from motet.services.worker.native.probing import NativeProbe
from motet.services.worker.native.sampler import Drawn, Sampler
from motet.services.worker.native.seats import LiveSequence, Seats
from motet.services.worker.native.step_clock import StepClock
from motet.shared import clock
from motet.shared.errors import BadRequest, InvalidAdapter, MotetError
from motet.shared.model import Capability, FinishReason, PerfModel, RequestBrief, Residency, SamplingParams
from motet.shared.telemetry import logger
from motet.shared.wire.stream import StreamItem
from motet.shared.worker_options import WorkerOptions

log = logger("motet.worker.engine")
TELL_S = 0.5
"""Time between two reports of which mechanisms are on."""
COMPILING_S = 0.002
"""Time between two looks at grammars that are being compiled, while there is nothing else to do."""


class Engine:
    """One model, many sequences. It owns KV accounting, adapter slots, queues and sampling state; the backend owns the tensors.

    `perf` returns the present estimate of step times. `cold_start` forces one way to start requests whose adapter is being
    copied. `merging` has the constants of merging, for a backend that can merge. `ends`: tokens that end an answer besides
    those of the checkpoint's configuration. `tokenizer`: the model's tokenizer.json, for outputs that follow a grammar.
    """

    def __init__(
        self,
        runner: Backend,
        limits: EngineLimits,
        options: WorkerOptions,
        *,
        perf: Callable[[], PerfModel] = lambda: START_PERF,
        merging: MergeConfig = MERGE,
        ends: Collection[int] = (),
        tokenizer: Path | None = None,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._vocab_size: int = runner.config.vocab_size
        self._eos = frozenset(runner.config.eos_token_ids).union(ends)
        self._grammars = grammars_for(tokenizer, self._vocab_size, self._eos) if tokenizer is not None else None
        self._compiling: list[tuple[LiveSequence, Future[Matcher]]] = []  # requests whose grammars are being compiled
        # The KV cache may be smaller than the model's context: a sequence alone in it must fit.
        model_len = limits.max_model_len or runner.config.max_model_len
        self.max_model_len = min(model_len, runner.config.max_model_len, limits.kv_blocks * limits.block_size)
        self.lora_bytes = runner.lora_bytes_total
        """Largest device memory of one adapter, in bytes."""
        memory = DeviceMemory(
            kv_blocks=limits.kv_blocks,
            block_size=limits.block_size,
            adapter_bytes=self.lora_bytes,
            block_bytes=runner.kv_block_bytes,
            shared=runner.elastic,
        )
        assert (options.merge != "off") == (runner.merged is not None), "an engine merges if its backend can"
        self._core: BatchCore[LiveSequence] = batch_core(
            memory,
            options,
            max_running=limits.max_running,
            perf=perf(),
            layers=runner.config.num_layers if runner.link.bytes_per_s < math.inf else None,
            merging=merging,
        )
        self._adapters = DeviceAdapters(runner, self._core.slots, perf)
        self._maker: CopyMaker | None = None
        """Makes the merged copy of the weights; None where no adapter is merged."""
        if runner.merged is not None and self._core.copy is not None:
            self._maker = CopyMaker(runner.merged, self._core.copy)
        self._told_s = 0.0  # when the mechanisms were last told
        self._step_s = 0.0  # how long the last step took, slices of a copy apart
        self._state = self._core.state
        self._probe = NativeProbe(runner, limits.block_size) if runner.probe_blocks else None
        self._probed_merged = ""  # the adapter of the copy that was probed last
        self.kv = KvIo(self._core.travelling, runner, self._keys_of)
        """Access to KV blocks, for requests that move between workers."""
        self._seats = Seats(
            seats=self._core.seats,
            max_step_tokens=options.max_step_tokens,
            max_model_len=self.max_model_len,
            block_size=limits.block_size,
        )
        self._sampler = Sampler(self._core.seats, self._vocab_size)
        self.clock = StepClock()
        self._output = StepOutput()  # of the step to come; what happens between steps is reported with it
        self._changed: dict[str, RequestBrief] = {}  # becomes its `changed`
        self.pause_s = 0.0
        """How long `step` will find nothing to do unless a command comes first."""

    @property
    def runner(self) -> Backend:
        """What computes its steps."""
        return self._runner

    @property
    def core(self) -> BatchCore[LiveSequence]:
        """What decides its steps."""
        return self._core

    @property
    def serves(self) -> frozenset[Capability]:
        """What it serves beyond the common: outputs that follow a grammar, where the model has a tokenizer for that."""
        return NATIVE if self._grammars is not None else frozenset()

    @property
    def kv_blocks_free(self) -> int:
        """Blocks that a new sequence could get, including unused cached blocks and the memory of idle adapters."""
        return self._core.kv_blocks_free

    @property
    def adapter_bytes_free(self) -> int:
        """Empty device memory that adapters may fill."""
        return self._core.adapter_bytes_free

    def take_prefixes(self) -> dict[int, bool] | None:
        """What became of cached KV blocks since the last call (`worker_events.Stepped.prefixes`), from the first call on."""
        kv = self._core.state.kv
        if kv.news is None and kv.prefix_cache:
            kv.news = {}
        return kv.take_news()

    @property
    def cold_start(self) -> ColdStartName:
        """How requests start whose adapter is being copied; "auto" where steps wait for copies."""
        cold = self._core.cold
        return cold.forced if cold is not None else "auto"

    @cold_start.setter
    def cold_start(self, way: ColdStartName) -> None:
        if self._core.cold is not None:
            self._core.cold.forced = way

    def briefs(self) -> list[RequestBrief]:
        """Every request of this engine, waiting or running."""
        return [live.brief() for live in self._sequences()]

    def residency(self) -> list[Residency]:
        """The adapters on the device."""
        return list(self._adapters.resident.values())

    def has_work(self) -> bool:
        """Whether `step` would compute or report anything, now or after `pause_s`."""
        core = self._core
        unread = self._probe is not None and self._adapters.unread
        waits = self._compiling or self._output.items or self._adapters.changes or unread
        return bool(core.busy or core.slots.loading or waits)

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request that arrived at `request.arrival_s`. It takes effect with the next step.

        The caller has checked it (`admission.check`), and the engine has no request of this id. Raises InvalidAdapter for an
        adapter that is larger than the device's adapter memory.
        """
        known = request.prompt_tokens + request.output_tokens
        assert 0 < request.prompt_tokens < self.max_model_len >= known, "admission lets no such request in"
        live = self._make_live(request)
        if live.adapter_bytes > self.lora_bytes:
            room = self.lora_bytes
            raise InvalidAdapter(f"the adapter needs {live.adapter_bytes} bytes on the device, which has {room} for adapters")
        finish = _finish_of(live) if request.output else None
        if finish is None and live.output_tokens >= request.sampling.max_tokens:
            finish = "length"
        if finish is not None:  # its owner lost the last frame, or asks for no token at all
            stop_token = live.tokens[-1] if finish == "stop" else None
            self._emit(live, StreamItem(request.request_id, request.epoch, live.output_tokens, [], finish, stop_token))
            return
        self._changed[request.request_id] = live.brief()
        if (wanted := request.sampling.structured) is None:
            self._core.start(live, now_s)
            return
        assert self._grammars is not None, "admission lets a grammar in only where the engine serves it"
        output = live.tokens[live.prompt_tokens :]
        self._compiling.append((live, self._grammars.matcher(wanted, output, _constraint(request))))

    def _start_compiled(self, now_s: float) -> None:
        """Start the requests whose grammars are compiled, and answer those whose cannot be."""
        compiling, self._compiling = self._compiling, []
        for live, found in compiling:
            if not found.done():
                self._compiling.append((live, found))
                continue
            try:
                live.matcher = found.result()
            except MotetError as error:
                self._answer(live, error)
            except Exception as error:
                log.exception("a grammar was not compiled", extra={"request": live.request.request_id})
                self._answer(live, MotetError(f"the grammar could not be compiled: {type(error).__name__}: {error}"))
            else:
                self._core.start(live, now_s)

    def _answer(self, live: LiveSequence, error: MotetError) -> None:
        """End a request that the core never had."""
        self._emit(live, live.request.item(live.output_tokens, "error", error=error))
        self._changed.pop(live.request.request_id, None)

    def cancel(self, request_id: str, epoch: int) -> bool:
        """Stop the request of this id if its epoch is `epoch` or older; its last item says "cancelled"."""
        live = self._find(request_id)
        if live is None or live.request.epoch > epoch:
            return False
        self._end(live, live.request.item(live.output_tokens, "cancelled"))
        return True

    def _keys_of(self, request_id: str, epoch: int) -> list[bytes]:
        """The keys of a request's full blocks; none if the engine does not have the request."""
        live = self._find(request_id)
        return cache_keys(live, 0, live.published) if live is not None and live.request.epoch == epoch else []

    def _find(self, request_id: str) -> LiveSequence | None:
        return next((live for live in self._sequences() if live.request.request_id == request_id), None)

    def step(self, now_s: float) -> StepOutput:
        """Run one batch through the model. With nothing to run, it only reports what happened since the last step."""
        stats = self._output.stats
        if self._compiling:
            self._start_compiled(now_s)
        if self._maker is not None and self._core.busy:
            stats.merge_s = self._maker.advance(self._step_s)
        for digest in self._core.look(self._adapters):
            self._adapters.whole(digest)
        probed = self._read_adapter()
        if self._core.busy:
            self.clock.begin()
            plan = self._schedule(now_s, stats)
            if not probed:
                self._read_adapter()
            self._read_merged(plan)
            drawn = self._run(plan, stats)
            if drawn is not None:
                self._postprocess(plan, drawn, stats)
        self._sweep()
        ran = stats.decode_rows or stats.prefill_requests
        self.pause_s = 0.0 if ran else self._adapters.pause_s(self._core.wait_ms)
        if self._compiling and not ran:
            self.pause_s = min(self.pause_s, COMPILING_S) or COMPILING_S
        stats.running, stats.waiting = len(self._state.running), len(self._state.waiting)
        if ran and (now_s >= self._told_s + TELL_S or not self._core.busy):
            self._told_s, stats.mechanisms = now_s, self._core.mechanisms
        return self._take_output()

    def load_adapter(self, adapter: HostAdapter, over: Collection[str] | None = None) -> bool:
        """Prefetch an adapter to the device if there is room (`BatchCore.load`, or with `over` `BatchCore.foresee`).

        Returns whether it is on the device or being copied; a step reports when it is there. Raises what the backend raises
        when it cannot take the weights.
        """
        digest = adapter.digest
        size_bytes = self._runner.adapter_bytes(adapter)
        grant = self._core.load(digest, size_bytes) if over is None else self._core.foresee(digest, size_bytes, over)
        if grant is not None:
            for evicted, slot in grant.evicted:
                self._adapters.left(evicted, slot)
        self._divide_memory()
        if grant is None:
            return digest in self._core.slots
        try:
            self._adapters.begin(grant.slot, adapter)
        except Exception:
            self._core.slots.drop(digest)
            raise
        return True

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Pin these adapters, and no others: they are evicted after all other adapters."""
        self._core.slots.pinned = digests

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        """End all requests with this adapter, take it off the device, and forget what was computed with it."""
        for live in [live for live in self._sequences() if live.adapter == digest]:
            self._fail(live, error, spoiled=True)
        self.unload_adapter(digest)
        self._state.kv.forget_all()

    def read_base(self) -> None:
        """Compute the base's answers to the probe, so that no step waits for them later."""
        if self._probe is not None:
            assert self._probe.base is not None

    def unload_adapter(self, digest: str) -> bool:
        """Take an adapter off the device, complete or not: now, or when its last request has ended.

        Returns whether it is gone already.
        """
        self._core.unload(digest)
        self._sweep()
        return digest not in self._core.doomed

    def abort_all(self, error: MotetError) -> StepOutput:
        """End every request with `error`. Returns their last items and everything else that was not reported yet."""
        for live in self._sequences():
            self._fail(live, error)
        return self._take_output()

    def close(self) -> None:
        """End everything that runs beside the steps."""
        self._runner.close()
        self._sampler.masks.close()
        if self._grammars is not None:
            self._grammars.close()

    def check(self) -> None:
        """Assert that blocks, slots and seats add up (tests, and idle moments)."""
        self._core.check()
        self._adapters.check()
        ids = [live.request.request_id for live in self._sequences()]
        assert len(set(ids)) == len(ids), "two requests of one id"

    # ---- schedule, run, postprocess

    def _schedule(self, now_s: float, stats: StepStats) -> StepPlan[LiveSequence]:
        plan = self._core.decide(now_s)
        sequences: list[LiveSequence] = []
        if self._maker is not None:
            sequences = self._sequences()  # as planned: one whose adapter cannot be loaded ends below
            self._maker.drop(plan)
        for live in plan.preempted:
            self._leave(live)
            self._changed[live.request.request_id] = live.brief()
        for live in plan.grown:
            self._seats.grew(live)
        for live in plan.considered:
            assert live.cold is not None, "it was considered"
            live.cold_since_s, live.cold_ttft_ms = now_s, live.cold.ttft_ms[live.cold.mode]
        for live in plan.admitted:
            self._seats.take(live)
            self._sampler.seat(live.row, live.request.sampling, live.tokens, live.prompt_tokens, live.ending)
            if live.matcher is not None:
                self._sampler.masks.seat(live.row, live.matcher)
            if live.admitted_s is None:
                live.admitted_s, live.cached_prompt_tokens = now_s, min(live.computed, live.prompt_tokens)
            stats.cached_tokens += live.computed  # before its first rows: tokens from the prefix cache
            self._changed[live.request.request_id] = live.brief()
            if live.cold is not None and not live.reported:
                stats.cold_starts.append((live.cold.mode, live.cold.reason))
        if plan.loads or plan.evictions or plan.prefetched:
            self._move_adapters(plan, stats)
        elif self._core.boundary is not None:
            self._divide_memory()
        if self._maker is not None:
            self._maker.begin(plan, sequences)
        stats.preempted = len(plan.preempted)
        count_plan(stats, plan.decodes, plan.prefills)
        if plan.merged:
            stats.without_lora()
        self.clock.lap("schedule")
        return plan

    def _run(self, plan: StepPlan[LiveSequence], stats: StepStats) -> Drawn | None:
        if not plan.decodes and not plan.prefills:
            return None
        try:
            batch, rows, lengths = self._seats.build(plan, stats)
            if plan.merged:
                batch.merged = True
                batch.row_slot.fill(-1)
            else:
                batch.slot_modes, stats.cold_rows = self._adapters.modes(self._core.cold, plan)
            if self._sampler.masks:
                self._sampler.masks.begin(rows)
            self.clock.lap("schedule")
            logits = self._runner.forward(batch)
            self.clock.lap("forward")
            drawn = self._sampler.sample(logits, rows, lengths) if rows.size else Drawn(rows)
            self.clock.lap("sample")
        except Exception as error:  # whatever it was, its requests must be answered and the others served
            self._output.failure = error
            for live in plan.decodes + plan.prefills:
                self._fail(live, MotetError(f"the engine step failed: {type(error).__name__}: {error}"), spoiled=True)
            self._state.kv.forget_all()
            return None
        return drawn

    def _weigh_modes(self, copy: MergedCopy, plan: StepPlan[LiveSequence], stats: StepStats) -> None:
        """Report a step to the merge policy: its duration for the gain of merging, its requests for the credits."""
        self._step_s = self.clock.step_s - self.clock.laps.get("probe", 0.0)
        stats.time_ms = 1000 * self._step_s
        copy.observe(stats)
        assert self._core.modes is not None, "an engine with a merged copy chooses between modes"
        self._core.modes.ran(1)
        stats.merging = MergeStats(plan.merged, plan.switched, plan.resting, copy.claimed_bytes, copy.lora)

    def _postprocess(self, plan: StepPlan[LiveSequence], drawn: Drawn, stats: StepStats) -> None:
        self._take_tokens(advance(plan), drawn, stats)
        self.clock.lap("postprocess")
        if self._core.copy is not None and self._core.weighs:
            self._weigh_modes(self._core.copy, plan, stats)

    def _take_tokens(self, drawing: list[LiveSequence], drawn: Drawn, stats: StepStats) -> None:
        stats.sampled = len(drawing)
        broken = set(drawn.broken)
        for index, (live, token) in enumerate(zip(drawing, drawn.tokens.tolist(), strict=True)):
            if index in broken:
                at = f"at output token {live.output_tokens}"
                sampling = live.request.sampling
                if live.matcher is not None:
                    why = live.matcher.error or "with the request's other fields it leaves no token to draw"
                    name = _constraint(live.request)
                    self._fail(live, BadRequest(f"{name}: {why} {at}", param=name))
                elif sampling.bad_words:  # no token may be drawn
                    self._fail(live, BadRequest(f"bad_words leaves no token to draw {at}", param="bad_words"))
                else:
                    self._fail(live, MotetError(f"the model's logits are not finite {at}"), spoiled=True)
                continue
            request = live.request
            item = StreamItem(request.request_id, request.epoch, live.output_tokens, [token])
            live.append(token)
            if not live.reported:
                live.reported = True
                item.cached_tokens = live.cached_prompt_tokens
                assert live.admitted_s is not None, "it has run"
                item.queue_ms = max(0.0, live.admitted_s - request.arrival_s) * 1000
                if live.cold is not None:
                    took_ms = (clock.now_s() - live.cold_since_s) * 1000
                    stats.cold_errors_ms.append((live.cold.mode, took_ms - live.cold_ttft_ms))
            if drawn.logprobs and index in drawn.logprobs:
                item.logprobs = [drawn.logprobs[index]]
            item.finish = _finish_of(live)
            if item.finish is None:
                self._emit(live, item)
            else:
                if item.finish == "stop":
                    item.stop_token = token
                self._end(live, item)

    def _take_output(self) -> StepOutput:
        out, self._output = self._output, StepOutput()
        out.residency, self._adapters.changes = self._adapters.changes, []
        loading, self._adapters.loading = self._adapters.loading, []
        if self._probe is not None:
            out.loading = loading
        out.changed = list(self._changed.values())
        self._changed.clear()
        if not out.empty:  # an empty output is not reported, so its copies are reported with the next one
            out.stats.copies = self._adapters.stats()
        out.stats.adapters_loaded, self._adapters.arrived = self._adapters.arrived, 0
        return out

    # ---- requests

    def _sequences(self) -> list[LiveSequence]:
        """Every request of this engine. It looks a request up by its id only to cancel it, so it keeps no index."""
        return [*self._state.waiting, *self._state.running, *[live for live, _ in self._compiling]]

    def _make_live(self, request: EngineRequest) -> LiveSequence:
        sampling, adapter = request.sampling, request.weights
        return LiveSequence(
            order=0,
            priority=request.priority,
            due_s=due_s(request.arrival_s, request.slo.ttft_slo_ms, begun=bool(request.output)),
            tokens=request.tokens,
            adapter=adapter.digest if adapter else "",
            adapter_bytes=self._runner.adapter_bytes(adapter) if adapter else 0,
            request=request,
            prompt_tokens=request.prompt_tokens,
            max_length=min(self.max_model_len, request.prompt_tokens + sampling.max_tokens),
            ending=self._ending(sampling),
            rank=adapter.rank if adapter else 0,
            expected_length=request.prompt_tokens + request.predicted_tokens,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            cache_scope=request.cache_scope,
            merged_bytes=self._maker.size(adapter) if adapter and self._maker is not None else 0,
        )

    def _ending(self, sampling: SamplingParams) -> set[int]:
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}

    def _emit(self, live: LiveSequence, item: StreamItem) -> None:
        self._output.items.setdefault(live.request.gateway_id, []).append(item)

    def _fail(self, live: LiveSequence, error: MotetError, *, spoiled: bool = False) -> None:
        self._end(live, live.request.item(live.output_tokens, "error", error=error), spoiled=spoiled)

    def _end(self, live: LiveSequence, item: StreamItem, *, spoiled: bool = False) -> None:
        self._emit(live, item)
        if any(live is one for one, _ in self._compiling):
            self._compiling = [one for one in self._compiling if one[0] is not live]
        else:
            self._core.end(live, spoiled=spoiled)
        self._leave(live)
        self._changed.pop(live.request.request_id, None)

    def _leave(self, live: LiveSequence) -> None:
        if live.row >= 0:
            self._sampler.leave(live.row)
            self._seats.leave(live)

    # ---- adapters

    def _read_adapter(self) -> bool:
        """Probe the adapter that has been on the device without it for the longest. At most one in a step."""
        unread = self._adapters.unread
        if self._probe is None or not unread:
            return False
        digest = next(iter(unread))
        self._add_reading(self._probe.read(digest, unread.pop(digest)))
        return True

    def _add_reading(self, reading: Reading) -> None:
        self._output.readings.append(reading)
        self._output.stats.probe_s += reading.took_s
        self.clock.lap("probe")

    def _read_merged(self, plan: StepPlan[LiveSequence]) -> None:
        """Probe a copy of the weights with an adapter before the first step that computes with it."""
        if self._probe is None or plan.merged == self._probed_merged:
            return
        if plan.merged:
            self._add_reading(self._probe.read_merged(plan.merged))
        if plan.merged or plan.copy_started or plan.dropped:
            self._probed_merged = plan.merged

    def _move_adapters(self, plan: StepPlan[LiveSequence], stats: StepStats) -> None:
        self.clock.lap("schedule")
        for digest, slot in plan.evictions:
            self._adapters.left(digest, slot)
        self._divide_memory()
        for live in plan.loads:
            adapter = live.request.weights
            assert adapter is not None, "only sequences with an adapter load one"
            try:
                self._adapters.begin(live.slot, adapter)
            except Exception as error:  # this adapter's requests end, the others of the step go on
                self._fail_load(plan, live, error)
        for live, slot in plan.prefetched:
            adapter = live.request.weights
            assert adapter is not None, "only sequences with an adapter have one copied"
            try:
                self._adapters.begin(slot, adapter)
            except Exception:  # its request finds out in its turn
                log.exception("an adapter was not copied ahead", extra={"adapter": adapter.digest})
                self._state.adapters.drop(adapter.digest)
        stats.load_s = self.clock.lap("load")

    def _divide_memory(self) -> None:
        """The boundary between KV blocks and adapters has moved: divide the device's memory accordingly."""
        boundary = self._core.boundary
        if boundary is None or not boundary.moved:
            return
        moves = boundary.settle()
        self._runner.divide(self._state.kv.total, self._state.adapters.bytes_total, moves)
        if moves:
            for live in self._state.running:
                if live.row >= 0:
                    self._seats.moved(live)

    def _fail_load(self, plan: StepPlan[LiveSequence], first: LiveSequence, error: Exception) -> None:
        answer = MotetError(f"adapter {first.adapter} could not be loaded: {type(error).__name__}: {error}", param="model")
        for live in [live for live in self._sequences() if live.adapter == first.adapter and live.slot >= 0]:
            if live.scheduled:
                plan.prefills.remove(live)
            self._fail(live, answer, spoiled=True)
        self._state.adapters.drop(first.adapter)

    def _sweep(self) -> None:
        for digest, slot in self._core.sweep():
            self._adapters.left(digest, slot)


def _constraint(request: EngineRequest) -> str:
    """The request's field that says what its output must look like."""
    return request.needs.get("structured", "structured_outputs")


def _finish_of(live: LiveSequence) -> FinishReason | None:
    """Why the sequence ends with its last token; None if it continues. Ending tokens cannot be drawn before min_tokens."""
    if live.tokens[-1] in live.ending:
        return "stop"
    return "length" if live.length >= live.max_length else None
