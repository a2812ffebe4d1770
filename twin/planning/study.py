"""A plan as it is written and read: from the planner's result, and back for a check on another load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from motet.policies.plan.fleet import Packed
from motet.policies.plan.loss import with_shares
from motet.policies.times.perf_model import MIB
from motet.shared.plan import VERSION, Checked, Plan, PlannedAdapter, PlannedKind, PlannedObjective, PlannedWorker
from motet.twin.figures import cell
from motet.twin.planning.check import Result
from motet.twin.planning.kinds import Kind, Part
from motet.twin.planning.loads import Loads
from motet.twin.planning.planner import Breaking, Goal, Made, Offer, Trial


def written(
    made: Made, offers: Sequence[Offer], goal: Goal, trial: Trial | None, *, bound: float | None, breaks: Breaking | None
) -> Plan:
    """The plan of the planner's result."""
    results: Sequence[Result | None] = made.results or [None] * len(made.workers)
    parts = made.parts
    most = {number: max(len(part.loads) for other, part in parts if other == number) for number, _ in parts}
    workers = []
    for worker, (number, part), result in zip(made.workers, parts, results, strict=True):
        kind = offers[number].kind
        workers.append(_worker(kind, worker, part, result, adapters=most[number] if kind.together else len(part.loads)))
    return Plan(
        motet_plan=VERSION,
        objective=goal.objective,
        headroom=goal.headroom,
        survive=goal.survive,
        objectives=tuple(PlannedObjective(slo=one.slo, share=one.share) for one in made.loads.objectives),
        kinds=tuple(PlannedKind(name=one.kind.name, cost=one.cost, most=one.most) for one in offers),
        workers=tuple(workers),
        cost=made.cost,
        bound=bound,
        checked=checked(parts, made.results, trial, breaks, made.left) if trial is not None and made.results else None,
    )


def _worker(kind: Kind, worker: Packed, part: Part, result: Result | None, *, adapters: int) -> PlannedWorker:
    """A worker of a plan, started for so many adapters."""
    law, at = kind.settings, part.setting
    slots, size = float(law.slots[at]), float(law.adapter_bytes[at])
    order = np.argsort(-part.loads.rate, kind="stable").tolist()
    return PlannedWorker(
        kind=kind.name,
        adapters=tuple(
            PlannedAdapter(name=part.loads.names[row], rank=int(part.loads.rank[row]), rate=float(part.loads.rate[row]))
            for row in order
        ),
        flags=kind.flags(at, adapters),
        s_max=int(law.max_rank[at]),
        a_max=int(slots) if np.isfinite(slots) else None,
        kv_tokens=int(law.kv_tokens[at]),
        adapter_bytes=int(size) if np.isfinite(size) else None,
        adapter_share=kind.adapter_share(at),
        busy=worker.busy,
        in_use=worker.adapters_in_use,
        limit=worker.limit,
        ttft_p99_ms=None if result is None else _finite(result.ttft_p99_ms),
        tpot_p99_ms=None if result is None else _finite(result.tpot_p99_ms),
        attained=None if result is None else result.share,
        served=None if result is None else result.served_share,
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def cells(worker: PlannedWorker) -> dict[str, str]:
    """A worker of a plan as text, by column. Latencies are in ms, without the unit."""
    return {
        "adapters": f"{len(worker.adapters):,}",
        "req/s": f"{sum(adapter.rate for adapter in worker.adapters):.1f}",
        "S_max": str(worker.s_max),
        "A_max": cell(worker.a_max, "d"),
        "KV tokens": f"{worker.kv_tokens:,}",
        "adapters MiB": cell(None if worker.adapter_bytes is None else worker.adapter_bytes / MIB, ",.0f"),
        "busy": f"{worker.busy:.0%}",
        "in use": f"{worker.in_use:.1f}",
        "TTFT p99": cell(worker.ttft_p99_ms, ",.0f"),
        "TPOT p99": cell(worker.tpot_p99_ms, ",.0f"),
        "attained": cell(worker.attained, ".2%"),
        "limit": worker.limit,
    }


def checked(
    parts: Sequence[tuple[int, Part]],
    results: Sequence[Result],
    trial: Trial,
    breaks: Breaking | None = None,
    left: Made | None = None,
) -> Checked:
    """What the twin found, over all workers. `left`: what remains of the plan after the loss that it survives."""
    worst_name, worst = "", 1.0
    for (_, part), result in zip(parts, results, strict=True):
        shares = result.attained / np.maximum(result.arrived, 1)
        shares[result.arrived == 0] = 1.0
        at = int(shares.argmin())
        if not worst_name or shares[at] < worst:
            worst_name, worst = part.loads.names[at], float(shares[at])
    return Checked(
        seeds=len(trial.seeds),
        seconds=trial.duration_s - trial.warm_s,
        attained=attained(results),
        worst_adapter=worst_name,
        worst_attained=worst,
        valid=all(result.valid for result in results) and (left is None or left.valid),
        after_loss=None if left is None else attained(left.results),
        holds_to=None if breaks is None else breaks.holds_to,
        breaks_first=None if breaks is None or breaks.worker is None else breaks.worker + 1,
        breaks_by="" if breaks is None else breaks.missed,
    )


def attained(results: Sequence[Result]) -> float:
    """The share of all requests that attained their objectives."""
    return sum(int(result.attained.sum()) for result in results) / max(1, sum(int(result.arrived.sum()) for result in results))


def parts_of(plan: Plan, loads: Loads, offers: Sequence[Offer]) -> tuple[list[tuple[int, Part]], float]:
    """The workers of a plan under another load, and the share of its requests on adapters that the plan does not have.

    These go to the workers that are least busy, one after another. Raises ValueError if a kind of the plan is not offered.
    """
    numbers = {one.kind.name: number for number, one in enumerate(offers)}
    missing = {worker.kind for worker in plan.workers} - numbers.keys()
    if missing:
        raise ValueError(f"the plan has workers of {', '.join(sorted(missing))}; give them with --worker")
    rows = {name: row for row, name in enumerate(loads.names)}
    planned: dict[str, float] = {}
    for worker in plan.workers:
        for adapter in worker.adapters:
            planned[adapter.name] = planned.get(adapter.name, 0.0) + adapter.rate
    taken: list[dict[int, float]] = [
        {rows[one.name]: one.rate / planned[one.name] for one in worker.adapters if one.name in rows} for worker in plan.workers
    ]
    unknown = [row for name, row in rows.items() if name not in planned]
    rates = [sum(loads.rate[row] * share for row, share in mine.items()) for mine in taken]
    for row in sorted(unknown, key=lambda row: -loads.rate[row]):
        at = int(np.argmin(rates))
        taken[at][row] = 1.0
        rates[at] += loads.rate[row]
    found = []
    for worker, mine in zip(plan.workers, taken, strict=True):
        if mine:
            number = numbers[worker.kind]
            index = np.array(sorted(mine))
            part = loads.take(index, loads.rate[index] * np.array([mine[row] for row in index.tolist()]))
            found.append((number, Part(setting=_setting(offers[number].kind, worker), loads=part)))
    return found, float(loads.rate[unknown].sum() / loads.rate.sum())


def _setting(kind: Kind, worker: PlannedWorker) -> int:
    """The kind's setting that is like the worker's."""
    law = kind.settings
    slots = np.where(np.isfinite(law.slots), law.slots, 0.0) - (worker.a_max or 0)
    away = np.abs(law.max_rank - worker.s_max) * 1e12 + np.abs(slots) * 1e9 + np.abs(law.kv_tokens - worker.kv_tokens)
    return int(away.argmin())


def explained(made: Made, offers: Sequence[Offer], name: str) -> list[str]:
    """Why an adapter is where it is, as sentences. Raises ValueError if the plan does not have it."""
    if name not in made.loads.names:
        raise ValueError(f"the plan has no adapter {name!r}")
    row = made.loads.names.index(name)
    demand, rank = made.loads.demand, int(made.loads.rank[row])
    lengths = f"{demand.prompt_tokens[row]:.0f} + {demand.output_tokens[row]:.0f} tokens"
    lines = [f"{name}: rank {rank}, {demand.rate[row]:.4g} requests/s of {lengths}."]
    homes = [place for place, worker in enumerate(made.workers) if row in worker.rows]
    if len(homes) > 1:
        lines.append(f"One worker cannot serve it alone, so {len(homes)} workers share its requests.")
    for place, worker in enumerate(made.workers):
        kind, at = offers[worker.kind].kind, worker.setting
        largest = int(kind.settings.max_rank[at])
        where = f"worker {place + 1} ({kind.name})"
        if rank > largest:
            lines.append(f"Not on {where}, whose largest rank is {largest}.")
            continue
        shares = worker.share_of
        with_it = _strained(made, worker, {row: 1.0} | shares)
        if place in homes:
            without_it = _strained(made, worker, {other: share for other, share in shares.items() if other != row})
            lines.append(f"On {where}: {with_it}; {without_it} without it.")
        else:
            lines.append(f"With it {where} would have {with_it}.")
    return lines


def _strained(made: Made, worker: Packed, shares: Mapping[int, float]) -> str:
    """What binds first on a worker with these adapters, and at which share of what is allowed."""
    if not shares:
        return "nothing"
    found = with_shares(made.loads.demand, made.kinds, worker, shares)
    return f"{found.limit} at {found.strain:.0%} of what is allowed"
