"""Fits step times by what steps read and compute; finer than the linear models that schedulers use.

A step runs all its rows, decodes and prefill chunks alike, through the weights at once:

    time = pass(rows)                     weights are read once: flat while memory is the limit, then a line per row
         + sampled * sequences            a token is drawn: output matrix, sampling, bookkeeping, one frame item
         + prefill * new requests         seats, block tables and prefix keys
         + adapter * MiB                  of the step's distinct adapters, read once however many rows use them
         + row_rank * ranks               summed over rows: what LoRA computes
         + context * tokens               in the KV cache of the step's sequences
         + longest * tokens               of the one with the most, which others do not share the work of
         + pairs * tokens                 that prefill rows attend to, summed

`pass` is piecewise linear between `ROWS` and extrapolated beyond its end. Beyond `FEW` rows, and at its end, it must not
fall; kernels for few rows may take longer than those for more. All weights come from one least-squares fit of relative
errors, and the others are not negative (`least_squares`). The unexplained part is kept as a spread: quantiles of measured to
expected time of steps with prefills, on which the tail of the time to first token depends. `undisturbed` removes steps that
took far longer than a first fit says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from motet.policies.times.least_squares import r_squared, relative_fit
from motet.policies.times.perf_fit import step_times
from motet.policies.times.perf_model import MIB, Floats
from motet.policies.times.step_record import Step
from motet.shared.model import EngineSteps

ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
FEW = 8
SLIVER = 0.85  # of the most rows measured: no knot beyond, since too few steps would determine the last line
DISTURBED = 2.5  # times what the fit says: such a step was interrupted, not just slow
SPREAD = 21  # quantiles


N = TypeVar("N", float, Floats)


def without_context_ms(times: EngineSteps, pass_ms: N, *, sampled: N, prefills: N, adapter_mib: N, row_ranks: N, pairs: N) -> N:
    """The time of a step but for what attention reads of the KV cache, and before the spread of steps with prefills."""
    return (
        pass_ms
        + times.sampled_ms * sampled
        + times.prefill_ms * prefills
        + times.adapter_mib_ms * adapter_mib
        + times.row_rank_ms * row_ranks
        + times.pair_ms * pairs
    )


def undisturbed(steps: Sequence[Step]) -> list[Step]:
    """The steps that other work on the machine did not disturb. Raises as `fit_steps`."""
    features, times, _ = _equations(steps)
    expected = features @ relative_fit(features, times)
    return [step for step, most in zip(steps, DISTURBED * expected, strict=True) if step.time_ms <= most]


def fit_steps(steps: Sequence[Step]) -> EngineSteps:
    """Fits the model of `steps`.

    Raises ValueError for too few steps, for times that are not finite and positive, and for times that no model fits.
    """
    all_features, times, knots = _equations(steps)
    passes = len(knots)
    count = passes + 7  # weights without those of the falls
    for features in (all_features, all_features[:, :count]):  # where a pass would fall to nothing, none may fall
        weights = relative_fit(features, times)
        expected = features @ weights
        falls = weights[count:]
        weights[1 : len(falls) + 1] -= falls
        pass_ms = weights[0] + np.concatenate([[0.0], np.cumsum(weights[1:passes] * np.diff(knots))])
        if pass_ms.min() > 0:
            break
    else:
        raise ValueError("the fitted time of a step is not positive: the measured steps differ too much")
    sampled, prefill, adapter_mib, row_rank, context_token, longest_token, pair = weights[passes:count].tolist()
    return EngineSteps(
        rows=tuple(knots),
        pass_ms=tuple(pass_ms.tolist()),
        sampled_ms=sampled,
        prefill_ms=prefill,
        adapter_mib_ms=adapter_mib,
        row_rank_ms=row_rank,
        context_token_ms=context_token,
        longest_token_ms=longest_token,
        pair_ms=pair,
        prefill_spread=_spread((times / expected)[[step.prefill_tokens > 0 for step in steps]]),
        r2=r_squared(times, expected),
    )


def _equations(steps: Sequence[Step]) -> tuple[Floats, Floats, list[int]]:
    """Features [steps, weights], times [steps], and the row counts between which the time of a pass is linear."""
    times = step_times(steps)
    most = max(step.decode_rows + step.prefill_tokens for step in steps)
    knots = [*(rows for rows in ROWS if rows < SLIVER * most), max(most, 2)]
    return np.array([_features(step, knots) for step in steps]), times, knots


def _spread(ratios: Floats) -> tuple[float, ...]:
    """`SPREAD` quantiles, of mean 1 when interpolated as the twin does; none for too few steps."""
    if len(ratios) < SPREAD:
        return ()
    quantiles = np.quantile(ratios, np.linspace(0.0, 1.0, SPREAD))
    return tuple((quantiles / np.mean((quantiles[1:] + quantiles[:-1]) / 2)).tolist())


def _features(step: Step, knots: Sequence[int]) -> Floats:
    rows = step.decode_rows + step.prefill_tokens
    ramps = [float(min(max(rows - low, 0), high - low)) for low, high in pairwise(knots)]
    rest = [
        step.sampled,
        step.prefill_requests,
        step.adapter_bytes / MIB,
        step.row_rank_sum,
        step.context_tokens,
        step.longest_context,
        step.prefill_pairs,
    ]
    falls = [-ramp for ramp, high in zip(ramps[:-1], knots[1:-1], strict=True) if high <= FEW]
    return np.array([1.0, *ramps, *rest, *falls], dtype=np.float64)
