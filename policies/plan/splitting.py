"""Copies of adapters that need more than one worker, and the reason where no worker can serve an adapter at all.

An adapter gets the smallest number of equal copies such that a worker can serve one. Two copies together then need more than
any worker has, so no packing puts them on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.policies.plan.capacity import judge
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Adapters, CannotServe, Kind, Rows

IDLE = 1e-9
"""Requests/s of an adapter on an idle worker, and of adapters without requests."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Copies:
    """A demand with a row for each copy of an adapter."""

    adapters: Adapters
    row: Rows  # of the adapter in the original demand
    share: Floats  # of its rate


def split(demand: Demand, kinds: Sequence[Kind]) -> Copies:
    """Copies such that each can be served by a worker of some kind. Raises CannotServe where an adapter cannot be split so."""
    whole = replace(demand, rate=np.maximum(demand.rate, IDLE))
    adapters = Adapters(whole, kinds)
    copies = np.ones(len(demand), dtype=np.intp)
    for row in _doubtful(adapters).tolist():
        copies[row] = _copies(whole.take([row]), kinds)
    rows = np.repeat(np.arange(len(demand)), copies)
    share = 1.0 / copies[rows]
    if len(rows) > len(demand):
        several = whole.take(rows)
        adapters = Adapters(replace(several, rate=several.rate * share), kinds)
    return Copies(adapters, rows, share)


def _doubtful(adapters: Adapters) -> Rows:
    """Adapters that no kind's worker can serve with the setting that has the most KV for them."""
    rank = adapters.demand.rank
    doubtful = np.ones(len(adapters), dtype=bool)
    for at, kind in enumerate(adapters.kinds):
        if kind.most == 0:
            continue
        room = np.where(kind.settings.max_rank >= rank[:, None], kind.settings.kv_tokens, -1.0)
        doubtful &= ~(adapters.strains(at, adapters.loads[at], room.argmax(axis=1)) <= 1.0)
    return np.flatnonzero(doubtful)


def _copies(one: Demand, kinds: Sequence[Kind]) -> int:
    """The smallest number of copies of an adapter that a worker can serve one of."""
    allowed = [kind for kind in kinds if kind.most != 0]

    def strain(rate: Floats) -> float:
        return min(float(judge(replace(one, rate=rate), kind.settings, kind.limits).strain.min()) for kind in allowed)

    if not allowed or strain(np.array([IDLE])) > 1.0:
        raise CannotServe(_reason(one, allowed))
    copies = 1
    while strain(one.rate / copies) > 1.0:
        copies += 1
    return copies


def _reason(one: Demand, kinds: Sequence[Kind]) -> str:
    """Why an adapter cannot be served by an idle worker, of the kind that comes nearest."""
    if not kinds:
        return "no workers are allowed"
    rank, largest = float(one.rank[0]), max(float(kind.settings.max_rank.max()) for kind in kinds)
    if rank > largest:
        return f"an adapter has rank {rank:.0f}; the largest that a worker holds is {largest:.0f}"
    size, room = float(one.size_bytes[0]), max(float(kind.settings.adapter_bytes.max()) for kind in kinds)
    if size > room:
        return f"an adapter takes {size / MIB:.0f} MiB; a worker has {room / MIB:.0f} MiB for adapters"
    idle = replace(one, rate=np.array([IDLE]))
    said = [judge(idle, kind.settings, kind.limits) for kind in kinds]
    verdict = min(said, key=lambda verdict: float(verdict.strain.min()))
    best = verdict.best
    objectives = {
        "TPOT": ("per token", verdict.tpot_ms[best], one.tpot_slo_ms[0]),
        "TTFT": ("to the first token", verdict.ttft_ms[best], one.ttft_slo_ms[0]),
    }
    limit = verdict.limit(best)
    if limit in objectives:
        what, needs_ms, slo_ms = objectives[limit]
        within = "" if needs_ms > slo_ms else f", of which {needs_ms / slo_ms / verdict.strain[best]:.0%} may be used"
        return f"an idle worker needs {needs_ms:.1f} ms {what}; the objective is {slo_ms:g}{within}"
    tokens = float(one.prompt_tokens[0] + one.output_square[0] / (2.0 * one.output_tokens[0]))
    return f"requests of {tokens:.0f} tokens leave room for {verdict.batch_most[best]:.1f} at a time on a worker ({limit})"
