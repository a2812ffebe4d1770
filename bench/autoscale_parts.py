"""Days of load, what workers serve of them by the law, and what is to be paid: the parts of `bench autoscale`.

Time goes in looks of 15 s. n workers serve `Law.capacity[n]` requests/s: the largest load for which the sizer's law says that n
are enough. What comes beyond waits, and a request that would wait for longer than the objective of the time to the first token
is refused, as Motet's schedulers do. A worker is paid from the moment when its start is asked for, and serves START_S later.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import numpy as np

from motet.policies.plan.capacity import Limits, judge
from motet.policies.plan.demand import Floats
from motet.policies.plan.packing import pack
from motet.policies.scale.base_sizer import LOOK_S
from motet.policies.scale.fleet_demand import AdapterShare
from motet.policies.scale.need import Asked, Objective, Packed, kind_of
from motet.policies.scale.rate_forecast import Rates
from motet.twin.profile import TwinProfile

START_S = 120.0
AGAIN_S = 300.0
"""A stop within so long before a start has saved next to nothing: a flap."""
MINUTE = round(60.0 / LOOK_S)
"""Looks in a minute."""
NEAR = 0.005
"""Capacities are known so closely."""


@dataclass(frozen=True, kw_only=True)
class Day:
    """Load by the minute. Its first `tuned` minutes may be used to choose constants; the others are held back."""

    name: str
    rate: Floats  # [minutes] requests/s
    tuned: int

    def arrivals(self, seed: int) -> Floats:
        """[looks] how many requests come: Poisson."""
        rates = np.repeat(self.rate, MINUTE)
        return np.random.default_rng(seed).poisson(rates * LOOK_S).astype(np.float64)


class Law:
    """What workers of a profile serve of requests that are alike but for their adapters, by the sizer's own law."""

    def __init__(self, profile: TwinProfile, rows: Sequence[AdapterShare], tokens: int, objective: Objective) -> None:
        self.worker, self.rows, self.tokens, self.objective = (profile.limits, profile.perf), list(rows), tokens, objective
        self.packed = Packed(objective)
        self.packed.know(self.asked(1.0), self.worker, 0.0)
        self._kind = kind_of(*self.worker)
        self.capacity = [0.0]
        one = judge(self.packed.demand(self.load(1.0)), self._kind.settings)
        self._most = float(one.capacity.max())  # of a worker that is always full
        self._each = np.linspace(1e-3, 1.0, 40) * self._most
        self._batches = np.array([self._batch(rate) for rate in self._each.tolist()])

    def load(self, rate: float) -> Rates:
        """So many requests/s."""
        return Rates(rate, rate * 2 * self.tokens)

    def asked(self, rate: float) -> Asked:
        """The same as a scheduler sees it."""
        each = rate * self.tokens
        return Asked(requests_s=rate, prompt_tokens_s=each, output_tokens_s=each, rows=self.rows)

    def _batch(self, rate: float) -> float:
        return float(judge(self.packed.demand(self.load(rate)), self._kind.settings).batch[0])

    def running(self, rate: float, workers: int) -> float:
        """Requests that run on all of them while so many requests/s come."""
        return workers * float(np.interp(rate / max(workers, 1), self._each, self._batches))

    def serves(self, workers: int) -> float:
        """Requests/s that so many workers serve within the objectives."""
        while len(self.capacity) <= workers:
            self.capacity.append(self._largest(len(self.capacity)))
        return self.capacity[workers]

    def _largest(self, workers: int) -> float:
        kind = replace(self._kind, limits=Limits(pool=workers))
        low, high = self.capacity[-1], workers * self._most
        while high - low > NEAR * high:
            rate = (low + high) / 2.0
            enough = len(pack(self.packed.demand(self.load(rate)), [kind], procedure="bisect").workers) <= workers
            low, high = (rate, high) if enough else (low, rate)
        return low

    def needed(self, rate: float) -> int:
        """Workers for so many requests/s, at least 1."""
        while self.serves(len(self.capacity) - 1) < rate:
            self.serves(len(self.capacity))
        return max(1, bisect_left(self.capacity, rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What an autoscaler sees at a look."""

    now_s: float
    arrived: float  # requests since the last look
    ready: tuple[str, ...]
    starting: dict[str, float]  # since
    queued: float
    running: float

    @property
    def current(self) -> int:
        """Those that start count."""
        return len(self.ready) + len(self.starting)


class Scaler(Protocol):
    """Says how many workers there should be."""

    def look(self, view: View) -> tuple[int, str]:
        """(workers, which one leaves: "" for those that start, then the newest)."""
        ...


@dataclass(kw_only=True)
class Fleet:
    """Workers that start and stop as they are told."""

    ready: list[str]
    starting: dict[str, float] = field(default_factory=dict)
    stops_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)

    def begin(self, now_s: float) -> None:
        """Starts that took their time are over."""
        for name in [name for name, since_s in self.starting.items() if now_s - since_s >= START_S]:
            del self.starting[name]
            self.ready.append(name)

    def follow(self, desired: int, leaves: str, now_s: float) -> None:
        """Start or stop workers until there are as many."""
        for place in range(desired - len(self.ready) - len(self.starting)):
            self.starting[f"{now_s:.0f}-{place}"] = now_s
            self.starts_s.append(now_s)
        for _ in range(len(self.ready) + len(self.starting) - desired):
            if leaves in self.ready:
                self.ready.remove(leaves)
            elif self.starting:
                self.starting.popitem()
            else:
                self.ready.pop()
            self.stops_s.append(now_s)

    def flaps(self, since_s: float) -> int:
        """Starts that have undone a stop."""
        stops, found = deque(at_s for at_s in self.stops_s if at_s >= since_s), 0
        for at_s in self.starts_s:
            while stops and stops[0] < at_s - AGAIN_S:
                stops.popleft()
            if stops and stops[0] < at_s:
                stops.popleft()
                found += 1
        return found


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a scaler did in a part of a day."""

    hours: float  # of the part
    worker_hours: float
    attainment: float
    flaps: int
    late_minutes: float  # in which there were fewer workers than the law says
    oracle_hours: float
    ready: Floats = field(repr=False)  # [looks] workers
    paid: Floats = field(repr=False)

    @property
    def vs_oracle(self) -> float:
        """Worker hours over the oracle's."""
        return self.worker_hours / self.oracle_hours

    @property
    def flaps_a_day(self) -> float:
        """Flaps in 24 hours of it."""
        return self.flaps / self.hours * 24.0


def oracle_looks(needs: Sequence[int]) -> int:
    """Looks that are paid by somebody who knows the future: workers are there whenever `needs` [looks] says, at the least cost.

    The dynamic program over the number of workers falls apart into levels: the k-th worker is needed while the need is k or
    more. Between two such times it is paid on, or stopped and started anew, whatever costs less. Its first start is paid too,
    except that of workers that are needed from the beginning.
    """
    lead, paid = round(START_S / LOOK_S), 0
    for level in range(1, max(needs) + 1):
        runs = [(needed, len(list(group))) for needed, group in groupby(need >= level for need in needs)]
        paid += sum(length for needed, length in runs if needed)
        gaps = [length for needed, length in runs if not needed]
        before, after = not runs[0][0], not runs[-1][0]
        between = gaps[before : len(gaps) - after]
        paid += sum(min(gap, lead) for gap in between) + (min(gaps[0], lead) if before else 0)
    return paid


def simulate(law: Law, day: Day, scaler: Scaler, *, seed: int, since: int = 0, until: int | None = None) -> Score:
    """A scaler from the day's beginning to minute `until`, judged from minute `since` on."""
    until = len(day.rate) if until is None else until
    arrivals = day.arrivals(seed)[: until * MINUTE]
    needs = [law.needed(rate) for rate in day.rate[:until].tolist()]
    fleet = Fleet(ready=[f"first-{place}" for place in range(needs[0])])
    waiting = _Waiting(law.objective.ttft_slo_ms / 1e3)
    columns = np.zeros((4, len(arrivals)))  # ready, paid, came, met
    for turn, came in enumerate(arrivals.tolist()):
        now_s = turn * LOOK_S
        fleet.begin(now_s)
        serves = law.serves(len(fleet.ready))
        met = waiting.pass_on(came, serves)
        columns[:, turn] = len(fleet.ready), len(fleet.ready) + len(fleet.starting), came, met
        full = waiting.count > 0.0
        view = View(
            now_s=now_s + LOOK_S,
            arrived=came,
            ready=tuple(fleet.ready),
            starting=dict(fleet.starting),
            queued=math.floor(waiting.count),
            running=law.running(math.inf if full else came / LOOK_S, len(fleet.ready)),
        )
        desired, leaves = scaler.look(view)
        fleet.begin(now_s + LOOK_S)
        fleet.follow(max(desired, 1), leaves, now_s + LOOK_S)
    first = since * MINUTE
    ready, paid, came_all, met_all = columns[:, first:]
    per_look = np.repeat(needs[since:], MINUTE)
    return Score(
        hours=(until - since) / 60.0,
        worker_hours=float(paid.sum()) * LOOK_S / 3600.0,
        attainment=float(met_all.sum() / max(came_all.sum(), 1.0)),
        flaps=fleet.flaps(since * 60.0),
        late_minutes=float((ready < per_look).sum()) * LOOK_S / 60.0,
        oracle_hours=oracle_looks(per_look.tolist()) * LOOK_S / 3600.0,
        ready=ready,
        paid=paid,
    )


class _Waiting:
    """Requests that wait, as a fluid, for at most as long as the objective allows."""

    def __init__(self, ttft_s: float) -> None:
        self.count, self._ttft_s = 0.0, ttft_s

    def pass_on(self, came: float, serves: float) -> float:
        """A look in which so many came; returns how many of them were not refused."""
        left = max(self.count + came - serves * LOOK_S, 0.0)
        self.count = min(left, self._ttft_s * serves)
        return came - min(left - self.count, came)
