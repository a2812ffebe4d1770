"""Decides when requests move between workers and which: triggers, hysteresis, and the plan of
`policies.cluster.migration_plan`.

    a scheduler's ClusterState ──> triggers ──> a replica per worker ──> plan ──> Moved to the owners of the requests

A plan is made when a worker of a base model is pressed and another one is not. Pressed: a request would wait there for more
than `wait_ms`, or for more than a queued request's objective for the time to first token. A plan is followed by `every_s`
without another one, and a request that moved stays for `rest_s`, so that nothing moves twice in vain.

The work of a request is its share of full batches: tokens left times the time of a step with every seat taken, divided by the
seats, and its prefill if that is still to come. Its memory is that of all its tokens to the end. Where a request goes, its KV
is computed again, or fetched from where it was if that pays (`policies.memory.kv_travel`). Either costs a running request time
and a waiting one nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.migration_plan import Held, Plan, PlanConfig, Replica, plan
from motet.policies.cluster.waits import room_share
from motet.policies.cluster.worker_load import tokens_left
from motet.policies.memory.kv_travel import Travel, compatible, travel
from motet.shared.model import Mechanism, PerfModel, RequestBrief, WorkerLimits

EVEN = 0.5
"""Workers are uneven when the shortest wait is below this share of the longest."""
NO_MEMORY: Mapping[str, float] = {}
"""Adapters take no KV tokens in this plan; the cost of another copy is the plan's `eta_ms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceConfig:
    """Triggers and hysteresis. `python -m bench dlora --tune` compares constants.

    `wait_ms` suits a dispatch that knows every worker's queue: with it, a smaller value moves many requests and saves nothing.
    Where requests are dispatched in turn, 50 ms is better.
    """

    wait_ms: float = 500.0
    every_s: float = 1.0
    rest_s: float = 10.0
    kv_travel: bool = True  # KV blocks are fetched where that pays
    plan: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Why a plan was made: expected waits on the workers of a base model, in milliseconds."""

    most_ms: float
    least_ms: float
    late: int  # workers where that is more than the objective of one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The workers of a base model that may need a plan, and why.

    It does not change with the cluster, so that another thread can make the plan.
    """

    base_model: str
    pressure: Pressure
    replicas: tuple[Replica, ...]

    def answer(self, config: PlanConfig) -> Plan:
        """The plan. It takes milliseconds to compute."""
        return plan(self.replicas, NO_MEMORY, config)


class Asked(Protocol):
    """The workers of a base model for which a plan is to be made. `Question` is one."""

    @property
    def base_model(self) -> str:
        """The name of the base model."""

    @property
    def pressure(self) -> Pressure:
        """Why."""

    def answer(self, config: PlanConfig) -> Plan:
        """The plan."""


class Rebalancing(Protocol):
    """The planning of one scheduler. `Rebalancer` is one."""

    config: RebalanceConfig

    def questions(
        self, state: ClusterState, now_s: float, *, stale_s: float, avg_resp_len: float, always: bool = False
    ) -> Sequence[Asked]:
        """What to plan now; with `always` whatever the triggers say (a dry run)."""

    def moved(self, plans: Iterable[Plan], now_s: float) -> None:
        """These plans were made and carried out."""

    def travels(self, state: ClusterState, request_id: str, source: str, to: str) -> bool:
        """Whether a request that moves should fetch its KV blocks; both workers are known."""

    def mechanism(self, now_s: float) -> Mechanism:
        """Whether requests move, and why, for people."""


@dataclass(eq=False)
class Rebalancer:
    """The planning of one scheduler. `questions` is called from time to time, and `moved` with what was decided.

    Times are seconds on the scheduler's clock.
    """

    config: RebalanceConfig = field(default_factory=RebalanceConfig)
    _planned_s: float = float("-inf")
    _moved_s: dict[str, float] = field(default_factory=dict)  # request id -> when it moved

    def questions(
        self, state: ClusterState, now_s: float, *, stale_s: float, avg_resp_len: float, always: bool = False
    ) -> list[Question]:
        """What to plan now. With `always`, every base model with two workers, whatever the triggers say (a dry run)."""
        if not always:
            if now_s - self._planned_s < self.config.every_s:
                return []
            self._moved_s = {one: at_s for one, at_s in self._moved_s.items() if now_s - at_s < self.config.rest_s}
        table, found = state.table, []
        live = (table["base"] >= 0) & (table["heard_s"] >= now_s - stale_s) & ~table["draining"]
        wait_ms = waits_ms(state, avg_resp_len)
        for base in np.unique(table["base"][live]).tolist():
            rows = np.flatnonzero(live & (table["base"] == base))
            if len(rows) < 2:
                continue
            most_ms, least_ms = float(wait_ms[rows].max()), float(wait_ms[rows].min())
            late = sum(wait_ms[row] > _objective_ms(state, row) for row in rows.tolist() if table["queued"][row])
            pressed = most_ms > self.config.wait_ms or late > 0
            if always or (pressed and least_ms < EVEN * most_ms):
                found.append(
                    Question(
                        base_model=state.base_model(base),
                        pressure=Pressure(most_ms=most_ms, least_ms=least_ms, late=int(late)),
                        replicas=tuple(self._replica(state, row) for row in rows.tolist()),
                    )
                )
        return found

    def moved(self, plans: Iterable[Plan], now_s: float) -> None:
        """These plans were made and carried out."""
        self._planned_s = now_s
        self._moved_s.update([(move.request_id, now_s) for one in plans for move in one.moves])

    def mechanism(self, now_s: float) -> Mechanism:
        """It is on."""
        return Mechanism("on", "whatever moves gain")

    def travels(self, state: ClusterState, request_id: str, source: str, to: str) -> bool:
        """Whether a request that moves should fetch its KV blocks; both workers are known."""
        brief = state.requests(source).get(request_id)
        (limits, _), (others, perf) = state.terms(source), state.terms(to)
        return (
            self.config.kv_travel
            and brief is not None
            and brief.phase == "running"
            and compatible(limits, others)
            and _travel(brief, others, perf).pays
        )

    def _replica(self, state: ClusterState, row: int) -> Replica:
        worker_id, table, perf = state.ids[row], state.table, state.perf
        seats = max(1.0, float(table["max_running"][row]))
        full_ms = float(perf.decode_base_ms[row] + perf.decode_row_ms[row] * seats)
        token_ms, share_ms = float(perf.prefill_token_ms[row]), full_ms / seats
        limits, own = state.terms(worker_id)
        travels = self.config.kv_travel and bool(limits.kv_format)
        held = []
        for brief in state.requests(worker_id).values():
            tokens, left = brief.prompt_tokens + brief.output_tokens, tokens_left(brief)
            waits = brief.phase != "running"
            again_ms = 0.0 if waits else tokens * token_ms
            if travels and not waits and (trip := _travel(brief, limits, own)).pays:
                again_ms = min(again_ms, trip.copy_ms)
            held.append(
                Held(
                    brief.request_id,
                    brief.adapter_digest,
                    left * share_ms + (tokens * token_ms if waits else 0.0),
                    float(tokens + left),
                    again_ms,
                    brief.request_id in self._moved_s,
                )
            )
        return Replica(
            worker_id=worker_id,
            requests=held,
            adapters=[digest for digest, tier in state.adapters(worker_id).items() if tier == "device"],
            memory=float(table["kv_tokens_total"][row]),
            takes=max(0, int(table["max_requests"][row] - table["exists"][row])),
        )


def _travel(brief: RequestBrief, limits: WorkerLimits, perf: PerfModel) -> Travel:
    tokens = brief.prompt_tokens + brief.output_tokens
    return travel(perf, tokens=tokens, rank=brief.rank, token_bytes=limits.kv_token_bytes)


def _objective_ms(state: ClusterState, row: int) -> float:
    """The tightest objective for the time to first token among a worker's queued requests."""
    requests = state.requests(state.ids[row]).values()
    return min((one.ttft_slo_ms for one in requests if one.phase != "running" and one.ttft_slo_ms), default=float("inf"))


def waits_ms(state: ClusterState, avg_resp_len: float) -> np.ndarray:
    """The expected wait of a new request on each worker before it runs: for room (`waits`), and the queue's prefill."""
    t = state.table
    with np.errstate(invalid="ignore"):  # rows without a worker
        behind, lacking = t["exists"] + 1.0 - t["max_running"], t["kv_tokens_promised"] - t["kv_tokens_free"]
        room_ms = avg_resp_len * t["step_ms"] * room_share(t, behind, lacking)
    return np.where(t["queued"] > 0.0, t["queue_ms"], 0.0) + np.nan_to_num(room_ms)
