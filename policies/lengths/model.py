"""A request's output length as a distribution, from a linear model over hashed features (`features`).

    x        text block: tf-idf, length 1      side block: SIDE_WEIGHT per feature
    P(length > edges[k]) = offset[k] + x . weights[:, k]        clipped to 0..1, falling in k

`edges` are quantiles of the lengths that the model was fitted on, so all parts of the distribution have the same weight.
Between two edges the distribution is linear in log(1 + length). `services/predictor/fit.py` fits the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from motet.policies.lengths.features import TEXT_IDS

SIDE_WEIGHT = 0.15
LONGEST_FACTOR = 1.5  # the distribution ends at so many times the longest length that the model was fitted on


class LengthModel(msgspec.Struct, frozen=True, kw_only=True):
    """K thresholds over SPACE features. Arrays are float32; `fitted_on` is the number of requests behind them."""

    edges: np.ndarray  # (K,) tokens, rising
    longest: float  # tokens
    rarity: np.ndarray  # (SPACE,) the inverse document frequency in the text block, SIDE_WEIGHT in the side block
    weights: np.ndarray  # (SPACE, K)
    offset: np.ndarray  # (K,)
    fitted_on: int

    def above(self, requests: Sequence[np.ndarray]) -> np.ndarray:
        """P(length > edge) of each request, (n, K) float64, from its feature ids (int64, each once)."""
        if not requests:
            return np.empty((0, len(self.edges)))
        ends = np.cumsum([len(one) for one in requests])
        begins = np.concatenate(([0], ends[:-1]))
        ids = np.concatenate(requests)
        owner = np.repeat(np.arange(len(requests)), np.diff(ends, prepend=0))
        values = scaled(ids, self.rarity[ids], owner, len(requests))
        padded = np.vstack((values[:, None] * self.weights[ids], np.zeros((1, len(self.edges)), np.float32)))
        sums = np.add.reduceat(padded, begins, axis=0)  # of an empty request: its neighbour's first row
        sums[begins == ends] = 0.0
        return falling(sums + self.offset)


def scaled(ids: np.ndarray, rarity: np.ndarray, owner: np.ndarray, rows: int) -> np.ndarray:
    """The entries of x: `rarity` of each id, with the text block of each row scaled to length 1.

    `owner`: the row of each id.
    """
    text = ids < TEXT_IDS
    square = np.bincount(owner, np.where(text, rarity, 0.0) ** 2, rows)
    return np.where(text, rarity / np.sqrt(np.maximum(square, 1e-12))[owner], rarity).astype(np.float32)


def falling(above: np.ndarray) -> np.ndarray:
    """Clipped to 0..1 and made non-increasing along the last axis, by the mean of the two monotone envelopes."""
    above = np.clip(np.asarray(above, np.float64), 0.0, 1.0)
    low = np.minimum.accumulate(above, axis=-1)
    high = np.maximum.accumulate(above[..., ::-1], axis=-1)[..., ::-1]
    return (low + high) / 2


class Curve:
    """Interpolates the distributions that one model gives, in both directions: level of a length, and length at a level."""

    def __init__(self, edges: np.ndarray, longest: float) -> None:
        self.edges = np.asarray(edges, np.float64)
        self._x = np.log1p(np.concatenate(([0.0], self.edges, [max(longest, self.edges[-1] + 1) * LONGEST_FACTOR])))

    def level(self, above: np.ndarray, tokens: int) -> float:
        """The level (0..1) of a length in a distribution `above` (K,): the middle of its step."""
        cumulative = np.concatenate(([0.0], 1.0 - above, [1.0]))
        low, high = np.interp(np.log1p([tokens - 1, tokens]), self._x, cumulative)
        return float((low + high) / 2)

    def tokens(self, above: np.ndarray, levels: Sequence[float]) -> list[float]:
        """The lengths at these levels, 0..1."""
        cumulative = np.concatenate(([0.0], 1.0 - above, [1.0]))
        rising = cumulative + np.arange(len(cumulative)) * 1e-9  # np.interp wants strictly rising abscissae
        found: list[float] = np.expm1(np.interp(levels, rising, self._x)).tolist()
        return found

    def share_between(self, above: np.ndarray, cuts: Sequence[float]) -> np.ndarray:
        """P(cuts[i-1] < length <= cuts[i]) of each of (n, K) distributions: (n, len(cuts) + 1)."""
        ends = np.log1p(np.asarray(cuts, np.float64))
        ones = np.ones((len(above), 1))
        cumulative = np.concatenate((0 * ones, 1.0 - above, ones), axis=1)
        at = np.clip(np.searchsorted(self._x, ends, side="right") - 1, 0, len(self._x) - 2)
        part = np.clip((ends - self._x[at]) / (self._x[at + 1] - self._x[at]), 0.0, 1.0)
        below = cumulative[:, at] + part * (cumulative[:, at + 1] - cumulative[:, at])
        return np.diff(np.concatenate((0 * ones, below, ones), axis=1), axis=1)
