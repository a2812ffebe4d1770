"""The state of the workers as other services know it, from the snapshots and deltas that workers publish.

    snapshot seq=7 ── delta 8 ── delta 9 ── ... ── snapshot seq=23        seq counts both
        │                │
        └── WorkerBook ──┴── incarnation? seq? ──> Reader: whole, change, facts, ended

`WorkerBook` decides which messages count and keeps the facts that every reader needs (`Known`). Each reader keeps requests and
adapters in its own form: `Shelf` by id and digest, `cluster_view` in the columns that scheduling reads.

Rules:
- A snapshot replaces everything, but for the adapters that are on the worker's disk alone: there may be thousands, and deltas
  tell what becomes of them. Only some snapshots list them (`lists_disk`); the others leave them as they were known.
- A delta counts only directly after the message before it; after a gap the requests stay as they were known until the next
  snapshot, while the facts that a delta states in full (memory, draining) are still taken.
- Only a snapshot introduces a worker or an incarnation. A new incarnation ends the one before at once, and late messages of the
  old one are ignored. So are messages of a worker that was lost (`lose`), unless its lease is held again.
- A worker that was only silent (`forget`) may send messages again under the same incarnation.

`Cadence` is the sender's side: how often a worker sends a message, and how often a snapshot. Times are on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.shared.model import Mechanism, RequestBrief, Residency, WorkerLimits
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot

HEARTBEAT_S = 0.5
DELTA_S = 0.02
"""Shortest time between a message and a delta that follows it."""
SNAPSHOT_REQUESTS = 64
"""With up to this many requests every heartbeat carries a snapshot, with up to twice as many every second one, and so on."""
MAX_BEATS = 4
"""Heartbeats from one snapshot to the next, at most."""
DISK_SNAPSHOTS = 10
"""One in this many snapshots lists the adapters on disk, for readers that started later or missed a delta."""
ENDED_MEMORY = 4096
"""Ended incarnations that are remembered, the oldest forgotten first."""


@dataclass(slots=True)
class Cadence:
    """Says which heartbeats carry a snapshot.

    The cost of reading a snapshot grows with its requests, so busy workers send fewer snapshots. Otherwise a scheduler with a
    thousand workers of 256 requests each would do little but read them.
    """

    beats_left: int = 0
    snapshots: int = 0

    def whole(self, requests: int) -> bool:
        """Whether the next heartbeat is a snapshot; otherwise it is a delta."""
        if self.beats_left > 0:
            self.beats_left -= 1
            return False
        self.beats_left = min(requests // SNAPSHOT_REQUESTS, MAX_BEATS - 1)
        self.snapshots += 1
        return True

    @property
    def lists_disk(self) -> bool:
        """Whether the next snapshot lists the adapters on disk. The first one does."""
        return self.snapshots % DISK_SNAPSHOTS == 1


@dataclass(slots=True)
class Known:
    """The facts of one worker that every reader needs."""

    worker_id: str
    incarnation: str
    limits: WorkerLimits
    seq: int = 0
    in_sync: bool = True  # no message since the last snapshot is missing
    listed: bool = False  # no message since the last list of its cached KV blocks is missing
    heard_s: float = 0.0
    snapshot_s: float = 0.0  # when its last snapshot was heard
    kv_blocks_free: int = 0
    adapter_bytes_free: int = 0
    draining: bool = False
    merged: str = ""  # digest of the adapter in its weights, as of the last snapshot
    merged_share: float = 0.0  # of its requests
    mechanisms: Mapping[str, Mechanism] = field(default_factory=dict)  # as of the last snapshot

    def take(self, word: WorkerSnapshot | WorkerDelta, now_s: float) -> None:
        """Take in the facts that every message states in full."""
        self.seq, self.heard_s, self.draining = word.seq, now_s, word.draining
        self.kv_blocks_free, self.adapter_bytes_free = word.kv_blocks_free, word.adapter_bytes_free


class Reader(Protocol):
    """Takes in the messages that a `WorkerBook` accepts."""

    def whole(self, known: Known, said: WorkerSnapshot, now_s: float) -> None:
        """A snapshot replaces everything; `known` is up to date."""

    def change(self, known: Known, said: WorkerDelta, now_s: float) -> None:
        """A delta continues the messages before it."""

    def facts(self, known: Known, now_s: float) -> None:
        """A delta arrived; its facts are in `known`. `change` follows unless an earlier message is missing."""

    def ended(self, known: Known) -> None:
        """The worker, or this incarnation of it, has ended."""


class WorkerBook:
    """The workers that sent messages and were not lost. `lease_held(worker_id)`: whether the worker holds a lease now."""

    def __init__(self, reader: Reader, lease_held: Callable[[str], bool] = lambda _: False) -> None:
        self._reader, self._lease_held = reader, lease_held
        self._known: dict[str, Known] = {}
        self._ended: dict[tuple[str, str], None] = {}  # (worker id, incarnation), in the order in which they ended
        self.gaps = 0
        """Gaps in the sequence numbers of received messages."""

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())

    def get(self, worker_id: str) -> Known | None:
        """One worker; None if it is unknown."""
        return self._known.get(worker_id)

    # ---- messages

    def snapshot(self, said: WorkerSnapshot, now_s: float) -> bool:
        """Take in a snapshot. Returns False if it is outdated and ignored."""
        worker_id, incarnation = said.worker_id, said.incarnation
        known = self._known.get(worker_id)
        if known is None or known.incarnation != incarnation:
            if self._is_over(worker_id, incarnation):
                return False
            self.lose(worker_id)  # the incarnation before
            known = self._known[worker_id] = Known(worker_id, incarnation, said.limits)
        elif said.seq <= known.seq:
            return False  # an older one, late
        elif said.seq != known.seq + 1 and known.in_sync:
            self.gaps += 1
        known.listed = said.prefixes is not None or (known.listed and said.seq == known.seq + 1)
        known.limits, known.in_sync, known.snapshot_s = said.limits, True, now_s
        known.merged, known.merged_share, known.mechanisms = said.merged, said.merged_share, said.mechanisms
        known.take(said, now_s)
        self._reader.whole(known, said, now_s)
        return True

    def delta(self, said: WorkerDelta, now_s: float) -> bool:
        """Take in a delta. Returns whether it continues the messages before it."""
        worker_id, incarnation = said.worker_id, said.incarnation
        known = self._known.get(worker_id)
        if known is None or known.incarnation != incarnation:
            if not self._is_over(worker_id, incarnation):
                self.lose(worker_id)  # the incarnation before
                self.gaps += 1  # the first snapshot of this one is still to come
            return False
        if said.seq <= known.seq:
            return False
        if said.seq != known.seq + 1:
            self.gaps += known.in_sync
            known.in_sync = known.listed = False
        known.take(said, now_s)
        self._reader.facts(known, now_s)
        if known.in_sync:
            self._reader.change(known, said, now_s)
        return known.in_sync

    def _is_over(self, worker_id: str, incarnation: str) -> bool:
        """Whether this incarnation, which is not the known one, has ended."""
        if (worker_id, incarnation) not in self._ended:
            return False
        if worker_id in self._known or not self._lease_held(worker_id):
            return True
        del self._ended[worker_id, incarnation]  # its lease lapsed for a moment, or a restart's lease came after its state
        return False

    # ---- absent workers

    def lose(self, worker_id: str) -> bool:
        """The worker died or stopped, though late messages of it may still arrive. Returns whether it was known."""
        known = self._known.get(worker_id)
        if known is None:
            return False
        self._ended[worker_id, known.incarnation] = None
        if len(self._ended) > ENDED_MEMORY:
            del self._ended[next(iter(self._ended))]
        return self.forget(worker_id)

    def forget(self, worker_id: str) -> bool:
        """Remove a worker of unknown fate until its next message. Returns whether it was known."""
        known = self._known.pop(worker_id, None)
        if known is None:
            return False
        self._reader.ended(known)
        return True

    def silent(self, since_s: float) -> list[Known]:
        """The workers whose last message is older than `since_s`."""
        return [known for known in self._known.values() if known.heard_s < since_s]

    def excuse_silence(self, now_s: float) -> None:
        """No message could arrive until now, so the silence of all workers begins now."""
        for known in self._known.values():
            known.heard_s = now_s


@dataclass(slots=True)
class Holdings:
    """The requests and adapters of one worker, as its messages state them."""

    requests: dict[str, RequestBrief] = field(default_factory=dict)
    adapters: dict[str, Residency] = field(default_factory=dict)

    def on_device(self, digest: str) -> bool:
        """Whether an adapter version is on this worker's device."""
        residency = self.adapters.get(digest)
        return residency is not None and residency.tier == "device"


NOTHING = Holdings()


class Shelf:
    """A plain reader: the requests and adapters of every worker by id and by digest, at most `max_requests` per worker."""

    def __init__(self, max_requests: int = 65_536) -> None:
        self._max_requests = max_requests
        self._held: dict[str, Holdings] = {}

    def of(self, worker_id: str) -> Holdings:
        """Requests and adapters of the worker. The caller must not change them."""
        return self._held.get(worker_id, NOTHING)

    def whole(self, known: Known, said: WorkerSnapshot, now_s: float) -> None:
        """Replace everything, except for the adapters on disk if the snapshot does not list them."""
        held, before = Holdings(), self.of(known.worker_id)
        if not said.lists_disk:
            held.adapters = {digest: one for digest, one in before.adapters.items() if one.tier == "disk"}
        self._held[known.worker_id] = held
        self._put(held, said.requests, said.adapters)

    def change(self, known: Known, said: WorkerDelta, now_s: float) -> None:
        """Take in the requests and adapters that came, changed or left."""
        held = self._held[known.worker_id]
        for request_id in said.removed:
            held.requests.pop(request_id, None)
        for digest in said.evicted:
            held.adapters.pop(digest, None)
        self._put(held, said.changed, said.resident)

    def facts(self, known: Known, now_s: float) -> None:
        """Does nothing: `known` has the facts."""

    def ended(self, known: Known) -> None:
        """Remove the worker."""
        del self._held[known.worker_id]

    def _put(self, held: Holdings, requests: Sequence[RequestBrief], adapters: Sequence[Residency]) -> None:
        for brief in requests:
            if brief.request_id in held.requests or len(held.requests) < self._max_requests:
                held.requests[brief.request_id] = brief
        for residency in adapters:
            held.adapters[residency.digest] = residency
