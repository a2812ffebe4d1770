"""The law against the twin, which simulates every step: capacities agree where a worker is overloaded."""

from __future__ import annotations

import numpy as np
import pytest

from motet.policies.plan.capacity import judge
from motet.shared.model import Slo
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_S
from motet.twin.planning.kinds import NativeKind, VllmKind, sent
from motet.twin.planning.loads import Loads, Objective, capped
from motet.twin.profile import a10_llama2_7b
from motet.twin.vllm.published import published
from motet.twin.vllm.serving import Objectives, serve
from motet.twin.workload import Lengths

OVERLOAD = 1.3


def loads(count: int, rank: int, prompt: float, output: float) -> Loads:
    lengths = Lengths.lognormal(np.random.default_rng(0), prompt_mean=prompt, output_mean=output)
    return Loads(
        names=tuple(f"a{i}" for i in range(count)),
        rate=np.full(count, 1.0 / count),
        rank=np.full(count, rank),
        size_bytes=np.full(count, rank << 18),
        pool=np.zeros(count, np.int64),
        objective=np.zeros(count, np.int64),
        lengths=(capped(lengths, 4000),),
        objectives=(Objective(slo=Slo()),),
    )


@pytest.mark.parametrize(("count", "rank"), [(16, 8), (64, 16), (96, 32)])
@pytest.mark.parametrize(("prompt", "output"), [(222, 196), (60, 400), (1000, 100)])
@pytest.mark.parametrize("model", ["llama-3.1-8b@h100", "qwen2.5-7b@h100"])
def test_the_capacity_of_a_vllm_worker_is_the_twins(model: str, prompt: int, output: int, count: int, rank: int):
    """Where every adapter has a slot: within 3% of the tokens/s of 400 overloaded seconds."""
    kind, one = VllmKind(name=model, calibration=published(model)), loads(count, rank, prompt, output)
    law = kind.settings
    setting = next(i for i in range(len(law)) if law.slots[i] >= count and law.max_rank[i] == rank)
    capacity = float(judge(one.demand, law).capacity[setting])
    work = one.faster(OVERLOAD * capacity).workload(np.random.default_rng(1), 600.0)
    served = serve(
        kind.config(setting),
        kind.calibration.steps,
        sent(work, one, 600.0),
        Objectives.same(count, np.inf, np.inf),
        200.0,
        drain_s=0.0,
    )
    assert capacity == pytest.approx(served.tok_s / one.demand.tokens_s, rel=0.03)


@pytest.mark.parametrize(("prompt", "output", "within"), [(21, 66, 0.03), (250, 231, 0.1)])
def test_the_capacity_of_a_native_worker_is_the_twins(prompt: int, output: int, within: float):
    """Where seats limit it within 3%; where KV blocks for some 20 requests do, within 10%."""
    kind, one = NativeKind(name="a10", profile=a10_llama2_7b()), loads(32, 16, prompt, output)
    capacity = float(judge(one.demand, kind.settings).capacity[0])
    work = one.faster(OVERLOAD * capacity).workload(np.random.default_rng(1), 600.0)
    cluster = Cluster(work, [kind.worker(0, len(one))], None)
    cluster.run(until_s=600.0)
    done = (cluster.metrics.end_ps > 100 * PS_PER_S) & (cluster.metrics.end_ps < 600 * PS_PER_S)
    tokens_s = float((work.prompt_tokens + work.output_tokens)[done].sum()) / 500.0
    assert capacity == pytest.approx(tokens_s / one.demand.tokens_s, rel=within)
