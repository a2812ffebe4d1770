"""Decides which sequences compute how many tokens in the next step: continuous batching with chunked prefill.

`decide(state)` moves sequences between the two lists of its state, books KV blocks and adapter slots for them, and
returns the plan of one step. State and plan are in `policies.step.batch_state`. The rules:

1. Running sequences with one token left to compute (decodes) go first, one row each, in their order. If one needs a block
   and none is free, the last running sequence is preempted: it gives everything back, waits in its place of the order, and
   later recomputes prompt and output (most of it from the prefix cache, if the blocks were not reused meanwhile).
2. What is left of `max_step_tokens` goes to prefill chunks of running sequences, again in their order.
3. Then waiting sequences come in, in their order, while seats, tokens and blocks last. Blocks for all known
   tokens are booked at once, and one block of headroom per running sequence must stay, so that newcomers are not
   preempted in the next step. A sequence that lacks *blocks* is not overtaken: the sequences behind it wait too.
   Where KV blocks and adapters share a budget (`policies.memory.boundary`), idle adapters make room for blocks and cached
   blocks for adapters before a sequence is preempted or waits.
4. A sequence whose *adapter* finds no slot is overtaken by up to `max_bypass` others, then only by base sequences, which need
   no slot. Running sequences free their slots when they end, so no sequence waits for ever.
   With size-based `queues`, a sequence may overtake only if it is predicted to end before the slot becomes free (Chameleon
   section 4.3.3, `policies.step.overtaking`). If the slot could be free sooner, the overtaking sequence is preempted.
5. A sequence whose adapter has a slot but is still being copied waits *with* that slot, however many sequences overtake it,
   until the copy is complete or `policies.step.cold_start` lets the sequence join earlier. It holds neither a seat nor blocks
   meanwhile.
6. Where the engine can merge an adapter into its weights, `policies.step.merge_decision` says before every step which adapters'
   sequences it may compute. The other running sequences rest with their blocks, and the other waiting ones wait. Resting
   sequences are preempted first when blocks are lacking.

The first running sequence is never preempted while another one runs, so every step makes progress.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic

from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_state import (
    AdmissionState,
    S,
    StepPlan,
    cache_keys,
    extend_keys,
    give_back_slot,
    insert,
    preempt,
    publish_full_blocks,
    turn,
)
from motet.policies.step.cold_start import ColdStarts
from motet.policies.step.merge_decision import Modes
from motet.policies.step.mode_demand import MODE_WINDOW, mode_demand
from motet.policies.step.overtaking import Overtaking
from motet.policies.step.request_queues import Queues

BYPASS_WINDOW = 128
"""Maximum waiting sequences without a slot that a step examines; bounds the work of the step."""
COLD_WINDOW = 8
"""Maximum sequences per step for which joining before the end of their adapter's copy is considered; copies come in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Limits of a step. A decode needs one token of the budget, so no more sequences run than `max_step_tokens`."""

    max_running: int
    max_step_tokens: int
    max_bypass: int = 64
    prefetch: int = 0  # waiting requests whose adapters are copied before their turn, where copies run beside the steps

    @property
    def seats(self) -> int:
        return min(self.max_running, self.max_step_tokens)


class BatchAdmission(Generic[S]):
    """The policy. Its limits are fixed; everything else is in the state that `decide` gets.

    `cold` decides about adapters that are being copied; it is needed when the state's slots are asynchronous. `queues` chooses
    the candidates; without it waiting sequences join in the order of `order_of`. `modes` chooses between merged and unmerged
    steps.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        cold: ColdStarts | None = None,
        queues: Queues[S] | None = None,
        modes: Modes | None = None,
    ) -> None:
        self.limits = limits
        self.queues = queues
        self.modes = modes
        self.overtaking: Overtaking[S] | None = Overtaking() if queues is not None and queues.squashes else None
        """Sequences that overtook others by prediction; None where the queues want no predictions."""
        self._cold = cold
        self._now_s = 0.0

    def decide(self, state: AdmissionState[S], now_s: float = 0.0) -> StepPlan[S]:
        """The next step's plan. Changes the state as if the step were already under way."""
        plan: StepPlan[S] = StepPlan()
        self._now_s = now_s
        plan.evictions += state.adapters.unkept()
        if self.overtaking is not None:
            self.overtaking.squash(state, lambda seq: self._preempt(state, seq, plan))
        if self.modes is None:
            self._fill(state, plan, None)
        elif state.running or state.waiting:
            self._fill_by_mode(state, plan, self.modes)
        return plan

    def _fill_by_mode(self, state: AdmissionState[S], plan: StepPlan[S], modes: Modes) -> None:
        """Fill the step with the sequences of the mode. If there are none, fill it with any sequences."""
        before = modes.merged
        mode = modes.choose(*mode_demand(state, self.limits.seats))  # rule 6
        turn(state, modes.merged)
        self._fill(state, plan, mode.only, mode.first)
        if mode.only is not None and not plan.tokens:
            modes.unmerge()
            turn(state, "")
            self._fill(state, plan, None)
        elif mode.only is not None:
            plan.resting = sum([seq.adapter not in mode.only for seq in state.running])
        plan.merged, plan.merge_candidate = modes.merged, mode.candidate
        plan.switched = modes.merged != before

    def _fill(
        self, state: AdmissionState[S], plan: StepPlan[S], only: Collection[str] | None, first: Collection[str] = ()
    ) -> None:
        """Fill the step: running sequences, then waiting ones.

        `only`: the adapters whose sequences may take part; None for all. `first`: the adapters whose sequences come first.
        """
        rows = tuple(state.running) if only is None else tuple([seq for seq in state.running if seq.adapter in only])
        self._schedule_decodes(state, plan, rows, only)
        if len(plan.decodes) < len(rows):
            self._schedule_prefills(state, plan, rows)
        if state.waiting:
            candidates = state.waiting if self.queues is None else self.queues.candidates(state, self._now_s)
            if first:  # rule 6
                candidates = sorted(candidates[:MODE_WINDOW], key=lambda seq: seq.adapter not in first)
            if only is not None:  # rule 6
                candidates = [seq for seq in candidates[:MODE_WINDOW] if seq.adapter in only]
            self._admit(state, plan, candidates)
            plan.starved = plan.starved or (state.boundary is not None and state.boundary.crowded)
            if self.limits.prefetch and state.adapters.asynchronous:
                self._prefetch(state, plan, candidates)

    def _schedule_decodes(
        self, state: AdmissionState[S], plan: StepPlan[S], rows: tuple[S, ...], only: Collection[str] | None
    ) -> None:
        """Rule 1."""
        kv, decodes, preempted = state.kv, plan.decodes, plan.preempted
        block_size, publishing, boundary = kv.block_size, kv.prefix_cache, state.boundary
        for seq in rows:
            computed = seq.computed
            if seq.length - computed != 1 or (preempted and not seq.blocks):
                continue  # still in its prompt, or preempted a moment ago
            if computed % block_size == 0 and computed == len(seq.blocks) * block_size:
                if boundary is not None and not kv.blank:
                    _find_blocks(state, plan, 1, 0)
                # The victim is the last running sequence, so never one that this loop has scheduled already.
                while not kv.free and seq.blocks:
                    self._preempt(state, state.running[-1] if only is None else _last_resting(state, only), plan)
                if not seq.blocks:
                    continue
                kv.extend(seq.blocks)
                plan.grown.append(seq)
            seq.scheduled = 1
            decodes.append(seq)
            if publishing and (computed + 1) % block_size == 0:
                publish_full_blocks(kv, seq, computed + 1)
        plan.tokens = len(plan.decodes)

    def _schedule_prefills(self, state: AdmissionState[S], plan: StepPlan[S], rows: tuple[S, ...]) -> None:
        """Rule 2."""
        for seq in rows:
            if not seq.scheduled and seq.blocks:
                self._schedule_chunk(state.kv, seq, plan)

    def _schedule_chunk(self, kv: KvBlocks, seq: S, plan: StepPlan[S]) -> None:
        seq.scheduled = min(seq.length - seq.computed, self.limits.max_step_tokens - plan.tokens)
        if seq.scheduled:
            plan.tokens += seq.scheduled
            plan.prefills.append(seq)
            publish_full_blocks(kv, seq, seq.computed + seq.scheduled)

    def _admit(self, state: AdmissionState[S], plan: StepPlan[S], candidates: list[S]) -> None:
        """Admit candidates and take them out of their list: rules 3 to 5."""
        in_order, max_bypass = candidates is state.waiting, self.limits.max_bypass
        blocked: list[S] = []
        index = asked = promised = 0
        if state.boundary is not None:
            state.boundary.crowded = False
        closed = False  # a sequence was overtaken `max_bypass` times: only base sequences may overtake it now
        room = self._has_room(state, plan)
        while room and index < len(candidates) and len(blocked) < BYPASS_WINDOW:
            seq = candidates[index]
            # rule 4: no slot
            if seq.adapter and seq.slot < 0 and (closed or not self._has_slot(state, seq, promised)):
                blocked.append(seq)
                closed |= seq.bypassed >= max_bypass
                index += 1
                continue
            # rule 4: by prediction
            if blocked and not self._may_overtake(state, seq, blocked):
                index += 1
                continue
            # rule 5
            if seq.adapter and self._cold is not None and self._under_way(state, seq, plan, self._cold):
                asked += 1
                if asked > COLD_WINDOW or not self._joins(seq, plan, self._cold):
                    promised += state.kv.blocks_for(seq.length)
                    index += 1
                    continue
            # rule 3: no blocks
            if not self._book_blocks(state, seq, index if in_order else state.waiting.index(seq), plan):
                plan.starved = True
                return
            # rule 3: it comes in
            self._book_slot(state, seq, plan)
            del candidates[index]
            if not in_order:
                state.waiting.remove(seq)
            self._run(state, seq, plan)
            room = self._has_room(state, plan)
            # rule 4: it has overtaken those without a slot
            for passed in blocked:
                passed.bypassed += 1
                closed |= passed.bypassed >= max_bypass

    def _has_room(self, state: AdmissionState[S], plan: StepPlan[S]) -> bool:
        """Whether the step has a seat and tokens left (rule 3)."""
        return len(state.running) < self.limits.seats and plan.tokens < self.limits.max_step_tokens

    def _may_overtake(self, state: AdmissionState[S], seq: S, blocked: list[S]) -> bool:
        """Whether the sequence may overtake those of `blocked`, which have no slot."""
        return not seq.adapter or self.overtaking is None or self.overtaking.may(state, seq, blocked)

    def _run(self, state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
        """The sequence, which has its blocks and slot, runs from now on."""
        if self.queues is not None:
            self.queues.began(seq, self._now_s)
        insert(state.running, seq)
        plan.admitted.append(seq)
        self._schedule_chunk(state.kv, seq, plan)

    def _prefetch(self, state: AdmissionState[S], plan: StepPlan[S], candidates: list[S]) -> None:
        """Begin the copies that the next candidates will need, if this takes nothing from running and waiting sequences."""
        slots = state.adapters
        for seq in candidates[: self.limits.prefetch]:
            if not seq.adapter or seq.adapter in slots:
                continue
            if state.boundary is not None:
                state.boundary.for_adapter(seq.adapter_bytes, evicting=False)
            grant = slots.prefetch(seq.adapter, seq.adapter_bytes)
            if grant is None:
                return  # later candidates must not take the room that this one waits for
            plan.evictions += grant.evicted
            plan.prefetched.append((seq, grant.slot))
            if self._cold is not None:
                self._cold.begun(seq.adapter, seq.adapter_bytes)

    def _preempt(self, state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
        preempt(state, seq, plan)
        if self.queues is not None:
            self.queues.stopped(seq, self._now_s)

    @staticmethod
    def _has_slot(state: AdmissionState[S], seq: S, promised: int) -> bool:
        """Whether the adapter has a slot or can get one. `promised`: KV blocks for earlier sequences that wait for a copy."""
        adapters, boundary = state.adapters, state.boundary
        if seq.adapter in adapters:
            return True
        if boundary is None:
            return adapters.fits(seq.adapter_bytes)
        return boundary.for_adapter(seq.adapter_bytes, blocks=promised + state.kv.blocks_for(seq.length))

    def _under_way(self, state: AdmissionState[S], seq: S, plan: StepPlan[S], cold: ColdStarts) -> bool:
        """Whether the adapter is still being copied. If so, the sequence holds the slot from now on."""
        adapters = state.adapters
        if seq.adapter not in adapters or seq.adapter in adapters.loading:
            self._book_slot(state, seq, plan)
            if plan.loads and plan.loads[-1] is seq:
                cold.begun(seq.adapter, seq.adapter_bytes)
        return seq.adapter in adapters.loading

    def _joins(self, seq: S, plan: StepPlan[S], cold: ColdStarts) -> bool:
        """Whether the sequence joins the next step although its adapter is not completely on the device."""
        rows = (*plan.decodes, *plan.prefills)
        assisted = [one for one in rows if cold.modes.get(one.adapter) == "assist"]
        choice = cold.consider(
            seq.adapter,
            seq.adapter_bytes,
            rank=seq.rank,
            tokens=seq.length,
            room=self.limits.max_step_tokens - plan.tokens,
            others=len(rows),
            assisted=(
                sum({one.adapter: one.adapter_bytes for one in assisted}.values()),
                sum(one.scheduled * one.adapter_bytes for one in assisted),
            ),
        )
        if seq.cold is None:
            plan.considered.append(seq)
        seq.cold = choice
        return choice.joins

    @staticmethod
    def _book_slot(state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
        if not seq.adapter or seq.slot >= 0:
            return
        grant = state.adapters.acquire(seq.adapter, seq.adapter_bytes)
        assert grant is not None, "the slot was there a moment ago"
        seq.slot = grant.slot
        if grant.load:
            plan.loads.append(seq)
            plan.evictions += grant.evicted

    @staticmethod
    def _book_blocks(state: AdmissionState[S], seq: S, index: int, plan: StepPlan[S]) -> bool:
        """Book blocks for every known token, shared ones first; False, and no change, when blocks are lacking.

        The last token is never taken from the cache, because its logits are needed.

        `index`: of the sequence in `waiting`.
        """
        kv = state.kv
        cached: list[int] = []
        if kv.prefix_cache:
            seq.merged = bool(seq.adapter) and seq.adapter == state.merged
            reusable = (seq.length - 1) // kv.block_size
            extend_keys(kv, seq, reusable)
            cached = kv.match(cache_keys(seq, 0, reusable))
        fresh = kv.blocks_for(seq.length) - len(cached)
        needed = fresh + len(state.running)
        boundary, count = state.boundary, needed + (kv.idle_among(cached) if cached else 0)
        if boundary is None:
            short = count > kv.free
        else:
            short = not boundary.admits(needed)
            short = short or (needed > kv.blank and not _find_blocks(state, plan, count, index + 1, seq))
        if short:
            return False
        if cached:
            kv.take(cached)
        seq.blocks = cached + kv.allocate(fresh)
        seq.computed, seq.found = len(cached) * kv.block_size, len(cached)
        seq.published = len(cached)
        return True


def _last_resting(state: AdmissionState[S], only: Collection[str]) -> S:
    """The last running sequence that the step leaves out; the last running one if it leaves out none."""
    running = state.running
    return next((seq for seq in reversed(running) if seq.adapter not in only), running[-1])


def _find_blocks(state: AdmissionState[S], plan: StepPlan[S], count: int, index: int, seq: S | None = None) -> bool:
    """Make `count` blocks available for the waiting sequence `seq` or a running one. Returns whether this was possible.

    If adapters have taken memory of the KV share, the sequences that wait from `index` on give up their slots.
    """
    boundary = state.boundary
    assert boundary is not None, "memory is shared"
    adapter, adapter_bytes = (seq.adapter, seq.adapter_bytes) if seq is not None else ("", 0)
    while not boundary.for_blocks(count, adapter=adapter, adapter_bytes=adapter_bytes):
        if not boundary.owns(count) or not _let_go(state, plan, index):
            return False
    return True


def _let_go(state: AdmissionState[S], plan: StepPlan[S], index: int) -> bool:
    """Take the slot from the last sequence of `waiting`, from `index` on, that had one before this step.

    Returns whether there was one.
    """
    for at in range(len(state.waiting) - 1, index - 1, -1):
        seq = state.waiting[at]
        if seq.slot >= 0 and not any(seq is one for one in plan.loads):
            give_back_slot(state, seq)
            return True
    return False
