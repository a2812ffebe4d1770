"""Forecasts the rates of a base model, requests/s and tokens/s, at the time when a worker that is started now is of use.

    fast      the mean of the last FAST_S
    trend     level + damped trend (Holt; Gardner and McKenzie 1985)
    hour, day the rate one period before the time that is forecast, times the level now over the level one period ago, as a
              mean of up to TURNS periods: much that people schedule begins with the hour
    point     the largest of these
    upper     point * the quantile of actual / point in the last forecasts of exactly this horizon, at least `fast`

The quantile is that of split conformal prediction; its level moves by `step` with every miss (adaptive conformal inference,
Gibbs and Candes 2021). A miss is not a rate above the forecast but what comes of it: a look at which there were fewer workers
than the load needed. Their share comes to `miss_share`: workers are whole and leave late, which is often enough by itself, and
then no margin is paid. A season counts as soon as its whole period was seen. Shares of adapters are not forecast: they stay as
they are. Everything is bounded: one bucket a minute for a day, and ERRORS errors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import ceil, exp, expm1, inf
from typing import NamedTuple

FAST_S = 120.0
"""About as long as a worker takes to start: one that is started for a shorter peak comes when it is over."""
BUCKET_S = 60.0
HOUR_S, DAY_S = 3600.0, 86_400.0
SEASONS = {"hour": HOUR_S, "day": DAY_S}
TURNS = 3
"""Periods whose mean is a season's rate, as far as a day reaches back."""
LEVEL_S = 900.0
"""Span of the levels that scale a season to now."""
MOST_SCALED = 2.0
"""Largest factor between now and one period ago that still counts as the same pattern."""
ERRORS = 480
LEAST_ERRORS = 20
FIRST_LEVEL = 0.5
"""Of the quantile, until misses are known."""
UNKNOWN = 1.25
"""Upper factor until there are LEAST_ERRORS errors."""


class Rates(NamedTuple):
    """Load of a base model."""

    requests_s: float
    tokens_s: float  # prompt and output


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """Constants of a forecast. The time constants are those of exponential fading."""

    miss_share: float = 0.1  # of looks at which there may be fewer workers than the load needs
    step: float = 0.05  # by which a miss moves the level of the quantile
    level_s: float = 60.0
    trend_s: float = 300.0
    damp_s: float = 300.0
    seasons: tuple[str, ...] = ("hour", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A forecast for `horizon_s` ahead."""

    upper: Rates
    point: Rates
    now: Rates  # the fast mean
    source: str  # of the requests' point: "fast", "trend", "hour" or "day"
    horizon_s: float


class RateForecast:
    """The rates of one base model. Looks come in order of time, `period_s` apart or a little more."""

    def __init__(self, *, period_s: float, config: ForecastConfig = ForecastConfig()) -> None:
        self._period_s, self._config = period_s, config
        self._series = [_Series(config) for _ in Rates._fields]
        self._level = FIRST_LEVEL

    def missed(self, short: bool) -> None:
        """Whether there were fewer workers at the last look than the load needed."""
        level = self._level + self._config.step * (float(short) - self._config.miss_share)
        self._level = min(max(level, 0.0), 1.0)

    def look(self, now_s: float, arrived: Rates, *, lead_s: float) -> Ahead:
        """Count what arrived since the last look, as numbers of requests and tokens, and forecast for `lead_s` + one period.

        A horizon of other length, in whole periods, forgets the errors: they were of the old one.
        """
        horizon_s = self._period_s * (1 + ceil(lead_s / self._period_s - 1e-9))
        seen = [series.look(now_s, count, horizon_s, self._level) for series, count in zip(self._series, arrived, strict=True)]
        upper, point, now = (Rates(*column) for column in zip(*(one[:3] for one in seen), strict=True))
        return Ahead(upper=upper, point=point, now=now, source=seen[0].source, horizon_s=horizon_s)


class _Seen(NamedTuple):
    upper: float
    point: float
    fast: float
    source: str


class _Series:
    """One rate."""

    def __init__(self, config: ForecastConfig) -> None:
        self._config = config
        self._recent: deque[tuple[float, float, float]] = deque()  # (from, until, count) that reach into the last FAST_S
        self._trend = _Trend(config)
        self._buckets = _Buckets()
        self._errors = _Errors()
        self._last_s: float | None = None

    def look(self, now_s: float, count: float, horizon_s: float, level: float) -> _Seen:
        if self._last_s is None:  # what came before the first look came in an unknown time
            self._last_s = now_s
            return _Seen(0.0, 0.0, 0.0, "fast")
        if now_s > self._last_s:
            self._count(self._last_s, now_s, count)
            self._last_s = now_s
        fast = self._fast()
        self._errors.happened(now_s, fast, horizon_s)
        values = {"fast": fast, "trend": self._trend.ahead(horizon_s)}
        values |= {name: self._buckets.season(now_s, horizon_s, SEASONS[name]) for name in self._config.seasons}
        source = max(values, key=lambda name: values[name])
        point = values[source]
        self._errors.expect(now_s + horizon_s, point)
        return _Seen(max(fast, point * self._errors.factor(level)), point, fast, source)

    def _count(self, since_s: float, now_s: float, count: float) -> None:
        self._recent.append((since_s, now_s, count))
        while self._recent[0][1] <= now_s - FAST_S:
            self._recent.popleft()
        self._trend.add(count / (now_s - since_s), now_s - since_s)
        self._buckets.add(since_s, now_s, count)

    def _fast(self) -> float:
        if not self._recent:
            return 0.0
        return sum(count for _, _, count in self._recent) / (self._recent[-1][1] - self._recent[0][0])


class _Trend:
    """Level and trend, both fading with time, so that looks need not be evenly spaced."""

    def __init__(self, config: ForecastConfig) -> None:
        self._config = config
        self._level: float | None = None
        self._slope = 0.0  # per second

    def add(self, rate: float, seconds: float) -> None:
        if self._level is None:
            self._level = rate
            return
        expected = self._level + self._slope * self._reach_s(seconds)
        level = expected - expm1(-seconds / self._config.level_s) * (rate - expected)
        kept = exp(-seconds / self._config.trend_s)
        slope = self._slope * exp(-seconds / self._config.damp_s)
        self._slope = kept * slope + (1.0 - kept) * (level - self._level) / seconds
        self._level = level

    def _reach_s(self, seconds: float) -> float:
        """What a slope of 1 adds in so long, as it is damped."""
        return -expm1(-seconds / self._config.damp_s) * self._config.damp_s

    def ahead(self, horizon_s: float) -> float:
        return 0.0 if self._level is None else max(0.0, self._level + self._slope * self._reach_s(horizon_s))


class _Buckets:
    """Counts of the last day and a little more, by BUCKET_S."""

    _kept = int((DAY_S + LEVEL_S) / BUCKET_S) + 2

    def __init__(self) -> None:
        self._counts: deque[float] = deque(maxlen=self._kept)
        self._next = 0  # number of the bucket after the last one
        self._since_s = inf

    def add(self, since_s: float, now_s: float, count: float) -> None:
        """Spread a count evenly over its time."""
        if not self._counts:
            self._since_s, self._next = since_s, int(since_s // BUCKET_S)
        for number in range(max(int(since_s // BUCKET_S), int(now_s // BUCKET_S) - self._kept), int(now_s // BUCKET_S) + 1):
            while self._next <= number:
                self._counts.append(0.0)
                self._next += 1
            inside_s = min(now_s, (number + 1) * BUCKET_S) - max(since_s, number * BUCKET_S)
            self._counts[number - self._next] += count * inside_s / (now_s - since_s)

    def _rate(self, at_s: float) -> float:
        return self._counts[int(at_s // BUCKET_S) - self._next] / BUCKET_S

    def _level(self, until_s: float) -> float:
        """The mean of the whole buckets in the last LEVEL_S."""
        last = int(until_s // BUCKET_S) - self._next
        buckets = int(LEVEL_S / BUCKET_S)
        return sum(self._counts[last - back] for back in range(1, buckets + 1)) / (buckets * BUCKET_S)

    def season(self, now_s: float, horizon_s: float, period_s: float) -> float:
        """The mean of the rates one to TURNS periods before `now_s + horizon_s`, each scaled to now. 0 before one was seen."""
        rates = []
        for turn in range(1, TURNS + 1):
            before_s = now_s - turn * period_s
            if turn * period_s > DAY_S or before_s - LEVEL_S - BUCKET_S < self._since_s:
                break
            before = self._level(before_s)
            scale = self._level(now_s) / before if before > 0.0 else 1.0
            rates.append(self._rate(before_s + horizon_s) * min(MOST_SCALED, scale))
        return sum(rates) / len(rates) if rates else 0.0


class _Errors:
    """Actual over forecast rate of the last forecasts for one horizon."""

    def __init__(self) -> None:
        self._horizon_s = 0.0
        self._expected: deque[tuple[float, float]] = deque()  # (for when, point)
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []

    def happened(self, now_s: float, rate: float, horizon_s: float) -> None:
        """The rate now: compare it with the last forecast whose time has come."""
        if horizon_s != self._horizon_s:
            self._horizon_s = horizon_s
            for kept in (self._expected, self._ratios, self._sorted):
                kept.clear()
        due = None
        while self._expected and self._expected[0][0] <= now_s:
            due = self._expected.popleft()
        if due is None or due[1] <= 0.0:
            return
        ratio = rate / due[1]
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > ERRORS:
            del self._sorted[bisect_left(self._sorted, self._ratios.popleft())]

    def expect(self, at_s: float, point: float) -> None:
        """A forecast was made."""
        self._expected.append((at_s, point))

    def factor(self, level: float) -> float:
        """What a point forecast is multiplied by, so that a share `level` of the last rates was not above it."""
        count = len(self._sorted)
        if count < LEAST_ERRORS:
            return UNKNOWN
        return self._sorted[min(max(ceil(level * (count + 1)), 1), count) - 1]
