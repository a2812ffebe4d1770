"""Predicts output lengths and learns from finished requests: the pure part of the predictor service, which has no clock,
NATS connection or training.

    estimate    hashed features ─► LengthModel ─► calibrated levels ─► p50, p90; the histogram where that is better
    observe     the same request with its length ─► calibration, histogram, window of the last requests
    fit_due     the window has changed enough ─► services/predictor/fit.py ─► adopt

A request is predicted only from earlier ones, so its level is an unbiased sample for the calibration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from motet.policies.lengths.calibration import Calibration, Record, pinball
from motet.policies.lengths.features import pack, side_feature, steps, unpack
from motet.policies.lengths.model import Curve, LengthModel
from motet.policies.lengths.quantiles import MAX_TOKENS, MIN_SAMPLES, Estimate, LengthQuantiles, Saved

SHARES = 0.5, 0.9
FIRST_FIT = 64  # requests before the first model
FIT_SHARE = 8  # one fit per so large a part of the window
SAVED_ADAPTERS = 4096
CALIBRATED_ADAPTERS = 4096


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished request: its packed features, including its adapter's at that time, and its length in tokens."""

    features: bytes
    tokens: int


class Learned(msgspec.Struct, kw_only=True):
    """Everything that a predictor has learned."""

    model: LengthModel | None
    window: list[Row]
    histograms: list[Saved]
    everybody: Record
    adapters: list[tuple[str, Record]]


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted quantiles of a request's length, and their source."""

    estimate: Estimate
    basis: str  # proxy: a model's that reads text; prompt: this one's; learned: a histogram's; default: nothing was seen yet


class LengthPredictor:
    """Predicts lengths by the histograms of at most `max_adapters` adapters, and by a model of the last `window` requests."""

    def __init__(self, max_adapters: int, window: int) -> None:
        self.lengths = LengthQuantiles(max_adapters)
        self.calibration = Calibration(min(max_adapters, CALIBRATED_ADAPTERS))
        self.model: LengthModel | None = None
        self.window: deque[Row] = deque(maxlen=window)
        self.since_fit = 0  # requests observed since the model's
        self._curve: Curve | None = None

    # ---- predicting

    def estimate(self, adapter: str, features: bytes, max_tokens: int, min_tokens: int = 0) -> Predicted:
        """The length of a request of this adapter ("" for the base) between `min_tokens` and `max_tokens` tokens."""
        known = self.lengths.estimate(adapter, MAX_TOKENS)
        basis, samples = "learned" if known.samples else "default", known.samples
        found: Sequence[float] = (known.p50_tokens, known.p90_tokens)
        if self.model is not None and features and self.calibration.model_is_better(adapter):
            found = self._quantiles(adapter, self._above(self._ids(adapter, features, known)))
            basis, samples = "prompt", self.model.fitted_on
        return Predicted(estimate=clipped(found, samples, max_tokens, min_tokens), basis=basis)

    def _ids(self, adapter: str, features: bytes, known: Estimate) -> np.ndarray:
        """The request's features, and those of its adapter: its identity and its typical length."""
        history = (0, 0) if self.lengths.samples(adapter) < MIN_SAMPLES else (steps(known.p50_tokens), steps(known.p90_tokens))
        more = (
            side_feature("adapter", adapter), side_feature("median", history[0]), side_feature("tail", history[1])
        )  # fmt: skip
        return unpack(features + pack(more))

    def _above(self, ids: np.ndarray) -> np.ndarray:
        assert self.model is not None
        row: np.ndarray = self.model.above([ids])[0]
        return row

    def _quantiles(self, adapter: str, above: np.ndarray) -> list[float]:
        assert self._curve is not None
        return self._curve.tokens(above, self.calibration.levels(adapter, SHARES))

    # ---- learning

    def observe(self, adapter: str, features: bytes, tokens: int) -> float | None:
        """A request of this adapter with these features ended with so many tokens; returns its level in the model."""
        tokens = min(max(1, tokens), MAX_TOKENS - 1)
        known = self.lengths.estimate(adapter, MAX_TOKENS)
        level = None
        if features:
            ids = self._ids(adapter, features, known)
            if self.model is not None and self._curve is not None:
                above = self._above(ids)
                level = self._curve.level(above, tokens)
                self.calibration.observe(
                    adapter,
                    level,
                    model_loss=pinball(tokens, self._quantiles(adapter, above), SHARES),
                    adapter_loss=pinball(tokens, (known.p50_tokens, known.p90_tokens), SHARES),
                )
            self.window.append(Row(pack(ids.tolist()), tokens))
            self.since_fit += 1
        self.lengths.observe(adapter, tokens)
        return level

    def fit_due(self) -> bool:
        """Whether enough requests have ended since the last fit."""
        return self.since_fit >= FIRST_FIT and (self.model is None or self.since_fit * FIT_SHARE >= len(self.window))

    def adopt(self, model: LengthModel, levels: Sequence[float]) -> None:
        """Predict with a new model. `levels`: the quantile levels of requests that it was not fitted on, if known."""
        self._take(model)
        self.since_fit = 0
        if levels:
            self.calibration.seed(levels)

    def _take(self, model: LengthModel | None) -> None:
        self.model = model
        self._curve = Curve(model.edges, model.longest) if model is not None else None

    # ---- keeping

    def state(self) -> Learned:
        """A copy of everything learned, for `restore`. It has only the SAVED_ADAPTERS most recently used adapters."""
        recent = list(self.calibration.adapters.items())[-SAVED_ADAPTERS:]
        return Learned(
            model=self.model,
            window=list(self.window),
            histograms=self.lengths.saved(SAVED_ADAPTERS),
            everybody=msgspec.structs.replace(self.calibration.all),
            adapters=[(adapter, msgspec.structs.replace(record)) for adapter, record in recent],
        )

    def restore(self, state: Learned) -> None:
        """Replace everything learned by a saved `state`."""
        self._take(state.model)
        self.since_fit = 0
        self.window.clear()
        self.window.extend(state.window)
        self.lengths.restore(state.histograms)
        self.calibration.all = state.everybody
        self.calibration.adapters.clear()
        self.calibration.adapters.update(state.adapters)


def clipped(quantiles: Sequence[float], samples: int, max_tokens: int, min_tokens: int = 0) -> Estimate:
    """p50 and p90 in whole tokens, clipped to what the request allows."""
    most = max(1, max_tokens)
    least = min(most, max(1, min_tokens))
    p50, p90 = (min(most, max(least, round(one))) for one in quantiles)
    return Estimate(p50_tokens=p50, p90_tokens=max(p50, p90), samples=samples)
