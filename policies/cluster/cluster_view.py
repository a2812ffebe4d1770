"""The state of the cluster as one scheduler knows it, live and in the twin: workers' messages and its own assignments.

messages of workers ──> WorkerBook ──> ClusterView ──> ClusterState (read by policies)
own assignments ─────────────────────> Flights ───────┘
"""

from __future__ import annotations

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.flights import Flights
from motet.policies.cluster.worker_book import Known
from motet.shared.wire.prefixes import unpack_keys
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot


class ClusterView:
    """Keeps `state` and `flights` up to date with the messages in a scheduler's `WorkerBook`."""

    def __init__(self, in_flight_s: float) -> None:
        self.state = ClusterState()
        self.flights = Flights(self.state, in_flight_s)

    def whole(self, known: Known, said: WorkerSnapshot, now_s: float) -> None:
        """Replace limits, coefficients, adapters and requests by those of a snapshot."""
        worker_id = known.worker_id
        self.state.put_worker(worker_id, said.limits, said.perf)
        tiers = {held.digest: held.tier for held in said.adapters}
        if not said.lists_disk:
            tiers = {digest: tier for digest, tier in self.state.adapters(worker_id).items() if tier == "disk"} | tiers
        self.state.replace_adapters(worker_id, tiers)
        self.facts(known, now_s)
        self.state.merge(worker_id, said.merged)
        if said.prefixes is not None:
            self.state.list_prefixes(worker_id, unpack_keys(said.prefixes))
        self._change_prefixes(said)
        self.flights.snapshot(worker_id, said.requests, now_s)

    def change(self, known: Known, said: WorkerDelta, now_s: float) -> None:
        """Take in a delta: requests and adapters that came, changed or left."""
        worker_id, state = known.worker_id, self.state
        self.flights.delta(worker_id, said.changed, said.removed, now_s, said.running_left)
        for held in said.resident:
            state.put_adapter(worker_id, held.digest, held.tier)
        for digest in said.evicted:
            state.drop_adapter(worker_id, digest)
        self._change_prefixes(said)

    def _change_prefixes(self, said: WorkerSnapshot | WorkerDelta) -> None:
        if said.cached or said.uncached:
            row, prefixes = self.state.row(said.worker_id), self.state.prefixes
            prefixes.add(row, unpack_keys(said.cached))
            prefixes.remove(row, unpack_keys(said.uncached))

    def facts(self, known: Known, now_s: float) -> None:
        """Take in the facts of any message; marks against the worker (refusing, draining) end."""
        self.state.prefixes.settle(now_s)
        self.state.heard(
            known.worker_id,
            now_s,
            kv_blocks_free=known.kv_blocks_free,
            draining=known.draining,
            adapter_bytes_free=known.adapter_bytes_free,
        )

    def ended(self, known: Known) -> None:
        """Remove the worker and all that it had."""
        self.state.drop_worker(known.worker_id)
        self.flights.forget(known.worker_id)
