"""The predictor: predicts a request's output length from hashed features of its prompt and from its adapter's past.

    Outcome ──► LengthPredictor.observe ──► window ──fit_due──► a process with scikit-learn ──► adopt ──► object store
    PredictRequest ──► LengthPredictor.estimate ──► Prediction
          └──► with text and --predictor-proxy: ProxyBatches, in batches ──┘

Every copy receives every outcome (no queue group), so any copy can answer any request. What was learned is kept in the object
store `motet_predictor`. A new copy starts from it, and a copy that finds a newer model there takes it instead of fitting one.
Without JetStream a copy learns for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys

import msgspec

from motet.policies.lengths.predictor import Learned, LengthPredictor
from motet.services.predictor import codec as coding
from motet.services.predictor.codec import FittedModel, Task
from motet.services.predictor.config import PredictorConfig
from motet.services.predictor.proxy_batches import ProxyBatches
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import MotetError
from motet.shared.malloc import return_large_buffers
from motet.shared.objects import Objects, read_object
from motet.shared.service import BusService, run
from motet.shared.telemetry import counter, gauge, histogram, logger
from motet.shared.wire.prediction import Outcome, Prediction, PredictRequest

log = logger("motet.predictor")
STATE = "state"  # the object's name
TICK_S = 0.25
FIT_TIMEOUT_S = 300.0
STATE_WAIT_S = 2.0  # for the object store, at the start: a mesh that starts has none yet

PREDICTIONS = counter(
    "motet_predictor_predictions",
    "Answers by basis: proxy (a model that reads text), prompt (the model over hashed features), learned (the adapter's"
    " past lengths) or default (no outcomes yet).",
    ["basis"],
)
PREDICT_S = histogram(
    "motet_predictor_predict_seconds",
    "Time to compute one answer, without the bus.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
)
OUTCOMES = counter("motet_predictor_outcomes", "Finished requests that were learned from.")
ADAPTERS = gauge("motet_predictor_adapters", "Adapters with a length histogram, the base model included.")
LEVEL = histogram(
    "motet_predictor_level",
    "Where lengths ended up in the prompt model's distribution, before calibration; uniform over 0 to 1 if it is right.",
    buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
)
FITS = counter(
    "motet_predictor_fits", "New prompt models by origin: fitted here, taken from another copy, or failed.", ["origin"]
)


class PredictorService(BusService):
    """A predictor process (`shared.service.Service`)."""

    name = "predictor"

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__(config)
        self._config = config
        self.predictor = LengthPredictor(config.max_histograms, config.predictor_window)
        self.lengths = self.predictor.lengths
        self.proxy = ProxyBatches.load(config.predictor_proxy) if config.predictor_proxy else None
        self.store: Objects | None = None
        self.stored = ""  # the id of the state in the store that this copy has read or written last
        self._learned = 0  # outcomes since then
        self._keeper: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Subscribe to outcomes and answer requests. The stored state is read meanwhile."""
        self._bus = bus = await Bus.connect(self._config.bus, self._config.process.identity(self.name), inbox=self.name)
        await bus.subscribe(subjects.OUTCOME, Outcome, self._learn)
        self._keeper = bus.spawn(self._keep_fitted(bus))
        await bus.serve("predict", subjects.PREDICT, PredictRequest, self._predict, queue=self.name)

    async def drain(self) -> None:
        await super().drain()
        await self._stop_keeper()
        if self._learned:
            await self._save()

    async def stop(self) -> None:
        await self._stop_keeper()
        if self.proxy is not None:
            await self.proxy.close()
        await super().stop()

    async def _stop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None

    # ---- messages

    def _learn(self, outcome: Outcome) -> None:
        level = self.predictor.observe(outcome.adapter_digest, outcome.features, outcome.output_tokens)
        if level is not None:
            LEVEL.observe(level)
        if self.proxy is not None:
            self.proxy.observe(outcome.adapter_digest, outcome.features, outcome.output_tokens)
        self._learned += 1
        OUTCOMES.inc()
        ADAPTERS.set(self.lengths.adapters)

    async def _predict(self, ask: PredictRequest) -> Prediction:
        began = now_s()
        found = self.predictor.estimate(ask.adapter_digest, ask.features, ask.max_tokens, ask.min_tokens)
        PREDICT_S.observe(now_s() - began)
        if self.proxy is not None and ask.prompt_text:
            found = await self.proxy.estimate(ask, found)
        PREDICTIONS.labels(found.basis).inc()
        estimate = found.estimate
        return Prediction(p50_tokens=estimate.p50_tokens, p90_tokens=estimate.p90_tokens, samples=estimate.samples)

    # ---- fits

    async def _keep_fitted(self, bus: Bus) -> None:
        await self._open_store(bus)
        while True:
            await asyncio.sleep(min(TICK_S, self._config.predictor_fit_s))
            if not self.predictor.fit_due():
                continue
            if self.store is None:
                await self._open_store(bus)
            if not await self._load(model_only=True):
                await self._fit()
            await asyncio.sleep(self._config.predictor_fit_s)

    async def _fit(self) -> None:
        """Fit a model in a process of its own, predict with it, and keep it."""
        window = list(self.predictor.window)
        task = Task([row.features for row in window], [row.tokens for row in window])
        fitted = None
        try:
            fitted = await _fitted(coding.encode(task))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("no model", extra={"error": repr(error)})
        if fitted is None:
            self.predictor.since_fit = 0  # again when as many more have ended
            FITS.labels("failed").inc()
            return
        self.predictor.adopt(fitted.model, fitted.levels)
        FITS.labels("here").inc()
        log.info("fitted", extra={"requests": fitted.model.fitted_on})
        await self._save()

    # ---- the object store

    async def _open_store(self, bus: Bus) -> None:
        if not self._config.predictor_state:
            return
        try:
            self.store = await Objects.open(bus, subjects.PREDICTOR, wait_s=STATE_WAIT_S)
        except MotetError as error:
            log.info("no object store yet", extra={"error": error.message})
            return
        if await self._load(model_only=False):
            log.info("goes on from what was learned before", extra={"requests": len(self.predictor.window)})

    async def _load(self, *, model_only: bool) -> bool:
        """Take over the stored state if it is not this copy's own; False without one."""
        if self.store is None or self._bus is None:
            return False
        try:
            info = await self.store.info(STATE)
            if info is None or info.nuid == self.stored:
                return False
            sink = io.BytesIO()
            await read_object(self._bus, self.store, STATE, sink)
            state = await asyncio.to_thread(coding.decompress, sink.getvalue(), Learned)
        except (MotetError, msgspec.MsgspecError, ValueError, TypeError) as error:
            log.warning("cannot read what was learned before", extra={"error": str(error)})
            return False
        self.stored = info.nuid or ""
        if not model_only:
            self.predictor.restore(state)
        elif state.model is not None:
            self.predictor.adopt(state.model, [])
            self.predictor.calibration.all = state.everybody
        else:
            return False
        FITS.labels("taken").inc()
        return True

    async def _save(self) -> None:
        if self.store is None:
            return
        state, self._learned = self.predictor.state(), 0
        try:
            await self.store.put(STATE, await asyncio.to_thread(coding.compress, state))
            info = await self.store.info(STATE)
            self.stored = (info.nuid or "") if info is not None else ""
        except MotetError as error:
            log.warning("cannot keep what was learned", extra={"error": error.message})


async def _fitted(task: bytes) -> FittedModel | None:
    """The result of `services.predictor.fit` on a task; None when there is nothing to learn from it or it failed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet.services.predictor.fit",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(FIT_TIMEOUT_S):
            found, _ = await process.communicate(task)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return await asyncio.to_thread(coding.decode, found, FittedModel) if process.returncode == 0 else None


def main(config: PredictorConfig) -> int:
    """Run a predictor until it is told to stop; returns the exit status."""
    return_large_buffers()
    return run(PredictorService(config), config)
