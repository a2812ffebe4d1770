"""Decides how many workers a base model should have, from a forecast and from what the workers are doing.

    bounds     never below `least_workers`, nor below 1 while requests came within `idle_s`; what is above `most_workers`
               leaves, one at a time
    lost       a worker that vanished without a word is expected back for OVERDUE leads: whoever started it starts it again. It
               serves nothing meanwhile, but it is among those that were decided, and no other one leaves
    doubt      with an input missing the count stays, and what was seen before does not count towards "down"
    up         at once, to what the forecast needs and the backlog: as if it were to be served, beside the forecast, by the time
               when a worker that starts now is ready and its first requests are due
    starting   counts as if it were ready. One that is not ready after OVERDUE leads does not; it is reported, and replaced by
               one other, since what stops one worker from starting often stops the next
    down       when fewer were enough, with SPARE, at every look of the last `down_s`, one at a time, and none while another
               starts or leaves
    impossible an objective that an idle worker misses: more workers do not help, so the count does not rise
    zero       after `idle_s` without a request, with nothing queued or parked; 1 at once when woken

The count of the look is the truth: if somebody else changed it, the decision starts from there. `needed` says how many workers
a load needs after consolidation, by the law and the packing of `policies.plan`. The rules answer what other autoscalers were
reported to do: grow without end while models load, swing between 1 and 2, grow for an objective that no worker can meet, and
shrink when their metrics are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from motet.policies.scale.rate_forecast import Rates
from motet.shared.wire.scale import Decision, Reason

OVERDUE = 2.0
"""Leads after which a worker that starts is no longer counted."""

SPARE = 0.05
"""A worker leaves only if the others are enough for a load that is higher by this share: one that stays the same wavers."""

NOTHING = Rates(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingConfig:
    """What an operator sets."""

    least_workers: int = 1
    most_workers: int = 1
    down_s: float = 600.0
    idle_s: float = 0.0  # 0: never to zero
    ttft_slo_ms: float = 1000.0

    def __post_init__(self) -> None:
        if not 0 <= self.least_workers <= self.most_workers or self.most_workers < 1:
            raise ValueError(f"workers must be 0 <= least <= most, most >= 1: {self.least_workers}, {self.most_workers}")
        if self.down_s < 0 or self.idle_s < 0 or self.ttft_slo_ms <= 0:
            raise ValueError("down_s and idle_s must be at least 0, ttft_slo_ms above 0")


class Need(msgspec.Struct, frozen=True):
    """How many workers a load needs."""

    workers: int
    limit: str = ""  # what one worker less would exceed
    impossible: str = ""  # a sentence, if an objective is missed by an idle worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What there is to know at one moment. Times are seconds on one clock."""

    now_s: float
    demand: Rates  # forecast
    ready: Mapping[str, float]  # worker: bytes that other workers must load when it leaves
    starting: Mapping[str, float] = field(default_factory=dict)  # worker: since
    leaving: Collection[str] = ()
    lost: Mapping[str, float] = field(default_factory=dict)  # worker that vanished: since
    told: int = 0  # workers that there should be by the last decision, whoever made it
    queued: Rates = NOTHING  # requests and tokens that wait on workers, as numbers
    parked: int = 0  # requests that wait at gateways for a first worker
    asked_s: float = 0.0  # of the last request
    missing: Collection[str] = ()  # names of inputs that are not there
    lead_s: float = 120.0


class Sizer:
    """The size of one base model. Keeps only what was needed at the looks of the last `down_s`."""

    def __init__(self, config: SizingConfig, needed: Callable[[Rates], Need]) -> None:
        self._config, self._needed = config, needed
        self._window = _Window(config.down_s)

    def look(self, look: Look) -> Decision:
        """Decide. The looks come in order of time."""
        workers = _Workers.of(look)
        if not workers.current and (look.parked or look.queued.requests_s):
            self._window.forget()
            return self._say(look, workers, "woken", max(1, self._config.least_workers))
        if look.missing:
            self._window.forget()
            return self._say(look, workers, "doubt", max(workers.hoped, self._config.least_workers))
        if self._idle(look):
            return self._to_zero(look, workers)
        load = self._load(look)
        need = self._needed(load)
        if need.impossible:
            self._window.forget()
            return self._say(look, workers, "impossible", max(workers.current, self._config.least_workers), need)
        kept = self._needed(Rates(*((1.0 + SPARE) * rate for rate in load)))
        return self._sized(look, workers, need, self._at_least(kept))

    def _load(self, look: Look) -> Rates:
        drain_s = look.lead_s + self._config.ttft_slo_ms / 1e3
        return Rates(*(rate + queued / drain_s for rate, queued in zip(look.demand, look.queued, strict=True)))

    def _at_least(self, need: Need) -> int:
        return max(1, self._config.least_workers, need.workers)

    def _sized(self, look: Look, workers: _Workers, need: Need, kept: int) -> Decision:
        config = self._config
        target = self._at_least(need)
        recent = self._window.add(look.now_s, kept)
        desired = min(target + min(1, len(workers.overdue)), config.most_workers)
        if desired > workers.current:
            return self._say(look, workers, "up", desired, need)
        fewer = workers.without_one >= recent and self._window.full(look.now_s)
        if fewer or workers.current > config.most_workers:
            return self._one_less(look, workers, "down", need)
        if workers.counted < target:
            return self._say(look, workers, "most" if target > config.most_workers else "steady", workers.current, need)
        reason: Reason = "settling" if workers.without_one >= target else "steady"
        return self._say(look, workers, reason, workers.current, need)

    def _idle(self, look: Look) -> bool:
        config = self._config
        waiting = look.parked or look.queued.requests_s
        return not config.least_workers and 0.0 < config.idle_s <= look.now_s - look.asked_s and not waiting

    def _to_zero(self, look: Look, workers: _Workers) -> Decision:
        self._window.forget()
        return self._one_less(look, workers, "idle") if workers.current else self._say(look, workers, "asleep", 0)

    def _one_less(self, look: Look, workers: _Workers, reason: Reason, need: Need | None = None) -> Decision:
        if look.leaving or workers.starts:
            return self._say(look, workers, "settling", workers.current, need)
        return self._say(look, workers, reason, workers.current - 1, need, leaves=workers.cheapest)

    def _say(
        self, look: Look, workers: _Workers, reason: Reason, desired: int, need: Need | None = None, leaves: str = ""
    ) -> Decision:
        return Decision(
            at_s=look.now_s,
            desired=desired,
            reason=reason,
            current=workers.current,
            starting=len(look.starting),
            needed=need.workers if need else 0,
            limit=need.limit if need else "",
            leaves=leaves,
            overdue=workers.overdue,
            missing=tuple(sorted(look.missing)),
            impossible=need.impossible if need else "",
        )


@dataclass(frozen=True, slots=True)
class _Workers:
    """The workers of a look, without those that leave."""

    current: int  # ready, starting, and expected back
    hoped: int  # the same, for however long they have been lost
    overdue: tuple[str, ...]
    starts: bool  # one that is not overdue
    ready: int
    cheapest: str  # of which the others must load the least when it leaves; "" without workers

    @classmethod
    def of(cls, look: Look) -> _Workers:
        late_s = look.now_s - OVERDUE * look.lead_s
        overdue = tuple(sorted(name for name, since_s in look.starting.items() if since_s < late_s))
        here = len(look.ready) + len(look.starting)
        back = sum(since_s >= late_s for since_s in look.lost.values())
        costs = {name: loaded for name, loaded in look.ready.items()} | dict.fromkeys(overdue, -1.0)
        return cls(
            current=max(here, min(look.told, here + back)),
            hoped=max(here, min(look.told, here + len(look.lost))),
            overdue=overdue,
            starts=len(look.starting) > len(overdue) or back > 0,
            ready=len(look.ready),
            cheapest=min(costs, key=lambda name: (costs[name], name), default=""),
        )

    @property
    def counted(self) -> int:
        """Those that serve or are going to."""
        return self.current - len(self.overdue)

    @property
    def without_one(self) -> int:
        """Ready workers when the cheapest one has left."""
        return self.ready if self.overdue else self.ready - 1


class _Window:
    """The most that was needed at the looks of the last `down_s`."""

    def __init__(self, down_s: float) -> None:
        self._down_s = down_s
        self._needs: deque[tuple[float, int]] = deque()  # (when, workers), workers falling: the most is first
        self._since_s = float("inf")

    def add(self, now_s: float, workers: int) -> int:
        """Count a look; returns the most."""
        self._since_s = min(self._since_s, now_s)
        while self._needs and self._needs[-1][1] <= workers:
            self._needs.pop()
        self._needs.append((now_s, workers))
        while self._needs[0][0] < now_s - self._down_s:
            self._needs.popleft()
        return self._needs[0][1]

    def full(self, now_s: float) -> bool:
        """Whether looks reach back far enough."""
        return now_s - self._since_s >= self._down_s

    def forget(self) -> None:
        """What was needed says nothing any more."""
        self._needs.clear()
        self._since_s = float("inf")
