"""Predictions of a proxy model, in batches: prompts that arrive while a batch runs form the next batch.

A thread runs the model. Its predictions are calibrated like those of the hashed model and compared with them: for adapters
where the proxy has been worse, the hashed model is used. When WAITING_MAX prompts wait, further ones get the hashed model's
answer at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from motet.policies.lengths.calibration import Calibration, pinball
from motet.policies.lengths.model import Curve
from motet.policies.lengths.predictor import CALIBRATED_ADAPTERS, SHARES, Predicted, clipped
from motet.shared.clock import now_s
from motet.shared.telemetry import histogram, logger
from motet.shared.wire.prediction import PredictRequest

log = logger("motet.predictor.proxy")
BATCH_MAX = 32
WAITING_MAX = 128
ANSWERED_MAX = 8192  # answers remembered until their outcome arrives
PROXY_S = histogram(
    "motet_predictor_proxy_seconds",
    "Time of one batch of the proxy model.",
    buckets=(1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0),
)


class TextReader(Protocol):
    """A model that reads text (services.predictor.proxy.Proxy)."""

    curve: Curve

    def above(self, texts: Sequence[str]) -> np.ndarray: ...


class ProxyBatches:
    """One model and the prompts that wait for it."""

    def __init__(self, model: TextReader, levels: Sequence[float], trained_on: int) -> None:
        self._model, self._trained_on = model, trained_on
        self.calibration = Calibration(CALIBRATED_ADAPTERS)
        self.calibration.seed(levels)
        # by a request's features: the distribution it was given, and the quantiles of the hashed model
        self._answered: OrderedDict[bytes, tuple[np.ndarray, tuple[int, int]]] = OrderedDict()
        self._waiting: list[tuple[str, asyncio.Future[np.ndarray | None]]] = []
        self._runner: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, directory: str) -> ProxyBatches:
        """The model that `motet predictor train` wrote to a directory. Raises ConfigError."""
        from motet.services.predictor.proxy import Proxy  # imports torch, which is needed here only

        model = Proxy.load(Path(directory))
        return cls(model, model.facts.levels, model.facts.trained_on)

    async def estimate(self, ask: PredictRequest, other: Predicted) -> Predicted:
        """The proxy's prediction; `other` if that was more accurate for this adapter so far, or if the proxy is too busy."""
        if len(self._waiting) >= WAITING_MAX:
            return other
        waiter: asyncio.Future[np.ndarray | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask.prompt_text, waiter))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())
        above = await waiter
        if above is None:
            return other
        self._remember(ask.features, above, other)
        if not self.calibration.model_is_better(ask.adapter_digest):
            return other
        found = clipped(self._quantiles(ask.adapter_digest, above), self._trained_on, ask.max_tokens, ask.min_tokens)
        return Predicted(estimate=found, basis="proxy")

    def observe(self, adapter: str, features: bytes, tokens: int) -> None:
        """Take in the true length of a finished request. It counts only if this process predicted the request."""
        answered = self._answered.pop(features, None)
        if answered is None:
            return
        above, others = answered
        self.calibration.observe(
            adapter,
            self._model.curve.level(above, max(1, tokens)),
            model_loss=pinball(tokens, self._quantiles(adapter, above), SHARES),
            adapter_loss=pinball(tokens, others, SHARES),
        )

    async def close(self) -> None:
        """Stop. Requests that still wait get the other prediction."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
            began = now_s()
            try:
                rows: Sequence[np.ndarray | None] = list(await asyncio.to_thread(self._model.above, [t for t, _ in batch]))
            except Exception as error:  # whatever a model may raise: predictions go on without it
                log.warning("the proxy model failed", extra={"error": repr(error)})
                rows = [None] * len(batch)
            PROXY_S.observe(now_s() - began)
            for (_, waiter), row in zip(batch, rows, strict=True):
                if not waiter.done():
                    waiter.set_result(row)

    def _quantiles(self, adapter: str, above: np.ndarray) -> list[float]:
        return self._model.curve.tokens(above, self.calibration.levels(adapter, SHARES))

    def _remember(self, features: bytes, above: np.ndarray, other: Predicted) -> None:
        while len(self._answered) >= ANSWERED_MAX:
            self._answered.popitem(last=False)
        self._answered[features] = above, (other.estimate.p50_tokens, other.estimate.p90_tokens)
