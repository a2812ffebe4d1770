"""Fits a length model to finished requests, in a separate process, so that no prediction waits for it.

    Task (msgpack) on stdin ─► tf-idf, ridge regression on "longer than edge k" (scikit-learn) ─► Fitted on stdout

scikit-learn and SciPy are imported here and nowhere else in a service. The predictor starts this module as
`python -m motet.services.predictor.fit`; the benches and `motet predictor` call `fit`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import Ridge

from motet.policies.lengths.features import SPACE, TEXT_IDS, unpack
from motet.policies.lengths.model import SIDE_WEIGHT, Curve, LengthModel, scaled
from motet.services.predictor import codec as coding
from motet.services.predictor.codec import FittedModel, Task

THRESHOLDS = 20
ALPHA = 0.6  # of the ridge; best of 0.3 to 2 in cross-validation on the first 64 to 4,000 requests of an instruction set
HELD_OUT = 5  # every fifth request checks a model that was fitted on the others
ITERATIONS, TOLERANCE = 60, 1e-3
EXIT_NOTHING = 3


def fit(requests: Sequence[np.ndarray], tokens: Sequence[int], *, thresholds: int = THRESHOLDS) -> FittedModel:
    """A model for requests with these feature ids and output lengths. Raises ValueError when all lengths are equal."""
    lengths = np.asarray(tokens, np.int64)
    held = np.arange(len(lengths)) % HELD_OUT == HELD_OUT - 1
    levels: list[float] = []
    if held.sum() >= HELD_OUT and len(np.unique(lengths[~held])) > 1:
        twin = _fit([one for one, out in zip(requests, held, strict=True) if not out], lengths[~held], thresholds)
        curve = Curve(twin.edges, twin.longest)
        above = twin.above([one for one, out in zip(requests, held, strict=True) if out])
        levels = [curve.level(row, int(n)) for row, n in zip(above, lengths[held], strict=True)]
    return FittedModel(_fit(requests, lengths, thresholds), levels)


def _fit(requests: Sequence[np.ndarray], lengths: np.ndarray, thresholds: int) -> LengthModel:
    shares = np.arange(1, thresholds + 1) / (thresholds + 1)
    edges = np.unique(np.quantile(lengths, shares, method="lower"))
    edges = edges[edges < lengths.max()]
    if not len(edges):
        raise ValueError("all requests have the same length")
    rows, sizes = len(requests), [len(one) for one in requests]
    ids = np.concatenate(requests) if rows else np.empty(0, np.int64)
    owner = np.repeat(np.arange(rows), sizes)
    seen = np.bincount(ids, minlength=SPACE)
    rarity = np.where(seen, np.log((1 + rows) / (1 + seen)) + 1, np.log(1 + rows) + 1).astype(np.float32)
    rarity[TEXT_IDS:] = SIDE_WEIGHT
    known, column = np.unique(ids, return_inverse=True)
    x = csr_matrix((scaled(ids, rarity[ids], owner, rows), (owner, column)), shape=(rows, len(known)))
    ridge = Ridge(alpha=ALPHA, solver="sparse_cg", max_iter=ITERATIONS, tol=TOLERANCE)
    ridge.fit(x, (lengths[:, None] > edges).astype(np.float32))
    weights = np.zeros((SPACE, len(edges)), np.float32)
    weights[known] = ridge.coef_.reshape(len(edges), -1).T
    return LengthModel(
        edges=edges.astype(np.float32),
        longest=float(lengths.max()),
        rarity=rarity,
        weights=weights,
        offset=np.asarray(ridge.intercept_, np.float32).reshape(-1),
        fitted_on=rows,
    )


def main() -> int:
    """Fit the task on stdin; exit status EXIT_NOTHING when there is nothing to learn from it."""
    os.nice(10)
    task = coding.decode(sys.stdin.buffer.read(), Task)
    try:
        fitted = fit([unpack(features) for features in task.features], task.tokens)
    except ValueError:
        return EXIT_NOTHING
    sys.stdout.buffer.write(coding.encode(fitted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
