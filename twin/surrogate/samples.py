"""Simulated runs to learn from: drawn over the space of the adapter-caching paper (section 8.3), and what is kept of each.

The paper's space is a product: three adapter sizes and three rates with repetition, a number of adapters, a number of slots;
266,200 runs of each model. Here its points are drawn by a scrambled Sobol sequence, and 60% of them where the law says that a
worker is busy .6 to 1.5, because elsewhere the outcome is clear. There are two kinds of runs:

    paper   the length means and the grid of the paper, a client with a limited number of ports, throughput over the whole run
    open    any length means and deviations, any number of adapters and slots, outcomes after a warm-up, objectives of its own

A paper run lasts an hour where slots are scarce: there, queues need most of it to fill, unless they are flooded. Every draw is
a function of the seed and the number of draws before it, so a prefix of the runs is a sample, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations_with_replacement
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from motet.policies.plan.capacity import LIMITS, Verdict, judge
from motet.policies.plan.demand import Demand
from motet.policies.plan.paper import TESTING_POINTS
from motet.twin.vllm.client import PORTS, Requests
from motet.twin.vllm.engine import EngineConfig
from motet.twin.vllm.law import settings
from motet.twin.vllm.published import MODELS, published
from motet.twin.vllm.runs import ANSWERED_SHARE
from motet.twin.vllm.serving import Objectives, serve
from motet.twin.vllm.tables import Row
from motet.twin.vllm.workload import PROMPT_MAX_TOKENS, REQUEST_MAX_TOKENS, arrivals, lengths

T = TypeVar("T")

SEED = 1
RANKS = (8, 16, 32)
RATES_REQ_S = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
TRIPLES_OF_RANKS = list(combinations_with_replacement(RANKS, 3))
TRIPLES_OF_RATES = list(combinations_with_replacement(RATES_REQ_S, 3))
SEATS = 2048
PAPER_TOKENS = {
    "llama-3.1-8b@h100": (223.0, 196.5),
    "qwen2.5-7b@h100": (223.0, 200.0),
}  # means of the paper's prompts and answers
NEAR, NEAR_SHARE = (0.6, 1.5), 0.6  # busy by the law, and the share of runs there
SCARCE, FLOODED = 0.7, 3.0  # a paper run lasts an hour above this strain of the slots, and below this busy
HOUR_S, WINDOW_S, WARM_S = 3600.0, 900.0, 300.0
DRAIN_S = 60.0
JUDGED_REQUESTS = 20  # an adapter with fewer has no meaningful share
PAPER_IN_16 = 11  # of 16 runs so many are paper runs
PROMPT_TOKENS, OUTPUT_TOKENS, DEVIATION = (50.0, 2000.0), (20.0, 600.0), (0.3, 1.5)  # ranges of open runs
LONGEST_PROMPT, LONGEST_OUTPUT = 8192, 4096
TTFT_SLO_MS, TPOT_SLO_MS = (200.0, 10_000.0), (25.0, 400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One run before it is made: a server, its adapters and their load."""

    number: int  # of the run; the seed of its arrivals and lengths
    profile: str  # of `published`
    paper: bool
    adapters: int
    a_max: int
    ranks: tuple[int, ...]  # dealt out in turn, as the paper's client does, and the rates, too
    rates_req_s: tuple[float, ...]
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    deviation: float  # of lengths, by their mean; 1 for the paper's
    ttft_slo_ms: float
    tpot_slo_ms: float
    duration_s: float
    warm_s: float

    @property
    def s_max(self) -> int:
        """The rank that slots are sized for: the largest, as in the paper."""
        return max(self.adapter_ranks)

    @property
    def adapter_ranks(self) -> list[int]:
        """The rank of each adapter, [adapters]."""
        ranks = [self.ranks[i % len(self.ranks)] for i in range(self.adapters)]
        return [int(rank) for rank in np.random.default_rng((SEED, self.number)).permutation(ranks)]

    @property
    def adapter_rates_req_s(self) -> list[float]:
        """The rate of each adapter, [adapters]."""
        return [self.rates_req_s[i % len(self.rates_req_s)] for i in range(self.adapters)]

    @property
    def answered_tokens(self) -> float:
        """The mean of the tokens that come out; the models of the paper's runs end some answers early."""
        return self.output_tokens * (ANSWERED_SHARE[MODELS[self.profile]] if self.paper else 1.0)

    def demand(self) -> Demand:
        """The load as the law sees it. Lengths of paper runs count as exponential."""
        pairs, count = np.unique(np.stack([self.adapter_rates_req_s, self.adapter_ranks]), axis=1, return_counts=True)
        return Demand.of(
            pairs[0],
            rank=pairs[1],
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.answered_tokens,
            output_square=self.answered_tokens**2 * (1 + self.deviation**2),
            ttft_slo_ms=self.ttft_slo_ms,
            tpot_slo_ms=self.tpot_slo_ms,
            count=count,
        )

    def verdict(self) -> Verdict:
        """What the law says of it, for its one setting."""
        return judge(self.demand(), settings(published(self.profile), slots=[self.a_max], ranks=[self.s_max], seats=SEATS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the twin says of a run. Shares are of all requests or adapters, times in ms."""

    arrived_tok_s: float  # prompt and answer tokens of the requests that came
    tok_s: float  # of the requests that were completed
    served_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    attained_share: float
    worst_attained_share: float  # of the adapters that have enough requests
    worst_ttft_p99_ms: float  # of an adapter
    running_mean: float
    preemptions: int
    loads: int


def simulate(run: Description) -> Labels:
    """Make a run."""
    calibration = published(run.profile)
    config = EngineConfig(
        a_max=run.a_max, s_max=run.s_max, kv_tokens=calibration.kv_tokens(run.a_max, run.s_max), max_num_seqs=SEATS
    )
    work = requests(run)
    found = serve(
        config,
        calibration.steps,
        work,
        Objectives.same(run.adapters, run.ttft_slo_ms, run.tpot_slo_ms),
        run.warm_s,
        request_s=calibration.api.request_s,
        drain_s=DRAIN_S,
        ports=PORTS if run.paper else sys.maxsize,
    )
    counted = np.asarray(work.arrival_s) >= run.warm_s
    tokens = np.asarray(work.prompt_tokens)[counted].sum() + np.asarray(work.output_tokens)[counted].sum()
    judged = found.arrived >= JUDGED_REQUESTS
    shares = found.attained[judged] / found.arrived[judged]
    return Labels(
        arrived_tok_s=float(tokens) / (run.duration_s - run.warm_s),
        tok_s=found.tok_s,
        served_share=found.served_share,
        ttft_p50_ms=found.ttft_p50_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        tpot_p50_ms=found.tpot_p50_ms,
        tpot_p99_ms=found.tpot_p99_ms,
        attained_share=found.attained_share,
        worst_attained_share=float(shares.min()) if len(shares) else found.attained_share,
        worst_ttft_p99_ms=float(np.max(found.adapter_ttft_p99_ms, where=judged, initial=found.ttft_p99_ms)),
        running_mean=found.running_mean,
        preemptions=found.preemptions,
        loads=found.loads,
    )


def requests(run: Description) -> Requests:
    """The requests of a run: each adapter is a Poisson source."""
    times, adapters = arrivals(run.adapter_rates_req_s, run.duration_s, run.number)
    rng = np.random.default_rng(run.number)
    if run.paper:
        prompts = lengths(len(times), run.prompt_tokens, PROMPT_MAX_TOKENS, rng)
        answers = lengths(len(times), run.answered_tokens, REQUEST_MAX_TOKENS, rng)
        answers = [min(answer, REQUEST_MAX_TOKENS - prompt) for prompt, answer in zip(prompts, answers, strict=True)]
    else:
        prompts = _gamma(len(times), run.prompt_tokens, run.deviation, LONGEST_PROMPT, rng)
        answers = _gamma(len(times), run.answered_tokens, run.deviation, LONGEST_OUTPUT, rng)
    return Requests(
        arrival_s=times,
        adapter=adapters,
        prompt_tokens=prompts,
        output_tokens=answers,
        ranks=run.adapter_ranks,
        duration_s=run.duration_s,
    )


def _gamma(count: int, mean: float, deviation: float, most: int, rng: np.random.Generator) -> list[int]:
    """Lengths of at least one token with a gamma distribution."""
    shape = deviation**-2
    drawn: NDArray[np.float64] = np.clip(np.rint(rng.gamma(shape, mean / shape, count)), 1, most)
    return [int(tokens) for tokens in drawn]


# ---- which runs


def draw(count: int, seed: int = SEED) -> list[Description]:
    """The first `count` runs: paper and open ones, and both models, in turn."""
    streams = {(paper, name): _stream(paper, name, seed) for paper in (True, False) for name in MODELS}
    names = tuple(MODELS)
    drawn = []
    for number in range(count):
        pair, model = divmod(number, len(names))
        paper = pair * PAPER_IN_16 % 16 < PAPER_IN_16
        drawn.append(Description(number=number, **next(streams[paper, names[model]])))
    return drawn


def _stream(paper: bool, profile: str, seed: int) -> Iterator[dict[str, Any]]:
    """Runs of one kind: of each five, three with busy in `NEAR`."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    sobol = qmc.Sobol(4 if paper else 9, scramble=True, rng=np.random.default_rng((seed, paper, *profile.encode())))
    points = (point for _ in iter(int, 1) for point in sobol.random(256).tolist())
    given = near_given = 0
    while True:
        near = near_given < NEAR_SHARE * (given + 1)
        while not found[near]:
            is_near, run = _placed((_paper if paper else _open)(profile, next(points)))
            found[is_near].append(run)
        given, near_given = given + 1, near_given + near
        yield found[near].pop(0)


def _placed(drawn: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a run is near the capacity, and the run with its window."""
    run = Description(number=0, **drawn, duration_s=WINDOW_S, warm_s=WARM_S)
    verdict = run.verdict()
    scarce = run.adapters > run.a_max and verdict.strains[0, LIMITS.index("slots")] > SCARCE
    long = run.paper and scarce and verdict.busy[0] < FLOODED
    window = {"duration_s": HOUR_S, "warm_s": 0.0} if long else {"duration_s": WINDOW_S, "warm_s": WARM_S}
    return bool(NEAR[0] <= verdict.busy[0] <= NEAR[1]), drawn | window


def _paper(profile: str, point: list[float]) -> dict[str, Any]:
    prompt_tokens, output_tokens = PAPER_TOKENS[profile]
    ranks = _of(TRIPLES_OF_RANKS, point[2])
    slots = [a for a in TESTING_POINTS if a in _slots(profile, max(ranks))]
    adapters = _of(TESTING_POINTS, point[0])
    return {
        "profile": profile,
        "paper": True,
        "adapters": adapters,
        "a_max": _of([a for a in slots if a <= adapters], point[1]),
        "ranks": ranks,
        "rates_req_s": _of(TRIPLES_OF_RATES, point[3]),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "deviation": 1.0,
        "ttft_slo_ms": 1000.0,
        "tpot_slo_ms": 200.0,
    }


def _open(profile: str, point: list[float]) -> dict[str, Any]:
    ranks = _of(TRIPLES_OF_RANKS, point[2])
    slots = _slots(profile, max(ranks))
    adapters = round(_between((1, 400), point[0]))
    return {
        "profile": profile,
        "paper": False,
        "adapters": adapters,
        "a_max": max(slots.start, round(_between((slots.start, max(slots.start, min(adapters, slots.stop - 1))), point[1]))),
        "ranks": ranks,
        "rates_req_s": _of(TRIPLES_OF_RATES, point[3]),
        "prompt_tokens": _between(PROMPT_TOKENS, point[4]),
        "output_tokens": _between(OUTPUT_TOKENS, point[5]),
        "deviation": DEVIATION[0] + (DEVIATION[1] - DEVIATION[0]) * point[6],
        "ttft_slo_ms": _between(TTFT_SLO_MS, point[7]),
        "tpot_slo_ms": _between(TPOT_SLO_MS, point[8]),
    }


@cache
def _slots(profile: str, s_max: int) -> range:
    """The numbers of slots of a size for which the KV size is known."""
    points = published(profile).kv_points[s_max]
    return range(points[0][0], points[-1][0] + 1)


def _of(choices: Sequence[T], share: float) -> T:
    return choices[int(share * len(choices))]


def _between(ends: tuple[float, float], share: float) -> float:
    """The point at a share of the way from one end to the other, by ratio."""
    return float(ends[0] * (ends[1] / ends[0]) ** share)


# ---- files: one line of CSV for each run


COLUMNS = tuple(field.name for of in (Description, Labels) for field in fields(of))


def to_line(run: Description, labels: Labels) -> str:
    """A run as a line of CSV, without its end. Triples are separated by spaces."""
    cells = [getattr(of, field.name) for of in (run, labels) for field in fields(of)]
    return ",".join(_cell(value) for value in cells)


def from_cells(row: Row) -> tuple[Description, Labels]:
    """A run from a line of CSV. Raises FileError for a bad cell."""
    run = {field.name: _value(row, field.name, str(field.type)) for field in fields(Description)}
    return Description(**run), Labels(**{field.name: _value(row, field.name, str(field.type)) for field in fields(Labels)})


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _value(row: Row, name: str, kind: str) -> Any:
    if kind == "str":
        return row.text(name)
    if kind.startswith("tuple"):
        try:
            return tuple((int if "int" in kind else float)(word) for word in row.text(name).split())
        except ValueError:
            raise row.error(name, f"{row.text(name)!r} is not a list of numbers") from None
    if kind == "float":
        return float("nan") if row.text(name) == "nan" else row.number(name)
    return bool(row.integer(name)) if kind == "bool" else row.integer(name)
