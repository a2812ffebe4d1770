"""The live side of the twin's bench: every request is served and timed, and the twin gets exactly the same requests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from bench.report import Elsewhere
from bench.rig.workers import LiveWorker, Served
from bench.twin_live import SHAPES, Outcome, mean_errors, pace, replayed, workload_of
from motet.shared.model import AdapterRef
from motet.shared.profile import VERSION, Hops
from motet.twin.profile import TwinProfile
from motet.twin.steps import A10_MBGMV
from motet.twin.workload import Workload
from tests.support_models import make_checkpoint
from tests.support_worker import worker_limits
from tests.twin.support import STEPS

REQUESTS = 12
HOPS = Hops(assign_ms=2.0, frame_ms=3.0)
OPTIONS = {"threads": "1", "max_running": "2", "max_waiting": "2", "lora_memory_mib": "8", "kv_blocks": "200"}


def workload(adapter: int, adapter_bytes: int, *, gap_s: float) -> Workload:
    return Workload(
        arrival_s=gap_s * np.arange(REQUESTS),
        adapter=np.full(REQUESTS, adapter),
        prompt_tokens=np.full(REQUESTS, 10),
        output_tokens=np.full(REQUESTS, 20),
        ranks=np.array([8]),
        adapter_bytes=np.array([adapter_bytes]),
    )


async def test_a_live_worker_serves_what_it_has_room_for_and_every_token_is_timed(tmp_path: Path) -> None:
    async with LiveWorker(make_checkpoint("llama2", tmp_path), OPTIONS, tmp_path) as worker:
        adapter = await worker.publish(8, 1)
        calm = await worker.run(workload(0, adapter.size_bytes, gap_s=0.3), [adapter])
        crowded = await worker.run(workload(-1, 0, gap_s=0.0), [adapter])
    assert [one.tokens for one in calm] == [20] * REQUESTS and not any(one.refused for one in calm)
    assert all(0.3 * number <= one.sent_s < one.first_s < one.end_s for number, one in enumerate(calm))
    assert 4 <= sum(not one.refused for one in crowded) < REQUESTS
    assert all(one.tokens == (0 if one.refused else 20) for one in crowded)


LIMITS = worker_limits(max_model_len=256, max_running=2, max_waiting=2, kv_blocks_total=200, adapter_bytes_total=1 << 20)


def test_a_machine_that_has_become_slower_shows_in_the_pace_of_its_profile() -> None:
    profile = TwinProfile(motet_profile=VERSION, limits=LIMITS, perf=A10_MBGMV, engine_steps=STEPS)
    slower = {name: value * 1.25 for name, value in asdict(STEPS).items() if name.endswith("_ms") and name != "pass_ms"}
    steps = replace(STEPS, pass_ms=tuple(1.25 * ms for ms in STEPS.pass_ms), **slower)
    assert pace(replace(profile, engine_steps=steps)) == pytest.approx(1.25 * pace(profile))
    assert STEPS.pass_ms[0] < pace(profile) < STEPS.pass_ms[2]


def test_the_twin_serves_as_many_of_the_same_requests() -> None:
    profile = TwinProfile(motet_profile=VERSION, limits=LIMITS, perf=A10_MBGMV, engine_steps=STEPS, hops=HOPS)
    outcome = replayed(workload(0, 1 << 16, gap_s=0.0), profile, skip=0)
    assert len(outcome.ttft_ms) == 4 and outcome.refused == REQUESTS - 4 and outcome.tokens == 4 * 20
    assert outcome.ttft_ms.min() > HOPS.assign_ms + HOPS.frame_ms + STEPS.prefill_spread[0] * STEPS.pass_ms[0]
    assert outcome.tpot_ms.min() > 0.95 * STEPS.pass_ms[0]  # one of its steps has a prefill and takes its chance
    assert len(replayed(workload(0, 1 << 16, gap_s=10.0), profile, skip=3).ttft_ms) == REQUESTS - 3


def test_what_other_processes_take_is_counted_and_what_ended_children_took_is_not() -> None:
    spin = [sys.executable, "-c", "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"]
    foreign = subprocess.Popen(spin)  # until it has ended it counts as another program's process
    others = Elsewhere()
    time.sleep(0.4)  # time: what others used in it is measured
    busy = others.cores()
    foreign.wait()
    others = Elsewhere()
    subprocess.run(spin, check=True)
    assert busy > 0.5 and others.cores() < busy


def test_cold_requests_follow_one_for_each_of_other_adapters() -> None:
    cold = next(shape for shape in SHAPES if shape.others)
    adapters = [AdapterRef(name=f"a{i}", digest=f"{i:064}", rank=8, size_bytes=1) for i in range(cold.adapters + cold.others)]
    found = workload_of(np.random.default_rng(0), cold, adapters, 5.0, 10.0)
    assert found.adapter[: cold.others].tolist() == list(range(cold.adapters, cold.adapters + cold.others))
    assert found.adapter[cold.others :].max() < cold.adapters and (np.diff(found.arrival_s) >= 0).all()


def test_errors_of_two_rounds_do_not_cancel() -> None:
    def outcome(*tpot_ms: float) -> Outcome:
        return Outcome(np.array([10.0, 10.0]), np.array(tpot_ms), 100, 1.0, 0)

    real = outcome(10.0, 10.0)
    errors = mean_errors([(real, outcome(11.0, 11.0)), (real, outcome(9.0, 9.0))])
    assert errors["tpot_p50_ms"] == pytest.approx(10.0) == pytest.approx(errors["tpot_p99_ms"])
    assert errors["ttft_p50_ms"] == 0 == errors["tokens_per_s"]


def test_figures_are_over_all_requests_of_all_rounds() -> None:
    def served(sent_s: float, first_s: float, end_s: float) -> Served:
        return Served(sent_s, [first_s, end_s], tokens=11, over=True)

    warm, refused = served(0.0, 9.0, 10.0), Served(2.0, refused=True, over=True)
    one = Outcome.live([warm, served(1.0, 1.1, 2.1), refused, served(2.0, 2.3, 5.3)], 1)
    assert one.ttft_ms.tolist() == pytest.approx([100, 300]) and one.tpot_ms.tolist() == pytest.approx([100, 300])
    assert (one.tokens, one.refused, one.seconds) == (22, 1, pytest.approx(4.3))
    both = Outcome.together([one, Outcome.live([served(0.0, 0.2, 1.2)], 0)]).figures()
    assert both["ttft_p50_ms"] == pytest.approx(200) and both["tokens_per_s"] == pytest.approx(33 / 5.5)
