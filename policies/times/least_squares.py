"""The offline estimator of step times: least squares whose weights are not negative, since no term makes a step faster.

`perf_fit`, `step_fit` and the twin's calibration to vLLM use it. The online estimator, which follows a live worker, is
`step_times`. The first fit loads SciPy, which no service does when it starts.
"""

from __future__ import annotations

import numpy as np

from motet.policies.times.perf_model import Floats

ROUNDS = 3  # of a relative fit
LEAST = 0.1  # of the measured time: no step weighs more, however short it should have been
TIED = 1e-6  # weight of zero for each feature, which divides what the data cannot tell apart


def not_negative(features: Floats, values: Floats) -> Floats:
    """The weights >= 0 [features] that minimise the squared error of `features [values, features] @ weights ~ values`."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    count = len(scale)
    weights, _ = nnls(
        np.vstack([features / scale, TIED * np.eye(count)]), np.concatenate([values, np.zeros(count)]), maxiter=100 * count
    )
    return np.asarray(weights / scale, np.float64)


def relative_fit(features: Floats, times: Floats, counts: Floats | None = None, known: Floats | None = None) -> Floats:
    """Weights >= 0 of `times ~ known + features @ weights`, with errors relative to the expected time.

    Row i counts `counts[i]` times. With errors relative to the measured time, slow steps would count less than fast ones, and
    the model would be too fast by the spread of times. The first round does that; later rounds divide by the expected time.
    """
    known = np.zeros(len(times)) if known is None else known
    often = np.ones(len(times)) if counts is None else np.sqrt(counts)
    expected, weights = times, np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        scale = often / expected
        weights = not_negative(features * scale[:, None], (times - known) * scale)
        expected = np.maximum(known + features @ weights, LEAST * times)
    return weights


def r_squared(values: Floats, predicted: Floats, counts: Floats | None = None) -> float:
    """Coefficient of determination: 1 is perfect, 0 no better than the mean; 0 for no values or all the same. Value i counts
    `counts[i]` times."""
    if not len(values):
        return 0.0
    counts = np.ones(len(values)) if counts is None else counts
    spread = float(counts @ (values - np.average(values, weights=counts)) ** 2)
    return 1.0 - float(counts @ (values - predicted) ** 2) / spread if spread else 0.0
