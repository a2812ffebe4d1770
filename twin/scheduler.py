"""A simulated scheduler: its own copy of the workers' state, delayed as on the bus, plus its own assignments.

`policy` is a name as in the live scheduler's configuration (`policies.dispatch`). The scheduler sees what a live one sees,
not the workers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from policies.candidates import Ask
from policies.choice import Choose
from policies.cluster_state import ClusterState, hash_of
from policies.dispatch import POLICIES, Decision, decide
from policies.flights import Flights
from policies.length_quantiles import LengthQuantiles
from policies.objectives import Admission
from shared.model import PerfModel, RequestBrief, Tier, WorkerLimits
from twin.workload import Request

ADAPTERS = 4096  # length histograms kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSpec:
    """As in services/scheduler/config.py. `oracle_lengths`: predictions are the true output lengths."""

    policy: str | Choose = "motet"  # a name of `POLICIES`, or a policy itself
    admission: Admission = "objective"
    stale_s: float = 3.0
    in_flight_s: float = 3.0
    attempts: int = 3
    max_tokens: int = 1024  # what requests ask for at most, as far as the predictor knows
    oracle_lengths: bool = False


class Report(msgspec.Struct, frozen=True):
    """A worker's report: its whole state, or the changes since the last report."""

    worker_id: str
    whole: bool
    kv_blocks_free: int
    changed: list[RequestBrief]
    removed: list[str]
    tiers: Mapping[str, Tier | None]  # adapters that are now in this tier, or in none
    running_left: int = 0  # what a whole report says request by request


class Scheduler:
    """Predicts lengths, decides, and keeps its assignments."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.spec = spec
        self._choose = POLICIES[spec.policy]() if isinstance(spec.policy, str) else spec.policy
        self.state = ClusterState()
        self.flights = Flights(self.state, spec.in_flight_s)
        self._lengths = LengthQuantiles(ADAPTERS)
        self._base_model = ""

    def meet(self, worker_id: str, limits: WorkerLimits, perf: PerfModel, now_s: float) -> None:
        """A worker's first snapshot, or new coefficients."""
        self._base_model = limits.base_model
        self.state.put_worker(worker_id, limits, perf)
        self.state.heard(worker_id, now_s, kv_blocks_free=limits.kv_blocks_total, draining=False)

    def hear(self, report: Report, now_s: float) -> None:
        """A worker's report arrived."""
        self.state.heard(report.worker_id, now_s, kv_blocks_free=report.kv_blocks_free, draining=False)
        if report.whole:
            self.flights.snapshot(report.worker_id, report.changed, now_s)
            held = {digest: tier for digest, tier in report.tiers.items() if tier is not None}
            self.state.replace_adapters(report.worker_id, held)
        else:
            self.flights.delta(report.worker_id, report.changed, report.removed, now_s)
            for digest, tier in report.tiers.items():
                if tier is None:
                    self.state.drop_adapter(report.worker_id, digest)
                else:
                    self.state.put_adapter(report.worker_id, digest, tier)
            self.state.set_running_left(report.worker_id, report.running_left)

    def predict(self, request: Request) -> int:
        """Expected output tokens."""
        if self.spec.oracle_lengths:
            return request.output_tokens
        return self._lengths.expected_tokens(request.digest, self.spec.max_tokens)

    def observe(self, request: Request) -> None:
        """A request has ended; its true length is known."""
        self._lengths.observe(request.digest, request.output_tokens)

    def decide(self, request: Request, predicted_tokens: int, tried: tuple[str, ...], now_s: float) -> Decision:
        """Choose a worker."""
        ask = Ask(
            base_model=self._base_model,
            rank=request.rank,
            tokens=request.prompt_tokens,
            tpot_slo_ms=request.slo.tpot_slo_ms,
            ttft_slo_ms=request.slo.ttft_slo_ms,
            out_tokens=predicted_tokens,
            adapter=request.digest,
            adapter_bytes=request.adapter_bytes,
            key=hash_of(str(request.index)),
            tried=tried,
        )
        avg_resp_len = self._lengths.mean_tokens()
        spec = self.spec
        return decide(
            self._choose, self.state, ask, now_s, stale_s=spec.stale_s, avg_resp_len=avg_resp_len, admission=spec.admission
        )

    def expect(self, worker_id: str, request: Request, request_id: str, predicted_tokens: int, now_s: float) -> None:
        """Count a request as assigned to a worker."""
        brief = RequestBrief(
            request_id,
            0,
            request.digest,
            request.rank,
            request.prompt_tokens,
            0,
            predicted_tokens,
            "waiting",
            request.slo.tpot_slo_ms,
            request.slo.ttft_slo_ms,
        )
        self.flights.expect(worker_id, brief, now_s)
