"""Kinds of workers and the adapters on each: what a packing decides and what it is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import Limits, Settings, Verdict, judge, judge_sets
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
    limits: Limits = field(default_factory=Limits)

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

    @classmethod
    def of(cls, kind: int, setting: int, rows: Sequence[int], shares: Sequence[float], said: Verdict, at: int = 0) -> Packed:
        """What the law's verdict says of the worker, in its row `at`."""
        facts = ("capacity", "busy", "batch", "adapters_in_use", "miss_share", "tpot_ms", "ttft_ms", "strain")
        return cls(
            kind=kind,
            rows=tuple(rows),
            shares=tuple(shares),
            setting=setting,
            limit=said.limit(at),
            **{name: float(getattr(said, name)[at]) for name in facts},
        )

    @property
    def share_of(self) -> dict[int, float]:
        """By row: the share of its rate."""
        return dict(zip(self.rows, self.shares, strict=True))

    def demand(self, demand: Demand) -> Demand:
        """What is asked of this worker."""
        return demand.shared(self.rows, self.shares)


def placed(demand: Demand, kinds: Sequence[Kind], kind: int, setting: int, shares: Mapping[int, float]) -> Packed:
    """A worker of a kind in a setting that serves adapters, given as row: share of its rate."""
    rows = sorted(shares)
    part = [shares[row] for row in rows]
    one, at = kinds[kind], np.array([setting])
    said = judge(demand.shared(rows, part), one.settings.take(at), one.limits.at(at))
    return Packed.of(kind, setting, rows, part, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Workers that serve a demand."""

    workers: tuple[Packed, ...]
    cost: float

    @property
    def strain(self) -> float:
        """Of the most strained worker. The law is satisfied where it is at most 1."""
        return max(worker.strain for worker in self.workers)


class CannotServe(Exception):
    """No packing serves the demand. The message is a sentence with the reason."""


@dataclass(slots=True)
class Worker:
    """A worker that is being packed: its adapters, their sums, and the best setting for them."""

    kind: int
    rows: list[int]
    load: Loads
    setting: int
    strain: float

    @property
    def rank(self) -> float:
        """The largest of its adapters."""
        return float(self.load.extreme("rank")[0])


class Adapters:
    """A demand with one row for each adapter, prepared for judging many sets of its rows on each kind."""

    def __init__(self, demand: Demand, kinds: Sequence[Kind]) -> None:
        self.demand, self.kinds = demand, kinds
        shapes = [(len(kind.settings), len(demand)) for kind in kinds]
        copies = [
            np.broadcast_to(kind.settings.steps.copy_ms(demand), shape) for kind, shape in zip(kinds, shapes, strict=True)
        ]
        self.loads = [Loads.of(demand, copy_ms) for copy_ms in copies]
        self.tokens = demand.rate * demand.output_tokens  # output tokens/s of each
        self._able: dict[tuple[int, float], tuple[Rows, Settings, Limits]] = {}

    def __len__(self) -> int:
        return len(self.demand)

    def worker(self, kind: int, rows: Iterable[int]) -> Worker:
        """A worker with these rows."""
        chosen = list(rows)
        load = self.loads[kind].joined(np.array(chosen, dtype=np.intp))
        settings, strains = self.best(kind, load)
        return Worker(kind, chosen, load, int(settings[0]), float(strains[0]))

    def best(self, kind: int, loads: Loads) -> tuple[Rows, Floats]:
        """(setting with the least strain, the strain) of each set, [sets]; (0, inf) where none holds the ranks.

        The settings are those for the largest rank of all sets.
        """
        able, settings, limits = self._settings(kind, float(loads.extreme("rank").max()))
        if not len(able):
            return np.zeros(len(loads), dtype=np.intp), np.full(len(loads), np.inf)
        sets, places = np.divmod(np.arange(len(loads) * len(able)), len(able))
        cases = loads.take(sets)
        copy_ms = cases.copies[np.arange(len(sets)), able[places]]
        verdict = judge_sets(cases, settings.take(places), limits.at(places), copy_ms=copy_ms)
        strains = verdict.strain.reshape(len(loads), len(able))
        return able[strains.argmin(axis=1)], strains.min(axis=1)

    def _settings(self, kind: int, rank: float) -> tuple[Rows, Settings, Limits]:
        """The settings with the smallest largest rank that holds this one. A larger one only costs more."""
        key = (kind, rank)
        if key not in self._able:
            one = self.kinds[kind]
            ranks = one.settings.max_rank
            rows = np.flatnonzero(ranks == ranks.min(where=ranks >= rank, initial=np.inf))
            self._able[key] = rows, one.settings.take(rows), one.limits.at(rows)
        return self._able[key]

    def strains(self, kind: int, loads: Loads, settings: Rows) -> Floats:
        """The strain of each set with the setting of the same row."""
        return self.verdict(kind, loads, settings).strain

    def verdict(self, kind: int, loads: Loads, settings: Rows) -> Verdict:
        """What the law says of each set with the setting of the same row."""
        one = self.kinds[kind]
        copy_ms = loads.copies[np.arange(len(loads)), settings]
        return judge_sets(loads, one.settings.take(settings), one.limits.at(settings), copy_ms=copy_ms)

    def packed(self, workers: Sequence[Worker]) -> list[Packed]:
        """What the law says of workers, with the settings that they have."""
        found: dict[int, Packed] = {}
        for kind in sorted({worker.kind for worker in workers}):
            mine = [at for at, worker in enumerate(workers) if worker.kind == kind]
            loads = Loads.stack([workers[at].load for at in mine])
            said = self.verdict(kind, loads, np.array([workers[at].setting for at in mine]))
            for place, at in enumerate(mine):
                rows = sorted(workers[at].rows)
                found[at] = Packed.of(kind, workers[at].setting, rows, (1.0,) * len(rows), said, place)
        return [found[at] for at in range(len(workers))]
