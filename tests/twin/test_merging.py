"""Promise: a simulated worker that can merge an adapter serves every request, and gains what LoRA costs when one dominates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bench.rivals.merging import AlwaysMerged
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging
from motet.twin.metrics import Latencies
from motet.twin.steps import A10_MBGMV, LoraShare, PerfSteps
from motet.twin.worker_spec import MergeInPlace, WorkerSpec
from motet.twin.workload import Workload
from tests.twin.support import history, run, spec, workload

SHARE = 0.389
COSTS = MergeCosts(switch_ms=50.0, step_ms=A10_MBGMV.decode_base_ms, row_ms=0.0, lora=SHARE)


def merging(config: MergeConfig | None = MergeConfig(), **options: object) -> WorkerSpec:  # noqa: B008 (frozen)
    base = spec(**options)  # type: ignore[arg-type]
    policy = partial(Merging, config=config) if config is not None else lambda _: AlwaysMerged(turn=50)
    return replace(base, steps=einsum(), in_place=MergeInPlace(costs=COSTS, policy=policy))


def einsum() -> LoraShare:
    return LoraShare(PerfSteps(replace_perf()), SHARE)


def replace_perf() -> object:
    import msgspec

    return msgspec.structs.replace(A10_MBGMV, prefill_lora_ms=0.0, decode_lora_ms=0.0)


def of_one_adapter(load: Workload, share: float) -> Workload:
    """The same requests, this share of them for adapter 0."""
    one = np.random.default_rng(5).random(len(load)) < share
    return replace(load, adapter=np.where(one, 0, np.maximum(load.adapter, 0)))


@pytest.mark.parametrize("config", [MergeConfig(), MergeConfig(credit=50.0, starving=150.0, normal=100.0), None])
@pytest.mark.parametrize("kv_blocks", [80, 400])
def test_every_request_is_served(config: MergeConfig | None, kv_blocks: int) -> None:
    load = of_one_adapter(workload(seconds=10.0, rate=6.0), 0.7)
    cluster = run(load, merging(config, kv_blocks=kv_blocks), workers=1)
    assert cluster.summary()["finished"] == len(load) - cluster.summary()["refused"]
    assert cluster.metrics.switches > 0
    expected = np.minimum(load.output_tokens, 1024 - load.prompt_tokens)
    ended = cluster.metrics.end_ps >= 0
    assert (cluster.metrics.output_tokens[ended] == expected[ended]).all()


@pytest.mark.parametrize("config", [MergeConfig(period=40, credit=80.0, starving=200.0, normal=120.0), None])
def test_runs_of_equal_steps_give_the_same_history_as_single_ones(config: MergeConfig | None) -> None:
    load = of_one_adapter(workload(seconds=8.0, rate=8.0), 0.8)
    at_once, one_by_one = (run(load, merging(config), workers=1, max_run=steps) for steps in (None, 1))
    assert history(at_once) == history(one_by_one)
    assert at_once.metrics.switches == one_by_one.metrics.switches


def per_token_ms(load: Workload, worker: WorkerSpec) -> float:
    cluster = run(load, worker, workers=1)
    times = Latencies.of(load, cluster.metrics)
    return float(times.e2e_ms.sum() / cluster.metrics.output_tokens.sum())


def test_one_adapter_alone_runs_as_fast_as_the_base_model() -> None:
    load = of_one_adapter(workload(seconds=20.0, rate=4.0), 1.0)
    merged, unmerged = per_token_ms(load, merging()), per_token_ms(load, replace(merging(), in_place=None))
    base = per_token_ms(replace(load, adapter=np.full(len(load), -1)), replace(merging(), in_place=None))
    assert merged == pytest.approx(base, rel=0.03)
    assert unmerged > 1.3 * merged


def test_a_mixture_is_not_slower_than_unmerged_and_always_merging_it_is() -> None:
    load = workload(seconds=20.0, rate=4.0)
    merged, unmerged = per_token_ms(load, merging()), per_token_ms(load, replace(merging(), in_place=None))
    assert merged <= 1.05 * unmerged
    assert per_token_ms(load, merging(None)) > 1.5 * unmerged
