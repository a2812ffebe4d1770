"""Decides which requests are in an engine that plans its own steps, such as vLLM, and which adapters are in its slots.

    start ──> waiting ──(enters)──> running ──> end        the engine holds the running ones and batches them itself
                 ▲                     │
                 └──────(pauses)───────┘

All other requests wait here. A request enters when the engine has a seat and KV blocks for it and its adapter is in a slot. So
the engine's own queue stays short, and the engine never chooses between adapters. The rules:

1. Requests enter in their order, or in that of `queues`, while seats and KV blocks last. A request that lacks blocks is not
   overtaken.
2. A new request whose adapter finds no slot pauses another adapter: its requests leave the engine and wait again, and it leaves
   its slot. Each of them must have drawn `TURN` tokens, and is paused only once. They continue when a slot is free, from the
   blocks in the engine's prefix cache. So a first token waits for a turn instead of a whole answer.
3. A request that finds no slot and nothing to pause is overtaken by up to `max_bypass` others, then only by requests without
   an adapter. A paused request that was overtaken so often pauses others too.
4. A request whose adapter is being copied waits with the slot and may be overtaken meanwhile.
5. A *suspect* is a request that may have killed an engine. It runs alone until it has drawn a token: the others are paused for
   it, or it waits until they have ended, and no other request enters meanwhile. So if it kills the engine again, no other
   request is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import msgspec

from motet.policies.memory.adapter_slots import AdapterSlots, Grant
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_state import AdmissionState, Sequence, give_back_slot, slot_users, wait
from motet.policies.step.request_queues import Queues, mechanisms_of
from motet.shared.model import Mechanism

WINDOW = 128
"""Maximum waiting requests that a decision examines."""
TURN = 4
"""Tokens that a request draws before it can be paused."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entrant(Sequence):
    """A request. `pausable`: it continues unchanged after it has left the engine and entered it again."""

    pausable: bool = False
    suspect: bool = False
    entries: int = 0  # how often it has entered
    entry_length: int = 0  # tokens when it last did


E = TypeVar("E", bound=Entrant)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryLimits:
    """`seats`: the largest number of requests in the engine."""

    seats: int
    max_bypass: int = 64


class Entries(msgspec.Struct, Generic[E]):
    """A decision, to be carried out in this order: pauses, evictions (digest, slot), loads, entries.

    The request of a load stays in the queue until `arrived`.
    """

    pauses: list[E] = []
    evictions: list[tuple[str, int]] = []
    loads: list[E] = []
    entered: list[E] = []


class EngineEntry(Generic[E]):
    """The requests of one engine. `slots` are asynchronous. `kv` only counts the blocks that requests need."""

    def __init__(self, limits: EntryLimits, *, kv: KvBlocks, slots: AdapterSlots, queues: Queues[E] | None = None) -> None:
        self.limits, self.slots, self._queues = limits, slots, queues
        self.state: AdmissionState[E] = AdmissionState(kv=kv, adapters=slots)
        slots.waited = lambda: {seq.adapter for seq in self.state.waiting}
        self._orders = count()
        self.doomed: set[str] = set()
        """Adapters that leave as soon as no request uses them."""

    def start(self, seq: E, now_s: float) -> None:
        """A request begins to wait."""
        seq.order = next(self._orders)
        wait(self.state, seq)
        if self._queues is not None:
            self._queues.arrived(seq, now_s)

    def end(self, seq: E) -> None:
        """A request has ended and gives back its blocks and slot."""
        running = any(seq is one for one in self.state.running)
        (self.state.running if running else self.state.waiting).remove(seq)
        if self._queues is not None:
            if running:
                self._queues.stopped(seq, self.slots.eviction.now_s)
            self._queues.left(seq)
        give_back_slot(self.state, seq)

    def decide(self, now_s: float, blocks_free: int) -> Entries[E]:
        """Which requests enter now. `blocks_free`: KV blocks, as the engine last reported them.

        `Sequence.scheduled`: the blocks that an entered request will take and that the engine has not allocated yet.
        """
        state, slots, max_bypass = self.state, self.slots, self.limits.max_bypass
        slots.eviction.now_s = now_s
        entries: Entries[E] = Entries()
        blocked: list[E] = []
        only_base = False
        blocks_free -= sum(seq.scheduled for seq in state.running)
        if self._suspect_runs():  # rule 5
            return entries
        order = (self._queues.candidates(state, now_s) if self._queues is not None else state.waiting)[:WINDOW]
        for seq in order:
            if len(state.running) >= self.limits.seats:  # rule 1
                break
            if seq.adapter and seq.slot < 0 and (only_base or not self._find_slot(seq, entries, now_s)):  # rule 3
                blocked.append(seq)
                only_base |= seq.bypassed >= max_bypass
                continue
            if seq.adapter in slots.loading:  # rule 4
                continue
            if seq.suspect and state.running:  # rule 5
                if not all(one.pausable and one.length > one.entry_length for one in state.running):
                    break
                entries.pauses += self._pause(state.running, now_s)
            needed = state.kv.blocks_for(seq.length)
            if state.running and needed + len(state.running) > blocks_free:  # rule 1
                break
            blocks_free -= needed
            self._enter(seq, needed, now_s)
            entries.entered.append(seq)
            for one in blocked:  # rule 3
                one.bypassed += 1
            if seq.suspect:  # rule 5
                break
        return entries

    def _suspect_runs(self) -> bool:
        """Whether a running request still is a suspect; one that has drawn a token is none any more."""
        for seq in self.state.running:
            seq.suspect = seq.suspect and seq.length == seq.entry_length
            if seq.suspect:
                return True
        return False

    def _find_slot(self, seq: E, entries: Entries[E], now_s: float) -> bool:
        """Give the request a slot, for which another adapter's requests may be paused. Returns whether it has one."""
        grant = self.slots.acquire(seq.adapter, seq.adapter_bytes)
        may_pause = not seq.entries or seq.bypassed >= self.limits.max_bypass  # rule 2, and the end of rule 3
        if grant is None and may_pause and (paused := self._pause_for(seq, now_s)):
            entries.pauses += paused
            grant = self.slots.acquire(seq.adapter, seq.adapter_bytes)
        if grant is None:
            return False
        seq.slot = grant.slot
        if grant.load:
            entries.evictions += grant.evicted
            entries.loads.append(seq)
        return True

    def _enter(self, seq: E, blocks: int, now_s: float) -> None:
        """The request enters the engine, which will allocate so many blocks for it."""
        seq.scheduled = blocks
        seq.entries, seq.entry_length = seq.entries + 1, seq.length
        self.state.waiting.remove(seq)
        self.state.running.append(seq)
        if self._queues is not None:
            self._queues.began(seq, now_s)

    def _pause_for(self, seq: E, now_s: float) -> list[E]:
        """Free a slot for a new request: the requests of one adapter wait again. Returns them; none if no adapter can leave.

        The adapter with the fewest requests leaves; of equal ones, the one whose requests have drawn the fewest tokens.
        """

        def drawn(one: E) -> int:
            return one.length - one.entry_length

        by_adapter: dict[str, list[E]] = {}
        for one in self.state.running:
            if one.adapter and one.adapter not in self.slots.pinned:
                by_adapter.setdefault(one.adapter, []).append(one)
        able = [
            users
            for digest, users in by_adapter.items()
            if len(users) == self.slots.users(digest)  # none of its requests is about to enter
            and all(one.pausable and one.entries == 1 and one.priority >= seq.priority and drawn(one) >= TURN for one in users)
        ]
        return self._pause(min(able, key=lambda users: (len(users), max(map(drawn, users)))), now_s) if able else []

    def _pause(self, running: list[E], now_s: float) -> list[E]:
        """These requests wait again."""
        paused = [*running]
        for one in paused:
            self.state.running.remove(one)
            if self._queues is not None:
                self._queues.stopped(one, now_s)
            give_back_slot(self.state, one)
            one.bypassed = one.scheduled = 0
            wait(self.state, one)
        return paused

    def empty_slots(self) -> None:
        """The engine was lost with its adapters. No request runs, and waiting requests give back their slots."""
        for seq in self.state.waiting:
            give_back_slot(self.state, seq)
        for digest in self.slots.digests():
            self.slots.drop(digest)

    @property
    def mechanisms(self) -> dict[str, Mechanism]:
        """Those that turn on by themselves, by name, and why they are on or not."""
        return mechanisms_of(self._queues, len(self.state.waiting))

    # ---- adapters without a request

    def load(self, digest: str, size_bytes: int) -> Grant | None:
        """The slot for a prefetched adapter; None when it is resident already or has no room.

        For a pinned one idle ones are evicted.
        """
        self.doomed.discard(digest)
        if digest in self.slots:
            return None
        return self.slots.prefetch(digest, size_bytes, evicting=digest in self.slots.pinned)

    def foresee(self, digest: str, size_bytes: int, over: Collection[str]) -> Grant | None:
        """The slot for an adapter that may be requested soon; None while any adapter is copied or any request waits."""
        if digest in self.slots or self.slots.loading or self.state.waiting:
            return None
        return self.slots.foresee(digest, size_bytes, over)

    def sweep(self) -> list[str]:
        """The adapters that leave now because they were unloaded."""
        if not self.doomed:
            return []
        used = {seq.adapter for seq in (*self.state.waiting, *self.state.running)} | set(self.slots.loading)
        idle = self.doomed - used
        self.doomed -= idle
        gone = [digest for digest in sorted(idle) if digest in self.slots]
        for digest in gone:
            self.slots.drop(digest)
        return gone

    def check(self) -> None:
        """Assert that seats and slots add up (tests, and idle moments)."""
        state, slots = self.state, self.slots
        assert len(state.running) <= self.limits.seats, "more requests than seats"
        assert all(not seq.adapter or seq.slot >= 0 for seq in state.running), "a request runs without its adapter"
        assert not any(seq.adapter in slots.loading for seq in state.running), "a request runs before its adapter has come"
        slots.check(slot_users(state))
