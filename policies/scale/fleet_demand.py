"""What is asked of the whole mesh: every scheduler counts its own requests and tells all others.

    submit ─> Tally ──DemandReport, every REPORT_S──> FleetDemand of every scheduler ─> rates by base model and adapter

A scheduler gets some of the requests only, which is enough for shares and not for sums. Refused requests count: what a mesh
has no room for is demand, too. A client that asks again is a new request, a durable request that waits for room is not.

Memory: `ADAPTERS_MAX` adapters of a base model in a report and in the shares, `WINDOW_S` of reports, `REFUSED_MAX` request ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from math import exp

from motet.shared.model import AdapterRef
from motet.shared.wire.demand import ADAPTERS_MAX, AdapterDemand, BaseDemand, DemandReport

REPORT_S = 5.0
WINDOW_S = 30.0  # that rates are taken over
SILENT_S = 2.5 * REPORT_S  # a scheduler that says nothing for so long is missing
FORGET_S = 60.0  # and is gone after this
SHARES_S = 600.0  # an adapter's requests count 1/e after this
LEAST = 0.01  # an adapter whose requests count less is forgotten
REFUSED_MAX = 4096
BASE_ALONE = AdapterRef(name="", digest="", rank=0, size_bytes=0)


class Tally:
    """Counts the requests of one scheduler since its last report. `since_s`: its start."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._bases: dict[str, BaseDemand] = {}
        self._refused: dict[str, None] = {}  # ids of requests that were counted and refused, the oldest first

    def asked(
        self,
        base_model: str,
        request_id: str,
        adapters: Iterable[AdapterRef] = (),
        *,
        prompt_tokens: int,
        output_tokens: int,
        refused: bool = False,
    ) -> None:
        """Count a request that was assigned, or refused for want of room. With several adapters it counts for each of them."""
        if request_id in self._refused:  # it waited for room, and was counted when it came
            if not refused:
                del self._refused[request_id]
            return
        if refused:
            self._refused[request_id] = None
            if len(self._refused) > REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
        base = self._bases.setdefault(base_model, BaseDemand())
        for ref in tuple(adapters) or (BASE_ALONE,):
            one = base.adapters.get(ref.digest)
            if one is None and len(base.adapters) < ADAPTERS_MAX:
                one = base.adapters[ref.digest] = AdapterDemand(0, 0, 0, 0, ref.rank, ref.size_bytes)
            _add(one if one is not None else base.rest, AdapterDemand(1, int(refused), prompt_tokens, output_tokens))

    def report(self, scheduler_id: str, now_s: float, *, leaving: bool = False) -> DemandReport:
        """What was counted since the last report."""
        report = DemandReport(scheduler_id=scheduler_id, seconds=now_s - self._since_s, bases=self._bases, leaving=leaving)
        self._since_s, self._bases = now_s, {}
        return report


@dataclass(frozen=True, slots=True)
class AdapterShare:
    """An adapter's share of the requests of its base model, of late."""

    share: float
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRates:
    """What is asked of one base model."""

    requests_s: float  # the refused ones too
    refused_s: float
    prompt_tokens_s: float
    output_tokens_s: float  # predicted
    adapters: Mapping[str, AdapterShare]  # by digest, "" for the base model alone; the shares add up to 1


@dataclass(slots=True)
class _Base:
    reports: deque[tuple[float, AdapterDemand]] = field(default_factory=deque)  # when it came, and its sums
    adapters: dict[str, AdapterDemand] = field(default_factory=dict)  # for rank and bytes
    weights: dict[str, float] = field(default_factory=dict)  # requests, as of `faded_s`
    faded_s: float = 0.0


class FleetDemand:
    """The demand on all base models, by the reports of all schedulers. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._bases: dict[str, _Base] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        self._heard: dict[str, float] = {}  # when, by scheduler
        self._since_s: float | None = None  # the beginning of the first report

    def hear(self, report: DemandReport, now_s: float) -> None:
        """A report has come."""
        self._since_s = now_s - report.seconds if self._since_s is None else self._since_s
        self._heard[report.scheduler_id] = now_s
        if report.leaving:
            del self._heard[report.scheduler_id]
        for name, asked in report.bases.items():
            base = self._bases.setdefault(name, _Base(faded_s=now_s))
            total = AdapterDemand(0, 0, 0, 0)
            for one in (*asked.adapters.values(), asked.rest):
                _add(total, one)
            base.reports.append((now_s, total))
            requests, tokens = self.counted(name)
            self._counted[name] = requests + total.requests, tokens + total.prompt_tokens + total.output_tokens
            _fade(base, now_s)
            for digest, one in asked.adapters.items():
                base.adapters[digest] = one
                base.weights[digest] = base.weights.get(digest, 0.0) + one.requests
            if len(base.weights) > ADAPTERS_MAX:
                _keep(base, nlargest(ADAPTERS_MAX, base.weights, key=base.weights.__getitem__))
        self._expire(now_s)

    def counted(self, base_model: str) -> tuple[int, int]:
        """Requests and tokens, prompts' and answers', that were reported so far."""
        return self._counted.get(base_model, (0, 0))

    def schedulers(self, now_s: float) -> list[str]:
        """Those that report."""
        self._expire(now_s)
        return sorted(self._heard)

    def missing(self, now_s: float) -> list[str]:
        """Those of them that have said nothing for `SILENT_S`: the rates may be too low."""
        return [name for name in self.schedulers(now_s) if now_s - self._heard[name] > SILENT_S]

    def rates(self, now_s: float) -> dict[str, BaseRates]:
        """By base model, those of the last `WINDOW_S`. Base models that nobody asks for any more are left out."""
        self._expire(now_s)
        return {name: self._rates(base, now_s) for name, base in sorted(self._bases.items())}

    def _rates(self, base: _Base, now_s: float) -> BaseRates:
        total = AdapterDemand(0, 0, 0, 0)
        for _, one in base.reports:
            _add(total, one)
        seconds = max(min(WINDOW_S, now_s - (self._since_s or 0.0)), REPORT_S)
        weight = sum(base.weights.values()) or 1.0
        return BaseRates(
            requests_s=total.requests / seconds,
            refused_s=total.refused / seconds,
            prompt_tokens_s=total.prompt_tokens / seconds,
            output_tokens_s=total.output_tokens / seconds,
            adapters={
                digest: AdapterShare(own / weight, base.adapters[digest].rank, base.adapters[digest].size_bytes)
                for digest, own in base.weights.items()
            },
        )

    def _expire(self, now_s: float) -> None:
        self._heard = {name: at_s for name, at_s in self._heard.items() if now_s - at_s <= FORGET_S}
        for name, base in list(self._bases.items()):
            while base.reports and now_s - base.reports[0][0] >= WINDOW_S:
                base.reports.popleft()
            if now_s - base.faded_s >= REPORT_S:
                _fade(base, now_s)
            if not base.reports and not base.weights:
                del self._bases[name]


def _add(total: AdapterDemand, one: AdapterDemand) -> None:
    total.requests += one.requests
    total.refused += one.refused
    total.prompt_tokens += one.prompt_tokens
    total.output_tokens += one.output_tokens


def _fade(base: _Base, now_s: float) -> None:
    left = exp((base.faded_s - now_s) / SHARES_S)
    base.weights = {digest: own * left for digest, own in base.weights.items()}
    base.faded_s = now_s
    _keep(base, [digest for digest, own in base.weights.items() if own >= LEAST])


def _keep(base: _Base, digests: Iterable[str]) -> None:
    base.weights = {digest: base.weights[digest] for digest in digests}
    base.adapters = {digest: base.adapters[digest] for digest in base.weights}
