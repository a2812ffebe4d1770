"""Measures the quality of predictions: accuracy by class, rank correlation, error, calibration, latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec
import numpy as np

from motet.policies.lengths.calibration import Calibration
from motet.policies.lengths.model import Curve
from motet.policies.lengths.predictor import SHARES

BATCH = 32


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of a model's predictions for requests of known length."""

    accuracy_3: float
    accuracy_3_by_class: list[float]  # short, medium, long
    accuracy_5: float
    spearman: float
    mae_tokens: float  # of p50
    below_p50: float  # share of requests
    below_p90: float


def class_cuts(lengths: Sequence[int], classes: int) -> list[float]:
    """The lengths that divide `lengths` into classes of equal size; a class includes its upper cut."""
    return np.quantile(lengths, np.arange(1, classes) / classes).tolist()


def judge(
    above: np.ndarray, curve: Curve, levels: Sequence[float], tokens: Sequence[int], cuts: tuple[list[float], list[float]]
) -> Judged:
    """Accuracy of predicted distributions, `above` [n, K], for n requests of known length `tokens`.

    `cuts`: the limits of three and of five classes. `levels` calibrate the quantiles, as in a predictor that has just got the
    model.
    """
    lengths = np.asarray(tokens)
    right = [curve.share_between(above, some).argmax(1) == np.searchsorted(some, lengths) for some in cuts]
    true = np.searchsorted(cuts[0], lengths)
    calibration = Calibration(1)
    calibration.seed(levels)
    at = calibration.levels("", SHARES)
    quantiles = np.array([curve.tokens(row, at) for row in above]).round()
    return Judged(
        accuracy_3=float(right[0].mean()),
        accuracy_3_by_class=[float(right[0][true == one].mean()) if (true == one).any() else 0.0 for one in range(3)],
        accuracy_5=float(right[1].mean()),
        spearman=spearman(above.sum(1), lengths),
        mae_tokens=float(np.abs(quantiles[:, 0] - lengths).mean()),
        below_p50=float((lengths <= quantiles[:, 0]).mean()),
        below_p90=float((lengths <= quantiles[:, 1]).mean()),
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation, ties at their mean rank."""
    return float(np.corrcoef(_ranks(np.asarray(a)), _ranks(np.asarray(b)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def latency_ms(predict: Callable[[int], object], batches: int, rounds: int) -> tuple[float, float]:
    """p50 and p99 of `predict(number of the batch)` in milliseconds, after a warm-up."""
    for number in range(min(5, rounds)):
        predict(number % batches)
    took = []
    for number in range(rounds):
        began = perf_counter()
        predict(number % batches)
        took.append(perf_counter() - began)
    p50, p99 = np.quantile(took, (0.5, 0.99))
    return float(p50) * 1e3, float(p99) * 1e3
