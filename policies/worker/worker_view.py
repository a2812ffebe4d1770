"""A worker's state, and the messages that tell schedulers of it: snapshots, and deltas between them.

    snapshot seq=7 ── delta 8 ── delta 9 ── ... ── snapshot seq=23        seq counts both

Applying the deltas to a snapshot gives the next snapshot, except for what moves in nearly every step: free KV blocks, free
adapter bytes and `running_left` are refreshed by whatever message comes next, each request's output tokens by snapshots. Keys
of cached KV blocks come and go with whatever message comes next, too; a snapshot lists all of them only on request.

Every change is remembered until the next message collects it, so code that changes the view sends nothing. Only the worker's
core (`worker_core`) changes it. A message has copies of the requests, because it may travel while they continue.

A request that comes and waits makes no message due, because its scheduler knows of it. Messages keep a distance (`DELTA_S`), so
the one about its prefill, which no scheduler can know, would come late.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from motet.policies.cluster.worker_load import tokens_left
from motet.shared.model import Mechanism, PerfModel, RequestBrief, Residency, WorkerLimits
from motet.shared.wire.prefixes import pack_keys
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot

PREFIXES_MAX = 1 << 17
"""Keys of cached KV blocks that a worker reports: those that came first. A list of so many is a message of 1 MiB."""


class View:
    """The state of one worker: its requests by id, its adapters by digest with their fastest tier, and its free memory."""

    def __init__(
        self, worker_id: str, incarnation: str, limits: WorkerLimits, mechanisms: Mapping[str, Mechanism] | None = None
    ) -> None:
        self.worker_id, self.incarnation, self.limits = worker_id, incarnation, limits
        self.kv_blocks_free = limits.kv_blocks_most
        self.adapter_bytes_free = limits.adapter_bytes_most
        self.draining = False
        self.merged = ""
        """Digest of the adapter that is merged into the weights. Like free memory it is told by the next message."""
        self.mechanisms: dict[str, Mechanism] = dict(mechanisms or {})
        """Those that turn on by themselves. The next snapshot tells them."""
        self.requests: dict[str, RequestBrief] = {}
        self.adapters: dict[str, Residency] = {}
        self.prefixes: set[int] = set()
        """Short keys of the cached KV blocks."""
        self._prefixes: dict[int, bool] = {}  # came (True) or left since the last message
        self._draining_told = False
        self._due = False  # for the sake of a request
        self._requests: dict[str, None] = {}  # changed, in the order of their first change
        self._adapters: dict[str, None] = {}
        self._seq = 0  # of the last message

    @property
    def changed(self) -> bool:
        """Whether a message is due."""
        return bool(self._due or self._adapters or self.draining != self._draining_told)

    def put(self, brief: RequestBrief) -> None:
        """Add a request, or show its new phase."""
        self._due = self._due or brief.phase != "waiting" or brief.request_id in self.requests
        self.requests[brief.request_id] = brief
        self._requests[brief.request_id] = None

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        if self.requests.pop(request_id, None) is not None:
            self._requests[request_id] = None
            self._due = True

    def progress(self, request_id: str, output_tokens: int) -> None:
        """A request has produced `output_tokens` tokens so far. This alone is no change to report."""
        brief = self.requests.get(request_id)
        if brief is not None:
            brief.output_tokens = max(brief.output_tokens, output_tokens)

    def place(self, digest: str, residency: Residency | None) -> None:
        """Show an adapter's fastest tier; None when it is in no tier."""
        if self.adapters.get(digest) == residency:
            return
        if residency is None:
            del self.adapters[digest]
        else:
            self.adapters[digest] = residency
        self._adapters[digest] = None

    def cache(self, changes: Mapping[int, bool]) -> None:
        """KV blocks with these keys can be reused from now on (True), or no longer. This alone is no reason for a message."""
        prefixes, pending = self.prefixes, self._prefixes
        for key, there in changes.items():
            if there == (key in prefixes):
                continue
            if not there:
                prefixes.remove(key)
            elif len(prefixes) < PREFIXES_MAX:
                prefixes.add(key)
            else:
                continue
            pending[key] = there

    def running_left(self) -> int:
        """Output tokens that the running requests are still expected to produce."""
        return sum(tokens_left(brief) for brief in self.requests.values() if brief.phase == "running")

    @property
    def merged_share(self) -> float:
        """The share of the requests that are for the merged adapter; 0 if none is merged."""
        if not self.merged or not self.requests:
            return 0.0
        return sum(brief.adapter_digest == self.merged for brief in self.requests.values()) / len(self.requests)

    def told(self) -> None:
        """Forget all changes, because a message has reported them or there is no listener."""
        self._requests.clear()
        self._adapters.clear()
        self._prefixes.clear()
        self._due = False
        self._draining_told = self.draining

    def snapshot(self, perf: PerfModel, *, lists_disk: bool = True, lists_prefixes: bool = True) -> WorkerSnapshot:
        """The whole state, pending changes included. Without `lists_disk` the changes on disk come with the next delta, and
        without `lists_prefixes` it has the changes of cached KV blocks.
        """
        pending = [] if lists_disk else [digest for digest in self._adapters if not self._in_memory(digest)]
        cached, uncached = (b"", b"") if lists_prefixes else self._prefix_changes()
        self.told()
        self._adapters.update(dict.fromkeys(pending))
        self._seq += 1
        return WorkerSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            limits=self.limits,
            perf=perf,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            requests=[replace(brief) for brief in self.requests.values()],
            adapters=[residency for residency in self.adapters.values() if lists_disk or residency.tier != "disk"],
            lists_disk=lists_disk,
            merged=self.merged,
            merged_share=self.merged_share,
            mechanisms=dict(self.mechanisms),
            prefixes=pack_keys(self.prefixes) if lists_prefixes else None,
            cached=cached,
            uncached=uncached,
        )

    def _prefix_changes(self) -> tuple[bytes, bytes]:
        """The keys of KV blocks that came and that left since the last message."""
        changes = self._prefixes
        return (
            pack_keys(key for key, there in changes.items() if there),
            pack_keys(key for key, there in changes.items() if not there),
        )

    def _in_memory(self, digest: str) -> bool:
        residency = self.adapters.get(digest)
        return residency is not None and residency.tier != "disk"

    def delta(self) -> WorkerDelta:
        """The changes since the last message. An id is in one list only: a request that came and ended is only in `removed`."""
        requests, adapters = self.requests, self.adapters
        cached, uncached = self._prefix_changes()
        self._seq += 1
        delta = WorkerDelta(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            changed=[replace(requests[request_id]) for request_id in self._requests if request_id in requests],
            removed=[request_id for request_id in self._requests if request_id not in requests],
            resident=[adapters[digest] for digest in self._adapters if digest in adapters],
            evicted=[digest for digest in self._adapters if digest not in adapters],
            running_left=self.running_left(),
            cached=cached,
            uncached=uncached,
        )
        self.told()
        return delta
