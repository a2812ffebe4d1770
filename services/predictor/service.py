"""The predictor: predicts a request's output length from running quantiles per adapter.

Every copy receives every outcome (no queue group), so any copy can answer any request. Quantiles live in memory only: a new
copy starts from defaults and needs a handful of outcomes per adapter.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from motet.policies.length_quantiles import LengthQuantiles
from motet.services.predictor.config import PredictorConfig
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.messages import Outcome, Prediction, PredictRequest
from motet.shared.service import BusService, run
from motet.shared.telemetry import REGISTRY

PREDICTIONS = Counter(
    "motet_predictor_predictions",
    "Answers by basis: learned (from outcomes) or default (no outcomes yet).",
    ["basis"],
    registry=REGISTRY,
)
PREDICT_S = Histogram(
    "motet_predictor_predict_seconds",
    "Time to compute one answer, without the bus.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
    registry=REGISTRY,
)
OUTCOMES = Counter("motet_predictor_outcomes", "Finished requests that were learned from.", registry=REGISTRY)
ADAPTERS = Gauge("motet_predictor_adapters", "Adapters with a length histogram, the base model included.", registry=REGISTRY)


class PredictorService(BusService):
    """A predictor process (`shared.service.Service`)."""

    name = "predictor"

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__(config)
        self._config = config
        self.lengths = LengthQuantiles(config.max_histograms)

    async def start(self) -> None:
        """Subscribe to outcomes, then answer requests."""
        self._bus = bus = await Bus.connect(self._config.bus, self._config.process.identity(self.name), inbox=self.name)
        await bus.subscribe(subjects.OUTCOME, Outcome, self._learn)
        await bus.serve("predict", subjects.PREDICT, PredictRequest, self._predict, queue=self.name)

    def _learn(self, outcome: Outcome) -> None:
        self.lengths.observe(outcome.adapter_digest, outcome.output_tokens)
        OUTCOMES.inc()
        ADAPTERS.set(self.lengths.adapters)

    async def _predict(self, ask: PredictRequest) -> Prediction:
        began = now_s()
        found = self.lengths.estimate(ask.adapter_digest, ask.max_tokens)
        PREDICT_S.observe(now_s() - began)
        PREDICTIONS.labels("learned" if found.samples else "default").inc()
        return Prediction(p50_tokens=found.p50_tokens, p90_tokens=found.p90_tokens, samples=found.samples)


def main(config: PredictorConfig) -> int:
    """Run a predictor until it is told to stop; returns the exit status."""
    return run(PredictorService(config), config)
