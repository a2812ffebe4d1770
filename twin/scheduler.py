"""A simulated scheduler: its own copy of the workers' state, delayed as on the bus, plus its own assignments.

`policy` is a name as in the live scheduler's configuration (`policies.cluster.dispatch`). The scheduler sees what a live one
sees, not the workers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.cluster_state import hash_of
from motet.policies.cluster.cluster_view import ClusterView
from motet.policies.cluster.dispatch import POLICIES, Decision, decide
from motet.policies.cluster.objectives import Admission
from motet.policies.cluster.worker_book import WorkerBook
from motet.policies.lengths.quantiles import LengthQuantiles
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState
from motet.twin.workload import Request

ADAPTERS = 4096  # length histograms kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSpec:
    """The options of a scheduler, as in services/scheduler/config.py.

    `oracle_lengths`: predictions are the true output lengths.
    """

    policy: str | Choose = "motet"  # a name of `POLICIES`, or a policy itself
    admission: Admission = "objective"
    stale_s: float = 3.0
    in_flight_s: float = 3.0
    attempts: int = 3
    max_tokens: int = 1024  # what requests ask for at most, as far as the predictor knows
    oracle_lengths: bool = False
    copies: int = 1  # how many there are


class Scheduler:
    """A simulated scheduler: it predicts lengths, decides, and keeps its assignments."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.spec = spec
        self._choose = POLICIES[spec.policy]() if isinstance(spec.policy, str) else spec.policy
        view = ClusterView(spec.in_flight_s)
        self.state, self.flights = view.state, view.flights
        self._book = WorkerBook(view)
        self._lengths = LengthQuantiles(ADAPTERS)
        self._base_model = ""

    def hear(self, word: WorkerState, now_s: float) -> None:
        """A worker's message arrived."""
        if isinstance(word, WorkerSnapshot):
            self._base_model = word.limits.base_model
            self._book.snapshot(word, now_s)
        else:
            self._book.delta(word, now_s)

    def predict(self, request: Request) -> int:
        """Expected output tokens."""
        if self.spec.oracle_lengths:
            return request.output_tokens
        return self._lengths.expected_tokens(request.adapter.digest, self.spec.max_tokens)

    def mean_tokens(self) -> float:
        """The average output length so far."""
        return self._lengths.mean_tokens()

    def observe(self, request: Request) -> None:
        """A request has ended; its true length is known."""
        self._lengths.observe(request.adapter.digest, request.output_tokens)

    def decide(
        self, request: Request, predicted_tokens: int, tried: tuple[str, ...], now_s: float, *, begun: bool = False
    ) -> Decision:
        """Choose a worker. `begun`: another worker has handed the request over."""
        ask = Ask(
            base_model=self._base_model,
            rank=request.adapter.rank,
            tokens=request.prompt_tokens,
            tpot_slo_ms=request.slo.tpot_slo_ms,
            ttft_slo_ms=request.slo.ttft_slo_ms,
            out_tokens=predicted_tokens,
            adapter=request.adapter.digest,
            adapter_bytes=request.adapter.size_bytes,
            key=hash_of(str(request.index)),
            tried=tried,
            begun=begun,
        )
        avg_resp_len = self._lengths.mean_tokens()
        spec = self.spec
        return decide(
            self._choose, self.state, ask, now_s, stale_s=spec.stale_s, avg_resp_len=avg_resp_len, admission=spec.admission
        )

    def expect(self, worker_id: str, request: Request, request_id: str, predicted_tokens: int, now_s: float) -> None:
        """Count a request as assigned to a worker."""
        self.flights.expect(worker_id, request.brief(request_id, predicted_tokens), now_s)
