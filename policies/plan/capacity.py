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

    busy <= b_max     most(B*, c B*) <= B_most     most(a, v) <= slots     TPOT and TTFT are within the objectives

and the same for bytes as for slots. most(n, v) is n + z sqrt(v / e) and what a Poisson distribution is skewed by, with
fewer deviations for slots (`SLOTS_Z`), as the twin finds them to break later than seats and KV blocks do; c is the
peakedness of the arrivals, and e = 1 - B T'(B) / T(B): where a larger batch has longer steps, requests stay longer and the
batch grows further. `latencies` has the times, with the waits for a seat or a slot. All of it is evaluated at once for every
way of setting a worker (`Settings`). It leaves out prefix caches and merged adapters, and of lengths it knows moments only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.latencies import Usual, latencies, most_of, wait_ms
from motet.policies.plan.loads import KEPT_S, TOKEN_S, At, Loads, when

BATCHES = np.geomspace(2e-3, 1.0, 40)
"""Batch sizes at which steps are computed, as shares of the largest batch."""
MANY_PROMPTS = 8.0
"""Prompts in a step that counts as full, where no number of tokens limits steps."""
FOR_EVER_MS = 1e12
LEAST_STIFFNESS = 0.1
SLOTS_Z = 0.75
"""Deviations that count for adapters in use, of those that count for requests."""
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
    z: float | Floats = 2.7
    latency: float | Floats = 1.0
    """Share of the objectives that the law's own latencies may take."""
    pool: int = 1
    """Workers among which requests are spread evenly as they come: the number on each deviates less, by its root.

    `bound` does not count on it."""

    def at(self, settings: int | NDArray[np.intp]) -> Limits:
        """The limits of some settings."""
        columns = ((name, getattr(self, name)) for name in ("busy", "z", "latency"))
        own = {name: value[settings] if isinstance(value, np.ndarray) else value for name, value in columns}
        return Limits(**own, pool=self.pool)


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


# in one piece: the formulas of the module, each of which needs those above it
def judge_sets(loads: Loads, settings: Settings, limits: Limits, *, copy_ms: Floats) -> Verdict:
    """The law for cases: each a set of adapters with a setting. `loads` has a row for each setting, or one for all.

    `copy_ms`: [settings], the time of copies weighted by rate, as in `Loads.copies`.
    """
    rate = loads.rate
    prompt, output = loads.mean("prompt"), loads.mean("output")
    context = prompt + loads.mean("square") / (2.0 * output)
    most = np.stack(
        np.broadcast_arrays(
            np.maximum(settings.kv_tokens - prompt, 1e-6) / (context + settings.block_tokens / 2 + settings.headroom_tokens),
            settings.seats,
            settings.step_tokens / (1.0 + prompt / output),
        )
    )
    batch_most = most.min(axis=0)
    batches = batch_most[:, None] * BATCHES
    token_s = batches / (rate * output)[:, None]
    with_prompts = -np.expm1(-batches / output[:, None])  # share of steps
    begin = batches / (output[:, None] * with_prompts)  # requests that begin in such a step
    used = At(token_s, TOKEN_S)
    mix = Mix(
        rows=batches,
        context_tokens=batches * context[:, None],
        distinct=np.minimum(used(loads.curve("used")), settings.slots[:, None]),
        adapter_bytes=np.minimum(used(loads.curve("used_bytes")), settings.adapter_bytes[:, None]),
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
    full = np.minimum(np.broadcast_to(settings.step_tokens, len(settings))[:, None] - batches, MANY_PROMPTS * prompt[:, None])
    full_ms = settings.steps.step_ms(replace(mix, prompt_tokens=full, prompts=full / prompt[:, None]))
    row_ms = np.gradient(step_ms, axis=1) / np.gradient(batches, axis=1)
    usual = Usual(
        **_where_reached(
            rates,
            rate,
            batch=batches,
            step_ms=np.maximum.accumulate(step_ms, axis=1),
            decode_ms=decode_ms,
            mixed_ms=mixed_ms,
            with_prompts=with_prompts,
            begin=begin,
            row_ms=row_ms,
            stiffness=np.clip(1.0 - batches * row_ms / step_ms, LEAST_STIFFNESS, 1.0),
            prompt_token_ms=full_ms / full,
        )
    )
    batch = usual.batch
    residence_s = batch / np.minimum(rate, capacity)
    token_s = residence_s / output
    share = loads.extreme("share")
    swell = np.sqrt(loads.peakedness / usual.stiffness)
    pool = limits.pool
    deviation = swell * np.sqrt(batch / pool)
    room = _Room(loads, settings, token_s, residence_s, np.sqrt(1.0 / usual.stiffness))
    waits_ms = np.maximum(
        wait_ms(pool * batch, pool * deviation, pool * batch_most, residence_s * 1e3, share), room.wait_ms(share)
    )
    waits_ms = waits_ms + np.where(miss_share > 1.0 - share, copy_ms, 0.0)
    tpot_ms, ttft_ms = latencies(usual, deviation, loads, waits_ms)
    ttft_slo_ms = loads.extreme("ttft_slo_ms") * limits.latency
    strains = np.stack(
        [
            rate / capacity / limits.busy,
            *(most_of(batch, deviation, limits.z, 1.0 / pool) / most),
            *room.strains(SLOTS_Z * limits.z),
            tpot_ms / (loads.extreme("tpot_slo_ms") * limits.latency),
            np.where(np.isfinite(ttft_slo_ms), np.minimum(ttft_ms, FOR_EVER_MS) / ttft_slo_ms, 0.0),
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
        adapters_in_use=room.used,
        miss_share=miss_share,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        strains=strains,
    )


def _where_reached(rates: Floats, rate: Floats, **columns: Floats) -> dict[str, Floats]:
    """Columns [cases, batches] where rising `rates` [cases, batches] reach `rate`; their ends where it is outside."""
    cases = np.arange(len(rates))
    after = np.clip((rates < rate[:, None]).sum(axis=1), 1, rates.shape[1] - 1)
    low, high = rates[cases, after - 1], rates[cases, after]
    share = np.clip((rate - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    return {
        name: column[cases, after - 1] + share * (column[cases, after] - column[cases, after - 1])
        for name, column in columns.items()
    }


def _missed(loads: Loads, settings: Settings) -> Floats:
    """Requests/s whose adapter is not on the device, [settings].

    Least recently used, by Che's approximation: an adapter is kept for the time in which as many others are asked for as
    there is room.
    """
    kept_s = np.full(len(settings), np.inf)
    for curve, room in ((loads.curve("kept"), settings.slots), (loads.curve("kept_bytes"), settings.adapter_bytes)):
        full = room < curve[:, -1]
        kept_s = np.minimum(kept_s, np.where(full, when(curve, np.where(full, room, 0.0), KEPT_S), np.inf))
    return np.where(np.isfinite(kept_s), At(np.minimum(kept_s, KEPT_S[-1]), KEPT_S)(loads.curve("missed")), 0.0)


class _Room:
    """The adapters in use, and their bytes, beside the room for them, [settings].

    Where all adapters fit, there is no wait. Their number is never counted as less than where requests stay for a shorter
    time: an adapter that is nearly always in use deviates little.
    """

    def __init__(self, loads: Loads, settings: Settings, token_s: Floats, residence_s: Floats, swell: Floats) -> None:
        freed = At(residence_s, KEPT_S)(loads.curve("missed"))  # adapters/s that come into use, as many as leave it
        self._rooms = (settings.slots, settings.adapter_bytes)
        self._units: tuple[float | Floats, ...] = (1.0, loads.extreme("size_bytes"))
        used, there = [loads.curve("used"), loads.curve("used_bytes")], At(token_s, TOKEN_S)
        self._all = [curve[:, -1] for curve in used]
        self._mean = [there(curve) for curve in used]
        self.used = self._mean[0]
        self._stay_ms = self.used / np.maximum(freed, 1e-12) * 1e3
        variances = (loads.curve("variance"), loads.curve("variance_bytes"))
        self._deviation = [swell * np.sqrt(there(np.maximum.accumulate(curve, axis=1))) for curve in variances]

    def wait_ms(self, share: Floats) -> Floats:
        """What the wait for room stays below for this share of the requests."""
        found = np.zeros(len(self._stay_ms))
        for room, everything, mean, deviation in zip(self._rooms, self._all, self._mean, self._deviation, strict=True):
            waits = wait_ms(mean, deviation, np.minimum(room, FOR_EVER_MS), self._stay_ms, share)
            found = np.maximum(found, np.where(room >= everything, 0.0, waits))
        return found

    def strains(self, z: float | Floats) -> Iterator[Floats]:
        """What is in use at most, over the room: of slots, then of bytes."""
        columns = zip(self._rooms, self._units, self._all, self._mean, self._deviation, strict=True)
        for room, unit, everything, mean, deviation in columns:
            yield np.minimum(most_of(mean, deviation, z, unit), everything) / room
