"""Promise: the fit finds the costs that made the steps, in any mix, and a busy machine does not distort it."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from motet.policies.times.perf_model import MIB
from motet.policies.times.step_fit import FEW, fit_steps, undisturbed
from motet.policies.times.step_record import Step

SAMPLED, PREFILL, ADAPTER_MIB, ROW_RANK, CONTEXT, LONGEST, PAIR = 0.05, 0.4, 0.11, 0.0004, 0.0006, 0.003, 0.0002


def pass_ms(rows: int) -> float:
    """Weights are read in 4 ms; beyond 32 rows the arithmetic takes longer."""
    return max(4.0, 0.125 * rows)


def measured(count: int, *, noise: float = 0.0) -> list[Step]:
    draw = random.Random(3)
    steps = []
    for number in range(count):
        decodes, prefills = draw.randrange(1, 48) if number % 3 else 0, draw.randrange(1, 4) if number % 3 != 1 else 0
        tokens = prefills * draw.randrange(5, 120)
        step = Step(
            time_ms=0.0,
            prefill_requests=prefills,
            prefill_tokens=tokens,
            decode_rows=decodes,
            context_tokens=(context := decodes * draw.randrange(20, 400) + tokens),
            longest_context=draw.randrange(context // (decodes + prefills), context + 1),
            prefill_pairs=tokens * draw.randrange(10, 200),
            row_rank_sum=(decodes + tokens) * draw.choice([0, 8, 64]),
            adapter_bytes=draw.randrange(8) * MIB,
            sampled=decodes + draw.randrange(prefills + 1),
        )
        time_ms = (
            pass_ms(step.decode_rows + step.prefill_tokens)
            + SAMPLED * step.sampled
            + PREFILL * step.prefill_requests
            + ADAPTER_MIB * step.adapter_bytes / MIB
            + ROW_RANK * step.row_rank_sum
            + CONTEXT * step.context_tokens
            + LONGEST * step.longest_context
            + PAIR * step.prefill_pairs
        )
        steps.append(replace(step, time_ms=time_ms * draw.uniform(1 - noise, 1 + noise)))
    return steps


def test_the_costs_that_made_the_steps_are_found():
    fitted = fit_steps(measured(1500, noise=0.02))
    assert fitted.r2 > 0.99
    assert fitted.sampled_ms == pytest.approx(SAMPLED, rel=0.2)
    assert fitted.prefill_ms == pytest.approx(PREFILL, rel=0.2)
    assert fitted.adapter_mib_ms == pytest.approx(ADAPTER_MIB, rel=0.1)
    assert fitted.row_rank_ms == pytest.approx(ROW_RANK, rel=0.1)
    assert fitted.context_token_ms == pytest.approx(CONTEXT, rel=0.1)
    assert fitted.longest_token_ms == pytest.approx(LONGEST, rel=0.1)
    assert fitted.pair_ms == pytest.approx(PAIR, rel=0.1)
    for rows, passed in zip(fitted.rows, fitted.pass_ms, strict=True):
        assert passed == pytest.approx(pass_ms(rows), rel=0.1), rows


def test_times_that_are_spread_are_right_on_average_and_the_spread_is_told():
    steps = measured(9000, noise=0.4)
    fitted, exact = fit_steps(steps), fit_steps(measured(9000))
    for rows, passed, right in zip(fitted.rows, fitted.pass_ms, exact.pass_ms, strict=True):
        assert passed == pytest.approx(right, rel=0.1), rows
    spread = fitted.prefill_spread
    assert (
        list(spread) == sorted(spread)
        and spread[0] == pytest.approx(0.6, abs=0.05)
        and spread[-1] == pytest.approx(1.4, abs=0.05)
    )
    assert sum(a + b for a, b in pairwise(spread)) / 2 / (len(spread) - 1) == pytest.approx(1.0)
    assert fit_steps([replace(step, prefill_requests=0, prefill_tokens=0) for step in steps]).prefill_spread == ()


def test_a_pass_may_be_shorter_with_more_rows_as_long_as_they_are_few():
    draw = random.Random(5)
    noise = [Step(time_ms=draw.uniform(1.0, 9.0), decode_rows=draw.randrange(1, 64), sampled=1) for _ in range(400)]
    fitted = fit_steps(noise)
    many = fitted.pass_ms[fitted.rows.index(FEW) :]
    assert list(many) == sorted(many) and min(fitted.pass_ms) > 0
    quick_six = {1: 9.0, 2: 9.5, 4: 9.5, 6: 8.0, 8: 8.5, 16: 12.0}
    steps = [Step(time_ms=quick_six[rows], decode_rows=rows) for rows in quick_six for _ in range(10)]
    fitted = fit_steps(steps)
    found = dict(zip(fitted.rows, fitted.pass_ms, strict=True))
    assert {rows: found[rows] for rows in quick_six} == pytest.approx(quick_six)


def test_a_pass_never_falls_at_its_end_from_where_it_continues():
    steps = [Step(time_ms=ms, decode_rows=rows) for rows, ms in {1: 9.0, 2: 9.5, 4: 8.0, 8: 7.0}.items() for _ in range(10)]
    fitted = fit_steps(steps)
    assert fitted.rows[-1] == FEW and fitted.pass_ms[-1] >= fitted.pass_ms[-2]


def test_a_pass_does_not_fall_where_it_would_fall_to_nothing():
    one = [Step(time_ms=10.0 + 2 * mib, decode_rows=1, adapter_bytes=mib * MIB) for mib in range(10) for _ in range(5)]
    four = [Step(time_ms=5.0, decode_rows=4, adapter_bytes=5 * MIB)] * 5
    fitted = fit_steps(one + four)
    assert list(fitted.pass_ms) == sorted(fitted.pass_ms) and fitted.pass_ms[0] > 0


def test_steps_by_which_a_pass_would_take_no_time_are_refused():
    steps = [Step(time_ms=float(mib**2), decode_rows=1, adapter_bytes=mib * MIB) for mib in range(1, 10) for _ in range(5)]
    with pytest.raises(ValueError, match="time of a step is not positive"):
        fit_steps(steps)


def test_the_fit_ends_at_the_most_rows_that_were_measured():
    steps = measured(600)
    fitted = fit_steps(steps)
    assert list(fitted.rows) == sorted(set(fitted.rows))
    assert fitted.rows[-1] == max(step.decode_rows + step.prefill_tokens for step in steps)


def test_steps_that_something_else_held_up_are_left_out_and_no_others():
    steps = measured(600, noise=0.02)
    held_up = {number: replace(steps[number], time_ms=4 * steps[number].time_ms) for number in range(0, 600, 30)}
    kept = undisturbed([held_up.get(number, step) for number, step in enumerate(steps)])
    assert kept == [step for number, step in enumerate(steps) if number not in held_up]


def test_too_few_steps_and_times_that_are_no_times_are_refused():
    for refused in (fit_steps, undisturbed):
        with pytest.raises(ValueError, match="too few"):
            refused(measured(10))
        for bad in (math.nan, math.inf, 0.0, -1.0):
            with pytest.raises(ValueError, match="finite and positive"):
                refused([*measured(100), Step(time_ms=bad, decode_rows=1)])
