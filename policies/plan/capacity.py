"""The law of a worker: how much load it carries, in closed form, from its step times and its memory.

One formula for the planner, its bound and its packing. A worker serves adapters with rates l_i (L in total), prompts of P and
outputs of O tokens on average. While B requests run,

    held    = P + E[O^2] / 2 E[O] + block / 2       KV tokens of a running request (long ones are met more often)
    B_most  = min(seats, (KV tokens - P) / held, tokens of a step / (1 + P/O)); a waiting prompt leaves room for P unused
    n(B)    = sum_i 1 - exp(-B l_i O_i / L O)       different adapters among them
    T(B)    = (1 - m) decode(B, n) + m mixed(B, n, B P / O m),  m = 1 - exp(-B/O)    a step; B / O requests end and begin in it
    rate(B) = B / (O T(B)),  C = rate's maximum for B <= B_most

and at the load L, B* is where rate(B*) = L, a request stays S = B* / L seconds, busy = L / C, and a = sum_i 1 - exp(-l_i S)
adapters are in use, with the variance v = sum_i exp(-l_i S) (1 - exp(-l_i S)). Copies of adapters that were evicted (Che's
approximation of least recently used) lengthen the steps. A load is small enough if

    busy <= b_max   B* + z sqrt(c B*) <= B_most   a + z sqrt(v) <= slots   T within TPOT   T/2 + mixed + copy within TTFT

and the same for bytes as for slots. The roots are square-root staffing, c is the peakedness of the arrivals. All of it is
evaluated at once for every way of setting a worker (`Settings`). It leaves out heavy tails beyond E[O^2], prefix caches and
merged adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from motet.policies.plan.demand import Demand, Floats

TIMES_S = np.geomspace(1e-3, 1e6, 128)
"""Times at which the adapters in use are counted; between them it is interpolated."""
BATCHES = np.geomspace(2e-3, 1.0, 40)
"""Batch sizes at which steps are computed, as shares of the largest batch."""
LIMITS = ("compute", "KV", "seats", "step tokens", "slots", "adapter memory", "TPOT", "TTFT")
"""What can bind, in the order of `Verdict.strains`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Steps of a kind, in arrays that broadcast to one shape: what a step contains on average."""

    rows: Floats  # requests that decode
    context_tokens: Floats  # in the KV cache of these
    distinct: Floats  # adapters of these
    adapter_bytes: Floats  # of the distinct adapters
    rank: float  # mean over requests
    max_rank: float
    adapters: float  # that the worker serves
    prompt_tokens: Floats | None = None
    prompts: Floats | None = None  # None: no request begins in these steps


class StepLaw(Protocol):
    """Step times of one kind of worker, for all its settings."""

    def step_ms(self, mix: Mix) -> Floats:
        """The time of steps, [settings, batches]."""
        ...

    def copy_ms(self, demand: Demand) -> Floats:
        """The time to copy an adapter to the device, [settings, rows of the demand]."""
        ...

    @property
    def stalls(self) -> bool:
        """Whether steps wait for copies."""
        ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The ways in which a worker of one kind can be set. Columns are [settings]."""

    steps: StepLaw
    slots: Floats  # adapters on the device; inf where only bytes count
    adapter_bytes: Floats  # for adapters; inf where only slots count
    max_rank: Floats
    kv_tokens: Floats
    seats: float
    step_tokens: float = np.inf
    block_tokens: int = 16
    headroom_tokens: float = 0.0
    """KV tokens that stay free for each running request."""

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a worker may be loaded. The planner tightens them where the twin finds an objective missed."""

    busy: float = 0.95
    z: float = 2.4
    latency: float = 1.0
    """Share of the objectives that the law's own latencies may take."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the law says of one load, for every setting. Columns are [settings]."""

    capacity: Floats  # requests/s
    busy: Floats
    batch: Floats  # B*; of the largest batch where the load is above the capacity
    batch_most: Floats
    adapters_in_use: Floats  # a
    miss_share: Floats  # of requests whose adapter must be copied
    tpot_ms: Floats
    ttft_ms: Floats
    strains: Floats = field(repr=False)
    """[settings, limits]: each demand divided by what is allowed. inf where it cannot be: a rank above the largest."""

    @property
    def strain(self) -> Floats:
        """The largest strain. The load is small enough where it is at most 1."""
        return np.asarray(self.strains.max(axis=1))

    @property
    def best(self) -> int:
        """The setting with the least strain."""
        return int(self.strain.argmin())

    def limit(self, setting: int) -> str:
        """What binds first."""
        return LIMITS[int(self.strains[setting].argmax())]


def judge(demand: Demand, settings: Settings, limits: Limits = Limits()) -> Verdict:
    """The law at a load, for all settings. The demand has at least one row, and a rate above 0."""
    use = _InUse(demand)
    rate = demand.total_rate
    prompt, output = demand.mean(demand.prompt_tokens), demand.mean(demand.output_tokens)
    context = prompt + demand.mean(demand.output_square) / (2.0 * output)
    most = np.stack(
        [
            np.maximum(settings.kv_tokens - prompt, 0.0) / (context + settings.block_tokens / 2 + settings.headroom_tokens),
            np.full(len(settings), settings.seats),
            np.full(len(settings), settings.step_tokens / (1.0 + prompt / output)),
        ]
    )
    batch_most = most.min(axis=0)
    batches = batch_most[:, None] * BATCHES
    with_prompts = -np.expm1(-batches / output)  # share of steps
    begin = batches / (output * with_prompts)  # requests that begin in such a step
    mix = Mix(
        rows=batches,
        context_tokens=batches * context,
        distinct=np.minimum(use.adapters.at(batches / rate), settings.slots[:, None]),
        adapter_bytes=np.minimum(use.size_bytes.at(batches / rate), settings.adapter_bytes[:, None]),
        rank=demand.mean(demand.rank),
        max_rank=float(demand.rank.max()),
        adapters=demand.adapters,
    )
    decode_ms = settings.steps.step_ms(mix)
    mixed_ms = settings.steps.step_ms(replace(mix, prompt_tokens=begin * prompt, prompts=begin))
    misses, copy_ms = use.misses(settings)
    stall_ms = copy_ms * misses if settings.steps.stalls else np.zeros(len(settings))
    step_ms = (1.0 - with_prompts) * decode_ms + with_prompts * mixed_ms + batches / output * stall_ms[:, None]

    rates = np.maximum.accumulate(batches / (output * step_ms) * 1e3, axis=1)
    capacity = rates[:, -1]
    batch = np.array([np.interp(rate, r, b) for r, b in zip(rates, batches, strict=True)])
    tpot_ms, begin_ms = (
        np.array([np.interp(b, x, y) for b, x, y in zip(batch, batches, times, strict=True)]) for times in (step_ms, mixed_ms)
    )
    copied = misses > 1.0 - float(demand.share.max())
    ttft_ms = 0.5 * tpot_ms + begin_ms + np.where(copied, copy_ms, 0.0)

    residence_s = batch / np.minimum(rate, capacity)
    strains = np.stack(
        [
            rate / capacity / limits.busy,
            *((batch + limits.z * np.sqrt(demand.peakedness * batch)) / most),
            use.adapters.most(residence_s, limits.z) / settings.slots,
            use.size_bytes.most(residence_s, limits.z) / settings.adapter_bytes,
            tpot_ms / (float(demand.tpot_slo_ms.min()) * limits.latency),
            ttft_ms / (float(demand.ttft_slo_ms.min()) * limits.latency),
        ],
        axis=1,
    )
    too_large = use.size_bytes.largest > settings.adapter_bytes
    strains[(float(demand.rank.max()) > settings.max_rank) | too_large, LIMITS.index("adapter memory")] = np.inf
    strains[batch_most < 1.0, LIMITS.index("KV")] = np.inf
    return Verdict(
        capacity=capacity,
        busy=rate / capacity,
        batch=batch,
        batch_most=batch_most,
        adapters_in_use=use.adapters.at(residence_s),
        miss_share=misses,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        strains=strains,
    )


class _InUse:
    """Which adapters of a demand are in use for some time, and which requests find theirs evicted.

    `adapters`, `size_bytes`: a count of each, as functions of time.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        lora = demand.count * (demand.rank > 0)
        stay = demand.rate * demand.output_tokens / demand.mean(demand.output_tokens)
        used = -np.expm1(-np.outer(TIMES_S, stay))
        asked = np.exp(-np.outer(TIMES_S, demand.rate))
        self.adapters = _Held(lora, used, asked)
        self.size_bytes = _Held(lora * demand.size_bytes, used, asked, demand.size_bytes)
        self._missed = asked @ (lora * demand.rate)
        self._weight = lora * demand.rate

    def misses(self, settings: Settings) -> tuple[Floats, Floats]:
        """(share of requests whose adapter is not on the device, mean time of a copy), [settings].

        Least recently used, by Che's approximation: an adapter is kept for the time in which as many others are asked for as
        there is room.
        """
        kept_s = np.minimum(self.adapters.kept_s(settings.slots), self.size_bytes.kept_s(settings.adapter_bytes))
        missed = np.where(np.isfinite(kept_s), np.interp(kept_s, TIMES_S, self._missed), 0.0)
        copies = settings.steps.copy_ms(self._demand)
        return missed / self._demand.total_rate, copies @ self._weight / max(float(self._weight.sum()), 1e-300)


class _Held:
    """Something that each adapter in use takes: `each` of a row of the demand, `unit` of one adapter."""

    def __init__(self, each: Floats, used: Floats, asked: Floats, unit: Floats | float = 1.0) -> None:
        self._all = float(each.sum())
        self._mean = used @ each
        self._deviation = np.sqrt((used * (1.0 - used)) @ (each * unit))
        self._kept = (1.0 - asked) @ each
        self.largest = float(np.max(np.where(each > 0, unit, 0.0)))

    def at(self, seconds: Floats) -> Floats:
        """Its mean amount in use by requests that stay so long."""
        return np.asarray(np.interp(seconds, TIMES_S, self._mean))

    def most(self, seconds: Floats, z: float) -> Floats:
        """The same and `z` standard deviations, at most all."""
        return np.minimum(self.at(seconds) + z * np.interp(seconds, TIMES_S, self._deviation), self._all)

    def kept_s(self, room: Floats) -> Floats:
        """For how long an adapter stays that nobody asks for, where there is so much room; inf for ever."""
        return np.where(room >= self._all, np.inf, np.interp(room, self._kept, TIMES_S))
