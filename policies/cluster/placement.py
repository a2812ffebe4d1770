"""Decides which adapters each worker should keep loaded: its homes, then copies by burst tolerance (dLoRA section 5.1).

    peak capacity of an adapter = free memory of the workers that hold it      (KV for its requests)
    burst tolerance             = peak capacity / load

The adapter with the lowest tolerance is loaded on one more worker, again and again. An adapter on more workers has more
capacity, but each copy takes memory from all adapters on its worker. Of all placements on the way, the one with the highest
lowest tolerance counts. The paper stops at the first copy that lowers it, but a second copy of every adapter may pay where one
of a single adapter does not. It does not say which worker gets a copy; here it is the one whose adapters expect the least
load. Adapters without load are not placed. Adapters at home (`homes`) come first, so copies get only what is left of a worker's
room.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.homes import NO_HOMES, Homes, plan
from motet.policies.cluster.worker_book import Known
from motet.policies.times.load_forecast import RATE_S, Forecast
from motet.policies.times.perf_model import Floats
from motet.shared.model import AdapterRef, Tier

LEAST = 2.0 / 900.0
"""Requests per second below which an adapter is not worth a place."""


class Placing:
    """The placements that one scheduler wants, by the requests that it gets. Times are seconds on one clock.

    With several schedulers each gets the same share of every adapter's requests, and only ratios matter.
    """

    def __init__(self) -> None:
        self._rates = Forecast()
        self._known: dict[str, tuple[str, int]] = {}  # base model and bytes, by digest
        self._targets: dict[str, tuple[str, ...]] = {}  # layers of those that not every worker can change
        self._since_s: float | None = None  # the first request

    def asked(self, adapter: AdapterRef, base_model: str, now_s: float) -> None:
        """A new request for the adapter came."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._rates.used(adapter.digest, now_s)
        self._known[adapter.digest] = base_model, adapter.size_bytes
        if adapter.targets:
            self._targets[adapter.digest] = adapter.targets
        if len(self._known) > 2 * len(self._rates):
            self._known = {digest: self._known[digest] for digest in self._rates if digest in self._known}
            self._targets = {digest: one for digest, one in self._targets.items() if digest in self._known}

    def look(self, workers: Iterable[Known], state: ClusterState, now_s: float, before: Homes = NO_HOMES) -> list[Look]:
        """What there is to place, one look for each base model. `before`: what was placed, also on workers that are gone."""
        loads: dict[str, dict[str, float]] = {}
        for digest in self._rates:
            if digest in self._known and (rate := self._rates.rate(digest, now_s)) >= LEAST:
                loads.setdefault(self._known[digest][0], {})[digest] = rate
        by_model: dict[str, list[Known]] = {}
        for known in workers:
            by_model.setdefault(known.limits.base_model, []).append(known)
        for base_model, group in by_model.items():
            for digest in [*loads.get(base_model, ())]:  # one that only some workers can run gets no place of its own
                targets = self._targets.get(digest)
                if targets and not all(state.changes_layers(targets)[state.row(one.worker_id)] for one in group):
                    del loads[base_model][digest]
        young = self._since_s is None or now_s < self._since_s + RATE_S
        return [
            Look(
                load=(load := loads.get(base_model, {})),
                size_bytes={digest: self._known[digest][1] for digest in load},
                rooms={
                    one.worker_id: Room(free_bytes=one.limits.adapter_bytes_most, slots=one.limits.pin_slots) for one in group
                },
                present={one.worker_id: dict(state.adapters(one.worker_id)) for one in group},
                before=before,
                kept={
                    one.worker_id: [digest for digest in before.get(one.worker_id, ()) if young and digest not in self._known]
                    for one in group
                },
            )
            for base_model, group in by_model.items()
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is known of the adapters and workers of one base model when they are placed. Nothing in it changes later.

    `load`: requests/s by adapter; `size_bytes`: of each; `rooms`, `present`: of each worker, and the tiers of its adapters;
    `before`: what was placed; `kept`: adapters of it that stay because this scheduler cannot know their load yet.
    """

    load: Mapping[str, float]
    size_bytes: Mapping[str, int]
    rooms: Mapping[str, Room]
    present: Mapping[str, Mapping[str, Tier]]
    before: Homes
    kept: Mapping[str, Sequence[str]]

    def place(self) -> dict[str, tuple[str, ...]]:
        """The adapters that each worker should keep loaded, the most important first, by worker id."""
        held = {
            worker: {digest for digest, tier in adapters.items() if tier == "device"}
            for worker, adapters in self.present.items()
        }
        homes = plan(self.load, self.size_bytes, held, self.before)
        placed = preload(self.load, self.size_bytes, self.rooms, self.present, homes)
        return {worker: (*digests, *self.kept[worker]) for worker, digests in placed.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A worker's memory for adapters: bytes free of adapters and KV blocks, and the number of adapters it may hold."""

    free_bytes: int
    slots: int


def preload(
    load: Mapping[str, float],
    size_bytes: Mapping[str, int],
    rooms: Mapping[str, Room],
    present: Mapping[str, Container[str]] | None = None,
    first: Homes = NO_HOMES,
) -> dict[str, tuple[str, ...]]:
    """The adapters that each worker should load, in the order in which they were placed.

    `load`: requests per second of each adapter; `size_bytes`: of each adapter; `rooms`: by worker; `present`: the adapters that
    each worker holds already, and gets before workers that do not; `first`: by worker, those that come before all copies, even
    where there are more of them than room.
    """
    names = sorted((one for one, rate in load.items() if rate > 0.0), key=lambda one: (-load[one], one))
    workers = sorted(rooms)
    placed: dict[str, list[str]] = {worker: [*first.get(worker, ())] for worker in workers}
    if not names or not workers:
        return {worker: () for worker in workers}
    rate = np.array([load[one] for one in names])
    size = np.array([float(size_bytes[one]) for one in names])
    free = np.array([float(rooms[worker].free_bytes) for worker in workers])
    slots = np.array([rooms[worker].slots for worker in workers])
    held = np.zeros((len(names), len(workers)), dtype=bool)
    away = np.array([[name not in (present or {}).get(worker, ()) for worker in workers] for name in names])
    for to, worker in enumerate(workers):
        held[:, to] = np.isin(names, placed[worker])
    free = np.maximum(free - size @ held, 0.0)
    slots -= held.sum(axis=0)
    for at, to in _copies(rate, size, free, slots, held, away):
        placed[workers[to]].append(names[at])
    return {worker: tuple(placed[worker]) for worker in workers}


def _copies(
    rate: Floats, size: Floats, free: Floats, slots: NDArray[np.int64], held: NDArray[np.bool_], away: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """(adapter, worker) of the copies up to the highest lowest tolerance. Changes `free`, `slots` and `held`."""
    copies, capacity = held.sum(axis=1).astype(float), held @ free
    chosen: list[tuple[int, int]] = []
    best, kept = float((capacity / rate).min()), 0  # the highest lowest tolerance so far, and the copies placed then
    while True:
        at = int(np.argmin(capacity / rate))  # the first one of several has the most load
        fits = ~held[at] & (free >= size[at]) & (slots > 0)
        if not fits.any():
            return chosen[:kept]
        expected = (rate / np.maximum(1.0, copies)) @ held
        order = np.lexsort((-free, expected, away[at]))
        to = int(order[fits[order]][0])
        capacity[held[:, to]] -= size[at]
        free[to] -= size[at]
        slots[to] -= 1
        held[at, to] = True
        copies[at] += 1.0
        capacity[at] += free[to]
        chosen.append((at, to))
        lowest = float((capacity / rate).min())
        if lowest > best or not best:
            best, kept = lowest, len(chosen)
