"""The sequences of one engine, the plan of a step, and what steps do to both.

    wait ──> waiting ──(a plan admits it)──> running ──> remove        a preempted sequence goes back to waiting
                                               │  ▲
                                            plan  advance              the plan's rows have run

    tokens    |-- cached or computed --|-- scheduled this step --|-- later chunks --|
              0                     computed          computed + scheduled        length

`policies.step.batch_admission` makes the plans. `advance` books one step of a plan. `advance_steady` books many equal decode
steps at once, and `steady_steps` says how many there are; the twin uses both.

Sequences are ordered by `priority`, then by `due_s`, then by arrival. `due_s` is the arrival plus PATIENCE times the objective
for the time to first token. With equal objectives that is first come, first served. An interactive request overtakes batch
requests that came before it, but each of them is overtaken only until its own due time.
"""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.boundary import Boundary
from motet.policies.memory.kv_blocks import KvBlocks, chain_key, merged_key, root_key
from motet.policies.step.cold_start import ColdChoice

PATIENCE = 4.0
"""A request can be overtaken for this many times its TTFT objective. With 1 (earliest deadline first), standard requests that
are almost late would make interactive ones late too under overload."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request inside the engine. `tokens` (int32) holds prompt and output; the first `length` of them are known.

    Only a prefix cache reads the ids themselves.
    """

    order: int  # of arrival, unique
    priority: int = 0  # the smallest goes first, whatever is due
    due_s: float = 0.0  # place in the order, on the clock of arrivals
    tokens: array[int]
    length: int = -1  # by default, of `tokens`
    adapter: str = ""  # digest, "" for the base
    adapter_bytes: int = 0  # on the device
    rank: int = 0  # of its adapter
    expected_length: int = 0  # prompt and predicted output; 0 for unknown
    tenant: str = ""
    tenant_weight: float = 1.0
    cache_scope: bytes = b""  # sequences of one scope share KV blocks (policies.memory.kv_blocks.cache_scope)
    computed: int = 0  # tokens whose K and V are in the cache
    scheduled: int = 0  # rows in the step being run
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # chain keys of full blocks known so far
    published: int = 0  # blocks whose key the cache has been told
    slot: int = -1  # adapter slot, -1 for the base
    bypassed: int = 0  # sequences that overtook this one while it found no slot
    merged: bool = False  # its blocks have the keys of its adapter merged into the weights (`cache_keys`)
    found: int = 0  # blocks in the prefix cache when it was admitted
    mixed: bool = False  # its K and V are of both modes, so no more of its blocks get keys
    merged_bytes: int = 0  # of a copy of the weights with its adapter merged; 0 where none is made
    cold: ColdChoice | None = None  # how it starts while its adapter is copied, as last chosen

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
    """Everything that a decision depends on. `waiting` and `running` are in order of `priority`, `due_s` and arrival."""

    kv: KvBlocks
    adapters: AdapterSlots
    waiting: list[S] = field(default_factory=list)
    running: list[S] = field(default_factory=list)
    boundary: Boundary | None = None
    """Moves room between `kv` and `adapters`; None where each has a region of its own."""
    merged: str = ""
    """The adapter in the weights."""


class StepPlan(msgspec.Struct, Generic[S]):
    """The plan of one step. Every sequence of `decodes` and `prefills` computes `scheduled` rows, from `computed` on."""

    decodes: list[S] = []
    prefills: list[S] = []
    admitted: list[S] = []  # also in `prefills`; `computed` is the part found in the prefix cache
    considered: list[S] = []  # for which `cold` was chosen for the first time
    preempted: list[S] = []
    grown: list[S] = []  # decodes that got one more block
    evictions: list[tuple[str, int]] = []  # (adapter digest, slot), before the loads
    loads: list[S] = []  # whose adapter must be copied to `slot` first
    prefetched: list[tuple[S, int]] = []  # still waiting, with the slot to copy the adapter to
    tokens: int = 0
    merged: str = ""  # the adapter in the weights: the step has its sequences alone, and computes them without LoRA
    switched: bool = False  # another one than in the step before, so the weights are changed first
    resting: int = 0  # running sequences that the step leaves out, because of the merged adapter
    merge_candidate: str = ""  # would be the merged adapter if a copy of the weights had it
    copy_started: str = ""  # whose copy of the weights may be made beside the steps from now on; the memory for it is free
    dropped: bool = False  # the copy of the weights is to be given up before memory is divided
    starved: bool = False  # a waiting sequence found no KV blocks, or its adapter no room


def turn(state: AdmissionState[S], merged: str) -> None:
    """From now on steps compute with this adapter merged; "" for none."""
    if merged == state.merged:
        return
    for seq in state.running:
        if seq.adapter and seq.adapter in (merged, state.merged):
            seq.mixed = True
    state.merged = merged


def due_s(arrival_s: float, ttft_slo_ms: float, *, begun: bool = False) -> float:
    """The time that orders requests. `begun`: it continues output of another worker, so it goes before new requests."""
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
    """Tokens that the rows of a chunk attend to, summed: row i attends to the `computed` tokens and to i + 1 of the chunk."""
    return scheduled * computed + scheduled * (scheduled + 1) // 2


def steady_steps(state: AdmissionState[S], plan: StepPlan[S], limit: int) -> int:
    """How many steps in a row `decide` would plan alike, this `plan` included; between 1 and `limit`.

    A plan repeats itself if all running sequences decode, nothing arrives, ends or is removed, and no sequence is preempted for
    a block. Waiting sequences keep waiting, because running ones only take blocks and keep their slots. With a prefix cache, a
    waiting sequence may begin with a block that becomes full, so the repetition ends there. While an adapter is copied the
    answer is 1: with each layer that arrives, a sequence may be able to join.
    """
    if state.adapters.loading:
        return 1
    if limit <= 1 or not plan.decodes or len(plan.decodes) + plan.resting < len(state.running) or plan.preempted:
        return 1
    kv, size = state.kv, state.kv.block_size
    steps = limit
    boundary = state.boundary
    free = kv.blank if boundary is not None and boundary.gives_blocks else kv.free  # a block beyond these needs a decision
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
    """`steps` steps of a steady plan have run, and each sequence drew as many tokens.

    This books what as many calls of `decide`, `advance` and `append` would have booked. With a prefix cache, `tokens` must have
    those tokens already.
    """
    kv, size = state.kv, state.kv.block_size
    if kv.prefix_cache:
        _book_in_order(kv, plan, steps)
    for seq in plan.decodes:
        seq.computed = end = seq.computed + steps
        seq.length = end + 1
        seq.scheduled = 0
        if (short := end - len(seq.blocks) * size) > 0:
            kv.extend(seq.blocks, 1 if short <= size else kv.blocks_for(short))


def _book_in_order(kv: KvBlocks, plan: StepPlan[S], steps: int) -> None:
    """Book blocks in the order of steps and sequences.

    This order decides which cached block is evicted, and which of two equal blocks gets the key. Without a prefix cache all
    blocks are alike.
    """
    size = kv.block_size
    bookings: list[tuple[int, tuple[int, float, int], int, S]] = []  # (step, turn, tokens computed by then, sequence)
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


def wait(state: AdmissionState[S], seq: S) -> None:
    """Add a sequence to `waiting`, at its place in the order."""
    insert(state.waiting, seq)


def insert(sequences: list[S], seq: S) -> None:
    """Put a sequence at its place in the order, which is nearly always the end."""
    if not sequences or order_of(sequences[-1]) <= order_of(seq):
        sequences.append(seq)
    else:
        insort(sequences, seq, key=order_of)


def remove(state: AdmissionState[S], seq: S, *, spoiled: bool = False) -> None:
    """Take a sequence out of either list and free its blocks and slot. `spoiled`: its K and V must not be reused."""
    if seq.blocks:
        state.running.remove(seq)
        _give_back(state, seq, spoiled=spoiled)
    else:
        state.waiting.remove(seq)
        give_back_slot(state, seq)


def preempt(state: AdmissionState[S], seq: S, plan: StepPlan[S]) -> None:
    """Free the blocks and the slot of a running sequence, and let it wait again."""
    state.running.remove(seq)
    _give_back(state, seq)
    wait(state, seq)
    plan.preempted.append(seq)


def _give_back(state: AdmissionState[S], seq: S, *, spoiled: bool = False) -> None:
    state.kv.release(seq.blocks, spoiled=spoiled)
    seq.blocks = []
    seq.computed = seq.scheduled = seq.published = 0
    seq.mixed = False
    give_back_slot(state, seq)


def give_back_slot(state: AdmissionState[S], seq: S) -> None:
    """Release the sequence's adapter slot, if it holds one."""
    if seq.slot >= 0:
        state.adapters.release(seq.adapter)
        seq.slot = -1


def slot_users(state: AdmissionState[S]) -> dict[str, int]:
    """The number of sequences that hold each adapter's slot."""
    users: dict[str, int] = {}
    for seq in (*state.waiting, *state.running):
        if seq.slot >= 0:
            users[seq.adapter] = users.get(seq.adapter, 0) + 1
    return users


def publish_full_blocks(kv: KvBlocks, seq: Sequence, end: int) -> None:
    """Give keys to the blocks that are full once tokens [0, end) are computed.

    This happens when the rows are scheduled, not when they have run: a layer writes the K and V of all rows before any row
    reads them, so sequences of the same step share a prompt too.
    """
    if not kv.prefix_cache or seq.mixed:
        return
    full = end // kv.block_size
    if full <= seq.published:
        return
    extend_keys(kv, seq, full)
    for index, key in enumerate(cache_keys(seq, seq.published, full), seq.published):
        kv.publish(seq.blocks[index], key, index)
    seq.published = full


def extend_keys(kv: KvBlocks, seq: Sequence, full: int) -> None:
    """Compute the keys of the sequence's first `full` blocks, as far as they are missing."""
    keys = seq.keys
    while len(keys) < full:
        start = len(keys) * kv.block_size
        parent = keys[-1] if keys else root_key(seq.adapter, seq.cache_scope)
        keys.append(chain_key(parent, seq.tokens[start : start + kv.block_size].tobytes()))


def cache_keys(seq: Sequence, first: int, end: int) -> list[bytes]:
    """The keys under which the cache has the blocks [first, end) of the sequence."""
    keys = seq.keys[first:end]
    return [merged_key(key) for key in keys] if seq.merged else keys


def _when(booking: tuple[int, tuple[int, float, int], int, object]) -> tuple[int, tuple[int, float, int]]:
    return booking[:2]


def order_of(seq: Sequence) -> tuple[int, float, int]:
    """The key by which sequences are ordered."""
    return seq.priority, seq.due_s, seq.order
