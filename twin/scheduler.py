"""A simulated scheduler: its own copy of the workers' state, delayed as on the bus, plus its own assignments.

It sees what a live one sees, not the workers themselves, and decides with the same `policies.cluster.scheduler_core`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_view import ClusterView
from motet.policies.cluster.describe import predicted
from motet.policies.cluster.dispatch import Decision
from motet.policies.cluster.scheduler_core import SchedulerCore
from motet.policies.cluster.worker_book import WorkerBook
from motet.policies.lengths.quantiles import LengthQuantiles
from motet.shared.model import RequestBrief
from motet.shared.scheduler_options import SchedulerOptions
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState
from motet.twin.content import prefix_keys
from motet.twin.workload import Request

DRAWS = {"draws": "prompt"}
"""What a request for a picture needs, and the field that asks for it."""
ADAPTERS = 4096  # length histograms kept


class SchedulerSpec(SchedulerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a scheduler, and what only a simulated one has.

    `choose`: a policy without a name. `oracle_lengths`: predictions are the true output lengths.
    """

    choose: Any = None  # Choose | None
    max_tokens: int = 1024  # what requests ask for at most, as far as the predictor knows
    oracle_lengths: bool = False
    copies: int = 1  # how many there are


class Scheduler:
    """A simulated scheduler: it predicts lengths, decides, and keeps its assignments."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.spec = spec
        view = ClusterView(spec.in_flight_s)
        self.state, self.flights = view.state, view.flights
        self.book = WorkerBook(view)
        self.core = SchedulerCore(spec, self.state, choose=spec.choose)
        self._lengths = LengthQuantiles(ADAPTERS)
        self._base_model = ""
        self._block_sizes: set[int] = set()  # of the workers with a prefix cache

    def hear(self, word: WorkerState, now_s: float) -> None:
        """A worker's message arrived."""
        if isinstance(word, WorkerSnapshot):
            self._base_model = word.limits.base_model
            if word.limits.prefix_cache:
                self._block_sizes.add(word.limits.block_size)
            self.book.snapshot(word, now_s)
        else:
            self.book.delta(word, now_s)

    def predict(self, request: Request, produced: int = 0) -> int:
        """Expected output tokens, of which `produced` are there."""
        if self.spec.oracle_lengths or request.image is not None:
            return request.output_tokens
        most = self.spec.max_tokens
        expected = self._lengths.expected_tokens(request.adapter.digest, most)
        return predicted(expected, most=most, produced=produced)

    def ask(self, request: Request, brief: RequestBrief, now_s: float, *, has_kv: bool = False) -> Ask:
        """A request came: the question which worker takes it. `has_kv`: its blocks come from where it has moved."""
        adapter = request.adapter if request.adapter.digest else None
        keys = tuple(prefix_keys(request, size) for size in sorted(self._block_sizes))
        return self.core.ask(
            brief,
            now_s,
            base_model=self._base_model,
            adapter=adapter,
            more=request.more,
            e2e_slo_ms=request.slo.e2e_slo_ms,
            prefix_keys=keys,
            needs=DRAWS if request.image is not None else {},
            has_kv=has_kv,
        )

    def mean_tokens(self) -> float:
        """The average output length so far."""
        return self._lengths.mean_tokens()

    def observe(self, request: Request) -> None:
        """A request has ended; its true length is known."""
        self._lengths.observe(request.adapter.digest, request.output_tokens)

    def decide(self, ask: Ask, now_s: float) -> Decision:
        """Choose a worker."""
        return self.core.decide(ask, now_s, self._lengths.mean_tokens())

    def expect(self, worker_id: str, brief: RequestBrief, now_s: float, ask: Ask, decision: Decision) -> RequestBrief:
        """Count a request as assigned to a worker. Returns what the worker is told of it."""
        brief = replace(brief, cached_tokens=decision.cached_tokens)
        self.flights.expect(worker_id, brief, now_s, ask.prefix_keys)
        return brief
