"""Promise: the fit finds the models that made the steps, with coefficients that are not negative, and R2 measures its error."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from msgspec.structs import replace

from motet.policies.times.perf_fit import fit
from motet.policies.times.perf_model import decode_ms, lora_load, prefill_ms
from motet.policies.times.step_record import Step
from motet.shared.model import PerfModel
from tests.support_worker import PERF


def measured(perf: PerfModel, count: int, *, noise: float = 0.02, context_ms: float = 0.0005) -> list[Step]:
    """Steps of `perf` with some noise: decodes, prefills and both."""
    draw = random.Random(4)
    steps = []
    for number in range(count):
        decodes = [draw.choice([0, 8, 16, 64]) for _ in range(draw.randrange(1, 40))] if number % 3 else []
        prefills = [draw.choice([0, 8, 64]) for _ in range(draw.randrange(1, 4))] if number % 3 != 1 else []
        tokens, context = len(prefills) * draw.randrange(10, 200), draw.randrange(20, 400) * len(decodes)
        time_ms = context_ms * context
        if decodes:
            time_ms += decode_ms(perf, float(len(decodes)), lora_load(perf.kernel, decodes))
        if prefills:
            time_ms += prefill_ms(perf, float(tokens), lora_load(perf.kernel, prefills))
        steps.append(
            Step(
                time_ms=time_ms * draw.uniform(1 - noise, 1 + noise),
                prefill_requests=len(prefills),
                prefill_tokens=tokens,
                prefill_rank_sum=sum(prefills),
                prefill_max_rank=max(prefills, default=0),
                decode_rows=len(decodes),
                decode_rank_sum=sum(decodes),
                decode_max_rank=max(decodes, default=0),
                context_tokens=context,
            )
        )
    return steps


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv"])
def test_the_kernel_and_the_coefficients_that_made_the_steps_are_found(kernel):
    perf = replace(PERF, kernel=kernel)
    fitted = fit(measured(perf, 1500), [(size, 1.0 + 0.5 * size) for size in (4.0, 8.0, 16.0)])
    assert fitted.perf.kernel == kernel
    assert fitted.r2_decode > 0.96 and fitted.r2_prefill > 0.96
    for name in ("prefill_token_ms", "decode_base_ms", "decode_row_ms", "decode_lora_ms", "load_base_ms", "load_ms_per_mib"):
        assert getattr(fitted.perf, name) == pytest.approx(getattr(perf, name), rel=0.15), name
    assert fitted.context_token_ms == pytest.approx(0.0005, rel=0.1)


def test_a_step_that_something_else_delayed_does_not_spoil_the_fit():
    steps = [step for step in measured(PERF, 300, noise=0.0) for _ in range(5)]
    delayed = [slower(step, 20.0) if number % 5 == 0 else step for number, step in enumerate(steps)]
    fitted = fit(delayed)
    assert fitted.r2_decode > 0.999 and fitted.perf.decode_base_ms == pytest.approx(PERF.decode_base_ms, rel=0.01)


def test_what_a_prefill_adds_to_decodes_does_not_bend_the_decode_part():
    """A step with both costs less than two steps."""
    steps = [
        replace(step, time_ms=0.8 * step.time_ms) if step.decode_rows and step.prefill_tokens else step
        for step in measured(PERF, 1500, noise=0.0)
    ]
    fitted = fit(steps)
    assert fitted.r2_decode > 0.999 and fitted.perf.decode_base_ms == pytest.approx(PERF.decode_base_ms, rel=0.01)


def test_times_that_are_spread_are_right_on_average():
    fitted = fit(measured(PERF, 6000, noise=0.4))
    assert fitted.perf.decode_base_ms == pytest.approx(PERF.decode_base_ms, rel=0.07)


def test_a_batch_counts_as_often_as_it_was_measured():
    often = [step for step in measured(PERF, 100, noise=0.0) for _ in range(20)]
    once = [slower(step, 1.5) for step in measured(PERF, 130, noise=0.0)[100:]]
    fitted = fit([*often, *once])
    assert fitted.r2_decode > 0.9 and fitted.perf.decode_base_ms == pytest.approx(PERF.decode_base_ms, rel=0.1)


def slower(step: Step, factor: float) -> Step:
    """The same step with `factor` times the duration."""
    return replace(step, time_ms=factor * step.time_ms)


def test_no_coefficient_goes_below_zero_and_noise_alone_is_no_model():
    draw = random.Random(9)
    steps = [
        Step(time_ms=draw.uniform(5.0, 50.0), decode_rows=draw.randrange(1, 64), decode_rank_sum=draw.randrange(2000))
        for _ in range(500)
    ]
    fitted = fit(steps)
    assert min(v for v in msgspec.structs.asdict(fitted.perf).values() if isinstance(v, float)) >= 0.0
    assert fitted.r2_decode < 0.2


def test_too_few_steps_and_times_that_are_no_times_are_refused():
    with pytest.raises(ValueError, match="too few"):
        fit(measured(PERF, 10))
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="finite and positive"):
            fit([*measured(PERF, 100), Step(time_ms=bad, decode_rows=1)])
