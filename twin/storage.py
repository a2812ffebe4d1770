"""Simulated disk and object store for `policies.memory.host_tier`: links with a latency and a bandwidth.

The latencies of concurrent loads overlap, and then the loads share the bandwidth equally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet.policies.memory.host_tier import Load
from motet.policies.times.perf_model import MIB
from motet.shared.model import AdapterRef
from motet.twin.events import STEP, Events, to_ps
from motet.twin.steps import Link

DISK = Link(1.0, 0.5)  # 2 GB/s
STORE = Link(5.0, 8.0)  # 1 Gbit/s


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageModel:
    """Sizes of host memory and disk, and loading times.

    `host_bytes` None: everything is in host memory already. `disk_bytes` None: the disk is never full.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk: Link = DISK
    store: Link = STORE


EVERYTHING_IN_HOST = StorageModel()


class _Way:
    """The loads on one link. `whole` is called with each completed load."""

    def __init__(self, link: Link, events: Events, whole: Callable[[str], None]) -> None:
        self._link, self._events, self._whole = link, events, whole
        self._left: dict[str, int] = {}  # digest -> how long the link alone takes for what is still to come
        self._at_ps = 0  # of which this is known
        self._serial = 0

    def begin(self, digest: str, size_bytes: int) -> None:
        link, events = self._link, self._events
        own_ps = to_ps(link.ms_per_mib * size_bytes / MIB)
        events.at(events.now_ps + to_ps(link.base_ms), STEP, self._join, digest, own_ps)

    def _join(self, digest: str, own_ps: int) -> None:
        self._pass()
        self._left[digest] = own_ps
        self._await_next()

    def _pass(self) -> None:
        now_ps, left = self._events.now_ps, self._left
        if left:
            each_ps = (now_ps - self._at_ps) // len(left)
            for digest in left:
                left[digest] -= each_ps
        self._at_ps = now_ps

    def _await_next(self) -> None:
        self._serial += 1
        if self._left:
            in_ps = len(self._left) * min(self._left.values())
            self._events.at(self._events.now_ps + in_ps, STEP, self._ended, self._serial)

    def _ended(self, serial: int) -> None:
        if serial != self._serial:
            return  # others came
        self._pass()
        digest = min(self._left, key=self._left.__getitem__)
        del self._left[digest]
        self._await_next()
        self._whole(digest)


class Storage:
    """Simulates a live worker's `AdapterLoader`. `whole(adapter)` is called when a load is complete."""

    def __init__(self, model: StorageModel, events: Events, whole: Callable[[AdapterRef], None]) -> None:
        self._loading: dict[str, AdapterRef] = {}
        self._whole = whole
        self._ways = {"disk": _Way(model.disk, events, self._ended), "store": _Way(model.store, events, self._ended)}
        self.fetches = self.reads = 0  # from the store, from disk

    def load(self, load: Load) -> None:
        """Begin a load."""
        adapter = self._loading[load.adapter.digest] = load.adapter
        self.reads += load.source == "disk"
        self.fetches += load.source == "store"
        self._ways[load.source].begin(adapter.digest, adapter.size_bytes)

    def _ended(self, digest: str) -> None:
        self._whole(self._loading.pop(digest))
