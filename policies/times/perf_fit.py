"""Fits a worker's linear step-time models to measured steps (CaraServe section 5: R2 of 0.96 there).

    time = [decodes]  * (decode_base + decode_row * B + decode_lora * load_d)
         + [prefills] * (prefill_base + prefill_token * T + prefill_lora * load_p)
         + context_token * tokens in the KV cache

The engine runs decodes and prefill chunks through the weights together, so a step with both costs less than the two apart.
Schedulers need the time that a prefill adds to decodes. So the decode part is fitted to steps that only decode, and the
prefill part to the time that other steps take beyond it, as the online estimator does (`step_times`). Both use
non-negative least squares with errors relative to the expected time, so that a few long prefills do not outweigh a thousand
decodes. Steps of equal batches are replaced by their median, which excludes short disturbances of the machine. A median has
the weight of its number of steps, in the fit and in R2: rarely measured batches get little weight. Both kernel models are
tried; the better one is the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from msgspec.structs import replace

from motet.policies.times.least_squares import not_negative, r_squared, relative_fit
from motet.policies.times.perf_model import Floats, Kernel, batch_load
from motet.policies.times.step_record import Step
from motet.shared.model import PerfModel

KERNELS: tuple[Kernel, ...] = ("mbgmv", "bgmv")
MIN_STEPS = 32
DECODE = 4  # the features of `_features` that belong to the decode part
BATCH = (  # steps that are equal in all of these are one batch, measured several times
    *("prefill_requests", "prefill_tokens", "prefill_rank_sum", "prefill_max_rank"),
    *("decode_rows", "decode_rank_sum", "decode_max_rank", "sampled"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The fitted models with their R2, for steps with and without a prefill."""

    perf: PerfModel
    context_token_ms: float
    r2_prefill: float
    r2_decode: float


def fit(steps: Sequence[Step], loads: Sequence[tuple[float, float]] = ()) -> Fitted:
    """The best models for `steps`; `loads` are (MiB, ms) of adapters copied to the device.

    Raises ValueError for too few steps, or times that are not finite and positive.
    """
    step_times(steps)
    load = fit_link(loads) if loads else (0.0, 0.0)
    typical, counts = _typical(steps)
    fitted = [_fit_kernel(kernel, typical, counts, load) for kernel in KERNELS]
    return max(fitted, key=lambda one: one.r2_decode + one.r2_prefill)


def step_times(steps: Sequence[Step]) -> Floats:
    """Milliseconds [steps]. Raises ValueError for too few of them to fit, or times that are not finite and positive."""
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} steps are too few to fit; {MIN_STEPS} are needed")
    times = np.array([step.time_ms for step in steps])
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError("step times must be finite and positive")
    return times


def fit_link(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(base ms, ms per MiB) of a link from measured (MiB, ms). Measurements of equal size are replaced by their median.

    Raises ValueError for times that are not finite.
    """
    if not np.isfinite(np.array(times)).all():
        raise ValueError("load times must be finite")
    sizes = np.array(sorted({size for size, _ in times}))
    typical = np.array([np.median([ms for other, ms in times if other == size]) for size in sizes])
    base, per_mib = not_negative(np.column_stack([np.ones(len(sizes)), sizes]), typical).tolist()
    return base, per_mib


def _typical(steps: Sequence[Step]) -> tuple[list[Step], Floats]:
    """One step for each kind of batch, with the median time at the mean context, and the number of steps of each."""
    alike: dict[tuple[int, ...], list[Step]] = {}
    batch_of = attrgetter(*BATCH)
    for step in steps:
        alike.setdefault(batch_of(step), []).append(step)
    typical = [
        replace(
            group[0],
            time_ms=float(np.median([step.time_ms for step in group])),
            context_tokens=round(float(np.mean([step.context_tokens for step in group]))),
        )
        for group in alike.values()
    ]
    return typical, np.array([len(group) for group in alike.values()], dtype=np.float64)


def _fit_kernel(kernel: Kernel, steps: Sequence[Step], counts: Floats, load: tuple[float, float]) -> Fitted:
    times = np.array([step.time_ms for step in steps])
    features = np.array([_features(kernel, step) for step in steps])
    prefills = np.array([step.prefill_tokens > 0 for step in steps])
    decode, prefill = features[:, :DECODE], features[:, DECODE:]
    weights, more = np.zeros(decode.shape[1]), np.zeros(prefill.shape[1])
    if not prefills.all():
        weights = relative_fit(decode[~prefills], times[~prefills], counts[~prefills])
    if prefills.any():
        more = relative_fit(prefill[prefills], times[prefills], counts[prefills], decode[prefills] @ weights)
    predicted = decode @ weights + prefill @ more
    decode_base, decode_row, decode_lora, context_token = weights.tolist()
    prefill_base, prefill_token, prefill_lora = more.tolist()
    perf = PerfModel(
        kernel=kernel,
        prefill_base_ms=prefill_base,
        prefill_token_ms=prefill_token,
        prefill_lora_ms=prefill_lora,
        decode_base_ms=decode_base,
        decode_row_ms=decode_row,
        decode_lora_ms=decode_lora,
        load_base_ms=load[0],
        load_ms_per_mib=load[1],
    )
    return Fitted(
        perf=perf,
        context_token_ms=context_token,
        r2_prefill=r_squared(times[prefills], predicted[prefills], counts[prefills]),
        r2_decode=r_squared(times[~prefills], predicted[~prefills], counts[~prefills]),
    )


def _features(kernel: Kernel, step: Step) -> list[float]:
    decodes, prefills = float(step.decode_rows > 0), float(step.prefill_tokens > 0)
    decode_load = batch_load(kernel, step.decode_rows, step.decode_rank_sum, step.decode_max_rank)
    prefill_load = batch_load(kernel, step.prefill_requests, step.prefill_rank_sum, step.prefill_max_rank)
    tokens = float(step.prefill_tokens)
    return [decodes, float(step.decode_rows), decode_load, float(step.context_tokens), prefills, tokens, prefill_load]
