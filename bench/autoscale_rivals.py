"""Other autoscalers, written anew from their documentation, and Motet's sizer as it runs in a scheduler.

*fixed*: one number all day. *hpa queue*: Kubernetes' HorizontalPodAutoscaler on waiting requests for each worker, which is how
the production stack of vLLM is scaled. *keda concurrency*: KEDA on requests that run or wait, for each worker. Both look every
15 s, ignore a difference of 10%, and go down to the largest number of the last `down_s`. *forecast x ceil*: the throughput mode
of Dynamo's planner: every `every_s` the forecast of the rate over what a worker serves, rounded up. *both*: the larger one of
*forecast x ceil* and *keda concurrency*. `rivals` has each with many values of its constants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np

from bench.autoscale_parts import START_S, Law, Scaler, View
from motet.policies.scale.base_sizer import LOOK_S, BaseSizer, Seen
from motet.policies.scale.sizing import SizingConfig

MOST = 64
TOLERANCE = 0.1


class MotetSizer:
    """Motet's sizer, with a law that its answers are kept in."""

    def __init__(self, law: Law, config: SizingConfig) -> None:
        self._law = law
        self._sizer = BaseSizer(config, law.packed)
        self._asked = 0.0

    def look(self, view: View) -> tuple[int, str]:
        """See `Scaler`."""
        self._asked += view.arrived
        tokens = 2 * self._law.tokens
        seen = Seen(
            now_s=view.now_s,
            counted=(self._asked, self._asked * tokens),
            asked=self._law.asked(view.arrived / LOOK_S),
            worker=self._law.worker,
            ready=dict.fromkeys(view.ready, 0.0),
            starting=view.starting,
            queued=view.queued,
            lead_s=START_S,
        )
        _, decision = self._sizer.look(seen)
        assert decision is not None
        return decision.desired, decision.leaves


@dataclass(frozen=True)
class Fixed:
    """One number."""

    workers: int

    def look(self, view: View) -> tuple[int, str]:
        """See `Scaler`."""
        return self.workers, ""


@dataclass
class Hpa:
    """Workers in proportion to a number of requests, `target` of them each."""

    measured: Callable[[View], float]
    target: float
    down_s: float
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def look(self, view: View) -> tuple[int, str]:
        """See `Scaler`."""
        ready = max(len(view.ready), 1)
        ratio = self.measured(view) / ready / self.target
        wanted = view.current if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ready * ratio)
        wanted = min(max(wanted, 1), MOST)
        while self._wanted and self._wanted[0][0] <= view.now_s - self.down_s:
            self._wanted.popleft()
        self._wanted.append((view.now_s, wanted))
        return max(count for _, count in self._wanted), ""


@dataclass
class ForecastCeil:
    """A forecast of the rate over what one worker serves, times a `margin`. `predictor`: "last" or "line", through five."""

    each: float  # requests/s of a worker
    every_s: float
    predictor: str
    margin: float
    _rates: list[float] = field(default_factory=list)
    _count: float = 0.0
    _desired: int | None = None

    def look(self, view: View) -> tuple[int, str]:
        """See `Scaler`."""
        self._count += view.arrived
        if view.now_s % self.every_s < LOOK_S / 2:
            self._rates.append(self._count / self.every_s)
            self._count = 0.0
            self._desired = min(max(math.ceil(self._ahead() * self.margin / self.each), 1), MOST)
        return view.current if self._desired is None else self._desired, ""

    def _ahead(self) -> float:
        """The rate in the next interval."""
        last = self._rates[-5:]
        if self.predictor == "last" or len(last) < 3:
            return last[-1]
        slope, level = np.polyfit(np.arange(len(last)), last, 1)
        return max(float(level + slope * len(last)), 0.0)


@dataclass(frozen=True)
class Both:
    """The larger number of two."""

    one: Scaler
    other: Scaler

    def look(self, view: View) -> tuple[int, str]:
        """See `Scaler`."""
        return max(self.one.look(view)[0], self.other.look(view)[0]), ""


def waiting(view: View) -> float:
    """Requests in queues."""
    return view.queued


def concurrency(view: View) -> float:
    """Requests in queues and in batches."""
    return view.queued + view.running


EVERY_S, MARGINS, DOWN_S = (60.0, 180.0, 300.0), (0.9, 1.0, 1.05, 1.1, 1.2, 1.35), (0.0, 120.0, 300.0, 900.0, 3600.0)
SHARES = (0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


Settings = dict[str, Callable[[], Scaler]]
"""Makes an autoscaler, by what is said of its constants."""


def rivals(law: Law, peak: int, *, quick: bool = False) -> dict[str, Settings]:
    """By name: the settings that are tried; with `quick` few of them. `peak`: workers that the busiest minute needs."""
    full = law.running(law.serves(peak), peak) / peak  # requests of a worker that is as busy as it may be
    each = law.serves(peak) / peak

    def forecast(every_s: float, predictor: str, margin: float) -> ForecastCeil:
        return ForecastCeil(each, every_s, predictor, margin)

    def keda(share: float, down_s: float) -> Hpa:
        return Hpa(concurrency, share * full, down_s)

    def both(every_s: float, predictor: str, margin: float, share: float, down_s: float) -> Both:
        return Both(forecast(every_s, predictor, margin), keda(share, down_s))

    found: dict[str, Settings] = {
        "fixed peak": {f"{count}": partial(Fixed, count) for count in range(max(1, peak // 2), peak + 3)},
        "hpa queue": {
            f"{target:g} waiting, down {down_s:g} s": partial(Hpa, waiting, target, down_s)
            for target, down_s in product((0.1, 0.5, 1.0, 2.0, 5.0, 10.0), (*DOWN_S, 7200.0, 14_400.0))
        },
        "keda concurrency": {
            f"{share:.0%} of a batch, down {down_s:g} s": partial(keda, share, down_s)
            for share, down_s in product(SHARES, DOWN_S)
        },
        "forecast x ceil": {
            f"every {every_s:g} s, {predictor}, x {margin:g}": partial(forecast, every_s, predictor, margin)
            for every_s, predictor, margin in product(EVERY_S, ("last", "line"), MARGINS)
        },
        "both": {
            f"{every_s:g} s, {predictor}, x {margin:g}; {share:.0%}, down {down_s:g} s": partial(
                both, every_s, predictor, margin, share, down_s
            )
            for every_s, predictor, margin, share, down_s in product(
                (60.0, 180.0), ("last", "line"), MARGINS[:4], SHARES[1:], (0.0, 300.0, 900.0)
            )
        },
    }
    if quick:
        return {name: dict(list(settings.items())[:: len(settings) // 4]) for name, settings in found.items()}
    return found
