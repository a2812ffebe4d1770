"""What a worker tells the schedulers about itself: snapshots, deltas between them, and its fitted step times.

    snapshot seq=7 ── delta 8 ── delta 9 ── ... ── snapshot seq=23        seq counts both

Applying the deltas to a snapshot gives the next snapshot, except for what moves in nearly every step: free KV blocks, free
adapter bytes and `running_left` are refreshed by whatever message comes next, each request's output tokens by snapshots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.policies.worker_view import View
from motet.services.worker.engine.request import StepStats
from motet.shared.messages import WorkerDelta, WorkerSnapshot
from motet.shared.model import PerfModel, WorkerLimits

# Measured with the demo model on two cores; the warm-up and the first real steps move it to where this worker is.
START_PERF = PerfModel(
    prefill_base_ms=4.0,
    prefill_token_ms=0.08,
    prefill_lora_ms=0.03,
    decode_base_ms=3.0,
    decode_row_ms=0.15,
    decode_lora_ms=0.008,
    load_base_ms=2.0,
    load_ms_per_mib=1.0,
    fetch_base_ms=5.0,  # from the object store at 1 Gbit/s; not refined
    fetch_ms_per_mib=8.0,
)


class WorkerView(View):
    """The view with what makes messages of it."""

    def __init__(self, worker_id: str, incarnation: str, limits: WorkerLimits) -> None:
        super().__init__(limits)
        self.worker_id, self.incarnation = worker_id, incarnation
        self.prefill_tokens_waiting = 0
        self._seq = 0

    def snapshot(self, perf: PerfModel, unix_ms: int) -> WorkerSnapshot:
        """Everything; pending changes are in it."""
        self.told()
        self._seq += 1
        return WorkerSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            sent_unix_ms=unix_ms,
            limits=self.limits,
            perf=perf,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            requests=list(self.requests.values()),
            adapters=list(self.adapters.values()),
            prefill_tokens_waiting=self.prefill_tokens_waiting,
        )

    def delta(self, unix_ms: int) -> WorkerDelta:
        """What changed since the last snapshot or delta."""
        changes = self.take()
        self._seq += 1
        return WorkerDelta(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self._seq,
            sent_unix_ms=unix_ms,
            kv_blocks_free=self.kv_blocks_free,
            adapter_bytes_free=self.adapter_bytes_free,
            draining=self.draining,
            changed=changes.changed,
            removed=changes.removed,
            resident=changes.resident,
            evicted=changes.evicted,
            running_left=self.running_left(),
        )


class StepTimes:
    """A running estimate of `PerfModel` from the engine's own steps.

    Two least-squares fits with forgetting: decode over (1, rows, LoRA load) from steps without prefill, and prefill over
    (1, tokens, LoRA load) from what a step with prefill took beyond its decode part. A batch that always looks the same
    cannot tell the three coefficients apart; they then keep the proportions of the start values.
    """

    FORGET = 0.998
    DRIFT_SHARE = 0.02  # what one step counts in `drift`

    def __init__(self, start: PerfModel) -> None:
        self._start = start
        self._decode = _Fit([start.decode_base_ms, start.decode_row_ms, start.decode_lora_ms])
        self._prefill = _Fit([start.prefill_base_ms, start.prefill_token_ms, start.prefill_lora_ms])
        self.drift = {"decode": 0.0, "prefill": 0.0}
        """How much longer steps take of late than the start values say, as a share; negative when they are shorter."""

    def observe(self, step_ms: float, stats: StepStats) -> None:
        """One step's time and what was in it. The prefilling requests' share of the ranks goes by their number."""
        rows = stats.decode_rows + stats.prefill_requests
        if not rows or stats.cold_rows:  # what a copy under way costs is no property of the engine
            return
        if self._start.kernel == "bgmv":
            decode_load = float(stats.decode_rows * stats.rank_max)
            prefill_load = float(stats.prefill_requests * stats.rank_max)
        else:
            decode_load = stats.rank_sum * stats.decode_rows / rows
            prefill_load = stats.rank_sum - decode_load
        decode, prefill = [1.0, stats.decode_rows, decode_load], [1.0, stats.prefill_tokens, prefill_load]
        expected_ms = self._decode.start(decode) if stats.decode_rows else 0.0
        if not stats.prefill_tokens:
            self._decode.observe(decode, step_ms)
            self._note_drift("decode", step_ms, expected_ms)
            return
        decode_ms = self._decode.predict(decode) if stats.decode_rows else 0.0
        self._prefill.observe(prefill, max(0.0, step_ms - decode_ms))
        self._note_drift("prefill", step_ms, expected_ms + self._prefill.start(prefill))

    def _note_drift(self, kind: str, step_ms: float, expected_ms: float) -> None:
        if expected_ms > 0:
            self.drift[kind] += self.DRIFT_SHARE * (step_ms / expected_ms - 1.0 - self.drift[kind])

    @property
    def model(self) -> PerfModel:
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
        )


class _Fit:
    """Least squares of relative errors with forgetting, kept near the proportions of the start values.

    Steps fit any split of their time when batches look alike, and a wrong split when something else made them slow: other
    processes on the same cores take more time while there is more load, which looks like a larger base. A split that says
    that one more row costs nothing draws every request to this worker. So a share of the data counts as a vote for
    the start values' proportions, at the speed that the data has, and no coefficient falls below `LEAST` of those.
    """

    PRIOR = 0.1  # steps that count for the start values themselves
    SHAPE = 0.002  # of the steps that are remembered count for their proportions
    LEAST = 0.25
    MOST = 3.0  # times what is expected: a step that took longer stood still, and counts as this
    USUAL_MS = (1.0, 0.1, 0.01)  # scale of a coefficient that starts at zero: base, per row or token, per unit of LoRA load

    def __init__(self, start: list[float]) -> None:
        self._start = np.array(start)
        self._scale = np.where(self._start > 0, self._start, self.USUAL_MS)
        self._shape = self._start / self._scale
        self._products = np.zeros((len(start), len(start)))  # sum of x x, of the steps that are remembered
        self._sums = np.zeros(len(start))  # sum of x * value
        self.weights = [float(value) for value in start]
        """The coefficients now; any thread may read them."""

    def start(self, features: list[float]) -> float:
        """What the start values say."""
        return float(np.dot(self._start, features))

    def predict(self, features: list[float]) -> float:
        return sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))

    def observe(self, features: list[float], value: float) -> None:
        value = min(value, self.MOST * self.predict(features))
        x = self._scale * features
        norm = float(np.linalg.norm(x)) or 1.0
        x, value = x / norm, value / norm  # relative errors: a long prefill must not outweigh a thousand decodes
        self._products = StepTimes.FORGET * self._products + np.outer(x, x)
        self._sums = StepTimes.FORGET * self._sums + x * value
        self.weights = (self._solve() * self._scale).tolist()

    def _solve(self) -> NDArray[np.float64]:
        shape = self._shape
        prior = self.PRIOR * float(shape @ shape)
        speed = (float(shape @ self._sums) + prior) / (float(shape @ self._products @ shape) + prior)
        ridge = self.PRIOR + self.SHAPE * float(self._products.trace())
        least = self.LEAST * speed * shape
        products = self._products + ridge * np.eye(len(shape))
        return least + _not_negative(products, self._sums + ridge * speed * shape - products @ least)


def _not_negative(products: NDArray[np.float64], sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The solution, in which what would be negative is zero and the others are fitted without it."""
    kept = list(range(len(sums)))
    found = np.zeros(len(sums))
    while kept:
        part = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
        if part.min() >= 0:
            found[kept] = part
            break
        del kept[int(part.argmin())]
    return found
