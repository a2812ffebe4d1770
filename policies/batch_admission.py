"""Decides which sequences compute how many tokens in the next step: continuous batching with chunked prefill.

`decide(state)` moves sequences between the two lists of its state, books KV blocks and adapter slots for them, and
returns the plan of one step; `advance(state, plan)` is called when the step has run. The rules:

1. Running sequences with one token left to compute (decodes) go first, one row each, in their order. If one needs a block
   and none is free, the last running sequence is preempted: it gives everything back, waits in its place of the order, and
   later recomputes prompt and output (most of it from the prefix cache, if nobody took the blocks).
2. What is left of `max_step_tokens` goes to prefill chunks of running sequences, again in their order.
3. Then waiting sequences come in, in their order, while seats, tokens and blocks last. Blocks for all known
   tokens are booked at once, and one block of headroom per running sequence must stay, so that newcomers are not
   preempted in the next step. A sequence short of *blocks* lets nobody pass.
   Where KV blocks and adapters share a budget (`policies.memory_boundary`), idle adapters make room for blocks and cached
   blocks for adapters before anybody is preempted or waits.
4. A sequence whose *adapter* finds no slot lets others pass, `max_bypass` of them; after that only base sequences, which
   cannot prolong its wait for a slot. Slots held by running sequences come free as those end, so nobody starves.
   Where `queues` say so, others pass only if they are predicted to end before it finds room (Chameleon section 4.3.3); who
   passed is preempted when the room comes sooner.
5. A sequence whose adapter has a slot but is still being copied waits *with* that slot, however many pass, until its copy is
   whole or `policies.cold_start` lets it join before. It holds neither a seat nor blocks meanwhile.

The order is that of `priority`, then of `due_s`: arrival plus PATIENCE times the objective for the time to first token. With
equal objectives that is first come, first served; an interactive request overtakes the batch requests that came before it,
and none of them for ever. The first sequence is never preempted while another one runs, so every step makes progress.

    tokens    |-- cached or computed --|-- scheduled this step --|-- later chunks --|
              0                     computed          computed + scheduled        length
"""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from motet.policies.adapter_slots import AdapterSlots
from motet.policies.cold_start import ColdChoice, ColdStarts
from motet.policies.kv_blocks import KvBlocks, chain_key, root_key
from motet.policies.memory_boundary import Boundary

BYPASS_WINDOW = 128
"""Maximum waiting sequences that are examined behind one without a slot; bounds the work of a step."""
PATIENCE = 4.0
"""A request can be overtaken for this many times its TTFT objective. With 1 (earliest deadline first), standard requests that
are almost late would make interactive ones late too under overload."""
COLD_WINDOW = 8
"""Maximum sequences per step for which joining before the end of their adapter's copy is considered; copies come in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Counts per step. A decode needs a token of the budget, so no more sequences run than `max_step_tokens`."""

    max_running: int
    max_step_tokens: int
    max_bypass: int = 64
    prefetch: int = 0  # waiting requests whose adapters are copied before their turn, where copies run beside the steps

    @property
    def seats(self) -> int:
        return min(self.max_running, self.max_step_tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request as the policy sees it. `tokens` are its ids (int32), of which `length` are known: prompt and output so far.
    Only a prefix cache reads the ids themselves."""

    order: int  # of arrival, unique
    priority: int = 0  # before everything else, smaller ones first
    due_s: float = 0.0  # its place in the order, on the clock of arrivals (`due_s`)
    tokens: array[int]
    length: int = -1  # by default, of `tokens`
    adapter: str = ""  # digest, "" for the base
    adapter_bytes: int = 0  # on the device
    rank: int = 0  # of its adapter
    expected_length: int = 0  # prompt and predicted output; 0 for unknown
    tenant: str = ""
    tenant_weight: float = 1.0
    cache_scope: bytes = b""  # who may share its KV blocks (policies.kv_blocks.cache_scope)
    computed: int = 0  # tokens whose K and V are in the cache
    scheduled: int = 0  # rows in the step being run
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # chain keys of full blocks known so far
    published: int = 0  # blocks whose key the cache has been told
    slot: int = -1  # adapter slot, -1 for the base
    bypassed: int = 0  # sequences that came in past this one while it found no slot
    cold: ColdChoice | None = None  # how it gets in while its adapter is copied, as last chosen

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = len(self.tokens)

    def append(self, token: int) -> None:
        """The next token was drawn."""
        self.tokens.append(token)
        self.length += 1


S = TypeVar("S", bound=Sequence)


@dataclass(slots=True)
class AdmissionState(Generic[S]):
    """All that a decision depends on. `waiting` and `running` are in order of `priority`, `due_s` and arrival."""

    kv: KvBlocks
    adapters: AdapterSlots
    waiting: list[S] = field(default_factory=list)
    running: list[S] = field(default_factory=list)
    boundary: Boundary | None = None
    """Moves room between `kv` and `adapters`; None where each has a region of its own."""


class StepPlan(msgspec.Struct, Generic[S]):
    """One step. Every sequence of `decodes` and `prefills` has its `scheduled` rows from `computed` on."""

    decodes: list[S] = []
    prefills: list[S] = []
    admitted: list[S] = []  # also in `prefills`; `computed` is what the prefix cache had of them
    considered: list[S] = []  # whose way in past a copy was chosen for the first time
    preempted: list[S] = []
    grown: list[S] = []  # decodes that got one more block
    evictions: list[tuple[str, int]] = []  # (adapter digest, slot), before the loads
    loads: list[S] = []  # whose adapter must be copied to `slot` first
    prefetched: list[tuple[S, int]] = []  # that wait on, and the slot to copy their adapter to
    tokens: int = 0


class Queues(Protocol[S]):
    """Which waiting sequences may come in, and in which order (`policies.request_queues`)."""

    squashes: bool
    """Whether sequences pass one without adapter memory by predicted ends, and are preempted when that was wrong."""

    def arrived(self, seq: S, now_s: float) -> None:
        """It waits from now on."""

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """Those of `state.waiting` that may come in with this step, in the order in which room is looked for."""

    def began(self, seq: S, now_s: float) -> None:
        """It runs."""

    def stopped(self, seq: S, now_s: float) -> None:
        """It ran and does not any more: preempted, or ended."""

    def left(self, seq: S) -> None:
        """It has ended."""


class BatchAdmission(Generic[S]):
    """The policy: limits fixed, everything else in the state it is given.

    `cold` decides about adapters under way; it is needed when the state's slots are asynchronous. `queues` decides whose turn
    it is; without it sequences come in by `order_of`.
    """

    def __init__(self, limits: AdmissionLimits, cold: ColdStarts | None = None, queues: Queues[S] | None = None) -> None:
        self.limits = limits
        self.queues = queues
        self.squashed = 0
        """Sequences that passed another one and were preempted for it."""
        self._cold = cold
        self._now_s = 0.0
        self._passed: list[tuple[S, list[S]]] = []  # sequences without adapter memory, and who passed them by prediction

    def decide(self, state: AdmissionState[S], now_s: float = 0.0) -> StepPlan[S]:
        """The next step's plan. Changes the state as if the step were already under way."""
        plan: StepPlan[S] = StepPlan()
        self._now_s = now_s
        plan.evictions += state.adapters.unkept()
        if self._passed:
            self._squash(state, plan)
        self._schedule_decodes(state, plan)
        self._schedule_prefills(state, plan)
        if state.waiting:
            candidates = state.waiting if self.queues is None else self.queues.candidates(state, now_s)
            self._admit(state, plan, candidates)
            if self.limits.prefetch and state.adapters.asynchronous:
                self._prefetch(state, plan, candidates)
        return plan

    def _schedule_decodes(self, state: AdmissionState[S], plan: StepPlan[S]) -> None:
        kv, decodes, preempted = state.kv, plan.decodes, plan.preempted
        block_size, publishing, boundary = kv.block_size, kv.prefix_cache, state.boundary
        for seq in tuple(state.running):
            computed = seq.computed
            if seq.length - computed != 1 or (preempted and not seq.blocks):
                continue  # still in its prompt, or preempted a moment ago
            if computed % block_size == 0 and computed == len(seq.blocks) * block_size:
                if boundary is not None and not kv.blank:
                    _find_blocks(state, plan, 1, 0)
                # The victim is the last of the running ones: never one that was served before in this loop.
                while not kv.free and seq.blocks:
                    self._preempt(state, state.running[-1], plan)
                if not seq.blocks:
                    continue
                kv.extend(seq.blocks)
                plan.grown.append(seq)
            seq.scheduled = 1
            decodes.append(seq)
            if publishing and (computed + 1) % block_size == 0:
                publish_full_blocks(kv, seq, computed + 1)
        plan.tokens = len(plan.decodes)

    def _schedule_prefills(self, state: AdmissionState[S], plan: StepPlan[S]) -> None:
        if len(plan.decodes) == len(state.running):
            return
        for seq in state.running:
            if not seq.scheduled:
                self._schedule_chunk(state.kv, seq, plan)

    def _schedule_chunk(self, kv: KvBlocks, seq: S, plan: StepPlan[S]) -> None:
        seq.scheduled = min(seq.length - seq.computed, self.limits.max_step_tokens - plan.tokens)
        if seq.scheduled:
            plan.tokens += seq.scheduled
            plan.prefills.append(seq)
            publish_full_blocks(kv, seq, seq.computed + seq.scheduled)

    def _admit(self, state: AdmissionState[S], plan: StepPlan[S], candidates: list[S]) -> None:
        """Let candidates in and take them out of their list."""
        queues = self.queues
        blocked: list[S] = []
        index = asked = promised = 0
        if state.boundary is not None:
            state.boundary.crowded = False
        closed = False  # a sequence has been passed often enough: only the base may
        while (
            index < len(candidates)
            and len(blocked) < BYPASS_WINDOW
            and len(state.running) < self.limits.seats
            and plan.tokens < self.limits.max_step_tokens
        ):
            seq = candidates[index]
            if seq.adapter and seq.slot < 0 and (closed or not self._has_slot(state, seq, promised)):
                blocked.append(seq)
                closed = closed or seq.bypassed >= self.limits.max_bypass
                index += 1
                continue
            if blocked and seq.adapter and queues is not None and queues.squashes:
                if steps_left(seq) + 1 >= steps_until_room(state, blocked[0].adapter_bytes):
                    index += 1
                    continue
                self._passed += [(one, [seq]) for one in blocked]
            if seq.adapter and self._cold is not None and self._under_way(state, seq, plan, self._cold):
                asked += 1
                if asked > COLD_WINDOW or not self._joins(seq, plan, self._cold):
                    promised += state.kv.blocks_for(seq.length)
                    index += 1
                    continue
            if not self._book_blocks(state, seq, index if queues is None else state.waiting.index(seq), plan):
                return
            self._book_slot(state, seq, plan)
            del candidates[index]
            if queues is not None:
                state.waiting.remove(seq)
                queues.began(seq, self._now_s)
            insort(state.running, seq, key=order_of)
            for passed in blocked:
                passed.bypassed += 1
                closed = closed or passed.bypassed >= self.limits.max_bypass
            plan.admitted.append(seq)
            self._schedule_chunk(state.kv, seq, plan)

    def _prefetch(self, state: AdmissionState[S], plan: StepPlan[S], candidates: list[S]) -> None:
        """Begin the copies that the next ones will need, where that takes nothing from those who run or wait."""
        slots = state.adapters
        for seq in candidates[: self.limits.prefetch]:
            if not seq.adapter or seq.adapter in slots:
                continue
            if state.boundary is not None:
                state.boundary.for_adapter(seq.adapter_bytes, evicting=False)
            grant = slots.prefetch(seq.adapter, seq.adapter_bytes)
            if grant is None:
                return  # later ones may not take the room that the first of them waits for
            plan.evictions += grant.evicted
            plan.prefetched.append((seq, grant.slot))
            if self._cold is not None:
                self._cold.begun(seq.adapter, seq.adapter_bytes)

    def _squash(self, state: AdmissionState[S], plan: StepPlan[S]) -> None:
        """Preempt those who passed a sequence by prediction if their adapters' memory is what it still lacks."""
        slots = state.adapters
        waiting = {id(seq) for seq in state.waiting}
        self._passed = [
            (seq, passing)
            for seq, others in self._passed
            if id(seq) in waiting and seq.slot < 0 and (passing := [one for one in others if one.slot >= 0 and one.blocks])
        ]
        for seq in dict.fromkeys(seq for seq, _ in self._passed):
            passing = [one for waits, others in self._passed if waits is seq for one in others]
            mine = {one.adapter for one in passing if slots.users(one.adapter) == 1}
            if slots.fits(seq.adapter_bytes) or not slots.fits(seq.adapter_bytes - sum(map(slots.size_bytes, mine))):
                continue
            for one in passing:
                if one.adapter in mine and one.blocks and not slots.fits(seq.adapter_bytes):
                    self._preempt(state, one, plan)
                    self.squashed += 1

    def _preempt(self, state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
        _preempt(state, seq, plan)
        if self.queues is not None:
            self.queues.stopped(seq, self._now_s)

    @staticmethod
    def _has_slot(state: AdmissionState[S], seq: S, promised: int) -> bool:
        """`promised`: KV blocks that those before it with an adapter on its way are going to need."""
        adapters, boundary = state.adapters, state.boundary
        if seq.adapter in adapters:
            return True
        if boundary is None:
            return adapters.fits(seq.adapter_bytes)
        return boundary.for_adapter(seq.adapter_bytes, blocks=promised + state.kv.blocks_for(seq.length))

    def _under_way(self, state: AdmissionState[S], seq: S, plan: StepPlan[S], cold: ColdStarts) -> bool:
        """Whether its adapter is still being copied; if it is, the sequence has its slot from here on."""
        adapters = state.adapters
        if seq.adapter not in adapters or seq.adapter in adapters.loading:
            self._book_slot(state, seq, plan)
            if plan.loads and plan.loads[-1] is seq:
                cold.begun(seq.adapter, seq.adapter_bytes)
        return seq.adapter in adapters.loading

    def _joins(self, seq: S, plan: StepPlan[S], cold: ColdStarts) -> bool:
        """Whether it is in the step to come although its adapter is not there yet."""
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
        """Blocks for every known token, shared ones first. The last token is always computed: its logits are wanted.

        `index`: of the sequence in `waiting`.
        """
        kv = state.kv
        cached: list[int] = []
        if kv.prefix_cache:
            reusable = (seq.length - 1) // kv.block_size
            _extend_keys(kv, seq, reusable)
            cached = kv.match(seq.keys[:reusable])
        fresh = kv.blocks_for(seq.length) - len(cached)
        needed = fresh + len(state.running)
        boundary, count = state.boundary, needed + kv.idle_among(cached)
        if boundary is None:
            short = count > kv.free
        else:
            short = not boundary.admits(needed)
            short = short or (needed > kv.blank and not _find_blocks(state, plan, count, index + 1, seq))
        if short:
            return False
        kv.take(cached)
        seq.blocks = cached + kv.allocate(fresh)
        seq.computed = len(cached) * kv.block_size
        seq.published = len(cached)
        return True


def due_s(arrival_s: float, ttft_slo_ms: float, *, begun: bool = False) -> float:
    """A request's place in the order. `begun`: it has output from another worker and goes on before what is new."""
    return arrival_s if begun else arrival_s + PATIENCE * ttft_slo_ms / 1000.0


def advance(plan: StepPlan[S]) -> list[S]:
    """The step has run: its rows are in the KV cache. Returns the sequences with a next token to draw, decodes first."""
    for seq in plan.decodes:
        seq.computed += 1
        seq.scheduled = 0
    complete = list(plan.decodes)
    for seq in plan.prefills:
        seq.computed += seq.scheduled
        seq.scheduled = 0
        if seq.computed == seq.length:
            complete.append(seq)
    return complete


def pairs(computed: int, scheduled: int) -> int:
    """What the rows of a chunk attend to, summed: row i of `scheduled` sees the `computed` tokens before it and i + 1 more."""
    return scheduled * computed + scheduled * (scheduled + 1) // 2


def steady_steps(state: AdmissionState[S], plan: StepPlan[S], limit: int) -> int:
    """How many steps in a row `decide` would plan alike, this `plan` included; between 1 and `limit`.

    Only decodes of all running sequences repeat themselves, while nothing arrives, ends or is removed, and no block has to
    be taken from a sequence. Whoever waits goes on waiting: running sequences only take blocks, and keep their slots. With
    a prefix cache a block that fills up may be the very one a waiting sequence begins with, so then the run ends there. While
    an adapter is copied every step is looked at: its layers come in, and somebody may join.
    """
    if state.adapters.loading:
        return 1
    if limit <= 1 or not plan.decodes or len(plan.decodes) < len(state.running) or plan.preempted:
        return 1
    kv, size = state.kv, state.kv.block_size
    steps = limit
    boundary = state.boundary
    free = kv.blank if boundary is not None and boundary.gives_blocks else kv.free  # the next one is a decision
    if state.waiting and kv.prefix_cache:
        steps = min(steps, min(size - 1 - seq.computed % size or size for seq in plan.decodes))
    if len(plan.decodes) * (steps // size + 1) <= free:
        return steps
    # How many steps each sequence can do with the blocks it has; then it takes one every `size` steps.
    room = sorted(len(seq.blocks) * size - seq.computed for seq in plan.decodes)
    taken = 0
    for turn in range(steps // size + 1):
        for left in room:
            if left + turn * size >= steps:
                break
            taken += 1
            if taken > free:
                return left + turn * size
    return steps


def advance_steady(state: AdmissionState[S], plan: StepPlan[S], steps: int) -> None:
    """`steps` steps of a steady plan have run and each sequence drew as many tokens: books what `decide`, `advance` and
    `append` would have booked. With a prefix cache, `tokens` has those tokens already."""
    kv, size = state.kv, state.kv.block_size
    if kv.prefix_cache:
        _book_in_order(kv, plan, steps)
    for seq in plan.decodes:
        seq.computed = end = seq.computed + steps
        seq.length = end + 1
        seq.scheduled = 0
        short = end - len(seq.blocks) * size
        if short > 0:
            kv.extend(seq.blocks, 1 if short <= size else kv.blocks_for(short))


def _book_in_order(kv: KvBlocks, plan: StepPlan[S], steps: int) -> None:
    """Blocks in the order of steps and sequences: which cached block is given up, and who has a content first, depends on it.

    Without a prefix cache all blocks are alike.
    """
    size = kv.block_size
    bookings: list[tuple[int, tuple[int, float, int], int, S]] = []  # (step, turn, tokens computed by then, who)
    for seq in plan.decodes:
        start, end = seq.computed, seq.computed + steps
        grows = range(len(seq.blocks) * size, end, size)
        fills = range(start + size - 1 - start % size, end, size)
        bookings += [(at - start, order_of(seq), at + 1, seq) for at in (*grows, *fills)]
    bookings.sort(key=_when)
    for _, _, end, seq in bookings:
        if end > len(seq.blocks) * size:
            kv.extend(seq.blocks)
        publish_full_blocks(kv, seq, end)


def remove(state: AdmissionState[S], seq: S, *, spoiled: bool = False) -> None:
    """Take a sequence out wherever it is and give back what it holds. `spoiled`: its K and V are not to be reused."""
    if seq.blocks:
        state.running.remove(seq)
        _give_back(state, seq, spoiled=spoiled)
    else:
        state.waiting.remove(seq)
        _give_back_slot(state, seq)


def publish_full_blocks(kv: KvBlocks, seq: Sequence, end: int) -> None:
    """Tell the cache of the blocks that are full once tokens [0, end) are computed.

    Done when the rows are scheduled and not when they have run: a layer writes all rows' K and V before any row reads,
    so sequences of the same step share a prompt too.
    """
    if not kv.prefix_cache:
        return
    full = end // kv.block_size
    if full <= seq.published:
        return
    _extend_keys(kv, seq, full)
    for index in range(seq.published, full):
        kv.publish(seq.blocks[index], seq.keys[index])
    seq.published = full


def _extend_keys(kv: KvBlocks, seq: Sequence, full: int) -> None:
    keys = seq.keys
    while len(keys) < full:
        start = len(keys) * kv.block_size
        parent = keys[-1] if keys else root_key(seq.adapter, seq.cache_scope)
        keys.append(chain_key(parent, seq.tokens[start : start + kv.block_size].tobytes()))


def steps_left(seq: Sequence) -> int:
    """Steps until it is predicted to end: a token each. At least 1."""
    return max(1, seq.expected_length - seq.length)


def steps_until_room(state: AdmissionState[S], size_bytes: int) -> float:
    """Steps until running sequences are predicted to have left enough adapter memory; infinite when they never do."""
    slots = state.adapters
    ends: dict[str, int] = {}
    for seq in state.running:
        if seq.slot >= 0:
            ends[seq.adapter] = max(ends.get(seq.adapter, 0), steps_left(seq))
    short = size_bytes
    for digest, steps in sorted(ends.items(), key=lambda end: end[1]):
        short -= slots.size_bytes(digest)
        if slots.fits(max(0, short)) or (short <= 0 and slots.fits(0)):
            return steps
    return float("inf")


def wait(state: AdmissionState[S], seq: S) -> None:
    """Queue a sequence in its place."""
    insort(state.waiting, seq, key=order_of)


def _find_blocks(state: AdmissionState[S], plan: StepPlan[S], count: int, index: int, seq: S | None = None) -> bool:
    """Whether `count` blocks can be had, for the waiting sequence `seq` or a running one.

    The sequences that wait from `index` on let go of adapters that have taken the share of KV blocks.
    """
    boundary = state.boundary
    assert boundary is not None, "memory is shared"
    adapter, adapter_bytes = (seq.adapter, seq.adapter_bytes) if seq is not None else ("", 0)
    while not boundary.for_blocks(count, adapter=adapter, adapter_bytes=adapter_bytes):
        if not boundary.owns(count) or not _let_go(state, plan, index):
            return False
    return True


def _let_go(state: AdmissionState[S], plan: StepPlan[S], index: int) -> bool:
    """Whether a waiting sequence from `index` on has held an adapter since before this step: the last of them lets go of it."""
    for at in range(len(state.waiting) - 1, index - 1, -1):
        seq = state.waiting[at]
        if seq.slot >= 0 and not any(seq is one for one in plan.loads):
            _give_back_slot(state, seq)
            return True
    return False


def _preempt(state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
    state.running.remove(seq)
    _give_back(state, seq)
    wait(state, seq)
    plan.preempted.append(seq)


def _give_back(state: AdmissionState[S], seq: S, *, spoiled: bool = False) -> None:
    state.kv.release(seq.blocks, spoiled=spoiled)
    seq.blocks = []
    seq.computed = seq.scheduled = seq.published = 0
    _give_back_slot(state, seq)


def _give_back_slot(state: AdmissionState[S], seq: S) -> None:
    if seq.slot >= 0:
        state.adapters.release(seq.adapter)
        seq.slot = -1


def _when(booking: tuple[int, tuple[int, float, int], int, object]) -> tuple[int, tuple[int, float, int]]:
    return booking[:2]


def order_of(seq: Sequence) -> tuple[int, float, int]:
    """The place of a sequence in the order."""
    return seq.priority, seq.due_s, seq.order
