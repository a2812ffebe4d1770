"""Other ways to place adapters, for comparison (adapter caching with a digital twin, section 8.4).

    MaxBase        adapters on a GPU until their rate is the most that the base model does; A_max = its adapters A
    MaxBase*       the same with A_max = A / 2
    Random         each adapter on one of the GPUs at random; A_max uniform in 1..A
    dLoRA          its proactive placement by burst tolerance (`policies.cluster.placement.preload`); A_max = A
    ProposedLat    each adapter on the GPU with the least rate so far; A_max = A
    rank-grouped   no worker has adapters of two ranks; else as `prefixes`

    paper          Algorithms 1 and 2 with the law as predictor (`paper`)

Most do not know whether what they place can be served: who asks for a placement judges it. An A_max that is no setting becomes
the next larger one; where there is none, the memory does not suffice and the setting is `NO_SETTING`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from motet.policies.cluster.placement import Room, preload
from motet.policies.plan.capacity import judge
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Kind, Packed, Packing, placed
from motet.policies.plan.paper import greedy
from motet.policies.plan.prefixes import by_prefixes, zigzag

Rival = Callable[[Demand, Sequence[Kind]], Packing]
NO_SETTING = -1
SEED = 1
DLORA_MOST = 128
"""Workers up to which dLoRA's placement is asked for. Its time grows with the square of their number."""


def max_base(demand: Demand, kinds: Sequence[Kind], *, half: bool = False) -> Packing:
    """MaxBase, and MaxBase* with `half`: adapters in the order given. Workers are not limited."""
    kind, alone = kinds[0], demand.take([0])
    base = judge(replace(alone, rank=np.zeros(1), size_bytes=np.zeros(1)), kind.settings)
    most = float(base.capacity.max()) * float(alone.prompt_tokens[0] + alone.output_tokens[0])
    tokens = demand.rate * (demand.prompt_tokens + demand.output_tokens)
    groups: list[list[int]] = [[]]
    sum_tokens = 0.0
    for row, needs in enumerate(tokens.tolist()):
        if groups[-1] and sum_tokens + needs > most:
            groups.append([])
            sum_tokens = 0.0
        groups[-1].append(row)
        sum_tokens += needs
    return _packing(demand, kind, groups, [math.ceil(len(rows) / 2) if half else len(rows) for rows in groups])


def at_random(demand: Demand, kind: Kind, workers: int) -> Packing:
    """Random, on workers of which some may stay empty."""
    chance = np.random.default_rng(SEED)
    where = chance.integers(0, workers, len(demand))
    groups = [np.flatnonzero(where == worker).tolist() for worker in range(workers)]
    return _packing(demand, kind, groups, [int(chance.integers(1, len(rows) + 1)) if rows else 0 for rows in groups])


def proposed_lat(demand: Demand, kind: Kind, workers: int) -> Packing:
    """ProposedLat: adapters in the order given."""
    groups: list[list[int]] = [[] for _ in range(workers)]
    rates = np.zeros(workers)
    for row, rate in enumerate(demand.rate.tolist()):
        least = int(rates.argmin())
        groups[least].append(row)
        rates[least] += rate
    return _packing(demand, kind, groups, [len(rows) for rows in groups])


def dlora(demand: Demand, kind: Kind, workers: int) -> Packing:
    """dLoRA's proactive placement in the memory for adapters of the setting that has the most. Copies share requests."""
    names = [f"{row:08d}" for row in range(len(demand))]
    load = dict(zip(names, demand.rate.tolist(), strict=True))
    sizes = dict(zip(names, np.maximum(demand.size_bytes, 1.0).astype(np.int64).tolist(), strict=True))
    room = np.minimum(kind.settings.adapter_bytes, kind.settings.slots * max(sizes.values()))
    rooms = {f"{worker:08d}": Room(free_bytes=int(room.max()), slots=len(names)) for worker in range(workers)}
    groups = [[int(name) for name in placed] for placed in preload(load, sizes, rooms).values()]
    copies = np.bincount([row for rows in groups for row in rows], minlength=len(demand))
    if not copies.all():
        raise CannotServe(f"{workers} workers have no room for {int((copies == 0).sum())} adapters")
    return _packing(demand, kind, groups, [len(rows) for rows in groups], shares=1.0 / copies)


def rank_grouped(demand: Demand, kinds: Sequence[Kind]) -> Packing:
    """Each rank on workers of its own, by the law's limits. Raises CannotServe."""
    adapters = Adapters(demand, kinds)
    order = zigzag(demand)
    workers = [one for rank in np.unique(demand.rank) for one in by_prefixes(adapters, order[demand.rank[order] == rank])]
    return Packing(workers=tuple(adapters.packed(workers)), cost=sum(kinds[one.kind].cost for one in workers))


def fewest(place: Callable[[Demand, Kind, int], Packing], most: int | None = None) -> Rival:
    """A rival that is told how many workers there are, at its best: with the fewest that the law does not find strained.

    At most `most`, or one for each adapter. Raises CannotServe where there is no such number.
    """

    def packed(demand: Demand, kinds: Sequence[Kind]) -> Packing:
        def strain(workers: int) -> float:
            try:
                return place(demand, kinds[0], workers).strain
            except CannotServe:
                return math.inf

        high, end = 1, min(len(demand), most or len(demand))
        while strain(high) > 1.0:
            if high >= end:
                raise CannotServe(f"every number of workers up to {end} is strained")
            high = min(2 * high, end)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if strain(middle) <= 1.0 else (middle, high)
        return place(demand, kinds[0], high)

    return packed


def _packing(
    demand: Demand, kind: Kind, groups: Sequence[Sequence[int]], a_max: Sequence[int], shares: np.ndarray | None = None
) -> Packing:
    """Groups of rows as workers; empty groups are no workers."""
    workers = []
    for rows, most in zip(groups, a_max, strict=True):
        if not rows:
            continue
        part = dict.fromkeys(sorted(rows), 1.0) if shares is None else {row: float(shares[row]) for row in sorted(rows)}
        setting = _setting(kind, float(demand.rank[rows].max()), most)
        workers.append(placed(demand, [kind], 0, setting, part) if setting != NO_SETTING else _without_room(part))
    return Packing(workers=tuple(workers), cost=kind.cost * len(workers))


def _without_room(shares: Mapping[int, float]) -> Packed:
    """A worker whose adapters need more slots than its memory has."""
    unknown = dict.fromkeys(("capacity", "busy", "batch", "adapters_in_use", "miss_share", "tpot_ms", "ttft_ms"), math.nan)
    return Packed(
        kind=0,
        rows=tuple(shares),
        shares=tuple(shares.values()),
        setting=NO_SETTING,
        strain=math.inf,
        limit="adapter memory",
        **unknown,
    )


def _setting(kind: Kind, rank: float, a_max: int) -> int:
    """The setting with the smallest S_max for this rank and then the smallest A_max that is not below."""
    settings = kind.settings
    able = np.flatnonzero((settings.max_rank >= rank) & (settings.slots >= a_max))
    if not len(able):
        return NO_SETTING
    return int(able[np.lexsort((settings.slots[able], settings.max_rank[able]))[0]])


RIVALS: dict[str, Rival] = {
    "maxbase": max_base,
    "maxbase*": lambda demand, kinds: max_base(demand, kinds, half=True),
    "random": fewest(at_random),
    "dlora": fewest(dlora, most=DLORA_MOST),
    "proposedlat": fewest(proposed_lat),
    "rank_grouped": rank_grouped,
    "paper": lambda demand, kinds: greedy(demand, kinds[0]),
}
"""By name. Those that know one kind take the first."""
