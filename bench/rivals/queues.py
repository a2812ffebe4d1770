"""Orders of waiting requests to compare with.

    sjf         least predicted output first (uServe): long requests starve when too much comes
    static      four queues of equal ranges and equal quotas between the smallest and the largest size (Chameleon section 5.4)
    chameleon   queues by K-means on the weighted size, quotas by the M/M/1 bound, two-phase admission (section 4.3)

Weighted request size (section 4.3.1), with maxima of the last T_refresh; a base request counts as the smallest adapter:

    WRS = (.4 * prompt / largest prompt + .6 * predicted output / largest) * adapter bytes / largest adapter bytes

Least quota of a queue in tokens (section 4.3.5): `S * D * (1 / SLO + lambda)`, with the largest token cost S seen in the queue,
the mean time D of its requests from admission to end, and their arrival rate lambda. What is left of all tokens is divided in
proportion. A request's token cost is prompt + predicted output + its adapter's bytes in tokens.

Where the least quotas are more than all tokens, the paper's condition does not hold, and there is one queue without a quota:
memory itself is the limit. Scaled-down quotas promise nothing, and the queue of large requests starves. A request whose adapter
is on the device goes ahead within its queue, by its TTFT objective times the share of waiting requests whose adapter is not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from motet.policies.step.batch_state import PATIENCE, AdmissionState, S
from motet.policies.step.overtaking import steps_left
from motet.policies.step.request_queues import TTFT_SLO_S, WINDOW, Queues

Floats = NDArray[np.float64]
INPUT, OUTPUT = 0.4, 0.6
"""A and B of the weighted request size."""
MAX_QUEUES = 4
REFRESH_S = 300.0
FIRST = 128
"""Requests after which the first queues are made; until then there is one."""
POINTS = 256
"""Quantiles that stand for all sizes when queues are made."""
STRUCTURE = 0.5
"""Mean silhouette below which sizes have no clusters, so that one queue serves them best."""


class ShortestFirst(Queues[S]):
    """The request with the least predicted output first, within a priority."""

    squashes = False

    def arrived(self, seq: S, now_s: float) -> None:
        """Does nothing: the order needs no history."""

    def began(self, seq: S, now_s: float) -> None:
        """Does nothing: the order needs no history."""

    def stopped(self, seq: S, now_s: float) -> None:
        """Does nothing: the order needs no history."""

    def left(self, seq: S) -> None:
        """Does nothing: the order needs no history."""

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The waiting requests, shortest first."""
        return nsmallest(WINDOW, state.waiting, key=lambda seq: (seq.priority, steps_left(seq), seq.order))


@dataclass(slots=True)
class _Facts:
    """The size of a request on its arrival."""

    prompt: int
    output: int
    size_bytes: int
    tokens: float  # cost that is charged to a quota
    slo_s: float
    at_s: float
    lane: int = 0
    began_s: float = -1.0
    duration_s: float = 0.0  # from its last admission to its end or preemption
    borrowed: bool = False


@dataclass(slots=True)
class _Lane:
    quota: float
    used: float = 0.0  # by running requests, without borrowed tokens
    running: int = 0


@dataclass(eq=False)
class SizeQueues(Queues[S]):
    """Chameleon's queues (section 4.3).

    `total_tokens`: the tokens that KV cache and adapter memory hold together; `token_bytes`: the KV bytes of one token.
    `static`: four queues with equal ranges and quotas instead, over the sizes of the first requests.
    `ahead`: how far, in TTFT objectives, a request goes ahead whose adapter is on the device when no other one's is.
    `scaled`: scale quotas down where they do not fit, in place of one queue.
    """

    total_tokens: float
    token_bytes: float
    refresh_s: float = REFRESH_S
    static: bool = False
    ahead: float = 1.0
    scaled: bool = False
    squashes: bool = True
    cuts: list[float] = field(default_factory=list)  # upper ends of all queues but the last
    lanes: list[_Lane] = field(default_factory=list)
    facts: dict[int, _Facts] = field(default_factory=dict)  # of waiting and running requests, by order
    borrowed: float = 0.0  # tokens that running requests have of the common pool
    _recent: deque[_Facts] = field(default_factory=deque)  # of requests that arrived within `refresh_s`
    _maxima: tuple[float, float, float] = (1.0, 1.0, 1.0)  # prompt, output, adapter bytes
    _smallest_bytes: int = 0  # of an adapter
    _refresh_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.lanes = [_Lane(inf)]

    def arrived(self, seq: S, now_s: float) -> None:
        """Put the request into its queue."""
        if seq.adapter_bytes and (seq.adapter_bytes < self._smallest_bytes or not self._smallest_bytes):
            self._smallest_bytes = seq.adapter_bytes
        facts = self.facts[seq.order] = _Facts(
            seq.length,
            steps_left(seq),
            seq.adapter_bytes,
            seq.length + steps_left(seq) + (seq.adapter_bytes / self.token_bytes if self.token_bytes else 0.0),
            max(0.0, seq.due_s - now_s) / PATIENCE or TTFT_SLO_S,
            now_s,
        )
        self._recent.append(facts)
        facts.lane = bisect_right(self.cuts, self.size(facts))

    def size(self, facts: _Facts) -> float:
        """The weighted size (section 4.3.1): 1 for a request that has the largest prompt, output and adapter."""
        prompt, output, size_bytes = self._maxima
        own_bytes = max(facts.size_bytes, self._smallest_bytes) or size_bytes
        return (INPUT * facts.prompt / prompt + OUTPUT * facts.output / output) * own_bytes / size_bytes

    def began(self, seq: S, now_s: float) -> None:
        """Charge the request's tokens to its queue's quota, or to the common pool."""
        facts = self.facts[seq.order]
        lane = self.lanes[facts.lane]
        facts.began_s = now_s
        lane.running += 1
        facts.borrowed = lane.used + facts.tokens > lane.quota
        if facts.borrowed:
            self.borrowed += facts.tokens
        else:
            lane.used += facts.tokens

    def stopped(self, seq: S, now_s: float) -> None:
        """Give back the charged tokens."""
        facts = self.facts[seq.order]
        if facts.began_s < 0:
            return
        lane = self.lanes[facts.lane]
        if facts.borrowed:
            self.borrowed -= facts.tokens
        else:
            lane.used -= facts.tokens
        lane.running -= 1
        facts.duration_s = now_s - facts.began_s
        facts.began_s = -1.0

    def left(self, seq: S) -> None:
        """Forget the request."""
        self.facts.pop(seq.order, None)

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """Algorithm 1: each queue within its quota, small requests first; then the tokens of empty queues, in the same order.

        Higher priorities go first. A queue without running requests may admit one request of any size.
        """
        if now_s >= self._refresh_at_s and (len(self._recent) >= FIRST or self._refresh_at_s):
            self._refresh(now_s)
        facts = self.facts
        waiting = residents_first(state, self._head_start_s) if self.ahead else state.waiting
        free = [lane.quota - lane.used for lane in self.lanes]
        chosen: list[S] = []
        at = 0
        while at < len(waiting) and len(chosen) < WINDOW:
            queues = self._of_one_priority(waiting, at)
            at += sum(map(len, queues))
            left: list[list[S]] = []
            for index, queue in enumerate(queues):
                taken = self._within(queue, free[index], chosen)
                if queue and not taken and not self.lanes[index].running:  # larger than the quota, and no other runs
                    chosen.append(queue[0])
                    taken = 1
                free[index] -= sum(facts[seq.order].tokens for seq in queue[:taken])
                left.append(queue[taken:])
            spare = sum(free[index] for index, queue in enumerate(left) if not queue and free[index] > 0) - self.borrowed
            for queue in left:
                taken = self._within(queue, spare, chosen)
                spare -= sum(facts[seq.order].tokens for seq in queue[:taken])
            if any(left):
                break  # lower priorities do not overtake
        return chosen

    def _head_start_s(self, seq: S) -> float:
        """A preempted request has none, so that it cannot pass again the request that it was squashed for."""
        facts = self.facts[seq.order]
        return 0.0 if facts.duration_s else self.ahead * facts.slo_s

    def _of_one_priority(self, waiting: list[S], at: int) -> list[list[S]]:
        """The requests from `at` on that have its priority, by queue."""
        queues: list[list[S]] = [[] for _ in self.lanes]
        level = waiting[at].priority
        while at < len(waiting) and waiting[at].priority == level:
            queues[self.facts[waiting[at].order].lane].append(waiting[at])
            at += 1
        return queues

    def _within(self, queue: list[S], tokens: float, chosen: list[S]) -> int:
        """Choose the first requests of a queue that fit into these tokens. Returns their number."""
        for index, seq in enumerate(queue):
            tokens -= self.facts[seq.order].tokens
            if tokens < 0:
                return index
            chosen.append(seq)
        return len(queue)

    # ---- every T_refresh

    def _refresh(self, now_s: float) -> None:
        """Make queues for the sizes of the last T_refresh, and divide all tokens among them."""
        recent = self._recent
        since_s = now_s - self.refresh_s
        while len(recent) > FIRST and recent[0].at_s < since_s:
            recent.popleft()
        span_s = max(now_s - recent[0].at_s, 1e-3)
        self._maxima = (
            float(max(one.prompt for one in recent)),
            float(max(one.output for one in recent)),
            float(max(max(one.size_bytes for one in recent), self._smallest_bytes, 1)),
        )
        sizes = np.array([self.size(one) for one in recent])
        if not self.static:
            self.cuts = cut_offs(sizes)
        elif not self.cuts:
            self.cuts = np.linspace(sizes.min(), sizes.max(), MAX_QUEUES + 1)[1:-1].tolist()
        least = self._least_quotas(span_s)
        if sum(least) > self.total_tokens and not self.scaled:
            self.cuts = []
        self._make_lanes(quotas(least, self.total_tokens) if self.cuts else [inf])
        self._refresh_at_s = now_s + min(self.refresh_s, span_s)  # at first sooner: quotas of few requests are rough

    def _make_lanes(self, shares: list[float]) -> None:
        """New lanes for `cuts` with these quotas, and what running requests take from them."""
        self._sort()
        self.lanes = [_Lane(share) for share in shares]
        for facts in self.facts.values():
            if facts.began_s >= 0:
                self.lanes[facts.lane].running += 1
                if not facts.borrowed:
                    self.lanes[facts.lane].used += facts.tokens

    def _sort(self) -> None:
        """Put all requests into the queues of `cuts`."""
        for facts in (*self._recent, *self.facts.values()):
            facts.lane = bisect_right(self.cuts, self.size(facts))

    def _least_quotas(self, span_s: float) -> list[float]:
        """The least quota of each queue, by the requests of the last `span_s`; static queues have equal ones."""
        count = len(self.cuts) + 1
        if self.static:
            return [self.total_tokens / count] * count
        self._sort()
        mean_s = _mean_duration_s(self._recent, 1.0)
        minima = []
        for index in range(count):
            members = [one for one in self._recent if one.lane == index]
            if not members:
                minima.append(0.0)
                continue
            tokens, slo_s = max(one.tokens for one in members), min(one.slo_s for one in members)
            minima.append(least_quota(tokens, _mean_duration_s(members, mean_s), slo_s, len(members) / span_s))
        return minima


def residents_first(state: AdmissionState[S], head_start_s: Callable[[S], float]) -> list[S]:
    """The waiting requests by priority and due time, where those whose adapter is on the device go ahead.

    They go ahead by their head start times the share of waiting requests whose adapter is not there. Where nearly all adapters
    of waiting requests are there they also stay, so a request in its turn saves no copy by coming sooner.
    """
    waiting, adapters = state.waiting, state.adapters
    here = {seq.adapter: not seq.adapter or seq.adapter in adapters for seq in waiting}
    missing = sum(not here[seq.adapter] for seq in waiting) / max(1, len(waiting))
    if not missing:
        return waiting

    def place(seq: S) -> tuple[int, float, int]:
        return seq.priority, seq.due_s - (missing * head_start_s(seq) if here[seq.adapter] else 0.0), seq.order

    return sorted(waiting, key=place)


def _mean_duration_s(requests: Iterable[_Facts], otherwise_s: float) -> float:
    """The mean time from admission to end of the requests that have ended; `otherwise_s` when none has."""
    ended = [one.duration_s for one in requests if one.duration_s]
    return sum(ended) / len(ended) if ended else otherwise_s


def least_quota(tokens: float, duration_s: float, slo_s: float, rate: float) -> float:
    """Tokens that keep an M/M/1 queue within its objective (Chameleon section 4.3.5): `S * D * (1 / SLO + lambda)`."""
    return tokens * duration_s * (1 / slo_s + rate)


def quotas(minima: list[float], total: float) -> list[float]:
    """All `total` tokens, divided among the queues in proportion to their minima; equally when all minima are 0."""
    whole = sum(minima)
    if not whole:
        return [total / len(minima)] * len(minima)
    return [total * least / whole for least in minima]


def cut_offs(sizes: Floats, most: int = MAX_QUEUES) -> list[float]:
    """Midpoints between the centroids of the best K-means clustering of `sizes` with K = 1..most; ascending, K - 1 of them.

    K is the one with the largest mean silhouette, and 1 when that is below STRUCTURE. (The least within-cluster sum of squares,
    as the paper says, always has the largest K.)
    """
    points = np.quantile(sizes, np.linspace(0, 1, POINTS)) if len(sizes) > POINTS else np.sort(sizes)
    best: list[float] = []
    best_width = STRUCTURE
    for count in range(2, min(most, len(np.unique(points))) + 1):
        begins = clusters(points, count)
        width = silhouette(points, begins)
        if width > best_width:
            centroids = [float(part.mean()) for part in np.split(points, begins[1:])]
            best_width, best = width, [(a + b) / 2 for a, b in pairwise(centroids)]
    return best


def clusters(points: Floats, count: int) -> list[int]:
    """Exact K-means in one dimension: where each of `count` clusters of ascending `points` [n] begins.

    Dynamic programming over prefixes: the best k clusters of the first j points end with points i..j for some i. O(k n^2).
    """
    n = len(points)
    sums, squares = np.concatenate([[0.0], np.cumsum(points)]), np.concatenate([[0.0], np.cumsum(points**2)])
    i, j = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        within = squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / (j - i)  # [i, j]: one cluster of points i .. j - 1
    within = np.where(j > i, within, np.inf)
    best = within[0]
    choices: list[NDArray[np.intp]] = []
    for _ in range(1, count):
        before = np.concatenate([[np.inf], best[:-1]])[:, None] + within  # the last cluster begins at i
        choices.append(before.argmin(axis=0))
        best = before.min(axis=0)
    begins, end = [], n
    for choice in reversed(choices):
        end = int(choice[end - 1])
        begins.append(end)
    return [0, *reversed(begins)]


def silhouette(points: Floats, begins: list[int]) -> float:
    """Mean over points [n] of (b - a) / max(a, b): a is the mean distance to its own cluster, b to the nearest other one."""
    distances = np.abs(points[:, None] - points[None, :])
    parts = [*zip(begins, [*begins[1:], len(points)], strict=True)]
    means = np.stack([distances[:, low:high].mean(axis=1) for low, high in parts])  # [cluster, point]
    own = np.concatenate([np.full(high - low, index) for index, (low, high) in enumerate(parts)])
    counts = np.array([high - low for low, high in parts])[own]
    at = np.arange(len(points))
    a = means[own, at] * counts / np.maximum(1, counts - 1)
    means[own, at] = np.inf
    b = means.min(axis=0)
    widest = np.maximum(a, b)
    widths = np.where((counts > 1) & (widest > 0), (b - a) / np.where(widest > 0, widest, 1.0), 0.0)
    return float(widths.mean())
