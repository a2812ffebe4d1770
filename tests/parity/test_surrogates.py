"""Flat arrays predict what scikit-learn predicts, bit for bit; so nothing else needs scikit-learn to use a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from motet.policies.plan.surrogate import Trees, decode
from motet.twin.surrogate.train import trees

NAMES = ("a", "b", "c", "d", "e")


def rows(count: int, seed: int) -> np.ndarray:
    """Features of very different sizes, some of which are not float32."""
    return np.random.default_rng(seed).lognormal(0, 3, (count, len(NAMES)))


def both(model: Any, classifies: bool) -> tuple[Any, Trees]:
    x = rows(500, 1)
    y = x[:, 0] * np.log1p(x[:, 1]) + x[:, 2]
    model.fit(x, y > np.median(y) if classifies else y)
    return model, decode(trees(model, "y", NAMES).encode())


def positive(model: Any, x: np.ndarray) -> np.ndarray:
    return np.asarray(model.predict_proba(x)[:, 1])


@pytest.mark.parametrize("leaves", [None, 32])
def test_a_tree(leaves: int | None) -> None:
    x = np.concatenate([rows(4_096, 2), rows(500, 1)])  # and rows that lie on thresholds' sides as in training
    model, flat = both(DecisionTreeRegressor(max_leaf_nodes=leaves, random_state=0), classifies=False)
    assert np.array_equal(flat.predict(x), model.predict(x))
    model, flat = both(DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0), classifies=True)
    assert np.array_equal(flat.predict(x), positive(model, x))


@pytest.mark.parametrize("count", [1, 7, 1_000])
def test_a_forest(count: int) -> None:
    x = rows(count, 3)
    model, flat = both(RandomForestRegressor(40, random_state=0, n_jobs=1), classifies=False)
    assert np.array_equal(flat.predict(x), model.predict(x))
    model, flat = both(RandomForestClassifier(40, min_samples_leaf=3, random_state=0, n_jobs=1), classifies=True)
    assert np.array_equal(flat.predict(x), positive(model, x))


@pytest.mark.parametrize(
    ("model", "raw"),
    [
        (GradientBoostingRegressor(n_estimators=30, random_state=0), lambda model, x: model.predict(x)),
        (GradientBoostingClassifier(n_estimators=30, random_state=0), lambda model, x: model.decision_function(x)),
    ],
)
def test_boosted_trees(model: Any, raw: Callable[[Any, np.ndarray], np.ndarray]) -> None:
    model, flat = both(model, classifies=hasattr(model, "predict_proba"))
    x = rows(1_000, 4)
    odds = flat.predict(x)
    if flat.log_odds:  # the exponential of two libraries may differ in its last bit
        assert odds == pytest.approx(positive(model, x), rel=1e-14)
        odds = decode(flat.encode().replace(b'"log_odds":true', b'"log_odds":false')).predict(x)
    assert np.array_equal(odds, raw(model, x))
