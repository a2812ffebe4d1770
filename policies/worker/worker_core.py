"""Decides what a worker does with requests and adapters: events in, actions out, for live and simulated workers.

    assign, cancel, adapters ──> WorkerCore.on(event, now_s) ──> start, stop, answer     to the engine and the gateways
    loads that ended         ──>   book of requests              load, evict, forget     to files and the object store
    steps that ended         ──>   host tier, residency          copy in, copy out       to the engine
                                   view for schedulers           refuse                  to the scheduler

Every request is in the core's book from its assignment to its end, also while its adapters are loaded. Its life is the table in
`policies.worker.request_life`; events and actions are in `policies.worker.worker_events`.

The engine plans its steps itself (`policies.step.batch_core`), in the live worker in a thread of its own. It gets requests by
*start* and reports on them by `Stepped`; a report may cross a *stop*. Neither the core nor the engine waits for the other. One
thread at a time calls `on`. A request's payload `R` is opaque to the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal

import msgspec

from motet.policies.memory import host_tier
from motet.policies.memory.host_tier import DiskRoom, HostTier
from motet.policies.memory.ledger import Budget, host_budget
from motet.policies.worker import pins
from motet.policies.worker.foresight import Foresight
from motet.policies.worker.gathering import Gathering
from motet.policies.worker.request_life import Entry, Key, R
from motet.policies.worker.worker_events import (
    Action,
    Answer,
    Assign,
    CancelRequest,
    Close,
    CopyIn,
    CopyOut,
    DiskFull,
    Event,
    Fetch,
    Fetched,
    FileLost,
    Loaded,
    LoadFailed,
    NotStarted,
    OwnerLost,
    PinAdapters,
    Pinned,
    Refuse,
    Registered,
    Start,
    Stepped,
    Stop,
    Tick,
    TooLargeForHost,
    Version,
)
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef, FinishReason, Residency

PIN_RETRY_S = 10.0
"""A pinned adapter that could not be loaded is tried again after this time."""


class Departures:
    """The times at which requests left. They tell a refused request when to try again."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=64)

    def left(self, now_s: float) -> None:
        """A request left at this time."""
        self._times_s.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """The mean time between recent departures, between 0.1 and 10 seconds; 1 when fewer than two are known."""
        if len(self._times_s) < 2:
            return 1.0
        return min(10.0, max(0.1, (now_s - self._times_s[0]) / len(self._times_s)))


@dataclass(slots=True, eq=False)
class _Fetch:
    """A holder of the host copy of a pinned or foreseen adapter during its load. A `foreseen` one goes to host memory only."""

    adapter: AdapterRef
    foreseen: bool = False


@dataclass(eq=False)
class WorkerCore(Generic[R]):
    """The requests of one worker, at most `max_requests`, and its adapters."""

    view: View
    host: HostTier[Entry[R] | _Fetch]
    max_requests: int
    closed: bool = False
    foresight: Foresight | None = None
    """Brings adapters one tier up before a request asks for them; None: off."""
    disk_room: DiskRoom = "made"
    """What the latest `DiskFull` came to."""
    memory: Budget = field(init=False)  # the host's
    book: dict[str, Entry[R]] = field(default_factory=dict)  # by request id, the newest epoch of each
    _older: dict[Key, Entry[R]] = field(default_factory=dict)  # leaving, because a newer epoch came
    _gathering: Gathering[R] = field(init=False)  # requests that wait for several adapters
    _device: set[str] = field(default_factory=set)  # adapters on the device, as the engine reported
    _versions: Mapping[str, Version] = field(default_factory=dict)
    _fetching: set[str] = field(default_factory=set)  # pinned adapters that are loaded into host memory
    _pinned: Mapping[str, AdapterRef] = field(default_factory=dict)
    _homes: dict[str, AdapterRef] = field(default_factory=dict)  # adapters at home here, to bring
    _retry_s: dict[str, float] = field(default_factory=dict)  # when pinned adapters are tried again that could not be loaded
    _departures: Departures = field(default_factory=Departures)
    _actions: list[Action[R]] = field(default_factory=list)
    _now_s: float = 0.0

    def __post_init__(self) -> None:
        self.memory = host_budget(self.host)
        self._gathering = Gathering(self.host)

    def __len__(self) -> int:
        return len(self.book) + len(self._older)

    def __iter__(self) -> Iterator[Entry[R]]:
        return iter([*self.book.values(), *self._older.values()])

    def entry(self, key: Key) -> Entry[R] | None:
        """The entry of a request in this epoch; None if it is not in the book."""
        request_id, epoch = key
        entry = self.book.get(request_id)
        return entry if entry is not None and entry.brief.epoch == epoch else self._older.get(key)

    @property
    def on_device(self) -> int:
        """The number of adapters on the device, as the engine reported it."""
        return len(self._device)

    # in one piece: one match, with a line or two for each event
    def on(self, event: Event[R], now_s: float) -> list[Action[R]]:
        """Take in an event. Returns the actions to carry out now, in order."""
        self._now_s = self.host.eviction.now_s = now_s
        match event:
            case Stepped():
                self._on_stepped(event)
            case Assign():
                self._on_assign(event)
            case CancelRequest(request_id, epoch):
                self._cancel(request_id, epoch)
            case OwnerLost(owner):
                for entry in [one for one in self.book.values() if one.owner == owner]:
                    self._cancel(*entry.key)
            case Close(reason):
                self.closed = self.view.draining = True
                if reason is not None:
                    for entry in [one for one in self.book.values() if one.phase == "loading"]:
                        self._give_up(entry)
                        self._answer(entry, "error", reason)
            case NotStarted(key, reason):
                self._on_not_started(key, reason)
            case Loaded(digest, size_bytes, file_bytes):
                self._on_loaded(digest, self.host.loaded(digest, size_bytes, file_bytes))
            case LoadFailed(digest, reason):
                self._on_load_failed(digest, reason)
            case Fetched(key):
                self._on_fetched(key)
            case FileLost(digest):
                self.host.file_lost(digest)
                self._place(digest)
            case DiskFull(missing_bytes):
                self.disk_room = self.host.make_disk_room(missing_bytes)
            case Pinned(adapters, homes):
                self._pin(adapters, homes)
            case Tick():
                self._bring_pinned()
                self._bring_home()
                self._look_ahead()
            case Registered(versions):
                self._on_registered(versions)
        if self._gathering:
            self._gather()
        actions = self._actions
        if actions:
            self._actions = []
        if self.host.actions:  # these come last: a copy that is evicted now may be one that a `CopyIn` above reads
            moves = self.host.take_actions()
            for move in moves:
                if not isinstance(move, host_tier.Load):
                    self._place(move.digest)
                    if self.foresight is not None and move.digest not in self._device:
                        self.foresight.left(move.digest)
            return [*actions, *moves]
        return actions

    # ---- requests

    def _on_assign(self, said: Assign[R]) -> None:
        brief, adapters = said.brief, said.adapters
        request_id, epoch = brief.request_id, brief.epoch
        newest = self.book.get(request_id)
        if newest is not None and newest.brief.epoch >= epoch:
            if newest.brief.epoch > epoch and (request_id, epoch) not in self._older:
                self._actions.append(Refuse("older", newest=newest.brief.epoch))
            return  # the same assignment again, because the first answer was lost
        if self.closed:
            self._actions.append(Refuse("closed"))
            return
        if newest is not None:
            self._cancel(request_id, epoch)
        if len(self.book) + len(self._older) >= self.max_requests:
            self._actions.append(Refuse("full", retry_after_s=self._departures.retry_after_s(self._now_s)))
            return
        if newest is not None and newest.phase == "leaving":
            self._older[newest.key] = newest
        entry = self.book[request_id] = Entry(brief, said.owner, adapters, said.payload, fetching=said.fetch)
        self._take_in(entry)

    def _take_in(self, entry: Entry[R]) -> None:
        """Load what a new request needs, or start it."""
        adapters = entry.adapters
        if self.foresight is not None:
            for adapter in adapters:
                self.foresight.asked(adapter.digest, self._now_s)
        if adapters and not self.host.fits(size_bytes := sum([adapter.size_bytes for adapter in adapters])):
            self._answer(entry, "error", TooLargeForHost(size_bytes, self.host.host_bytes or 0))
            return
        if entry.fetching:
            self._actions.append(Fetch(entry))
        if len(adapters) > 1 and not all(self.host.has(adapter.digest) for adapter in adapters):
            self._gathering.join(entry)
        else:
            self._hold(entry)
        if entry.complete:
            self._ready(entry)
        else:
            entry.move("load")
            self._show(entry, "loading")

    def _hold(self, entry: Entry[R], *, first: bool = False) -> None:
        """Hold the host copies of the request's adapters, and load those that are missing. `first`: before all other loads."""
        for adapter in entry.adapters:
            if self.host.hold(adapter, entry, first=first):
                entry.holds += (adapter.digest,)

    def _gather(self) -> None:
        """Let requests in that wait for several adapters, and send out those for which there is no room any more."""
        gathering = self._gathering
        while (entry := gathering.too_many()) is not None:
            self._stop_loads(entry)
            self._release(entry)
        while True:
            if (large := gathering.too_large()) is not None:
                entry, size_bytes = large
                self._answer(entry, "error", TooLargeForHost(size_bytes, self.host.host_bytes or 0))
            elif (entry := gathering.enter()) is not None:
                self._hold(entry, first=True)
                if entry.complete:
                    gathering.leave(entry)
                    self._ready(entry)
            else:
                return

    def _ready(self, entry: Entry[R]) -> None:
        """The adapters of the request are in host memory, if it has any."""
        if not entry.fetching:
            self._start(entry)
        elif entry.phase == "new":
            entry.move("load")
            self._show(entry, "loading")

    def _on_fetched(self, key: Key) -> None:
        entry = self.entry(key)
        if entry is not None and entry.fetching:
            entry.fetching = False
            if entry.phase == "loading" and entry.complete:
                self._start(entry)

    def _start(self, entry: Entry[R]) -> None:
        entry.move("start")
        self._show(entry, "waiting")
        self._actions.append(Start(entry))

    def _on_not_started(self, key: Key, reason: object) -> None:
        entry = self.entry(key)
        assert entry is not None, "it was started a moment ago"
        if reason is not None:
            self._answer(entry, "error", reason)
        else:
            self._forget(entry)

    def _cancel(self, request_id: str, epoch: int) -> None:
        entry = self.book.get(request_id)
        if entry is None or entry.brief.epoch > epoch:
            return
        if entry.phase == "loading":
            self._give_up(entry)
            self._answer(entry, "cancelled")
        else:
            entry.move("cancel")
            self._actions.append(Stop(*entry.key))

    def _answer(self, entry: Entry[R], finish: FinishReason, reason: object = None, failed: str = "") -> None:
        """End a request that the engine never got or did not take."""
        self._departures.left(self._now_s)
        self._forget(entry)
        self._actions.append(Answer(entry, finish, reason, failed))

    def _give_up(self, entry: Entry[R], failed: str = "") -> None:
        """The request no longer waits for its adapters. `failed`: the one whose load has ended."""
        if len(entry.adapters) > 1:
            waits = self._gathering.inside(entry)
            self._gathering.leave(entry)
            if not waits:
                return
        self._stop_loads(entry, failed)

    def _stop_loads(self, entry: Entry[R], failed: str = "") -> None:
        """The loads that the request waits for, but the `failed` one, no longer count it."""
        for adapter in entry.adapters:
            if adapter.digest != failed and adapter.digest not in entry.holds:
                self.host.give_up(adapter.digest, entry)

    def _release(self, entry: Entry[R]) -> None:
        """The request holds no copies any more."""
        for digest in entry.holds:
            self.host.release(digest)
        entry.holds = ()

    def _forget(self, entry: Entry[R]) -> None:
        entry.move("end")
        self._release(entry)
        request_id = entry.brief.request_id
        if self.book.get(request_id) is entry:
            del self.book[request_id]
            self.view.remove(request_id)
        else:
            del self._older[entry.key]

    def _on_stepped(self, said: Stepped) -> None:
        view = self.view
        if said.free is not None:
            view.kv_blocks_free, view.adapter_bytes_free = said.free
        if said.merged is not None:
            view.merged = said.merged
        if said.mechanisms is not None:
            view.mechanisms |= said.mechanisms
        if said.prefixes:
            view.cache(said.prefixes)
        for digest, there in said.device:
            if there:
                self._device.add(digest)
                if self.foresight is not None:
                    self.foresight.came(digest)
            else:
                self._device.discard(digest)
                if self.foresight is not None:
                    self.foresight.left(digest)
            self._place(digest)
        for brief in said.moved:
            entry = self.book.get(brief.request_id)
            if entry is not None and entry.brief.epoch == brief.epoch and entry.phase != "loading":
                entry.move("admit" if brief.phase == "running" else "preempt")
                entry.brief = brief
                self.view.put(brief)
        for key in said.ended:
            entry = self.entry(key)
            if entry is not None:
                self._departures.left(self._now_s)
                self._forget(entry)
        for request_id, output_tokens in said.progress:
            view.progress(request_id, output_tokens)

    def _show(self, entry: Entry[R], phase: Literal["loading", "waiting"]) -> None:
        brief = entry.brief
        if brief.phase != phase:
            brief = entry.brief = msgspec.structs.replace(brief, phase=phase)
        self.view.put(brief)

    # ---- adapters

    def _on_loaded(self, digest: str, holders: list[Entry[R] | _Fetch]) -> None:
        self._place(digest)
        for holder in holders:
            if isinstance(holder, Entry):
                holder.holds += (digest,)
                if holder.complete:
                    self._gathering.leave(holder)
                    self._ready(holder)
                continue
            if not holder.foreseen:
                self._fetching.discard(digest)
                self._homes.pop(digest, None)
                self._actions.append(CopyIn(digest))
            elif self.foresight is not None:
                self.foresight.came(digest)
            self.host.release(digest)

    def _on_load_failed(self, digest: str, reason: object) -> None:
        self._homes.pop(digest, None)
        if digest in self._pinned:
            self._retry_s[digest] = self._now_s + PIN_RETRY_S
        for holder in self.host.failed(digest):
            if isinstance(holder, Entry):
                self._give_up(holder, failed=digest)
                self._answer(holder, "error", reason, failed=digest)
            else:
                self._fetching.discard(digest)
        self._place(digest)

    def _pin(self, adapters: Sequence[AdapterRef], homes: Sequence[AdapterRef]) -> None:
        self._pinned = pins.within(adapters, self.view.limits)
        self._retry_s.clear()
        self._homes = {one.digest: one for one in homes}
        self.host.pinned = set(self._pinned)
        self._actions.append(PinAdapters(self._pinned.keys()))
        self._bring_pinned()

    def _bring_pinned(self) -> None:
        """Load the pinned adapters that are not in both memories: new ones, and those evicted for a request."""
        for digest, adapter in self._pinned.items():
            if (digest in self._device and self.host.has(digest)) or digest not in self._versions:
                continue
            if self.host.has(digest):
                self._actions.append(CopyIn(digest))
            elif (
                digest not in self._fetching
                and self.host.fits(adapter.size_bytes)
                and self._now_s >= self._retry_s.get(digest, 0.0)
            ):
                self._fetching.add(digest)
                self.host.fetch(adapter, _Fetch(adapter))

    def _bring_home(self) -> None:
        """Load the next adapter that is at home here into room that is free. Each is brought once."""
        for digest, adapter in list(self._homes.items()):
            if digest in self._fetching:
                return
            if digest in self._device or digest not in self._versions:
                del self._homes[digest]
            elif self.host.has(digest):
                self._actions.append(CopyIn(digest))
                del self._homes[digest]
                return
            elif self.host.spare(adapter.size_bytes, ()):
                self._fetching.add(digest)
                self.host.fetch(adapter, _Fetch(adapter))
                return
            else:
                del self._homes[digest]

    def _look_ahead(self) -> None:
        """Bring an adapter that is likely to be requested soon to the device or to host memory."""
        foresight, host, now_s = self.foresight, self.host, self._now_s
        if foresight is None:
            return
        self.view.mechanisms["foresight"] = foresight.mechanism
        if host.loading or self.closed:
            return
        if any(brief.phase != "running" for brief in self.view.requests.values()):
            return
        running = len(self.view.requests)
        known = self._versions
        above = foresight.next(now_s, lambda one: one not in self._device and one in known and host.has(one), running=running)
        if above is not None:
            self._actions.append(CopyIn(above, foresight.weaker(above, self._device, now_s)))
        if host.host_bytes is None:
            return
        digest = foresight.next(now_s, lambda one: host.tier(one) == "disk" and one in known, running=running)
        if digest is None:
            return
        size_bytes = known[digest].size_bytes
        if host.spare(size_bytes, foresight.weaker(digest, host.copies, now_s)):
            adapter = AdapterRef(name=digest, digest=digest, rank=known[digest].rank, size_bytes=size_bytes)
            host.fetch(adapter, _Fetch(adapter, foreseen=True))

    def _on_registered(self, versions: Mapping[str, Version]) -> None:
        """Remove the versions that are not registered any more. Running requests keep theirs until they end."""
        self._versions = versions
        for digest in {*self.host.copies, *self.host.files, *self._device}:
            if digest in versions:
                self._place(digest)
            else:
                self._actions.append(CopyOut(digest))
                self.host.drop(digest)

    def _place(self, digest: str) -> None:
        """Show the fastest tier of an adapter in the worker's state, because it may have changed."""
        tier = "device" if digest in self._device else self.host.tier(digest)
        residency = None
        if tier is not None:
            facts = self._versions.get(digest) or self.view.adapters.get(digest)  # the second: deleted, but still in use
            if facts is not None:
                residency = Residency(digest, facts.rank, facts.size_bytes, tier)
        self.view.place(digest, residency)

    def check(self) -> None:
        """Assert that book, view and host tier agree (tests)."""
        assert set(self.view.requests) == set(self.book), "the view shows other requests than the book has"
        assert all(entry.key == key and entry.phase == "leaving" for key, entry in self._older.items()), self._older
        assert all(entry.phase not in ("new", "gone") for entry in self), "an entry that is not here"
        assert len(self) <= self.max_requests
        holding = [digest for entry in self for digest in entry.holds]
        if self.host.host_bytes is not None:
            held = {digest: self.host.holders(digest) for digest in self.host.copies if self.host.holders(digest)}
            assert held == {digest: holding.count(digest) for digest in set(holding)}, "holders"
        self.host.check()
