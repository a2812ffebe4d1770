"""What a gateway has heard of the workers of its base model: who serves, and which requests they say they have."""

from __future__ import annotations

from motet.policies.cluster.worker_book import Holdings, Shelf, WorkerBook
from motet.shared.model import Capability
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState

SCHEMES_MAX = 4
STALE_S = 10.0  # a worker without a message for this long is forgotten


class WorkersSeen:
    """The workers that report their state. Times are seconds on one clock."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self._shelf = Shelf()
        self.book = WorkerBook(self._shelf)

    def hear(self, state: WorkerState, now_s: float) -> str:
        """A worker's message came. Returns "new" for a worker that was not there before, "known", or "" for no news of one."""
        if not isinstance(state, WorkerSnapshot):
            self.book.delta(state, now_s)
            return ""
        if state.limits.base_model != self.base_model:
            return ""
        known = state.worker_id in self.book
        if not self.book.snapshot(state, now_s):
            return ""
        return "known" if known else "new"

    def prefix_schemes(self) -> list[tuple[int, bool]]:
        """How workers name cached blocks: (tokens in a block, whether tenants share those of the base model)."""
        limits = [known.limits for known in self.book if known.limits.prefix_cache]
        return sorted({(one.block_size, one.prefix_cache == "base") for one in limits})[:SCHEMES_MAX]

    def any_can(self, capability: Capability) -> bool:
        """Whether a worker that takes requests has this capability."""
        return any(capability in known.limits.capabilities and not known.draining for known in self.book)

    def silent(self, now_s: float) -> list[str]:
        """The workers without a message for too long."""
        return [known.worker_id for known in self.book.silent(now_s - STALE_S)]

    def held(self, worker_id: str) -> Holdings:
        """The requests and adapters of a worker; empty for an unknown worker."""
        return self._shelf.of(worker_id)

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        """Whether a snapshot taken after `since_s` shows that the worker does not have this request."""
        known = self.book.get(worker_id)
        if known is None or known.snapshot_s < since_s:
            return False
        brief = self.held(worker_id).requests.get(request_id)
        return brief is None or brief.epoch != epoch
