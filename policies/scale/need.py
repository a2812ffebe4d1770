"""How many workers a load needs: the law and the packing of `policies.plan`, from what live workers say of themselves.

    FleetDemand ─rates, shares─┐
    RateForecast ─load ahead───┤─> Demand, a row for each adapter ─┐
    limits and step times of the workers that serve ─> a Kind ─────┴─> pack ─> workers

Step times are the workers' own estimates (`PerfModel`). A mesh may have workers of several kinds; sizes are made for the kind
that most of them are, and for the middle one of their step times. At most `ROWS_MAX` adapters have rows of their own: the less
busy ones take part in equal groups, each of which stands for its adapters' load and bytes.

A plan is made for each worker by itself; a size counts on dispatch. A request goes to a worker with room, so seats and KV
blocks are short only when all workers' are. n workers are enough if the packing needs at most n where the number of requests on
each deviates as that of all of them over n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import CannotServe, Kind, Packing
from motet.policies.plan.native import native_settings
from motet.policies.plan.native_steps import LinearSteps
from motet.policies.plan.packing import pack
from motet.policies.scale.fleet_demand import AdapterShare, BaseRates
from motet.policies.scale.rate_forecast import Rates
from motet.policies.scale.sizing import Need
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions

ROWS_MAX = 512
ALIKE = 0.02
"""Loads are rounded up to powers of 1 + ALIKE: answers are kept for these."""
KNOWN_S = 60.0
"""An answer counts at least for so long although shares and step times change: a packing takes up to some hundred ms."""
EVEN = 1 << 20
"""Workers among which load is as even as can be."""
USUAL_TOKENS = 128.0
"""Tokens of a prompt and of an answer where no request has come yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What most requests are to meet."""

    ttft_slo_ms: float
    tpot_slo_ms: float
    share: float = 0.99


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a base model now."""

    requests_s: float
    prompt_tokens_s: float
    output_tokens_s: float
    rows: list[AdapterShare]  # at most ROWS_MAX: the busiest adapters, and groups of the others

    @classmethod
    def of(cls, rates: BaseRates) -> Self:
        """From the rates by adapter."""
        return cls(
            requests_s=rates.requests_s,
            prompt_tokens_s=rates.prompt_tokens_s,
            output_tokens_s=rates.output_tokens_s,
            rows=_rows(list(rates.adapters.values())),
        )

    @property
    def tokens_each(self) -> float:
        """Tokens of a request, prompt and answer; 0 where none came."""
        return (self.prompt_tokens_s + self.output_tokens_s) / self.requests_s if self.requests_s else 0.0


Worker = tuple[WorkerLimits, PerfModel]
"""Limits and step times, as it reports them."""


def typical(workers: Sequence[Worker]) -> Worker:
    """Of the kind that most of these workers are, the one with the middle step times. There is at least one worker."""
    counts = Counter(_memory(limits) for limits, _ in workers)
    most = max(counts, key=lambda memory: (counts[memory], memory))
    alike = sorted((one for one in workers if _memory(one[0]) == most), key=lambda one: _step_ms(one[1]))
    return alike[len(alike) // 2]


def kind_of(limits: WorkerLimits, perf: PerfModel) -> Kind:
    """Workers like this one, for the law."""
    steps = LinearSteps(perf=perf, stalls=limits.copies == "stall")
    settings = native_settings(limits, WorkerOptions(), steps)
    if not limits.kv_block_bytes:  # its memory stays divided as it is
        settings = settings.take(np.array([0]))
    return Kind(name=limits.engine, settings=settings)


def _memory(limits: WorkerLimits) -> tuple[int, ...]:
    return limits.max_running, limits.kv_blocks_total * limits.block_size, limits.adapter_bytes_total, limits.max_lora_rank


def _step_ms(perf: PerfModel) -> float:
    return perf.decode_base_ms + 8.0 * perf.decode_row_ms


class Packed:
    """The workers that loads need. Remembers for `KNOWN_S` what loads that are alike need."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._rows: list[AdapterShare] = []
        self._tokens = USUAL_TOKENS, USUAL_TOKENS  # of prompts and answers, the last that were seen
        self._kind: Kind | None = None
        self._known: dict[tuple[int, int], Need] = {}
        self._known_s = 0.0
        self._basis: object = None  # of the answers that are known

    def know(self, asked: Asked, worker: Worker | None, now_s: float) -> None:
        """What is asked for now, and a `typical` worker; None without any."""
        if asked.requests_s:
            self._tokens = asked.prompt_tokens_s / asked.requests_s, max(asked.output_tokens_s / asked.requests_s, 1.0)
        basis = asked.rows, worker, *map(_bin, self._tokens)
        old = now_s - self._known_s >= KNOWN_S and basis != self._basis
        if old or (self._kind is None) != (worker is None):
            self._known, self._known_s, self._basis = {}, now_s, basis
        self._rows, self._kind = asked.rows, kind_of(*worker) if worker is not None else None

    def __call__(self, load: Rates) -> Need:
        """The need of a load, of the adapters in the shares that are known."""
        if load.requests_s <= 0.0 or self._kind is None or not self._rows:
            return Need(1)
        alike = _bin(load.requests_s), _bin(load.tokens_s / load.requests_s)
        if alike not in self._known:
            most, each = ((1.0 + ALIKE) ** number for number in alike)
            self._known[alike] = self._pack(Rates(most, most * each if load.tokens_s else 0.0), self._kind)
        return self._known[alike]

    def _pack(self, load: Rates, kind: Kind) -> Need:
        try:
            packing = _pooled(self.demand(load), kind)
        except CannotServe as error:
            return Need(0, impossible=str(error))
        return Need(len(packing.workers), max(packing.workers, key=lambda worker: worker.strain).limit)

    def demand(self, load: Rates) -> Demand:
        """The load, a row for each adapter or group."""
        prompt, output = self._tokens
        longer = load.tokens_s / load.requests_s / (prompt + output) if load.tokens_s else 1.0
        rows = self._rows
        return Demand.of(
            np.array([one.share for one in rows]) * load.requests_s,
            rank=[one.rank for one in rows],
            size_bytes=[one.size_bytes for one in rows],
            prompt_tokens=max(prompt * longer, 1.0),
            output_tokens=max(output * longer, 1.0),
            ttft_slo_ms=self._objective.ttft_slo_ms,
            tpot_slo_ms=self._objective.tpot_slo_ms,
            share=self._objective.share,
        )


def _pooled(demand: Demand, kind: Kind) -> Packing:
    """The fewest workers that are enough when requests are spread over as many of them."""

    def packed(pool: int) -> Packing:
        pooled = replace(kind, limits=replace(kind.limits, pool=pool))
        return pack(demand, [pooled], procedure="bisect")

    low = len(packed(EVEN).workers)
    found = packed(low)
    high = len(found.workers)
    while low < high:  # `high` workers are enough; fewer than `low` are not
        middle = (low + high) // 2
        fewer = packed(middle)
        if len(fewer.workers) <= middle:
            found, high = fewer, middle
        else:
            low = middle + 1
    return found


def _bin(value: float) -> int:
    return math.ceil(math.log(max(value, 1e-9)) / math.log1p(ALIKE) - 1e-6)


def _rows(shares: list[AdapterShare]) -> list[AdapterShare]:
    """The busiest, and groups of the others."""
    busiest = sorted(shares, key=lambda one: (-one.share, one.rank, one.size_bytes))
    own, others = busiest[: ROWS_MAX // 2], busiest[ROWS_MAX // 2 :]
    each = -(-len(others) // (ROWS_MAX // 2)) if others else 1
    groups = [others[at : at + each] for at in range(0, len(others), each)]
    return own + [
        replace(
            group[0],
            share=sum(one.share for one in group),
            rank=max(one.rank for one in group),
            size_bytes=sum(one.size_bytes for one in group),
        )
        for group in groups
    ]
