"""A plan: workers, the adapters and the memory of each, and what the twin found. `motet plan --json` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from motet.shared.json_files import FileError, line_of, read_versioned
from motet.shared.model import Slo

VERSION = 1
_Share = Annotated[float, Meta(ge=0, le=1)]
_Amount = Annotated[float, Meta(ge=0)]


class PlannedObjective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objective of a class of requests, and the share of them that must meet it."""

    slo: Slo
    share: _Share


class PlannedKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of worker that could be had, as `--worker` named it."""

    name: str
    cost: _Amount = 1.0  # per worker and hour
    most: Annotated[int, Meta(ge=0)] | None = None


class PlannedAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter on a worker; `rate` is what this worker gets of its requests per second."""

    name: str
    rank: Annotated[int, Meta(ge=0)]
    rate: _Amount


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker: its adapters, how it is set, and what the law and the twin say of it."""

    kind: str
    adapters: tuple[PlannedAdapter, ...]
    flags: str
    """The options to start it with."""
    s_max: int = 0
    """The largest rank that it takes."""
    a_max: int | None = None
    """Its adapter slots; None where only bytes limit the adapters on the device."""
    kv_tokens: int
    adapter_bytes: int | None = None
    """Bytes of its memory for adapters; None where only slots limit them."""
    adapter_share: _Share | None = None
    """Of the memory for KV blocks and adapters, what adapters get; None where it is not known."""
    busy: _Amount
    """Load over the capacity."""
    in_use: _Amount
    """Adapters that are in use at a time, on average."""
    limit: str
    """What binds first."""
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    attained: _Share | None = None
    served: _Share | None = None


class Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the twin found with requests that were drawn anew."""

    seeds: int
    seconds: float  # of load that counted, with each seed
    attained: _Share
    worst_adapter: str
    worst_attained: _Share
    valid: bool
    """Every worker and every adapter keeps its objective, also after the loss of the most loaded workers that it survives."""
    after_loss: _Share | None = None
    """What is attained without the most loaded `survive` workers."""
    holds_to: float | None = None
    """The largest multiple of the load at which the plan is still valid, as far as was looked."""
    breaks_first: int | None = None
    """The worker that misses first beyond it, by its place from 1."""
    breaks_by: str = ""
    """What it misses."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole plan."""

    motet_plan: int
    objective: str
    headroom: _Amount
    survive: Annotated[int, Meta(ge=0)] = 0
    objectives: tuple[PlannedObjective, ...]
    kinds: tuple[PlannedKind, ...]
    workers: tuple[PlannedWorker, ...]
    cost: _Amount
    bound: _Amount | None = None
    """Fewer workers (with the objective `cost`: less cost) than this are impossible under the law."""
    checked: Checked | None = None


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises FileError naming the line and the field."""
    text, plan = read_versioned(path, Plan, "motet_plan", VERSION)
    names = {kind.name for kind in plan.kinds}
    for place, worker in enumerate(plan.workers):
        if worker.kind not in names:
            raise FileError(path, line_of(text, "workers"), f"workers[{place}].kind", f"{worker.kind!r} is none of kinds")
        if not worker.adapters:
            raise FileError(path, line_of(text, "workers"), f"workers[{place}].adapters", "there must be at least one")
    if not plan.workers or not plan.objectives:
        raise FileError(path, 1, "workers" if not plan.workers else "objectives", "there must be at least one")
    return plan


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan in the format of `read_plan`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
