"""The workers that the law proposes, where packing alone is not the answer.

together    kinds that `motet up` starts with one setting: that of most workers, for all
survive     N of W workers may be gone: they are packed for W / (W - N) of the load, each takes every rank, and there are so
            many at least. The smallest W for which that is enough
spread      the lowest latencies: all workers that there can be, strained alike
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import CannotServe, Kind, Packed, Rows
from motet.policies.plan.loss import with_shares
from motet.policies.plan.packing import pack, pack_onto

Propose = Callable[[Sequence[Kind]], Sequence[Packed]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked besides the demand. `together`: numbers of kinds."""

    together: frozenset[int] = frozenset()
    survive: int = 0
    spread: bool = False


def workers_for(demand: Demand, kinds: Sequence[Kind], question: Question) -> tuple[Packed, ...]:
    """The workers. Raises CannotServe with the reason where there are none."""
    return tuple(alike(lambda some: _proposed(demand, some, question), kinds, question.together))


def _proposed(demand: Demand, kinds: Sequence[Kind], question: Question) -> list[Packed]:
    lost = question.survive
    if lost:
        every = {number: _of_all_ranks(kind, demand) for number, kind in enumerate(kinds)}
        return _with(kinds, every, lambda some: _spread_or_not(demand, some, question, _surviving(demand, some, lost)))
    return _spread_or_not(demand, kinds, question, pack(demand, kinds).workers)


def _of_all_ranks(kind: Kind, demand: Demand) -> Rows:
    """The settings of a kind that take the largest rank; all settings where none does."""
    able = np.flatnonzero(kind.settings.max_rank >= demand.rank.max())
    return able if len(able) else np.arange(len(kind.settings))


def _surviving(demand: Demand, kinds: Sequence[Kind], lost: int) -> list[Packed]:
    """The fewest workers of which so many may be gone, packed for what the others get then."""
    allowed = sum(np.inf if kind.most is None else kind.most for kind in kinds)
    total = len(pack(demand, kinds).workers) + lost
    while total <= allowed:
        more = demand.faster(total / (total - lost))
        try:
            workers = pack(more, kinds).workers
        except CannotServe:  # with more workers each gets less from those that are gone
            workers = ()
        if 0 < len(workers) <= total:
            return _restated(demand, kinds, divided(more, kinds, workers, total))
        total += 1
    raise CannotServe(f"{allowed:.0f} workers are allowed; the load cannot do without {lost} of them")


def _spread_or_not(demand: Demand, kinds: Sequence[Kind], question: Question, workers: Sequence[Packed]) -> list[Packed]:
    if not question.spread:
        return list(workers)
    found = Counter(worker.kind for worker in workers)
    counts = [found[number] if kind.most is None else kind.most for number, kind in enumerate(kinds)]
    more = demand.faster(sum(counts) / (sum(counts) - question.survive))
    return _restated(demand, kinds, divided(more, kinds, pack_onto(more, kinds, counts).workers, sum(counts)))


def divided(demand: Demand, kinds: Sequence[Kind], workers: Sequence[Packed], total: int) -> list[Packed]:
    """As many workers: the most strained one, again and again, becomes two that share its adapters. Raises CannotServe."""
    found = list(workers)
    while len(found) < total:
        counts = Counter(worker.kind for worker in found)
        free = [number for number, kind in enumerate(kinds) if kind.most is None or counts[number] < kind.most]
        able = [place for place, worker in enumerate(found) if worker.kind in free]
        if not able:
            raise CannotServe(f"{total} workers are needed, and {len(found)} are allowed")
        worker = found.pop(max(able, key=lambda place: found[place].strain))
        halves = {row: share / 2.0 for row, share in worker.share_of.items()}
        found += [with_shares(demand, kinds, worker, halves)] * 2
    return found


def _restated(demand: Demand, kinds: Sequence[Kind], workers: Sequence[Packed]) -> list[Packed]:
    """Workers that were packed for more load, as the law judges them at this one."""
    return [with_shares(demand, kinds, worker, worker.share_of) for worker in workers]


def alike(propose: Propose, kinds: Sequence[Kind], together: frozenset[int]) -> list[Packed]:
    """The workers proposed for the kinds, those of a kind of `together` with one setting.

    It is the one that most of them have; where not all adapters can be served with it, the next. Raises CannotServe.
    """
    workers, chosen = list(propose(kinds)), dict[int, Rows]()
    for kind in sorted(together):
        counts = Counter(worker.setting for worker in workers if worker.kind == kind)
        if len(counts) > 1:
            workers, chosen[kind] = _one_setting(propose, kinds, chosen, kind, [setting for setting, _ in counts.most_common()])
    return workers


def _one_setting(
    propose: Propose, kinds: Sequence[Kind], chosen: Mapping[int, Rows], kind: int, settings: Sequence[int]
) -> tuple[list[Packed], Rows]:
    failed: CannotServe | None = None
    for setting in settings:
        only = np.array([setting])
        try:
            return _with(kinds, {**chosen, kind: only}, propose), only
        except CannotServe as error:
            failed = failed or error
    assert failed is not None, "there is a setting"
    raise failed


def _with(kinds: Sequence[Kind], chosen: Mapping[int, Rows], propose: Propose) -> list[Packed]:
    """The workers proposed where some kinds have only these settings, with the settings' numbers among all."""
    some = [
        replace(kind, settings=kind.settings.take(chosen[number]), limits=kind.limits.at(chosen[number]))
        if number in chosen
        else kind
        for number, kind in enumerate(kinds)
    ]
    return [
        replace(worker, setting=int(chosen[worker.kind][worker.setting])) if worker.kind in chosen else worker
        for worker in propose(some)
    ]
