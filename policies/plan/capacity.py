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
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.loads import KEPT_S, TOKEN_S, Loads, at, when

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
    rank: Floats  # mean over requests
    max_rank: Floats
    adapters: Floats  # that the worker serves
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

    def take(self, settings: NDArray[np.intp]) -> StepLaw:
        """The same for some of the settings, in any order."""
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

    def take(self, settings: NDArray[np.intp]) -> Settings:
        """Some of the settings, in any order."""
        columns = {name: getattr(self, name)[settings] for name in ("slots", "adapter_bytes", "max_rank", "kv_tokens")}
        return replace(self, steps=self.steps.take(settings), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a worker may be loaded. The planner tightens them where the twin finds an objective missed.

    Numbers, or columns [settings].
    """

    busy: float | Floats = 0.95
    z: float | Floats = 2.4
    latency: float | Floats = 1.0
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
    rows = Loads.of(demand, settings.steps.copy_ms(demand))
    whole = rows.joined(np.arange(len(rows)))
    return judge_sets(whole, settings, limits, copy_ms=whole.copies[0])


def judge_sets(loads: Loads, settings: Settings, limits: Limits, *, copy_ms: Floats) -> Verdict:
    """The law for cases: each a set of adapters with a setting. `loads` has a row for each setting, or one for all.

    `copy_ms`: [settings], the time of copies weighted by rate, as in `Loads.copies`.
    """
    rate = loads.rate
    prompt, output = loads.mean("prompt"), loads.mean("output")
    context = prompt + loads.mean("square") / (2.0 * output)
    most = np.stack(
        np.broadcast_arrays(
            np.maximum(settings.kv_tokens - prompt, 0.0) / (context + settings.block_tokens / 2 + settings.headroom_tokens),
            settings.seats,
            settings.step_tokens / (1.0 + prompt / output),
        )
    )
    batch_most = most.min(axis=0)
    batches = batch_most[:, None] * BATCHES
    token_s = batches / (rate * output)[:, None]
    with_prompts = -np.expm1(-batches / output[:, None])  # share of steps
    begin = batches / (output[:, None] * with_prompts)  # requests that begin in such a step
    mix = Mix(
        rows=batches,
        context_tokens=batches * context[:, None],
        distinct=np.minimum(at(loads.curve("used"), token_s, TOKEN_S), settings.slots[:, None]),
        adapter_bytes=np.minimum(at(loads.curve("used_bytes"), token_s, TOKEN_S), settings.adapter_bytes[:, None]),
        rank=loads.mean("rank")[:, None],
        max_rank=loads.extreme("rank")[:, None],
        adapters=loads.adapters[:, None],
    )
    decode_ms = settings.steps.step_ms(mix)
    mixed_ms = settings.steps.step_ms(replace(mix, prompt_tokens=begin * prompt[:, None], prompts=begin))
    miss_share = _missed(loads, settings) / rate
    copy_ms = copy_ms / np.maximum(loads.totals[:, -1], 1e-300)
    stall_ms = copy_ms * miss_share if settings.steps.stalls else np.zeros(len(settings))
    step_ms = (1.0 - with_prompts) * decode_ms + with_prompts * mixed_ms + batches / output[:, None] * stall_ms[:, None]

    rates = np.maximum.accumulate(batches / (output[:, None] * step_ms) * 1e3, axis=1)
    capacity = rates[:, -1]
    batch, tpot_ms, begin_ms = _where_reached(rates, rate, (batches, step_ms, mixed_ms))
    copied = miss_share > 1.0 - loads.extreme("share")
    ttft_ms = 0.5 * tpot_ms + begin_ms + np.where(copied, copy_ms, 0.0)

    token_s = batch / (np.minimum(rate, capacity) * output)
    strains = np.stack(
        [
            rate / capacity / limits.busy,
            *((batch + limits.z * np.sqrt(loads.peakedness * batch)) / most),
            _most_in_use(loads, "", token_s, limits.z) / settings.slots,
            _most_in_use(loads, "_bytes", token_s, limits.z) / settings.adapter_bytes,
            tpot_ms / (loads.extreme("tpot_slo_ms") * limits.latency),
            ttft_ms / (loads.extreme("ttft_slo_ms") * limits.latency),
        ],
        axis=1,
    )
    too_large = loads.extreme("size_bytes") > settings.adapter_bytes
    strains[(loads.extreme("rank") > settings.max_rank) | too_large, LIMITS.index("adapter memory")] = np.inf
    strains[batch_most < 1.0, LIMITS.index("KV")] = np.inf
    return Verdict(
        capacity=capacity,
        busy=rate / capacity,
        batch=batch,
        batch_most=batch_most,
        adapters_in_use=at(loads.curve("used"), token_s, TOKEN_S),
        miss_share=miss_share,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        strains=strains,
    )


def _where_reached(rates: Floats, rate: Floats, columns: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Columns [cases, batches] where rising `rates` [cases, batches] reach `rate`; their ends where it is outside."""
    cases = np.arange(len(rates))
    after = np.clip((rates < rate[:, None]).sum(axis=1), 1, rates.shape[1] - 1)
    low, high = rates[cases, after - 1], rates[cases, after]
    share = np.clip((rate - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    return tuple(column[cases, after - 1] + share * (column[cases, after] - column[cases, after - 1]) for column in columns)


def _missed(loads: Loads, settings: Settings) -> Floats:
    """Requests/s whose adapter is not on the device, [settings].

    Least recently used, by Che's approximation: an adapter is kept for the time in which as many others are asked for as
    there is room.
    """
    kept_s = np.full(len(settings), np.inf)
    for curve, room in ((loads.curve("kept"), settings.slots), (loads.curve("kept_bytes"), settings.adapter_bytes)):
        full = room < curve[:, -1]
        kept_s = np.minimum(kept_s, np.where(full, when(curve, np.where(full, room, 0.0), KEPT_S), np.inf))
    return np.where(np.isfinite(kept_s), at(loads.curve("missed"), np.minimum(kept_s, KEPT_S[-1]), KEPT_S), 0.0)


def _most_in_use(loads: Loads, unit: str, token_s: Floats, z: float | Floats) -> Floats:
    """Adapters in use (or their bytes) and `z` standard deviations more, at most all, [settings]."""
    used = loads.curve("used" + unit)
    deviation = np.sqrt(at(loads.curve("variance" + unit), token_s, TOKEN_S))
    return np.minimum(at(used, token_s, TOKEN_S) + z * deviation, used[:, -1])
