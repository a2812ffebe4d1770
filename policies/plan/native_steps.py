"""Step times of native workers for the law: the models of a profile, in arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import Mix
from motet.policies.plan.demand import Demand, Floats
from motet.policies.times import perf_model
from motet.policies.times.perf_model import MIB, Coefficients
from motet.policies.times.step_fit import without_context_ms
from motet.shared.model import EngineSteps, PerfModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSteps:
    """Steps by `PerfModel` (CaraServe section 5): the times of prefill and decode add up."""

    perf: PerfModel
    schedule_ms: float = 0.0
    context_token_ms: float = 0.0
    stalls: bool = True

    def step_ms(self, mix: Mix) -> Floats:
        """See `StepLaw`."""
        perf = cast(Coefficients[Floats], self.perf)
        rank = mix.max_rank if self.perf.kernel == "bgmv" else mix.rank
        total_ms = self.schedule_ms + self.context_token_ms * mix.context_tokens
        total_ms = total_ms + perf_model.decode_ms(perf, mix.rows, mix.rows * rank)
        if mix.prompts is not None and mix.prompt_tokens is not None:
            total_ms = total_ms + perf_model.prefill_ms(perf, mix.prompt_tokens, mix.prompts * rank)
            total_ms = total_ms + self.context_token_ms * mix.prompt_tokens
        return np.asarray(total_ms)

    def copy_ms(self, demand: Demand) -> Floats:
        """See `StepLaw`."""
        return _copy_ms(self.perf, demand)

    def take(self, settings: NDArray[np.intp]) -> Self:
        """See `StepLaw`: one worker has these steps whatever its memory is divided into."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps by `EngineSteps`: what they read and compute (`policies.times.step_fit`)."""

    times: EngineSteps
    perf: PerfModel  # of copies
    stalls: bool = True

    def step_ms(self, mix: Mix) -> Floats:
        """See `StepLaw`."""
        times, rows, pairs = self.times, mix.rows, np.zeros_like(mix.rows)
        prompts, context = pairs, mix.context_tokens
        if mix.prompts is not None and mix.prompt_tokens is not None:
            rows, prompts, context = rows + mix.prompt_tokens, mix.prompts, context + mix.prompt_tokens
            pairs = mix.prompt_tokens * (mix.prompt_tokens / mix.prompts + 1.0) / 2.0
        fixed_ms = without_context_ms(
            times,
            _pass_ms(times, rows),
            sampled=mix.rows + prompts,
            prefills=prompts,
            adapter_mib=mix.adapter_bytes / MIB,
            row_ranks=rows * mix.rank,
            pairs=pairs,
        )
        if mix.prompts is not None and times.prefill_spread:
            fixed_ms = fixed_ms * float(np.mean(times.prefill_spread))
        longest = mix.context_tokens / np.maximum(mix.rows, 1e-9)
        return np.asarray(fixed_ms + times.context_token_ms * context + times.longest_token_ms * longest)

    def copy_ms(self, demand: Demand) -> Floats:
        """See `StepLaw`."""
        return _copy_ms(self.perf, demand)

    def take(self, settings: NDArray[np.intp]) -> Self:
        """See `StepLaw`: one worker has these steps whatever its memory is divided into."""
        return self


def _copy_ms(perf: PerfModel, demand: Demand) -> Floats:
    return np.array([[perf_model.load_ms(perf, size) for size in demand.size_bytes.tolist()]])


def _pass_ms(times: EngineSteps, rows: Floats) -> Floats:
    """The time of a pass, on the line through the measured points, which continues beyond the last one."""
    xs, ys = np.asarray(times.rows, dtype=np.float64), np.asarray(times.pass_ms)
    beyond = np.maximum(rows - xs[-1], 0.0) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return np.asarray(np.interp(rows, xs, ys) + beyond)
