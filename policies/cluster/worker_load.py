"""The load of one worker: its requests, with the sums, maxima and counts that decisions read.

`queued` requests are in phase "loading" or "waiting"; `exists` = queued + running. Counts for overload decisions are kept per
band of the TTFT objective, since more urgent requests run first.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from motet.shared.model import PictureBrief, RequestBrief

Key = TypeVar("Key")


class Ranks:
    """A multiset of ranks, with its size, sum and maximum."""

    __slots__ = ("counts", "max", "size", "sum")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.size = self.sum = self.max = 0

    def add(self, rank: int) -> None:
        self.counts[rank] = self.counts.get(rank, 0) + 1
        self.size += 1
        self.sum += rank
        if rank > self.max:
            self.max = rank

    def remove(self, rank: int) -> None:
        self.size -= 1
        self.sum -= rank
        if not _one_less(self.counts, rank) and rank == self.max:
            self.max = max(self.counts, default=0)


BANDS_MS = (1_000.0, 5_000.0)
"""Upper ends of the bands of TTFT objectives: interactive, standard; the third band is all above."""


def band_of(ttft_slo_ms: float) -> int:
    """The band of an objective; a lower band is more urgent. An unknown objective (0) counts as standard."""
    return bisect_left(BANDS_MS, ttft_slo_ms) if ttft_slo_ms else 1


@dataclass(slots=True)
class Band:
    """The requests of one band on one worker."""

    running: int = 0
    queued: int = 0
    queue_tokens: int = 0  # to prefill


@dataclass(slots=True)
class Share:
    """The requests of one tenant on one worker."""

    requests: int = 0
    weight: float = 1.0


class WorkerLoad:
    """One worker's requests and their aggregates. Token counts are expected values, from each request's prediction."""

    __slots__ = (
        "adapters",
        "bands",
        "exists",
        "extra_ranks",
        "extra_rows",
        "objectives",
        "queue",
        "queue_out",
        "queue_tokens",
        "requests",
        "running_left",
        "tenants",
        "tightest",
        "uneven",
    )

    def __init__(self) -> None:
        self.requests: dict[str, RequestBrief] = {}
        self.exists, self.queue = Ranks(), Ranks()
        self.queue_tokens = 0  # to prefill
        self.queue_out = self.running_left = 0  # output tokens still to come, of queued and of running requests
        self.adapters: dict[str, int] = {}  # digest -> requests that use it
        self.bands = [Band() for _ in range(len(BANDS_MS) + 1)]
        self.tenants: dict[str, Share] = {}
        self.objectives: dict[float, int] = {}  # time per output token in ms -> requests that want it
        self.tightest = inf  # the smallest of `objectives`
        self.uneven = False  # some request here has added more or less to a step than one row
        self.extra_rows = self.extra_ranks = 0.0  # rows of all requests beyond one each, and these rows times their ranks

    def put(self, brief: RequestBrief) -> RequestBrief | None:
        """Add a request, or replace its state. Returns its state before."""
        old = self.requests.get(brief.request_id)
        if old is None:
            self.add(brief)
        elif _same_kind(old, brief):
            self.requests[brief.request_id] = brief
            self._unbook(old)
            self._book(brief)
        else:
            self.remove(brief.request_id)
            self.add(brief)
        return old

    def _book(self, brief: RequestBrief) -> None:
        band, left = self.bands[band_of(brief.ttft_slo_ms)], tokens_left(brief)
        if brief.phase == "running":
            band.running += 1
            self.running_left += left
        else:
            tokens = tokens_to_prefill(brief)
            band.queued += 1
            band.queue_tokens += tokens
            self.queue.add(brief.rank)
            self.queue_tokens += tokens
            self.queue_out += left

    def _unbook(self, brief: RequestBrief) -> None:
        band, left = self.bands[band_of(brief.ttft_slo_ms)], tokens_left(brief)
        if brief.phase == "running":
            band.running -= 1
            self.running_left = max(0, self.running_left - left)
        else:
            tokens = tokens_to_prefill(brief)
            band.queued -= 1
            band.queue_tokens -= tokens
            self.queue.remove(brief.rank)
            self.queue_tokens -= tokens
            self.queue_out -= left

    def add(self, brief: RequestBrief) -> None:
        """Add a request that is not here yet."""
        self.requests[brief.request_id] = brief
        self.exists.add(brief.rank)
        self._book(brief)
        if brief.adapter_digest:
            self.adapters[brief.adapter_digest] = self.adapters.get(brief.adapter_digest, 0) + 1
        if brief.picture is not None:
            self._count_picture(brief.picture, brief.rank, 1)
        share = self.tenants.get(brief.tenant)
        if share is None:
            share = self.tenants[brief.tenant] = Share()
        share.requests += 1
        share.weight = brief.tenant_weight
        objective_ms = brief.tpot_slo_ms
        if objective_ms > 0:
            self.objectives[objective_ms] = self.objectives.get(objective_ms, 0) + 1
            self.tightest = min(self.tightest, objective_ms)

    def remove(self, request_id: str) -> RequestBrief | None:
        """Remove a request and return it; None if it is unknown."""
        brief = self.requests.pop(request_id, None)
        if brief is None:
            return None
        self.exists.remove(brief.rank)
        self._unbook(brief)
        if brief.adapter_digest:
            _one_less(self.adapters, brief.adapter_digest)
        if brief.picture is not None:
            self._count_picture(brief.picture, brief.rank, -1)
        share = self.tenants[brief.tenant]
        share.requests -= 1
        if not share.requests:
            del self.tenants[brief.tenant]
        objective_ms = brief.tpot_slo_ms
        if objective_ms > 0 and not _one_less(self.objectives, objective_ms) and objective_ms == self.tightest:
            self.tightest = min(self.objectives, default=inf)
        return brief

    def _count_picture(self, picture: PictureBrief, rank: int, sign: int) -> None:
        """Count a picture's rows beyond the first and its further adapters (`sign` 1), or no longer (-1)."""
        self.uneven = True
        self.extra_rows += sign * (picture.rows - 1.0)
        self.extra_ranks += sign * (picture.rows - 1.0) * rank
        for digest in picture.more:
            if sign > 0:
                self.adapters[digest] = self.adapters.get(digest, 0) + 1
            else:
                _one_less(self.adapters, digest)

    def kv_tokens_promised(self) -> float:
        """KV tokens that the queue will take, plus half of those that running requests will add (others end meanwhile)."""
        return self.queue_tokens + self.queue_out + 0.5 * self.running_left

    def progress(self, now: dict[str, RequestBrief]) -> bool:
        """If `now` (requests by id) has the same requests and they only made progress, apply it.

        Returns whether that was so.
        """
        requests = self.requests
        if now.keys() != requests.keys():
            return False
        left = 0
        for request_id, brief in now.items():
            known = requests[request_id]
            if brief.phase == "running":
                known.output_tokens = brief.output_tokens
                to_come = brief.predicted_tokens - brief.output_tokens
                left += to_come if to_come > 1 else 1  # `tokens_left`, without a call for each of hundreds
            if known != brief:
                return False
        self.requests, self.running_left = now, left
        return True


def tokens_left(brief: RequestBrief) -> int:
    """Output tokens that the request is still expected to produce, at least one."""
    left = brief.predicted_tokens - brief.output_tokens
    return left if left > 1 else 1


def tokens_to_prefill(brief: RequestBrief) -> int:
    """Tokens that a queued request has to prefill. A resumed request also computes its output so far again."""
    return brief.prompt_tokens + brief.output_tokens - brief.cached_tokens


def _same_kind(a: RequestBrief, b: RequestBrief) -> bool:
    """Whether both are equal in everything that is counted independently of the phase."""
    return (
        a.rank == b.rank
        and a.adapter_digest == b.adapter_digest
        and a.tpot_slo_ms == b.tpot_slo_ms
        and a.tenant == b.tenant
        and a.picture == b.picture
    )


def _one_less(counts: dict[Key, int], key: Key) -> int:
    """Decrease the count of `key`, and remove it at zero. Returns the new count."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
