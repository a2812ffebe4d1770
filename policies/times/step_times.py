"""The online estimator of step times, which follows a live worker step by step. The offline estimator is `least_squares`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.policies.times.link_times import LinkTimes
from motet.policies.times.perf_model import Floats, batch_load
from motet.policies.times.step_record import Step
from motet.shared.model import PerfModel


class StepTimes:
    """A running estimate of `PerfModel` from the engine's own steps.

    Two least-squares fits with forgetting: decode over (1, rows, LoRA load) from steps without prefill, and prefill over
    (1, tokens, LoRA load) from what a step with prefill took beyond its decode part. A batch that always looks the same
    cannot tell the three coefficients apart; they then keep the proportions of the start values.
    """

    DRIFT_SHARE = 0.02  # weight of one step in `drift`
    FINISH_SHARE = 0.1  # weight of one decoding step

    def __init__(self, start: PerfModel) -> None:
        self._start = start
        self._decode = OnlineFit([start.decode_base_ms, start.decode_row_ms, start.decode_lora_ms])
        self._prefill = OnlineFit([start.prefill_base_ms, start.prefill_token_ms, start.prefill_lora_ms])
        self.link = LinkTimes()
        """The link from other workers to this one. The worker reports its measurements to it."""
        self._finish_ms = start.finish_ms
        self.drift = {"decode": 0.0, "prefill": 0.0}
        """How much longer recent steps take than the start values say, as a share; negative when they are shorter."""

    def observe(self, step: Step) -> None:
        """Take in one step. Steps with cold rows are ignored, because the cost of a copy is no property of the engine."""
        if step.cold_rows or not step.decode_rows + step.prefill_requests:
            return
        kernel = self._start.kernel
        decode_load = batch_load(kernel, step.decode_rows, step.decode_rank_sum, step.decode_max_rank)
        prefill_load = batch_load(kernel, step.prefill_requests, step.prefill_rank_sum, step.prefill_max_rank)
        decode, prefill = (1.0, step.decode_rows, decode_load), (1.0, step.prefill_tokens, prefill_load)
        expected_ms = self._decode.start(decode) if step.decode_rows else 0.0
        if not step.prefill_tokens:
            self._decode.observe(decode, step.time_ms)
            self._note_drift("decode", step.time_ms, expected_ms)
            return
        decode_ms = self._decode.predict(decode) if step.decode_rows else 0.0
        self._prefill.observe(prefill, max(0.0, step.time_ms - decode_ms))
        self._note_drift("prefill", step.time_ms, expected_ms + self._prefill.start(prefill))

    def _note_drift(self, kind: str, step_ms: float, expected_ms: float) -> None:
        if expected_ms > 0:
            self.drift[kind] += self.DRIFT_SHARE * (step_ms / expected_ms - 1.0 - self.drift[kind])

    def finished(self, area: float, took_ms: float) -> None:
        """A step decoded pictures of so many times 512 x 512 pixels."""
        each_ms = took_ms / area
        self._finish_ms += self.FINISH_SHARE * (each_ms - self._finish_ms) if self._finish_ms else each_ms

    @property
    def model(self) -> PerfModel:
        """The present estimate; times of adapter loads and fetches are the start values. Any thread may read it."""
        decode, prefill = self._decode.weights, self._prefill.weights
        return PerfModel(
            kernel=self._start.kernel,
            prefill_base_ms=prefill[0],
            prefill_token_ms=prefill[1],
            prefill_lora_ms=prefill[2],
            decode_base_ms=decode[0],
            decode_row_ms=decode[1],
            decode_lora_ms=decode[2],
            load_base_ms=self._start.load_base_ms,
            load_ms_per_mib=self._start.load_ms_per_mib,
            fetch_base_ms=self._start.fetch_base_ms,
            fetch_ms_per_mib=self._start.fetch_ms_per_mib,
            kv_base_ms=self.link.base_ms,
            kv_ms_per_mib=self.link.ms_per_mib,
            finish_ms=self._finish_ms,
        )


class OnlineFit:
    """Recursive least squares of relative errors with forgetting, kept near the proportions of the start values.

    When batches look alike, many divisions of a step's time among the coefficients fit equally well. A wrong one fits when
    something else slows the steps: other processes on the same cores take more time under more load, which looks like a larger
    base. With a division in which one more row costs nothing, schedulers would send every request to this worker. So the start
    values' proportions, scaled to the measured speed, count as `SHAPE` of the data, and no coefficient falls below `LEAST` of
    them.
    """

    FORGET = 0.998  # weight of the past, with each step
    PRIOR = 0.1  # weight of the start values themselves, in steps
    SHAPE = 0.002  # weight of the start values' proportions, as a share of the steps that are remembered
    LEAST = 0.25
    MOST = 3.0  # times what is expected: a step that took longer was interrupted, and counts as this
    SOLVE = 8  # steps from one solution to the next, once there are `EARLY` of them: a solution takes longer than a sum
    EARLY = 64
    USUAL_MS = (1.0, 0.1, 0.01)  # scale of a coefficient that starts at zero: base, per row or token, per unit of LoRA load

    def __init__(self, start: Sequence[float], *, shape: float = SHAPE) -> None:
        """`start` [3]: the coefficients at the beginning, as in `USUAL_MS`. `shape`: replaces `SHAPE`."""
        self._share = shape
        self._start = np.array(start)
        self._scale = np.where(self._start > 0, self._start, self.USUAL_MS)
        self._shape = self._start / self._scale
        self._products = np.zeros((len(start), len(start)))  # sum of x x, of the steps that are remembered
        self._sums = np.zeros(len(start))  # sum of x * value
        self._steps = 0
        self.weights = [float(value) for value in start]
        """The present coefficients; any thread may read them."""

    def start(self, features: Sequence[float]) -> float:
        """The value with the start coefficients."""
        return float(np.dot(self._start, features))

    def predict(self, features: Sequence[float]) -> float:
        """The value with the present coefficients."""
        return sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take in a step: `features` [3] took `value`."""
        value = min(value, self.MOST * self.predict(features))
        x = self._scale * features
        norm = float(np.linalg.norm(x)) or 1.0
        x, value = x / norm, value / norm  # relative errors: a long prefill must not outweigh a thousand decodes
        self._products = self.FORGET * self._products + np.outer(x, x)
        self._sums = self.FORGET * self._sums + x * value
        self._steps += 1
        if self._steps <= self.EARLY or not self._steps % self.SOLVE:
            self.weights = (self._solve() * self._scale).tolist()

    def _solve(self) -> Floats:
        shape = self._shape
        prior = self.PRIOR * float(shape @ shape)
        speed = (float(shape @ self._sums) + prior) / (float(shape @ self._products @ shape) + prior)
        ridge = self.PRIOR + self._share * float(self._products.trace())
        least = self.LEAST * speed * shape
        products = self._products + ridge * np.eye(len(shape))
        return least + _not_negative(products, self._sums + ridge * speed * shape - products @ least)


def _not_negative(products: Floats, sums: Floats) -> Floats:
    """The solution of the normal equations with no negative coefficient: negative ones become 0 and the others are fitted
    again.
    """
    kept = list(range(len(sums)))
    found = np.zeros(len(sums))
    while kept:
        part = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
        if part.min() >= 0:
            found[kept] = part
            break
        del kept[int(part.argmin())]
    return found
