"""What the workers of a plan serve when some of them are gone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from motet.policies.plan.capacity import judge
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import CannotServe, Kind, Packed


def taken_over(demand: Demand, kinds: Sequence[Kind], workers: Sequence[Packed], gone: Collection[int]) -> list[Packed]:
    """The workers that are left, with the adapters of those that are `gone`.

    An adapter that has no worker any more goes to the one that is strained least with it, those with the largest rates first.
    One that has copies elsewhere is shared by these. Settings stay. Raises CannotServe if no worker takes an adapter's rank.
    """
    left = [worker for place, worker in enumerate(workers) if place not in gone]
    shares = [dict(zip(worker.rows, worker.shares, strict=True)) for worker in left]
    lost = sorted({row for place in gone for row in workers[place].rows}, key=lambda row: (-demand.rate[row], row))
    for row in lost:
        homes = [mine for mine in shares if row in mine]
        if homes:
            for mine in homes:
                mine[row] = 1.0 / len(homes)
            continue
        able = [
            at for at, worker in enumerate(left) if kinds[worker.kind].settings.max_rank[worker.setting] >= demand.rank[row]
        ]
        if not able:
            raise CannotServe(f"no worker that is left takes rank {demand.rank[row]:.0f}")
        strains = [with_shares(demand, kinds, left[at], shares[at] | {row: 1.0}).strain for at in able]
        shares[able[int(np.argmin(strains))]][row] = 1.0
    return [with_shares(demand, kinds, worker, mine) for worker, mine in zip(left, shares, strict=True)]


def with_shares(demand: Demand, kinds: Sequence[Kind], worker: Packed, shares: Mapping[int, float]) -> Packed:
    """A worker with other adapters, given as row: share of its rate, in the same setting."""
    rows = sorted(shares)
    part = [shares[row] for row in rows]
    taken = demand.take(rows)
    kind, at = kinds[worker.kind], np.array([worker.setting])
    said = judge(replace(taken, rate=taken.rate * np.array(part)), kind.settings.take(at), kind.limits.at(at))
    return replace(
        worker,
        rows=tuple(rows),
        shares=tuple(part),
        limit=said.limit(0),
        strain=float(said.strain[0]),
        capacity=float(said.capacity[0]),
        busy=float(said.busy[0]),
        batch=float(said.batch[0]),
        adapters_in_use=float(said.adapters_in_use[0]),
        miss_share=float(said.miss_share[0]),
        tpot_ms=float(said.tpot_ms[0]),
        ttft_ms=float(said.ttft_ms[0]),
    )
