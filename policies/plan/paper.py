"""The greedy algorithm of "adapter caching with a digital twin" (section 7, Algorithms 1 and 2).

Adapters are put on one GPU after another in the order of `zigzag`. Whenever a GPU has a number of adapters that is a testing
point, a predictor says for its A_max and the next larger one what throughput it reaches and whether adapters starve. Where both
starve, the adapters since the last test go back to the queue, and the next GPU is begun.

The paper leaves open or contradicts, and this does: A_max begins at 0 and is first the smallest testing point; of the two A_max
the one with more throughput is chosen among those that do not starve (the paper asks for starvation only after choosing); a GPU
that fails a test keeps what it was given before; the last test raises A_max until nothing starves or no larger one is left; an
A_max for which there is no setting needs more memory than there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import judge
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Adapters, CannotServe, Kind, Packing, Rows, Worker
from motet.policies.plan.prefixes import zigzag

TESTING_POINTS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)

Flags = NDArray[np.bool_]
Predict = Callable[[Demand, Rows], tuple[Floats, Flags]]
"""(tokens/s, whether adapters starve) of the adapters of a GPU, for each of some settings of its kind."""


def by_law(kind: Kind, *, served: float | None = None) -> Predict:
    """The law as predictor. Adapters starve where it is strained, or by the paper's rule where less than `served` is served."""

    def predict(demand: Demand, settings: Rows) -> tuple[Floats, Flags]:
        verdict = judge(demand, kind.settings, kind.limits)
        rates = np.minimum(verdict.capacity, demand.total_rate)
        starves = verdict.strain > 1.0 if served is None else rates < served * demand.total_rate
        tokens = rates / demand.total_rate * demand.tokens_s
        return tokens[settings], (starves | ~np.isfinite(verdict.strain))[settings]

    return predict


@dataclass(slots=True)
class _Gpu:
    """A GPU: the adapters that passed its last test, the adapters that were added after it, and A_max."""

    kept: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    a_max: int = 0


def greedy(demand: Demand, kind: Kind, predict: Predict | None = None) -> Packing:
    """The packing that Algorithm 1 finds with at most `kind.most` GPUs. Raises CannotServe for "starvation"."""
    asks = _Tests(demand, kind, predict or by_law(kind))
    queue = deque(zigzag(demand).tolist())
    gpus: list[_Gpu] = []
    gpu: _Gpu | None = None
    while queue:
        if gpu is None:
            if kind.most is not None and len(gpus) >= kind.most:
                raise CannotServe(f"adapters starve on {len(gpus)} workers, the most that are allowed")
            gpu = _Gpu()
            gpus.append(gpu)
        gpu.tried.append(queue.popleft())
        due = len(gpu.kept) + len(gpu.tried) in TESTING_POINTS
        if (due and not asks.test(gpu)) or (not queue and gpu.tried and not asks.test(gpu, last=True)):
            _give_back(gpu, queue)
            gpu = None
    adapters = Adapters(demand, [kind])
    workers = [asks.worker(adapters, gpu) for gpu in gpus if gpu.kept]
    return Packing(workers=tuple(adapters.packed(workers)), cost=kind.cost * len(workers))


def _give_back(gpu: _Gpu, queue: deque[int]) -> None:
    """Put the adapters of a failed test back where they came from. Raises CannotServe where the next GPU would fail alike."""
    if not gpu.kept:
        raise CannotServe(f"an empty worker cannot serve the next {len(gpu.tried)} adapters of the order without starvation")
    queue.extendleft(reversed(gpu.tried))
    gpu.tried.clear()


class _Tests:
    """Algorithm 2 for one kind."""

    def __init__(self, demand: Demand, kind: Kind, predict: Predict) -> None:
        self._demand, self._kind, self._predict = demand, kind, predict

    def test(self, gpu: _Gpu, *, last: bool = False) -> bool:
        """Whether the GPU serves all its adapters, which are then kept with the A_max that does it best."""
        larger = [point for point in TESTING_POINTS if point > gpu.a_max]
        points = [point for point in (gpu.a_max, *(larger if last else larger[:1])) if point]
        rows = [*gpu.kept, *gpu.tried]
        settings = {point: at for point in points if (at := self.setting(rows, point)) is not None}
        if not settings:
            return False
        tokens, starves = self._predict(self._demand.take(rows), np.array(list(settings.values())))
        able = [at for at in range(len(settings)) if not starves[at]]
        if not able:
            return False
        best = max(able, key=lambda at: (tokens[at], -at if last else at))
        gpu.kept, gpu.tried, gpu.a_max = rows, [], list(settings)[best]
        return True

    def worker(self, adapters: Adapters, gpu: _Gpu) -> Worker:
        """The GPU with the adapters that it kept."""
        setting = self.setting(gpu.kept, gpu.a_max)
        assert setting is not None, "it passed a test"
        return replace(adapters.worker(0, gpu.kept), setting=setting)

    def setting(self, rows: list[int], a_max: int) -> int | None:
        """The setting with this A_max and the smallest S_max that holds the adapters; None where memory is too small."""
        rank = self._demand.rank[rows].max()
        settings = self._kind.settings
        able = np.flatnonzero((settings.slots == a_max) & (settings.max_rank >= rank))
        return int(able[settings.max_rank[able].argmin()]) if len(able) else None
