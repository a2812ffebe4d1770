"""Sizes one base model: what a scheduler sees of it -> forecast, need and decision.

    Seen ─> Ahead (RateForecast) ─┐
         └> Packed, the law ──────┴─> Look ─> Sizer ─> Decision

`Seen` holds all that a decision depends on, so a log of them replays to the same decisions
(`services.scheduler.decision_log`), and a bench decides by the same code as a live scheduler.
"""

from __future__ import annotations

import msgspec

from motet.policies.scale.need import Asked, Packed, Worker
from motet.policies.scale.rate_forecast import Ahead, RateForecast, Rates
from motet.policies.scale.sizing import Look, Sizer, SizingConfig
from motet.shared.wire.scale import Decision

LOOK_S = 15.0
"""Time between two looks."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to see of a base model at one moment. Times are seconds on one clock."""

    now_s: float
    counted: tuple[float, float]  # requests and tokens that were ever asked for
    asked: Asked
    worker: Worker | None  # the one that sizes are made for (`need.typical`); None without any
    ready: dict[str, float]  # worker: bytes that other workers must load when it leaves
    starting: dict[str, float] = {}  # worker: since
    leaving: list[str] = []
    lost: dict[str, float] = {}  # worker that vanished: since
    told: int = 0  # workers that there should be by the last decision, whoever made it
    queued: float = 0.0  # requests that wait on workers
    parked: int = 0  # requests that wait at gateways for a first worker
    missing: list[str] = []  # names of inputs that are not there
    lead_s: float  # from the start of a worker to its first request
    decides: bool = True  # whether its scheduler is the one that decides


class BaseSizer:
    """The size of one base model. What it sees comes in order of time, `LOOK_S` apart or a little more."""

    def __init__(self, config: SizingConfig, packed: Packed) -> None:
        self._forecast = RateForecast(period_s=LOOK_S)
        self._packed = packed
        self._sizer = Sizer(config, packed)
        self._asked_s: float | None = None  # of the last request; before one, of the first look
        self._counted = 0.0, 0.0

    def look(self, seen: Seen) -> tuple[Ahead, Decision | None]:
        """The forecast, and the decision: None where another scheduler decides."""
        asked = seen.asked
        self._packed.know(asked, seen.worker, seen.now_s)
        ahead = self._ahead(seen)
        if not seen.decides:
            return ahead, None
        look = Look(
            now_s=seen.now_s,
            demand=ahead.upper,
            ready=seen.ready,
            starting=seen.starting,
            leaving=seen.leaving,
            lost=seen.lost,
            told=seen.told,
            queued=Rates(seen.queued, seen.queued * asked.tokens_each),
            parked=seen.parked,
            asked_s=self._asked_s if self._asked_s is not None else seen.now_s,
            missing=seen.missing,
            lead_s=seen.lead_s,
        )
        return ahead, self._sizer.look(look)

    def _ahead(self, seen: Seen) -> Ahead:
        """The forecast, from what has come since the last look."""
        arrived = Rates(*(now - before for now, before in zip(seen.counted, self._counted, strict=True)))
        self._counted = seen.counted
        if arrived.requests_s or seen.parked or self._asked_s is None:
            self._asked_s = seen.now_s
        ahead = self._forecast.look(seen.now_s, arrived, lead_s=seen.lead_s)
        if seen.ready:
            self._forecast.missed(self._packed(ahead.now).workers > len(seen.ready))
        return ahead
