"""Kinds of workers and the adapters on each: what a packing decides and what it is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import LIMITS, Limits, Settings, Verdict, judge_sets
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.loads import Loads

Rows = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of worker that a plan may use."""

    name: str
    settings: Settings
    cost: float = 1.0
    most: int | None = None  # workers; None: any number
    limits: Limits = Limits()

    def tightened(self, setting: int, limits: Limits) -> Kind:
        """The kind with lower limits for every setting whose largest rank is that of `setting`.

        The limits thus stay with adapters of these ranks, whatever workers they are packed into.
        """
        alike = self.settings.max_rank == self.settings.max_rank[setting]

        def column(old: float | Floats, new: float | Floats, *, larger: bool = False) -> Floats:
            pick = np.maximum if larger else np.minimum
            return np.where(alike, pick(old, new), np.broadcast_to(old, len(self.settings)))

        tight = Limits(
            busy=column(self.limits.busy, limits.busy),
            z=column(self.limits.z, limits.z, larger=True),
            latency=column(self.limits.latency, limits.latency),
        )
        return replace(self, limits=tight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A worker of a packing, and what the law says of it."""

    kind: int
    rows: tuple[int, ...]  # adapters: rows of the demand, ascending
    shares: tuple[float, ...]  # of the rate of each adapter; below 1 where copies on other workers serve the rest
    setting: int
    strain: float
    limit: str  # what binds first, one of `capacity.LIMITS`
    capacity: float  # requests/s
    busy: float
    batch: float
    adapters_in_use: float
    miss_share: float
    tpot_ms: float
    ttft_ms: float

    def demand(self, demand: Demand) -> Demand:
        """What is asked of this worker."""
        taken = demand.take(list(self.rows))
        return replace(taken, rate=taken.rate * np.array(self.shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Workers that serve a demand."""

    workers: tuple[Packed, ...]
    cost: float

    @property
    def strain(self) -> float:
        """Of the most strained worker."""
        return max(worker.strain for worker in self.workers)


class CannotServe(Exception):
    """No packing serves the demand. The message is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best setting for a set of adapters on a kind."""

    setting: int
    strain: float


class Adapters:
    """A demand with one row for each adapter, prepared for judging many sets of its rows on each kind."""

    def __init__(self, demand: Demand, kinds: Sequence[Kind]) -> None:
        self.demand = demand
        self.kinds = kinds
        self.loads = [Loads.of(demand, kind.settings.steps.copy_ms(demand)) for kind in kinds]
        self._able: dict[tuple[int, float], tuple[Rows, Settings, Limits]] = {}

    def __len__(self) -> int:
        return len(self.demand)

    def joined(self, kind: int, rows: Sequence[int] | Rows) -> Loads:
        """A set of adapters."""
        return self.loads[kind].joined(np.asarray(rows, dtype=np.intp))

    def choose(self, kind: int, load: Loads) -> Choice:
        """The setting with the least strain for one set."""
        settings, verdict = self._judged(kind, load)
        if verdict is None:
            return Choice(0, np.inf)
        best = verdict.best
        return Choice(int(settings[best]), float(verdict.strain[best]))

    def _judged(self, kind: int, load: Loads) -> tuple[Rows, Verdict | None]:
        rank = float(load.extreme("rank")[0])
        able, settings, limits = self.able(kind, rank)
        return able, judge_sets(load, settings, limits, copy_ms=load.copies[0, able]) if len(able) else None

    def able(self, kind: int, rank: float) -> tuple[Rows, Settings, Limits]:
        """The settings of a kind that hold adapters of this rank."""
        key = (kind, rank)
        if key not in self._able:
            one = self.kinds[kind]
            rows = np.flatnonzero(one.settings.max_rank >= rank)
            self._able[key] = rows, one.settings.take(rows), at_settings(one.limits, rows)
        return self._able[key]

    def strains(self, kind: int, loads: Loads, settings: Rows) -> Floats:
        """The strain of each set with the setting of the same row."""
        one = self.kinds[kind]
        copy_ms = loads.copies[np.arange(len(loads)), settings]
        return judge_sets(loads, one.settings.take(settings), at_settings(one.limits, settings), copy_ms=copy_ms).strain

    def packed(self, kind: int, rows: Iterable[int], setting: int | None = None) -> Packed:
        """A worker with these rows, and its best setting if none is given."""
        ordered = np.array(sorted(rows), dtype=np.intp)
        load = self.joined(kind, ordered)
        chosen = self.choose(kind, load).setting if setting is None else setting
        at = np.array([chosen])
        one = self.kinds[kind]
        said = judge_sets(load, one.settings.take(at), at_settings(one.limits, at), copy_ms=load.copies[0, at])
        facts = ("capacity", "busy", "batch", "adapters_in_use", "miss_share", "tpot_ms", "ttft_ms", "strain")
        return Packed(
            kind=kind,
            rows=tuple(ordered.tolist()),
            shares=(1.0,) * len(ordered),
            setting=chosen,
            limit=said.limit(0),
            **{name: float(getattr(said, name)[0]) for name in facts},
        )


def at_settings(limits: Limits, settings: Rows) -> Limits:
    """The limits of some settings."""

    def column(values: float | Floats) -> float | Floats:
        return values[settings] if isinstance(values, np.ndarray) else values

    return Limits(busy=column(limits.busy), z=column(limits.z), latency=column(limits.latency))
