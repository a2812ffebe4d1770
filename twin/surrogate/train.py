"""Trains the models of a worker with scikit-learn, which nothing else in the twin imports.

The adapter-caching paper's models (sections 6 and 8.3, appendix B): random forest, SVM and nearest neighbour on seven features,
one set of models for each base model and GPU, hyperparameters by `HalvingGridSearchCV` with five folds; and the refined tree of
at most 32 rules. Where the paper is silent or its grid is redundant:

    max_features "auto" no longer exists: it meant 1.0 for regression; "friedman_mse" is "squared_error", "log_loss" "entropy"
    points of a grid that do the same are one point: degree outside of poly, coef0 and gamma outside of their kernels, gamma
    "auto" beside "scale" on scaled features, min_samples_split up to twice min_samples_leaf, and any epsilon up to 1 percent;
    468 of 3,456 points of the forest's regression remain (one resource), and 636 of 9,216 of the SVM's
    the number of trees is the halving's resource (8 to 256), of the other models it is the number of samples
    SVM and KNN get logarithms of 1 + feature, since rates and adapters go over decades; for the SVM these have mean 0 and
    deviation 1, and throughput is learned as a logarithm in percent, so that epsilon is in percent
    KNN counts the sum of rates three times and ranks a tenth (`NEAR_WEIGHTS`), the best of twelve in cross-validation
    the SVM gets a limit of iterations, because some points never converge

Ours learn what the law gets wrong: features without units, so that one model serves every profile and every length.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 - makes the next import possible
from sklearn.model_selection import HalvingGridSearchCV, KFold, StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from motet.policies.plan.features import PAPER
from motet.policies.plan.surrogate import Trees

Floats = NDArray[np.float64]
Point = dict[str, Any]

FOLDS = 5
SEED = 0
TREES_MOST, TREES_LEAST = 256, 8  # the resource of a forest's search
SAMPLES_LEAST = 60  # the first round of the other searches
SVM_ITERATIONS = 100_000
NEAR_WEIGHTS = {"rate_sum_req_s": 3.0, "rank_max": 0.1, "rank_mean": 0.1, "rank_std": 0.1}  # of distances; others 1
MOST_PERCENT = 2000.0  # e^20 tokens/s, where the answer of an SVM far from its data ends
MOST_RULES = 32
RULE_COST = 0.01  # a rule must lower the error by so much of it
BOOSTED = {
    "n_estimators": 250,
    "learning_rate": 0.05,
    "max_depth": 5,
    "min_samples_leaf": 5,
    "subsample": 0.7,
    "max_features": 0.5,
}  # of 120 trees of depth 3, 120 of 4 and these, the best in cross-validation


# ---- appendix B


def _forest_points(criteria: Sequence[str], features: Sequence[object]) -> list[Point]:
    return [
        {"criterion": criterion, "max_depth": depth, "min_samples_leaf": leaf, "min_samples_split": split, "max_features": most}
        for criterion in criteria
        for depth in (None, 5, 10, 20)
        for leaf in (1, 2, 5, 10, 32, 128)
        for split in (2, 5, 10, 20)
        if split == 2 or split > 2 * leaf
        for most in features
    ]


def _svm_points(fixed: Point) -> list[Point]:
    gammas, zeros = ("scale", 0.01, 0.1, 1, 10), (0, 0.1, 0.5, 1)
    shapes: list[Point] = [{"kernel": "linear"}]
    shapes += [{"kernel": "rbf", "gamma": gamma} for gamma in gammas]
    shapes += [{"kernel": "sigmoid", "gamma": gamma, "coef0": zero} for gamma in gammas for zero in zeros]
    shapes += [
        {"kernel": "poly", "gamma": gamma, "coef0": zero, "degree": degree}
        for gamma in gammas
        for zero in zeros
        for degree in (2, 3, 4, 5)
    ]
    return [{"C": c} | shape | fixed for c in (0.1, 1, 10, 100, 1000, 10000) for shape in shapes]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model for one task: how to make it, the points of its grid, and how its features are scaled.

    `percent`: it learns 100 times the logarithm of its target.
    """

    make: Callable[..., Any]
    points: Sequence[Point]
    scale: Callable[[], Any] | None = None
    percent: bool = False

    def model(self, point: Mapping[str, Any], **more: Any) -> Any:
        """An untrained model with the parameters of a point."""
        model = self.make(**point, **more)
        if self.scale is not None:
            model = Pipeline([("scale", self.scale()), ("model", model)])
        return TransformedTargetRegressor(model, func=_percent, inverse_func=_of_percent) if self.percent else model

    @property
    def prefix(self) -> str:
        """What `model` calls a parameter of a point, before the parameter's name."""
        return "regressor__" * self.percent + "model__" * (self.scale is not None)


def _percent(target: Floats) -> Floats:
    return 100.0 * np.log(target)


def _of_percent(percent: Floats) -> Floats:
    return np.asarray(np.exp(np.clip(percent, 0.0, MOST_PERCENT) / 100.0))


def _standard_logs() -> Any:
    return make_pipeline(FunctionTransformer(np.log1p), StandardScaler())


def _weighted_logs() -> Any:
    return FunctionTransformer(_weighted)


def _weighted(x: Floats) -> Floats:
    return np.log1p(x) * [NEAR_WEIGHTS.get(name, 1.0) for name in PAPER]


def _svm(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **point: kind(max_iter=SVM_ITERATIONS, **point)


def _neighbour(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **point: kind(n_neighbors=1, leaf_size=8, weights="uniform", algorithm="kd_tree", **point)


THROUGHPUT = {
    "rf": Family(RandomForestRegressor, _forest_points(("squared_error", "absolute_error", "poisson"), (1.0, "sqrt", "log2"))),
    "svm": Family(_svm(SVR), _svm_points({"epsilon": 1}), _standard_logs, percent=True),
    "knn": Family(_neighbour(KNeighborsRegressor), [{"p": 1}, {"p": 2}], _weighted_logs),
}
STARVATION = {
    "rf": Family(RandomForestClassifier, _forest_points(("gini", "entropy"), (None, "sqrt", "log2"))),
    "svm": Family(_svm(SVC), _svm_points({}), _standard_logs),
    "knn": Family(_neighbour(KNeighborsClassifier), [{"p": 1}, {"p": 2}], _weighted_logs),
}


_DEEP: Point = {"max_features": 1.0, "min_samples_leaf": 1, "min_samples_split": 2, "n_estimators": 216}
CHOSEN: dict[str, dict[str, dict[str, Point]]] = {
    "llama-3.1-8b@h100": {
        "throughput": {
            "rf": {"criterion": "poisson", "max_depth": 10, **_DEEP},
            "svm": {"C": 1000, "epsilon": 1, "gamma": "scale", "kernel": "rbf"},
            "knn": {"p": 2},
        },
        "starvation": {
            "rf": {
                "criterion": "entropy",
                "max_depth": None,
                "max_features": None,
                "min_samples_leaf": 1,
                "min_samples_split": 10,
                "n_estimators": 216,
            },
            "svm": {"C": 10000, "gamma": 0.01, "kernel": "rbf"},
            "knn": {"p": 2},
        },
    },
    "qwen2.5-7b@h100": {
        "throughput": {
            "rf": {"criterion": "squared_error", "max_depth": None, **_DEEP},
            "svm": {"C": 10000, "epsilon": 1, "gamma": 0.1, "kernel": "rbf"},
            "knn": {"p": 2},
        },
        "starvation": {
            "rf": {
                "criterion": "entropy",
                "max_depth": 10,
                "max_features": None,
                "min_samples_leaf": 1,
                "min_samples_split": 2,
                "n_estimators": 216,
            },
            "svm": {"C": 1000, "coef0": 1, "degree": 2, "gamma": 0.1, "kernel": "poly"},
            "knn": {"p": 2},
        },
    },
}
"""What `python -m bench planner_models --search` chose on simulated runs, by profile, task and family."""


def search(family: Family, x: Floats, y: NDArray[Any], *, scoring: Any, trees: bool) -> tuple[Point, float]:
    """The best point of a family's grid and its score in cross-validation.

    `scoring`: as scikit-learn takes it; `trees`: the resource is the number of trees.
    """
    folds = (StratifiedKFold if y.dtype == bool else KFold)(FOLDS, shuffle=True, random_state=SEED)
    resource: dict[str, Any] = {"min_resources": min(SAMPLES_LEAST, len(x))}
    more = {"random_state": SEED} if trees else {}
    if trees:
        resource = {"resource": "n_estimators", "min_resources": TREES_LEAST, "max_resources": TREES_MOST}
    model = family.model({}, **more)
    grid = [{family.prefix + name: [value] for name, value in point.items()} for point in family.points]
    found = HalvingGridSearchCV(model, grid, cv=folds, scoring=scoring, refit=False, random_state=SEED, **resource)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found.fit(x, y)
    return {name.removeprefix(family.prefix): value for name, value in found.best_params_.items()}, float(found.best_score_)


def fit(family: Family, point: Point, x: Floats, y: NDArray[Any], *, trees: bool) -> BaseEstimator:
    """A model with the parameters of a point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return family.model(point, **{"random_state": SEED} if trees else {}).fit(x, y)


def probability(model: Any, x: Floats) -> Floats:
    """A classifier's probability of True, [runs]."""
    return (
        np.asarray(model.predict_proba(x)[:, 1])
        if True in model.classes_ and len(model.classes_) > 1
        else model.predict(x) * 1.0
    )


# ---- the refined tree


def small_tree(x: Floats, y: Floats) -> DecisionTreeRegressor:
    """The best tree of at most `MOST_RULES` rules, where a rule costs `RULE_COST` of the cross-validated error.

    The error is absolute. So give throughput as its logarithm, which makes it a relative one, and starvation as a probability.
    """

    def tree(rules: int) -> DecisionTreeRegressor:
        return DecisionTreeRegressor(max_leaf_nodes=rules, random_state=SEED)

    def cost(rules: int) -> float:
        found = cross_val_predict(tree(rules), x, y, cv=KFold(FOLDS, shuffle=True, random_state=SEED))
        return float(np.mean(np.abs(found - y))) * (1 + RULE_COST * rules)

    return tree(min(range(8, MOST_RULES + 1, 4), key=cost)).fit(x, y)


# ---- ours


def boosted(x: Floats, y: NDArray[Any]) -> GradientBoostingClassifier | GradientBoostingRegressor:
    """Boosted trees of a residual, or of whether objectives are met."""
    kind = GradientBoostingClassifier if y.dtype == bool else GradientBoostingRegressor
    return kind(**BOOSTED, random_state=SEED).fit(x, y)


# ---- as flat arrays


def trees(model: Any, target: str, features: Sequence[str]) -> Trees:
    """A trained tree, forest or boosted classifier or regressor as arrays. A classifier's value is the probability of True."""
    boosted = isinstance(model, GradientBoostingClassifier | GradientBoostingRegressor)
    forest = isinstance(model, RandomForestClassifier | RandomForestRegressor)
    classifies = isinstance(model, RandomForestClassifier | DecisionTreeClassifier)
    members = [one.tree_ for one in (np.ravel(model.estimators_) if boosted or forest else [model])]
    offsets = np.cumsum([0, *(tree.node_count for tree in members)])
    columns: dict[str, list[Any]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
    for offset, tree in zip(offsets, members, strict=False):
        leaf, own = tree.children_left < 0, np.arange(tree.node_count)
        columns["feature"] += np.where(leaf, 0, tree.feature).tolist()
        columns["threshold"] += np.where(leaf, 0.0, tree.threshold).tolist()
        columns["left"] += (np.where(leaf, own, tree.children_left) + offset).tolist()
        columns["right"] += (np.where(leaf, own, tree.children_right) + offset).tolist()
        value = _probability(model, tree.value) if classifies else tree.value[:, 0, 0]
        columns["value"] += (model.learning_rate * value if boosted else value).tolist()
    return Trees(
        target=target,
        features=tuple(features),
        roots=tuple(offsets[:-1].tolist()),
        feature=tuple(columns["feature"]),
        threshold=tuple(columns["threshold"]),
        left=tuple(columns["left"]),
        right=tuple(columns["right"]),
        value=tuple(columns["value"]),
        depth=max(int(tree.max_depth) for tree in members),
        start=float(np.ravel(model._raw_predict_init(np.zeros((1, len(features)), np.float32)))[0]) if boosted else 0.0,
        divisor=float(len(members)) if forest else 1.0,
        log_odds=isinstance(model, GradientBoostingClassifier),
    )


def _probability(model: Any, value: Floats) -> Floats:
    """The share of True in each node, [nodes]; `value` is [nodes, 1, classes]."""
    classes = model.classes_.tolist()
    return value[:, 0, classes.index(True)] if True in classes else np.zeros(len(value))
