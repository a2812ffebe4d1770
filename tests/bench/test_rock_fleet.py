"""The fleet of `bench rock`: requests, loads and batches take the time that its pages say, and no request is lost."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench import rock
from bench.rock_fleet import jobs, machines, systems
from bench.rock_fleet.fleet import Dispatch, Fleet, Node, System, Worker
from bench.rock_fleet.jobs import Job
from bench.rock_fleet.machines import GPU_KINDS, Gpu, Loads
from bench.rock_fleet.measure import Outcome, Setting, measure
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.step.image_batch import ImageBatch, ImageBatchLimits, ImageSequence
from motet.policies.times.image_times import Bucket, ImageTimes

ONE, MIXED = Worker(mixed=False, rows=1, launch=0.5), Worker(mixed=True, rows=2, launch=0.5)
MIB = 2**20
LOAD_S = 5.0


def gpus(count: int = 1, room_mb: int = 1000, base: int = 0) -> list[Gpu]:
    """GPUs of one kind."""
    return [Gpu(at, GPU_KINDS[1], at // 4, base, room_mb * MIB) for at in range(count)]


def job(at: int, arrival_s: float, adapter: str = "a", *, kind: int = 0, alone_s: float = 20.0, mb: float = 50.0) -> Job:
    return Job(at, arrival_s, kind, adapter, 16, mb, 20, alone_s)


def ran(system: System, asked: list[Job], worker: Worker = ONE, fleet_of: list[Gpu] | None = None) -> Fleet:
    """A fleet after its run. A load takes LOAD_S."""
    fleet = Fleet(fleet_of or gpus(), asked, Loads([LOAD_S], [one.adapter for one in asked], base_s=30.0), system, worker)
    fleet.run()
    return fleet


SPEED = gpus()[0].speed


def test_a_request_alone_takes_its_load_and_its_steps_and_the_next_one_with_its_adapter_no_load() -> None:
    first, second = job(0, 0.0), job(1, 100.0)
    fleet = ran(systems.lrums(), [first, second])
    assert fleet.end_s[first] == pytest.approx(LOAD_S + 20.0 / SPEED)
    assert fleet.end_s[second] - 100.0 == pytest.approx(20.0 / SPEED)
    assert fleet.hits == {second} and fleet.updates == 1


def test_round_robin_loads_for_every_request() -> None:
    asked = [job(at, 3.0 * at, "ab"[at % 2]) for at in range(12)]
    fleet = ran(systems.rrod(), asked, fleet_of=gpus(3))
    assert fleet.updates == len(asked) and not fleet.hits


def test_a_gpu_that_has_another_base_model_loads_that_first() -> None:
    only = job(0, 0.0, kind=2)
    fleet = ran(systems.blind(), [only])
    assert fleet.end_s[only] == pytest.approx(30.0 + 20.0 / SPEED)  # its adapter loads beside that


def test_a_one_adapter_worker_runs_requests_of_two_adapters_one_after_the_other() -> None:
    asked = [job(0, 0.0, "a"), job(1, 0.0, "b")]
    fleet = ran(systems.lrums(), asked)
    assert fleet.began_s[asked[1]] == pytest.approx(fleet.end_s[asked[0]] + LOAD_S)


def test_a_one_adapter_worker_batches_requests_of_one_adapter() -> None:
    asked = [job(0, 0.0, "b"), job(1, 1.0, "a"), job(2, 1.0, "b"), job(3, 1.0, "a")]
    fleet = ran(systems.lrums(), asked, Worker(mixed=False, rows=4, launch=0.5))
    assert fleet.began_s[asked[1]] == fleet.began_s[asked[3]] > fleet.end_s[asked[0]]
    assert fleet.end_s[asked[3]] - fleet.began_s[asked[3]] == pytest.approx(30.0 / SPEED)  # 20 steps of .5 + 2 * .5 s
    assert fleet.began_s[asked[2]] >= fleet.end_s[asked[3]]


def test_a_mixed_worker_runs_requests_of_two_adapters_together_and_loads_beside_its_steps() -> None:
    asked = [job(0, 0.0, "a"), job(1, 0.0, "b"), job(2, 1.0, "c")]
    fleet = ran(systems.motet(), asked, MIXED)
    assert fleet.began_s[asked[0]] == fleet.began_s[asked[1]] == pytest.approx(LOAD_S)
    assert fleet.end_s[asked[0]] == pytest.approx(LOAD_S + 30.0 / SPEED)
    assert fleet.began_s[asked[2]] == pytest.approx(fleet.end_s[asked[0]])  # its load was over before


class OneNode(Dispatch):
    """All requests go to the first node."""

    def choose(self, job: Job) -> Node:
        return self.fleet.nodes[0]


def test_a_mixed_worker_ends_requests_when_image_batch_does() -> None:
    times = [(0.0, 20.0), (2.0, 12.0), (3.0, 30.0), (9.0, 16.0), (11.0, 20.0), (90.0, 20.0)]
    asked = [job(at, arrival_s, f"a{at}", alone_s=alone_s) for at, (arrival_s, alone_s) in enumerate(times)]
    fleet = ran(System(dispatch=OneNode(), free=True), asked, MIXED)
    step_s = max(fleet.base_s + sum(0.5 * one.alone_s / one.steps for one in pair) for pair in pairwise(asked))
    for one, end_s in stepped(fleet, asked).items():
        assert fleet.end_s[one] == pytest.approx(end_s, abs=3.0 * step_s / SPEED)  # it joins between steps


def stepped(fleet: Fleet, asked: list[Job]) -> dict[Job, float]:
    """When Motet's image batch ends the requests, step by step; encoding and decoding take no time."""
    bucket, step_times = Bucket(64, 64), ImageTimes()
    for rows, ms in ((1, 1000.0), (2, 1500.0)):
        step_times.observe(bucket, rows, ms)
    slots = AdapterSlots(64, 10_000 * MIB)
    batch: ImageBatch[ImageSequence] = ImageBatch(ImageBatchLimits(rows_most=lambda _: 2), slots=slots, times=step_times)
    now_s, waiting, ends, owners = 0.0, list(asked), {}, {}
    while waiting or len(batch):
        while waiting and waiting[0].arrival_s <= now_s:
            one = waiting.pop(0)
            seq = ImageSequence(order=one.at, bucket=bucket, rows=1, steps=one.steps, adapters=((one.adapter, one.size_bytes),))
            owners[seq] = one
            batch.add(seq)
        plan = batch.plan(now_s)
        if plan.stage is None:
            now_s = waiting[0].arrival_s
            continue
        if plan.stage == "denoise":
            rows_s = sum(0.5 * owners[seq].alone_s / owners[seq].steps for seq in plan.requests)
            now_s += (fleet.base_s + rows_s) / fleet.nodes[0].gpu.speed
        for seq in batch.done(plan):
            ends[owners[seq]] = now_s
    return ends


def test_above_the_limit_the_least_recently_used_adapters_leave() -> None:
    asked = [job(at, 100.0 * at, name, mb=30.0) for at, name in enumerate("abcab")]
    limited, whole = (
        ran(System(dispatch=OneNode(), fullest=share), asked, fleet_of=gpus(room_mb=100)) for share in (0.85, 1.0)
    )
    assert limited.nodes[0].cached() == {"a", "b"} and limited.updates == 5
    assert whole.nodes[0].cached() == {"a", "b", "c"} and whole.updates == 3


SYSTEMS: dict[str, Callable[[], System]] = {
    "rrod": systems.rrod,
    "lrums": systems.lrums,
    "proactive": systems.proactive,
    "rock": systems.rock,
    "rock, bound": lambda: systems.rock(bound=True),
    "motet": systems.motet,
    "bound": systems.bound,
    **systems.without(),
    **systems.with_parts(),
}


def setting(worker: Worker = ONE, load: float = 0.5) -> Setting:
    """A short run of the whole fleet."""
    asked = jobs.drawn(500, 3)
    loads = machines.drawn_loads(sorted({one.adapter for one in asked}), 4)
    return Setting(earlier=asked[:200], asked=asked[200:], loads=loads, load=load, room_mb=200.0, worker=worker, seeds=(1,))


@pytest.mark.parametrize("name", sorted(SYSTEMS))
@pytest.mark.parametrize("worker", [ONE, MIXED], ids=["one adapter", "mixed"])
def test_every_system_ends_every_request_and_a_second_run_gives_the_same(name: str, worker: Worker) -> None:
    first = measure(SYSTEMS[name], setting(worker))
    assert first.mean_s > 0.0 and 0.0 <= first.hit_rate < 1.0
    assert first == measure(SYSTEMS[name], setting(worker))


def test_no_system_is_faster_than_the_one_without_loads_and_round_robin_is_the_slowest() -> None:
    found = {name: measure(SYSTEMS[name], setting()) for name in ("rrod", "proactive", "rock", "motet", "bound")}
    assert min(found.values(), key=lambda one: one.mean_s) is found["bound"]
    assert max(found.values(), key=lambda one: one.mean_s) is found["rrod"]
    assert found["bound"].update_s == 0.0


def test_the_distance_from_the_paper_is_zero_for_its_own_figures_and_the_root_of_the_mean_square_for_others() -> None:
    def outcome(mean_s: float, hit_rate: float, updates: float) -> Outcome:
        return Outcome(mean_s=mean_s, p99_s=0.0, hit_rate=hit_rate, updates=updates, ahead=0.0, update_s=0.0, per_kind_s=())

    paper = {name: outcome(40.0 * latency, hits, updates) for name, (latency, hits, updates) in rock.PAPER.items()}
    assert rock.distance({name: paper[name] for name in rock.BASELINES}) == pytest.approx(0.0)
    other = outcome(paper["LRUMS"].mean_s * np.exp(0.3), 0.392 + 0.4, 45.0)
    assert rock.distance({"RROD": paper["RROD"], "LRUMS": other}) == pytest.approx(np.sqrt((0.3**2 + 0.4**2) / 6))


def test_the_fleet_is_that_of_the_paper() -> None:
    found = machines.fleet(jobs.drawn(500, 3), 200.0)
    assert len(found) == 64 and len({one.machine for one in found}) == 16
    assert all(len({one.kind.name for one in found if one.machine == machine}) == 1 for machine in range(16))
    assert sum(1.0 / one.speed for one in found) / 64 == pytest.approx(1.0)
    assert {one.base for one in found} == {0, 1, 2}
    sizes = [jobs.adapter_size(f"x{at}") for at in range(2000)]
    assert {rank for rank, _ in sizes} == {8, 16, 32, 64}
    assert 5.0 <= min(mb for _, mb in sizes) < 6.0 and 195.0 < max(mb for _, mb in sizes) <= 200.0


def test_loads_take_the_measured_times_and_larger_adapters_longer() -> None:
    names = [f"x{at}" for at in range(200)]
    loads = Loads([1.0 + 0.01 * at for at in range(1000)], names)
    drawn = sorted(loads.seconds(name, 0, nth) for name in names for nth in range(20))
    assert drawn[len(drawn) // 2] == pytest.approx(6.0, abs=0.5) and 1.0 <= drawn[0] < 1.3 and drawn[-1] > 10.7
    small, large = (pick(names, key=lambda name: jobs.adapter_size(name)[1]) for pick in (min, max))
    assert loads.mean_s(large) > 2.0 * loads.mean_s(small)


def test_of_a_recorded_trace_the_requests_with_one_adapter_are_taken_in_order(tmp_path: Path) -> None:
    lines = [
        "row,predict_type,exec_time_seconds,num_inference_steps,num_lora,lora_ids",
        "0,TXT_2_IMG,300,30,1,aa",
        "1,TXT_2_IMG,20,30,0,",
        "2,IMG_2_IMG,20,10,1,bb",
        "3,INPAINTING,20,30,2,aa;bb",
    ]
    path = tmp_path / "requests.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert jobs.recorded(path) == [jobs.Asked(0, "aa", 30, 120.0), jobs.Asked(2, "bb", 20, 20.0)]
