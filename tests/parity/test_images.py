"""The live image engine and the twin's worker get the same requests and must plan the same steps, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.policies.step.image_batch import ImagePlan
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.image_engine import engine as live_engine
from motet.services.worker.image_engine.drawing import Drawing
from motet.shared.model import (
    AdapterRef,
    ImageParams,
    ImageSizeSteps,
    ImageSteps,
    PerfModel,
    SamplingParams,
    Slo,
    Weighted,
    WorkerLimits,
)
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_S
from motet.twin.image_steps import ImageStepModel, measured_times
from motet.twin.link import LinkModel
from motet.twin.steps import PerfSteps
from motet.twin.worker_spec import ImageSpec, WorkerSpec
from motet.twin.workload import Workload
from tests.services.worker.image_engine.support_engine import Driven
from tests.support_image_models import Oracle, make_adapter, make_image_checkpoint, shapes_of

LATENT_PX, TOKENS, REQUESTS, SLOTS, ROWS = 2, 77, 30, 3, 6
SIZES = ((32, 32), (32, 64))
FACTS = ImageSteps(
    sizes=tuple(
        ImageSizeSteps(
            height=height // LATENT_PX,
            width=width // LATENT_PX,
            text_tokens=TOKENS,
            rows=(1, 2, 4, 8),
            step_ms=tuple(width / 32 * ms for ms in (10.0, 11.0, 14.0, 25.0)),
            decode_ms=3.0,
            decode_picture_ms=4.0,
        )
        for width, height in SIZES
    ),
    encode_ms=5.0,
    encode_request_ms=1.0,
    rank_ms=40.0,
    adapter_ms=0.7,
    latent_px=LATENT_PX,
    rows_max=ROWS,
)
PERF = PerfModel(
    prefill_base_ms=1.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.0,
    decode_base_ms=10.0,
    decode_row_ms=1.0,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=0.0,
)
Plans = list[tuple[str | None, list[str]]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    model_dir = make_image_checkpoint("sd15", Path(tmp_path_factory.mktemp("parity-images")))
    shapes = shapes_of(model_dir)
    return Oracle(model_dir, [make_adapter(shapes, f"a{seed}", (4, 8), "attention", seed) for seed in range(5)])


def made(seed: int, sizes_bytes: list[int], ranks: list[int]) -> Workload:
    """Requests of two sizes with none to two adapters, guided or not, some with an objective or with several pictures."""
    rng = np.random.default_rng(seed)
    images = tuple(
        ImageParams(width=width, height=height, steps=steps, guidance=guidance, pictures=pictures)
        for width, height in SIZES
        for steps in (2, 5, 9)
        for guidance in (1.0, 3.0)
        for pictures in (1, 4)
    )
    image = rng.integers(len(images), size=REQUESTS)
    first = rng.integers(-1, len(ranks), size=REQUESTS)
    second = [(int(rng.choice([i for i in range(len(ranks)) if i != one])),) if rng.random() < 0.3 else () for one in first]
    return Workload(
        arrival_s=np.cumsum(rng.exponential(0.04, size=REQUESTS)),
        adapter=first,
        more=[more if one >= 0 else () for one, more in zip(first.tolist(), second, strict=True)],
        prompt_tokens=np.full(REQUESTS, TOKENS),
        output_tokens=np.array([images[i].steps + 1 for i in image.tolist()]),
        ranks=np.array(ranks),
        adapter_bytes=np.array(sizes_bytes),
        image=image,
        images=images,
        slo=rng.integers(2, size=REQUESTS),
        slos=(Slo(), Slo(e2e_slo_ms=300.0)),
    )


class Clock:
    """Picoseconds, moved by the steps."""

    def __init__(self) -> None:
        self.now_ps = 0

    def __call__(self) -> float:
        return self.now_ps / PS_PER_S


def live(driven: Driven, workload: Workload, clock: Clock) -> Plans:
    """The plans of the live engine. Its passes run, and the clock moves by the time of each."""
    engine, model, plans = driven.engine, ImageStepModel(FACTS), Plans()
    batch: Any = engine.batch
    batch.times = measured_times(FACTS)
    planned = batch.plan

    def plan(now_s: float) -> ImagePlan[Drawing]:
        found: ImagePlan[Drawing] = planned(now_s)
        if found.stage is not None:
            plans.append((found.stage, [one.request.request_id for one in found.requests]))
            ranks = sum(one.image.rows * sum(each.ref.rank for each in one.request.weighted) for one in found.requests)
            took_ps.append(model.step_ps(found, ranks))
        return found

    def timed(work: Any) -> Any:
        def run(drawings: Any) -> Any:
            clock.now_ps += took_ps.pop()
            return work(drawings)

        return run

    took_ps: list[int] = []
    batch.plan = plan
    for name in ("encode", "denoise", "decode"):
        setattr(driven.passes, name, timed(getattr(driven.passes, name)))
    coming = [*workload]
    while coming or engine.has_work():
        if not engine.has_work():
            clock.now_ps = max(clock.now_ps, coming[0].arrival_ps)
        while coming and coming[0].arrival_ps <= clock.now_ps:
            one = coming.pop(0)
            used = [driven.oracle.adapters[int(ref.name.split("-")[1])].host for ref in one.adapters]
            refs = [
                AdapterRef(name=each.digest, digest=each.digest, rank=each.rank, size_bytes=each.blob_bytes) for each in used
            ]
            request = EngineRequest.local(
                one.request_id,
                [1] * TOKENS,
                SamplingParams(max_tokens=1000, seed=one.index),
                gateway_id="gateway",
                arrival_s=one.arrival_ps / PS_PER_S,
                adapters=tuple(Weighted(ref) for ref in refs),
                copies=tuple(used),
                image=one.image,
                slo=one.slo,
            )
            engine.add(request, clock())
        output = engine.step(clock())
        assert output.failure is None, output.failure
        engine.check()
    return plans


def simulated(workload: Workload, lora_bytes: int) -> Plans:
    """The plans of the twin's worker."""
    limits = WorkerLimits(
        base_model="m",
        engine="images",
        max_model_len=400,
        max_running=64,
        max_waiting=64,
        block_size=1,
        kv_blocks_total=128 * 400,
        adapter_bytes_total=lora_bytes,
        max_lora_rank=64,
        capabilities=("draws",),
        copies="wait",
    )
    spec = WorkerSpec(
        limits=limits,
        perf=PERF,
        steps=PerfSteps(PERF),
        link=LinkModel(bytes_per_s=1e18, layers=1),
        options=WorkerOptions(max_loras=SLOTS, foresight="off"),
        images=ImageSpec(steps=FACTS),
    )
    cluster, plans = Cluster(workload, [spec], None), Plans()
    cluster.workers[0].engine.plans = lambda plan: plans.append((plan.stage, [one.request.request_id for one in plan.requests]))
    cluster.run()
    cluster.workers[0].engine.batch.check()
    cluster.workers[0].core.check()
    return plans


@pytest.mark.parametrize("seed", range(3))
def test_the_twins_image_worker_plans_the_steps_of_the_live_engine(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(live_engine, "clock_s", clock)
    driven = Driven(oracle.model_dir, oracle, slots=SLOTS, rows=ROWS)
    sizes = [driven.adapters.size_bytes(one.host) for one in oracle.adapters]
    workload = made(seed, sizes, [one.host.rank for one in oracle.adapters])
    expected = live(driven, workload, clock)
    stages = {stage for stage, _ in expected}
    assert stages == {"encode", "denoise", "decode"} and max(len(requests) for _, requests in expected) > 2
    assert simulated(workload, driven.adapters.slots.bytes_total) == expected
