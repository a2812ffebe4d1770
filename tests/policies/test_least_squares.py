"""Promise: the fit has the smallest error of all weights that are not negative; equal columns share their weight."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from motet.policies.times.least_squares import not_negative


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_terms_fits_better(seed):
    draw = np.random.default_rng(seed)
    features = draw.random((30, 4)) * [1.0, 100.0, 1e4, 1e-3]  # terms of a step time differ by orders of magnitude
    values = features @ (draw.normal(size=4) / features.mean(axis=0)) + draw.normal(size=30)
    weights = not_negative(features, values)
    assert weights.min() >= 0.0
    for count in range(5):
        for kept in map(list, combinations(range(4), count)):
            other = np.zeros(4)
            other[kept] = np.linalg.lstsq(features[:, kept], values, rcond=None)[0]
            if other.min() >= 0.0:
                assert error(features, values, weights) <= error(features, values, other) * (1 + 1e-9)


def error(features, values, weights) -> float:
    return float(np.square(features @ weights - values).sum())


def test_two_terms_that_always_come_together_share_their_time():
    rows = np.arange(1.0, 9.0)
    weights = not_negative(np.column_stack([rows, 64 * rows]), 2.0 * rows)
    assert weights == pytest.approx([1.0, 1.0 / 64], rel=1e-3)


def test_a_term_that_never_occurs_costs_nothing():
    assert not_negative(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([3.0, 6.0])) == pytest.approx([3.0, 0.0])
