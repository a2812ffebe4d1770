"""Decides which adapters each worker should keep loaded, by burst tolerance (dLoRA section 5.1).

    peak capacity of an adapter = free memory of the workers that hold it      (KV for its requests)
    burst tolerance             = peak capacity / load

The adapter with the lowest tolerance is loaded on one more worker, again and again. An adapter on more workers has more
capacity, but each copy takes memory from all adapters on its worker. Of all placements on the way, the one with the highest
lowest tolerance counts. The paper stops at the first copy that lowers it, but a second copy of every adapter may pay where one
of a single adapter does not. It does not say which worker gets a copy; here it is the one whose adapters expect the least
load. Adapters without load are not placed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.worker_book import Known
from motet.policies.times.load_forecast import Forecast
from motet.shared.model import AdapterRef

LEAST = 2.0 / 900.0
"""Requests per second below which an adapter is not worth a place."""


class Placing:
    """The placements that one scheduler wants, by the requests that it gets. Times are seconds on one clock.

    With several schedulers each gets the same share of every adapter's requests, and only ratios matter.
    """

    def __init__(self) -> None:
        self._rates = Forecast()
        self._sizes: dict[str, int] = {}

    def asked(self, adapter: AdapterRef, now_s: float) -> None:
        """A new request for the adapter came."""
        self._rates.used(adapter.digest, now_s)
        self._sizes[adapter.digest] = adapter.size_bytes
        if len(self._sizes) > 2 * len(self._rates):
            self._sizes = {digest: self._sizes[digest] for digest in self._rates if digest in self._sizes}

    def place(self, workers: Iterable[Known], state: ClusterState, now_s: float) -> dict[str, tuple[str, ...]]:
        """The adapters that each worker should keep loaded (`preload`), by worker id."""
        loads = {digest: rate for digest in self._rates if (rate := self._rates.rate(digest, now_s)) >= LEAST}
        by_model: dict[str, list[Known]] = {}
        for known in workers:
            by_model.setdefault(known.limits.base_model, []).append(known)
        placed: dict[str, tuple[str, ...]] = {}
        for group in by_model.values():
            rooms = {one.worker_id: Room(free_bytes=one.limits.adapter_bytes_most, slots=one.limits.pin_slots) for one in group}
            present = {one.worker_id: state.adapters(one.worker_id) for one in group}
            placed |= preload(loads, self._sizes, rooms, present)
        return placed


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
) -> dict[str, tuple[str, ...]]:
    """The adapters that each worker should load, in the order in which they were placed.

    `load`: requests per second of each adapter; `size_bytes`: of each adapter; `rooms`: by worker; `present`: the adapters that
    each worker holds already, and gets before workers that do not.
    """
    names = sorted((one for one, rate in load.items() if rate > 0.0), key=lambda one: (-load[one], one))
    workers = sorted(rooms)
    placed: dict[str, list[str]] = {worker: [] for worker in workers}
    if not names or not workers:
        return {worker: () for worker in workers}
    rate = np.array([load[one] for one in names])
    size = np.array([float(size_bytes[one]) for one in names])
    free = np.array([float(rooms[worker].free_bytes) for worker in workers])
    slots = np.array([rooms[worker].slots for worker in workers])
    held = np.zeros((len(names), len(workers)), dtype=bool)
    away = np.array([[name not in (present or {}).get(worker, ()) for worker in workers] for name in names])
    capacity, copies = np.zeros(len(names)), np.zeros(len(names))
    chosen: list[tuple[int, int]] = []  # (adapter, worker), as placed
    best, kept = 0.0, 0  # the highest lowest tolerance so far, and the copies placed then
    while True:
        at = int(np.argmin(capacity / rate))  # the first one of several has the most load
        fits = ~held[at] & (free >= size[at]) & (slots > 0)
        if not fits.any():
            break
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
    for at, to in chosen[:kept]:
        placed[workers[to]].append(names[at])
    return {worker: tuple(placed[worker]) for worker in workers}
