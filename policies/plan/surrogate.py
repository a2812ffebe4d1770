"""Trained trees as flat arrays: their predictions without the library that trained them, and their rules in words.

A model is a sum of trees, `(start + sum of their leaves) / divisor`. A random forest has start 0 and divides by the number of
its trees. Gradient boosting starts at its first guess and divides by 1. A single tree is a forest of one. A boosted model of a
probability sums log odds (`log_odds`). Nodes of all trees are in one set of arrays. A leaf is a node that leads to itself, so
all rows go down the same number of steps, and nobody asks whether one has arrived.

Inputs are rounded to float32 before they are compared, as scikit-learn does; a prediction is equal to its own, bit for bit
(tests/parity). Adapter-caching paper, section 6.1: the refined tree has at most 32 rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Trees(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, kw_only=True):
    """A trained model of one number; fields as in its JSON. Lists over nodes have equal lengths."""

    motet_surrogate: int = 1  # version of the format
    target: str  # what is predicted, with its unit
    features: tuple[str, ...]
    roots: tuple[int, ...]  # the first node of each tree
    feature: tuple[int, ...]  # by node: the feature that is compared
    threshold: tuple[float, ...]  # by node: not above it, go left
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]  # by node; of leaves it counts
    depth: int  # steps from a root to the deepest leaf
    start: float = 0.0
    divisor: float = 1.0
    log_odds: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if a node leads nowhere, so that a damaged file is refused and not followed."""
        nodes = len(self.feature)
        if self.motet_surrogate != 1:
            raise ValueError(f"motet_surrogate {self.motet_surrogate} is not known")
        if (
            not self.features
            or not self.roots
            or any(len(column) != nodes for column in (self.threshold, self.left, self.right, self.value))
        ):
            raise ValueError("feature, threshold, left, right and value have one entry for each node, and there is a tree")
        for name, found, end in (
            ("roots", self.roots, nodes),
            ("left", self.left, nodes),
            ("right", self.right, nodes),
            ("feature", self.feature, len(self.features)),
        ):
            if not all(0 <= one < end for one in found):
                raise ValueError(f"{name}: entries are from 0 to {end - 1}")
        if not 0 <= self.depth < nodes or not self.divisor > 0:
            raise ValueError("depth is below the number of nodes, and divisor above 0")

    @cached_property
    def _columns(self) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.intp], Floats]:
        # the children of a node are neighbours in one array: right at 2 n, left at 2 n + 1
        children = np.stack([self.right, self.left], axis=1).astype(np.intp).reshape(-1)
        return np.array(self.feature, np.intp), np.array(self.threshold), children, np.array(self.value)

    def predict(self, x: Floats) -> Floats:
        """Predictions for rows of features [n, features]: [n]."""
        feature, threshold, children, value = self._columns
        rows = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
        first = np.arange(len(x), dtype=np.intp) * len(self.features)
        total = np.full(len(x), self.start)
        for root in self.roots:
            node = np.full(len(x), root, dtype=np.intp)
            for _ in range(self.depth):
                goes_left = rows[first + feature[node]] <= threshold[node]
                node = children[2 * node + goes_left]
            total += value[node]
        return self._linked(total / self.divisor)

    def _linked(self, total: Floats) -> Floats:
        return 1.0 / (1.0 + np.exp(-total)) if self.log_odds else total

    def rules(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """The rules of a single tree, (conditions, value), from left to right. A rule is a way to a leaf."""
        yield from self._rules_below(self.roots[0], {})

    def _rules_below(self, node: int, bounds: dict[int, tuple[float, float]]) -> Iterator[tuple[tuple[str, ...], float]]:
        if self.left[node] == node:
            conditions = tuple(_condition(self.features[name], *bounds[name]) for name in sorted(bounds))
            yield conditions, (self.start + self.value[node]) / self.divisor
            return
        name, threshold = self.feature[node], self.threshold[node]
        low, high = bounds.get(name, (-math.inf, math.inf))
        yield from self._rules_below(self.left[node], bounds | {name: (low, min(high, threshold))})
        yield from self._rules_below(self.right[node], bounds | {name: (max(low, threshold), high)})

    def encode(self) -> bytes:
        """The model as JSON."""
        return msgspec.json.encode(self)


def _condition(name: str, above: float, most: float) -> str:
    """In words: `above` < name <= `most`."""
    if above == -math.inf:
        return f"{name} <= {most:.4g}"
    return f"{name} > {above:.4g}" if most == math.inf else f"{above:.4g} < {name} <= {most:.4g}"


def decode(data: bytes) -> Trees:
    """A model from JSON. Raises msgspec.ValidationError or msgspec.DecodeError, with the field, for anything else."""
    return msgspec.json.decode(data, type=Trees)
