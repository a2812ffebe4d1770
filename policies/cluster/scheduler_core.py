"""What a scheduler decides, live and simulated: the question that a request is, and the worker that takes it.

Its shell keeps the cluster's state (`cluster_view`), predicts lengths, and sends what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.demand import Demand
from motet.policies.cluster.describe import ask_of
from motet.policies.cluster.dispatch import POLICIES, Decision, decide, named
from motet.policies.cluster.placement import Placing
from motet.policies.cluster.queue_moves import AdapterSizes, QueueMoves
from motet.policies.cluster.rebalance import RebalanceConfig, Rebalancer, Rebalancing
from motet.shared.model import AdapterRef, RequestBrief
from motet.shared.scheduler_options import SchedulerOptions
from motet.shared.wire.prefixes import PrefixKeys


class SchedulerCore:
    """The decisions of one scheduler. `choose`: a policy that has no name in `options`. Times are seconds on one clock."""

    def __init__(self, options: SchedulerOptions, state: ClusterState, *, choose: Choose | None = None) -> None:
        self.options, self.state = options, state
        self.placing = Placing()
        self._sizes = AdapterSizes()
        self._demand = Demand()
        self._choose = choose or POLICIES.named(options.policy)()

    def rebalancer(self) -> Rebalancing:
        """What plans moves of requests, as the options say."""
        if self.options.rebalance == "on":
            return Rebalancer(RebalanceConfig(kv_travel=self.options.kv_travel))
        return QueueMoves(self._sizes)

    def ask(
        self,
        brief: RequestBrief,
        now_s: float,
        *,
        base_model: str,
        adapter: AdapterRef | None,
        more: tuple[AdapterRef, ...] = (),
        e2e_slo_ms: float = 0.0,
        prefix_keys: tuple[PrefixKeys, ...] = (),
        needs: Mapping[str, str] = {},
        avoid: tuple[str, ...] = (),
        repeated: int = 0,
        has_kv: bool = False,
    ) -> Ask:
        """A request came: the question which worker takes it.

        `more`: its adapters after the first.
        `e2e_slo_ms`: 0 for none.
        `has_kv`: its blocks come from where it has moved.
        `repeated`: refusals of its tenant's requests that its gateway has given by itself; the others as in `Ask`.
        """
        if adapter is not None and not brief.epoch:
            for one in (adapter, *more):
                self._sizes.asked(one.digest, one.size_bytes)
                if self.options.placement:
                    self.placing.asked(one, base_model, now_s)
        standing = self._demand.asked(brief.tenant, brief.tenant_weight, now_s, 1 + max(0, repeated))
        size_bytes = adapter.size_bytes if adapter is not None else 0
        return ask_of(
            brief,
            standing,
            base_model=base_model,
            adapter_bytes=size_bytes,
            more=more,
            largest_rank=max([one.rank for one in (adapter, *more)]) if adapter is not None and more else 0,
            e2e_slo_ms=e2e_slo_ms,
            prefix_keys=prefix_keys if self.options.prefix_aware else (),
            travels=self.options.kv_travel and not has_kv,
            needs=needs,
            targets=adapter.targets if adapter is not None else (),
            avoid=avoid,
        )

    def decide(self, ask: Ask, now_s: float, avg_resp_len: float) -> Decision:
        """The worker for a request. `avg_resp_len`: the average response length in tokens."""
        options = self.options
        return decide(
            self._choose,
            self.state,
            ask,
            now_s,
            stale_s=options.stale_s,
            avg_resp_len=avg_resp_len,
            admission=options.admission,
        )

    def named(self, ask: Ask, worker_id: str, now_s: float) -> Decision | None:
        """The decision for the worker that a move names; None if it cannot take the request."""
        return named(self.state, ask, worker_id, now_s, stale_s=self.options.stale_s)
