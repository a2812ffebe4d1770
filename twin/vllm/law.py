"""The vLLM flavour's workers for the law of `policies.plan.capacity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import Mix, Settings
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.paper import TESTING_POINTS
from motet.twin.vllm.calibrate import STEP_TOKENS, Calibration
from motet.twin.vllm.engine import KV_BLOCK_TOKENS
from motet.twin.vllm.steps import TERMS, VllmStepModel, features


@dataclass(frozen=True, slots=True)
class VllmSteps:
    """Steps of vLLM with so many slots of such a rank, [settings]."""

    model: VllmStepModel
    a_max: Floats
    s_max: Floats
    stalls = True

    def step_ms(self, mix: Mix) -> Floats:
        """See `StepLaw`."""
        prompt_tokens = 0.0 if mix.prompt_tokens is None else mix.prompt_tokens
        prompts = 0.0 if mix.prompts is None else mix.prompts
        a_max, s_max = self.a_max[:, None], self.s_max[:, None]
        x = features(
            mix.rows + prompt_tokens,
            mix.rows + prompts,
            mix.context_tokens,
            a_max,
            s_max,
            mix.distinct,
            mixed=mix.prompts is not None,
        )
        weights = np.array([self.model.ms[term] for term in TERMS])
        return np.asarray(x @ weights + mix.distinct * (self.model.listed_us * 1e-3 * mix.adapters))

    def copy_ms(self, demand: Demand) -> Floats:
        """See `StepLaw`."""
        full = demand.rank >= self.s_max[:, None]
        return np.where(full, self.model.load_full_ms, self.model.load_padded_ms)

    def take(self, settings: NDArray[np.intp]) -> VllmSteps:
        """See `StepLaw`."""
        return replace(self, a_max=self.a_max[settings], s_max=self.s_max[settings])


def settings(
    calibration: Calibration, *, slots: Sequence[int] = TESTING_POINTS, ranks: Sequence[int] | None = None, seats: int = 256
) -> Settings:
    """Every (A_max, S_max) of which the KV size is known. `ranks`: those of S_max to choose from, by default all."""
    found = []
    for s_max, points in sorted(calibration.kv_points.items()):
        if ranks is None or s_max in ranks:
            found += [(a, s_max, calibration.kv_tokens(a, s_max)) for a in slots if points[0][0] <= a <= points[-1][0]]
    if not found:
        raise ValueError("no KV size was measured for these slots and ranks")
    a_max, s_max_column, kv_tokens = np.array(found, dtype=np.float64).T
    return Settings(
        steps=VllmSteps(calibration.steps, a_max, s_max_column),
        slots=a_max,
        adapter_bytes=np.full(len(a_max), np.inf),
        max_rank=s_max_column,
        kv_tokens=kv_tokens,
        seats=seats,
        step_tokens=STEP_TOKENS,
        block_tokens=KV_BLOCK_TOKENS,
    )
