"""The state messages of a worker to the schedulers: snapshots, and deltas between them.

    snapshot seq=7 ── delta 8 ── delta 9 ── ... ── snapshot seq=23        seq counts both

Applying the deltas to a snapshot gives the next snapshot, except for what moves in nearly every step: free KV blocks, free
adapter bytes and `running_left` are refreshed by whatever message comes next, each request's output tokens by snapshots.
"""

from __future__ import annotations

from motet.policies.worker.worker_view import View
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot


class WorkerView(View):
    """The worker's state as others see it, and the messages made of it."""

    def __init__(self, worker_id: str, incarnation: str, limits: WorkerLimits) -> None:
        super().__init__(limits)
        self.worker_id, self.incarnation = worker_id, incarnation
        self.prefill_tokens_waiting = 0
        self._seq = 0

    def snapshot(self, perf: PerfModel, unix_ms: int, *, lists_disk: bool = True) -> WorkerSnapshot:
        """The whole state, pending changes included. Without `lists_disk` the changes on disk come with the next delta."""
        if lists_disk:
            self.told()
            adapters = list(self.adapters.values())
        else:
            adapters = self.loaded()
        self._seq += 1
        return WorkerSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            sent_unix_ms=unix_ms,
            limits=self.limits,
            perf=perf,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            requests=list(self.requests.values()),
            adapters=adapters,
            lists_disk=lists_disk,
            prefill_tokens_waiting=self.prefill_tokens_waiting,
            merged=self.merged,
            merged_share=self.merged_share,
        )

    def delta(self, unix_ms: int) -> WorkerDelta:
        """The changes since the last snapshot or delta."""
        changes = self.take()
        self._seq += 1
        return WorkerDelta(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            sent_unix_ms=unix_ms,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            changed=changes.changed,
            removed=changes.removed,
            resident=changes.resident,
            evicted=changes.evicted,
            running_left=self.running_left(),
        )
