"""Promise: a simulated image worker takes the time that its steps take, draws every picture, and repeats a run to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motet.shared.json_files import FileError
from motet.shared.model import SLO_MAX_MS, ImageParams, ImageSizeSteps, ImageSteps, PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_MS, PS_PER_S
from motet.twin.image_traces import Prompt, draw_prompts, most_used, read_prompts, workload_of
from motet.twin.link import LinkModel
from motet.twin.metrics import NEVER
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import PerfSteps
from motet.twin.worker_spec import ImageSpec, WorkerSpec
from motet.twin.workload import Workload

MIB = 1 << 20
SIZE = ImageSizeSteps(
    height=64, width=64, text_tokens=77, rows=(1, 2, 8), step_ms=(20.0, 22.0, 40.0), decode_ms=10.0, decode_picture_ms=30.0
)
FACTS = ImageSteps(
    sizes=(SIZE,), encode_ms=4.0, encode_request_ms=1.0, rank_ms=0.01, adapter_ms=0.5, rows_max=8, area_max=1 << 20
)
PERF = PerfModel(
    prefill_base_ms=5.0,
    prefill_token_ms=0.01,
    prefill_lora_ms=0.0,
    decode_base_ms=18.0,
    decode_row_ms=3.0,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=1.0,
    finish_ms=40.0,
)


def worker(*, room: int = 4, bytes_per_s: float = 1e9, drag: float = 0.0) -> WorkerSpec:
    """A worker whose device has room for so many adapters of 10 MiB."""
    limits = WorkerLimits(
        base_model="m",
        engine="images",
        max_model_len=1077,
        max_running=16,
        max_waiting=200,
        block_size=1,
        kv_blocks_total=216 * 1077,
        adapter_bytes_total=room * 10 * MIB,
        max_lora_rank=64,
        capabilities=("draws",),
        copies="wait",
    )
    return WorkerSpec(
        limits=limits,
        perf=PERF,
        steps=PerfSteps(PERF),
        link=LinkModel(bytes_per_s=bytes_per_s, layers=1, drag=drag),
        options=WorkerOptions(max_loras=room, foresight="off"),
        images=ImageSpec(steps=FACTS),
    )


def asked(prompts: list[Prompt], arrival_s: list[float], *, adapters: int = 8, **more: object) -> Workload:
    ranks, sizes = np.full(adapters, 16), np.full(adapters, 10 * MIB)
    workload, _ = workload_of(prompts, np.array(arrival_s), ranks=ranks, adapter_bytes=sizes, **more)  # type: ignore[arg-type]
    return workload


def run(workload: Workload, *workers: WorkerSpec, scheduler: SchedulerSpec | None = None) -> Cluster:
    cluster = Cluster(workload, workers, scheduler)
    cluster.run()
    for one in cluster.workers:
        one.engine.batch.check()
        one.core.check()
        assert not len(one.core) and not len(one.engine.batch), "a request is left"
    return cluster


def took_ms(cluster: Cluster) -> list[float]:
    return ((cluster.metrics.end_ps - cluster.workload.arrival_s * PS_PER_S) / PS_PER_MS).tolist()


def test_a_picture_alone_takes_its_encoding_its_steps_and_its_decoding() -> None:
    cluster = run(asked([Prompt((), 30, 1)], [1.0]), worker())
    assert took_ms(cluster) == pytest.approx([5.0 + 30 * 22.0 + 40.0])
    first_ms = (cluster.metrics.first_ps - PS_PER_S) / PS_PER_MS
    assert first_ms.tolist() == pytest.approx([5.0 + 22.0]) and cluster.metrics.output_tokens.tolist() == [31]


def test_adapters_cost_their_copy_once_and_their_ranks_in_every_step() -> None:
    prompts = [Prompt((0, 1), 10, 1), Prompt((0, 1), 10, 1)]
    cluster = run(asked(prompts, [0.0, 10.0]), worker())
    warm_ms = 5.0 + 10 * (22.0 + 0.01 * 2 * 32 + 2 * 0.5) + 40.0
    copy_ms = 2 * 10 * MIB / 1e9 * 1000
    assert took_ms(cluster) == pytest.approx([warm_ms + copy_ms, warm_ms], abs=0.01)
    assert cluster.metrics.device_loads == 2


def test_a_larger_picture_takes_more_in_every_stage() -> None:
    small, large = (run(asked([Prompt((), 10, 1)], [0.0], size=(side, side)), worker()) for side in (512, 1024))
    assert took_ms(small) == pytest.approx([5.0 + 220.0 + 40.0])
    assert took_ms(large) == pytest.approx([5.0 + 10 * (18.0 + 4 * 4.0) + 10.0 + 4 * 30.0])


def test_who_waits_for_a_copy_holds_up_nobody_unless_copies_take_the_engines_time() -> None:
    def others(**spec: float) -> tuple[float, float]:
        found = took_ms(run(asked([Prompt((), 40, 1), Prompt((3,), 5, 1)], [0.0, 0.1]), worker(bytes_per_s=20e6, **spec)))
        return found[0], found[1]

    alone = took_ms(run(asked([Prompt((), 40, 1)], [0.0]), worker()))[0]
    beside, waits = others()
    assert alone < beside < alone + 5 * 20.0 + 50.0 and waits > 500.0
    assert others(drag=1.0)[0] > beside + 400.0


def test_the_pictures_of_a_prompt_arrive_together_and_share_steps() -> None:
    workload = asked([Prompt((2,), 20, 4)], [0.0])
    assert len(workload) == 4 and {one.image.pictures for one in workload if one.image is not None} == {4}
    together = max(took_ms(run(workload, worker(bytes_per_s=1e12))))
    one = took_ms(run(asked([Prompt((2,), 20, 1)], [0.0]), worker(bytes_per_s=1e12)))[0]
    assert together < 2.5 * one


@pytest.mark.parametrize("workers", [1, 3])
def test_every_picture_is_drawn_by_workers_behind_a_scheduler_and_the_same_arguments_repeat_the_run(workers: int) -> None:
    rng = np.random.default_rng(3)
    prompts = draw_prompts(rng, 80, np.full(8, 1 / 8), steps=8, pictures=(1, 1, 4))
    prompts = [
        replace(one, adapters=(*one.adapters, (one.adapters[0] + 1) % 8)) if i % 5 == 0 else one
        for i, one in enumerate(prompts)
    ]
    workload = asked(
        prompts, np.cumsum(rng.exponential(0.15, size=80)).tolist(), slo=Slo(ttft_slo_ms=SLO_MAX_MS, tpot_slo_ms=SLO_MAX_MS)
    )
    runs = [run(workload, *[worker(room=3)] * workers, scheduler=SchedulerSpec()) for _ in range(2)]
    assert (runs[0].metrics.end_ps != NEVER).all() and not runs[0].metrics.refused.any()
    assert len(set(runs[0].metrics.worker.tolist())) == workers
    assert (runs[0].metrics.end_ps == runs[1].metrics.end_ps).all() and runs[0].summary() == runs[1].summary()


def test_what_would_be_done_too_late_is_refused_and_the_rest_is_in_time_more_often() -> None:
    prompts, arrivals = [Prompt((), 30, 1)] * 60, np.linspace(0.0, 3.0, 60).tolist()
    slo = Slo(ttft_slo_ms=SLO_MAX_MS, tpot_slo_ms=SLO_MAX_MS, e2e_slo_ms=3000.0)
    by_objective, by_room = (
        run(asked(prompts, arrivals, slo=slo), worker(), scheduler=SchedulerSpec(admission=admission))
        for admission in ("objective", "room")
    )
    assert by_room.metrics.refused.sum() == 0 < by_objective.metrics.refused.sum() < 60
    assert by_objective.summary()["slo_attainment"] > by_room.summary()["slo_attainment"]


def test_a_worker_that_draws_needs_its_step_times_and_its_link() -> None:
    with pytest.raises(ValueError, match="its steps and its link are expected"):
        Cluster(asked([Prompt((), 3, 1)], [0.0]), [replace(worker(), link=None)], None)


# ---- traces

HEADER = "row,gmt_create,predict_type,num_images_per_prompt,num_inference_steps,num_lora,lora_ids,lora_scales\n"


def test_a_trace_of_pictures_is_read_in_its_order_with_adapters_steps_pictures_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        HEADER
        + "0,,TXT_2_IMG,4,30,2,bb;aa,1;0.8\n"
        + "1,2024-11-15 16:57:50,TXT_2_IMG,,,0,,\n"
        + "2,2024-11-15 16:57:51,IMG_2_IMG,1,20,1,aa,1\n"
    )
    first, second, third = read_prompts(path)
    assert first == Prompt((0, 1), 30, 4) and (second.adapters, second.steps, second.pictures) == ((), 30, 1)
    assert (third.adapters, third.steps) == ((1,), 20)
    assert third.time_s is not None and second.time_s is not None and third.time_s - second.time_s == 1.0
    assert most_used([first, second, third, third], 1) == [replace(third, adapters=(0,))] * 2


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("a,b\n1,2\n", "gmt_create"),
        (HEADER + "0,,T,1,x,0,,\n", "num_inference_steps"),
        (HEADER + "0,,T,0,30,0,,\n", "num_images_per_prompt"),
    ],
)
def test_a_malformed_trace_is_refused_with_line_and_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(FileError, match=field):
        read_prompts(path)


def test_a_workload_of_pictures_has_a_request_for_each_and_names_what_it_belongs_to() -> None:
    prompts = [Prompt((5, 1), 30, 3), Prompt((), 20, 1)]
    workload, of = workload_of(prompts, np.array([1.0, 2.0]), ranks=np.full(8, 4), adapter_bytes=np.full(8, 7), size=(256, 512))
    requests = [*workload]
    assert of.tolist() == [0, 0, 0, 1] and [one.arrival_ps // PS_PER_S for one in requests] == [1, 1, 1, 2]
    assert [one.digest for one in requests[0].adapters] == ["adapter-00005", "adapter-00001"] and requests[3].adapters == ()
    assert requests[0].image == ImageParams(width=256, height=512, steps=30, pictures=3) and requests[0].output_tokens == 31
    some = workload.take(np.array([2, 3]))
    assert [one.image for one in some] == [requests[2].image, requests[3].image] and next(iter(some)).more == requests[2].more
