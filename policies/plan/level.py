"""Levelling: adapters move between the workers of a packing until all are strained alike.

The most strained worker gives an adapter to one of the least strained, or exchanges two, such that the larger strain of both
falls the most. Candidates are those whose tokens/s come nearest to half of the difference; the law judges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.policies.plan.fleet import Adapters, Rows, Worker
from motet.policies.plan.loads import Loads

OTHERS = 4
"""Workers that an adapter may go to in one step: the least strained."""
CANDIDATES = 3
AFTER_EMPTYING = 16
"""Moves that level the workers which took over the adapters of one."""
LEAST_GAIN = 1e-3
"""Strain by which a move must lower the larger of two."""


def level(adapters: Adapters, workers: list[Worker], steps: int) -> None:
    """Level in place, in at most `steps` moves. Workers whose strain no move lowers are left as they are."""
    stuck: set[int] = set()
    for _ in range(steps):
        order = sorted(range(len(workers)), key=lambda at: workers[at].strain)
        free = [at for at in order if at not in stuck]
        if not free or len(workers) < 2:
            return
        at = free[-1]
        others = [other for other in order[:OTHERS] if workers[at].strain - workers[other].strain > LEAST_GAIN]
        if not others:
            return
        if (move := _best(adapters, workers, at, others)) is None:
            stuck.add(at)
        else:
            _make(adapters, workers, at, move)
            stuck.clear()


@dataclass(frozen=True, slots=True)
class _Move:
    """Adapters that go to another worker, and those that come from there."""

    rows: tuple[int, ...]
    to: int
    back: tuple[int, ...] = ()


def _best(adapters: Adapters, workers: list[Worker], at: int, others: list[int]) -> _Move | None:
    """The move that lowers the larger strain of two workers the most, with the settings that they have.

    The other worker may take the setting of the first instead.
    """
    one = workers[at]
    moves = [move for other in others for move in _candidates(adapters, one, workers[other], other)]
    if not moves:
        return None
    tried: dict[int, list[tuple[int, Loads, int]]] = {}  # by kind: (place, load, setting)
    for place, move in enumerate(moves):
        other = workers[move.to]
        here = _exchanged(adapters, one.kind, one.load, move.rows, move.back)
        there = _exchanged(adapters, other.kind, other.load, move.back, move.rows)
        tried.setdefault(one.kind, []).append((3 * place, here, one.setting))
        tried.setdefault(other.kind, []).append((3 * place + 1, there, other.setting))
        if other.kind == one.kind and other.setting != one.setting:
            tried[one.kind].append((3 * place + 2, there, one.setting))
    strains = np.full(3 * len(moves), np.inf)
    for kind, cases in tried.items():
        places, loads, settings = zip(*cases, strict=True)
        strains[list(places)] = adapters.strains(kind, Loads.stack(loads), np.array(settings))
    larger = np.maximum(strains[0::3], np.minimum(strains[1::3], strains[2::3]))
    best = int(larger.argmin())
    return moves[best] if larger[best] < one.strain - LEAST_GAIN else None


def _exchanged(adapters: Adapters, kind: int, load: Loads, gone: tuple[int, ...], come: tuple[int, ...]) -> Loads:
    loads = adapters.loads[kind]
    if come:
        load = load.with_each(loads.joined(come))
    return load.without_each(loads.joined(gone)) if gone else load


def _candidates(adapters: Adapters, one: Worker, other: Worker, to: int) -> list[_Move]:
    """Moves and exchanges that bring about half of the difference in strain to the other worker."""
    tokens = adapters.tokens
    mine, theirs = _distinct(adapters, one), _distinct(adapters, other)
    part = 0.5 * (1.0 - other.strain / one.strain) * float(tokens[one.rows].sum())
    moves = []
    if len(one.rows) > 1:
        nearest = np.argsort(np.abs(tokens[mine] - part), kind="stable")[:CANDIDATES]
        moves = [_Move((int(row),), to) for row in mine[nearest]]
    rank = float(other.load.extreme("rank")[0])
    small = sorted((row for row in one.rows if adapters.demand.rank[row] <= rank), key=lambda row: (tokens[row], row))
    every = float(tokens[small].sum()) / part if small else 0.0
    if 1.0 < every < 0.5 * len(small):
        moves.append(_Move(tuple(small[round(place)] for place in np.arange(0.0, len(small) - 1.0, every)), to))
    differences = np.abs(tokens[mine][:, None] - tokens[theirs] - part)
    differences[mine[:, None] == theirs] = np.inf
    for index in np.argsort(differences, axis=None, kind="stable")[:CANDIDATES].tolist():
        moves.append(_Move((int(mine[index // len(theirs)]),), to, (int(theirs[index % len(theirs)]),)))
    return moves


def _distinct(adapters: Adapters, worker: Worker) -> Rows:
    """One row of a worker for each rate and rank."""
    rows = np.array(worker.rows, dtype=np.intp)
    kinds = np.stack([adapters.demand.rate[rows], adapters.demand.rank[rows]])
    return rows[np.unique(kinds, axis=1, return_index=True)[1]]


def _make(adapters: Adapters, workers: list[Worker], at: int, move: _Move) -> None:
    one, other = workers[at], workers[move.to]
    workers[at] = adapters.worker(one.kind, [row for row in one.rows if row not in move.rows] + list(move.back))
    workers[move.to] = adapters.worker(other.kind, [row for row in other.rows if row not in move.back] + list(move.rows))


def emptied(adapters: Adapters, workers: list[Worker]) -> list[Worker] | None:
    """The workers without the lightest of the dearest kind, whose adapters the others serve; None where they cannot."""
    if len(workers) < 2:
        return None
    costs = [adapters.kinds[worker.kind].cost for worker in workers]
    light = min(range(len(workers)), key=lambda at: (workers[at].strain / costs[at], at))
    rest = [worker for at, worker in enumerate(workers) if at != light]
    if workers[light].strain * costs[light] > sum((1.0 - worker.strain) * adapters.kinds[worker.kind].cost for worker in rest):
        return None
    for row in sorted(workers[light].rows, key=lambda row: (-adapters.tokens[row], row)):
        if add(adapters, rest, row) > MOST_ABOVE:
            return None
    level(adapters, rest, AFTER_EMPTYING)
    return rest if max(worker.strain for worker in rest) <= 1.0 else None


MOST_ABOVE = 1.05
"""Strain up to which a worker is loaded in the hope that levelling lowers it."""


def add(adapters: Adapters, workers: list[Worker], row: int) -> float:
    """Put one more adapter on the worker that it strains the least, and return its strain."""
    best = (np.inf, 0)
    for kind in sorted({worker.kind for worker in workers}):
        places = [at for at, worker in enumerate(workers) if worker.kind == kind]
        loads = Loads.stack([workers[at].load for at in places]).with_each(adapters.loads[kind].take([row]))
        strains = adapters.strains(kind, loads, np.array([workers[at].setting for at in places]))
        best = min(best, (float(strains.min()), places[int(strains.argmin())]))
    to = best[1]
    workers[to] = adapters.worker(workers[to].kind, [*workers[to].rows, row])
    return workers[to].strain
