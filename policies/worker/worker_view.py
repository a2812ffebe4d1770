"""A worker's state as it is sent to schedulers, and the changes that were not sent yet.

Every change is remembered until `take` collects it for the next message, so code that changes the view sends nothing. Values
that move in nearly every step (free memory, tokens so far) do not count as changes; the next message carries them.
"""

from __future__ import annotations

import msgspec

from motet.policies.cluster.worker_load import tokens_left
from motet.shared.model import RequestBrief, Residency, WorkerLimits


class Changes(msgspec.Struct):
    """The changes since the last message. An id is in one list only: a request that came and ended is only in `removed`."""

    changed: list[RequestBrief]
    removed: list[str]
    resident: list[Residency]
    evicted: list[str]


class View:
    """The state of one worker: its requests by id, its adapters by digest with their fastest tier, and its free memory."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.kv_blocks_free = limits.kv_blocks_most
        self.adapter_bytes_free = limits.adapter_bytes_most
        self.draining = False
        self.merged = ""
        """Digest of the adapter that is merged into the weights. Like free memory it is told by the next message."""
        self.requests: dict[str, RequestBrief] = {}
        self.adapters: dict[str, Residency] = {}
        self._draining_told = False
        self._requests: dict[str, None] = {}  # changed, in the order of their first change
        self._adapters: dict[str, None] = {}

    @property
    def changed(self) -> bool:
        """Whether a message is due."""
        return bool(self._requests or self._adapters or self.draining != self._draining_told)

    def put(self, brief: RequestBrief) -> None:
        """Add a request, or show its new phase."""
        self.requests[brief.request_id] = brief
        self._requests[brief.request_id] = None

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        if self.requests.pop(request_id, None) is not None:
            self._requests[request_id] = None

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
        self._draining_told = self.draining

    def loaded(self) -> list[Residency]:
        """The adapters in memory, for a snapshot without those on disk. Forgets all changes but those on disk."""
        pending = [digest for digest in self._adapters if not self._in_memory(digest)]
        self.told()
        self._adapters.update(dict.fromkeys(pending))
        return [residency for residency in self.adapters.values() if residency.tier != "disk"]

    def _in_memory(self, digest: str) -> bool:
        residency = self.adapters.get(digest)
        return residency is not None and residency.tier != "disk"

    def take(self) -> Changes:
        """The changes since the last message. They are forgotten."""
        changes = Changes([], [], [], [])
        for request_id in self._requests:
            brief = self.requests.get(request_id)
            if brief is not None:
                changes.changed.append(brief)
            else:
                changes.removed.append(request_id)
        for digest in self._adapters:
            residency = self.adapters.get(digest)
            if residency is not None:
                changes.resident.append(residency)
            else:
                changes.evicted.append(digest)
        self.told()
        return changes
