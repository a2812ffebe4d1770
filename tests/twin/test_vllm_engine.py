"""The vLLM flavour's engine: admission, waiting, preemption, and that advancing many steps at once changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from motet.twin.vllm.client import ApiServer, Outcome, Requests
from motet.twin.vllm.engine import EngineConfig, SimulatedVllm
from motet.twin.vllm.steps import VllmStepModel
from tests.twin.support_vllm import TEN_MS, drawn, model, work

QUIET = ApiServer(series_s=0.0, name_s=0.0)


MIXED = model(constant=12.0, tokens=0.01, rows=0.005, context_ktokens=0.06, mixed_context_ktokens=0.1, adapter=0.3)


def engine(
    asked: Requests, steps: VllmStepModel = TEN_MS, a_max: int = 2, kv_tokens: int = 1 << 20, **options: bool
) -> SimulatedVllm:
    config = EngineConfig(a_max=a_max, s_max=8, kv_tokens=kv_tokens)
    return SimulatedVllm(config, steps, asked, QUIET, **options)


def test_one_request_takes_one_step_per_token() -> None:
    run = engine(work((1.0, 0, 20, 5)))
    outcome = run.run()
    assert run.client.first_s[0] == pytest.approx(1.0 + 0.010 + 0.005)  # one step and the load of its adapter
    assert run.client.last_s[0] == pytest.approx(run.client.first_s[0] + 4 * 0.010)
    assert outcome.itl_mean_ms == pytest.approx(10.0)
    assert (outcome.completed, outcome.loads) == (1, 1)
    assert outcome.total_tok_s == pytest.approx(25 / 100)


def test_an_adapter_without_a_slot_waits_and_others_overtake_it() -> None:
    run = engine(work((0.0, 0, 10, 100), (0.0, 1, 10, 100), (0.1, 2, 10, 5), (0.2, 0, 10, 5)))
    run.run()
    first = run.client.first_s
    assert first[3] < first[2]  # a later request of an adapter in the batch is not held up
    assert first[2] > min(run.client.last_s[0], run.client.last_s[1])  # and the third adapter waits for a slot


def test_requests_of_the_same_class_are_served_in_order_of_arrival() -> None:
    requests = [(0.0, 0, 2000, 3)] + [(0.001 * (i + 1), 0, 1500, 3) for i in range(4)]
    run = engine(work(*requests))
    run.run()
    assert run.client.first_s == sorted(run.client.first_s)


def test_the_least_recently_batched_adapter_is_replaced() -> None:
    # adapters 0 and 1 fill both slots; 0 runs again; 2 then takes the slot of 1, so that 0 needs no load and 1 does
    steps = [(0.0, 0), (1.0, 1), (2.0, 0), (3.0, 2), (4.0, 0), (5.0, 1)]
    run = engine(work(*[(t, a, 10, 5) for t, a in steps]))
    run.run()
    took = [round((run.client.first_s[i] - t) * 1e3) for i, (t, _) in enumerate(steps)]
    assert took == [15, 15, 10, 15, 10, 15]


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    run = engine(work((0.0, 0, 5000, 2)))
    run.run()
    assert run.client.first_s[0] == pytest.approx(3 * 0.010 + 0.005)  # 2048 + 2048 + 904 tokens


def test_the_youngest_request_is_preempted_and_completes_later() -> None:
    run = engine(work((0.0, 0, 100, 200), (0.01, 0, 100, 200), (0.02, 0, 100, 200)), kv_tokens=512)
    outcome = run.run()
    assert outcome.preemptions > 0
    assert outcome.completed == 3
    assert run.client.last_s[0] < run.client.last_s[1] < run.client.last_s[2]
    assert run.free_blocks == 512 // 16  # every block came back


def test_a_request_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 64 KV tokens"):
        engine(work((0.0, 0, 60, 10)), kv_tokens=64)


@pytest.mark.parametrize(
    ("rate", "kv_tokens", "a_max"), [(0.2, 1 << 20, 4), (1.5, 1 << 20, 4), (1.5, 6_000, 12), (4.0, 20_000, 4)]
)
def test_advancing_many_steps_in_one_go_is_exact(rate: float, kv_tokens: int, a_max: int) -> None:
    asked = drawn(rate, 12, 60.0)
    runs = [engine(asked, MIXED, a_max, kv_tokens, advance_in_one_go=one_go) for one_go in (True, False)]
    fast, slow = (run.run() for run in runs)
    assert _counts(fast) == _counts(slow)
    assert fast.itl_mean_ms == pytest.approx(slow.itl_mean_ms, rel=1e-9)
    for ahead, walked in zip(runs[0].client.last_s, runs[1].client.last_s, strict=True):
        assert (math.isnan(ahead) and math.isnan(walked)) or ahead == pytest.approx(walked, rel=1e-9)
    assert runs[0].client.strides < runs[1].client.strides or rate > 1


def _counts(outcome: Outcome) -> tuple[int, ...]:
    return (outcome.completed, outcome.steps, outcome.loads, outcome.preemptions, outcome.refused)


def test_blocks_and_batch_are_empty_when_everything_is_done() -> None:
    rng = np.random.default_rng(5)
    count = 200
    asked = work(
        *[
            (float(t), int(a), int(p), int(o))
            for t, a, p, o in zip(
                np.sort(rng.uniform(0, 5, count)),
                rng.integers(0, 3, count),
                rng.integers(1, 900, count),
                rng.integers(1, 300, count),
                strict=True,
            )
        ],
        duration_s=10_000.0,
    )
    run = engine(asked, MIXED, a_max=2, kv_tokens=8_000)
    assert run.run().completed == count
    assert (run.free_blocks, run.decoding, run.context_tokens, run.distinct, run.waiting, run.waiting_in) == (
        500,
        0,
        0,
        0,
        0,
        0,
    )
    assert not run.running
    assert run.grows_at == [0] * 16
