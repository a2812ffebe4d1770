"""What the workers of a plan serve when some of them are gone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import CannotServe, Kind, Packed, placed


def taken_over(demand: Demand, kinds: Sequence[Kind], workers: Sequence[Packed], gone: Collection[int]) -> list[Packed]:
    """The workers that are left, with the adapters of those that are `gone`.

    An adapter that has no worker any more goes to the one that is strained least with it, those with the largest rates first.
    One that has copies elsewhere is shared by these. Settings stay. Raises CannotServe if no worker takes an adapter's rank.
    """
    left = [worker for place, worker in enumerate(workers) if place not in gone]
    shares = [worker.share_of for worker in left]
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
    return placed(demand, kinds, worker.kind, worker.setting, shares)
