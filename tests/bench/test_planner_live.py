"""The parts of the bench that puts a plan on live workers: its load, its flags, and what is compared."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from bench.cluster_live import PACE
from bench.cluster_live_parts import Answers, MixedSteps, Setting, popularity_and_lengths
from bench.planner_live import PacedKind, Pair, Side, as_planned, figures, largest, loads_of, paced_kind, variables
from motet.shared.model import WorkerLimits
from motet.twin.planning.check import Job
from motet.twin.planning.kinds import Outcome, Part, Seen
from motet.twin.planning.planner import Offer
from motet.twin.workload import Workload

SHARES, LENGTHS = popularity_and_lengths(None, 10)
SETTING = Setting(workers=2, seats=8, pace=PACE, rate=1.0, requests=1, seed=1, shares=SHARES, lengths=LENGTHS)
SIZES = {name: int(rank) << 12 for name, rank in zip(SETTING.names, SETTING.ranks, strict=True)}
LIMITS = WorkerLimits(
    base_model="demo",
    max_model_len=2048,
    max_running=32,
    max_waiting=4096,
    block_size=16,
    kv_blocks_total=8192,
    adapter_bytes_total=1 << 28,
    max_lora_rank=256,
    kv_token_bytes=2048,
)
KIND = paced_kind(LIMITS)


def whole(part: Part) -> Outcome:
    """Every request of the part attained, a hundred for each adapter."""
    n = np.full(len(part.loads), 100)
    return Outcome(
        arrived=n, served=n, attained=n, in_ttft=int(n.sum()), in_tpot=int(n.sum()), ttft_p99_ms=1.0, tpot_p99_ms=1.0
    )


def none(part: Part) -> Outcome:
    """No request of the part attained."""
    n = np.full(len(part.loads), 100)
    return Outcome(arrived=n, served=n, attained=0 * n, in_ttft=0, in_tpot=0, ttft_p99_ms=1e4, tpot_p99_ms=1e4)


def test_a_paced_worker_is_simulated_with_the_steps_of_its_pace() -> None:
    assert isinstance(KIND, PacedKind)
    spec = KIND.worker(0, 10)
    assert spec.steps == MixedSteps(KIND.profile.perf)
    assert KIND.profile.perf.decode_base_ms == PACE.step_ms
    assert spec.limits == LIMITS


def test_the_load_is_the_largest_that_the_twin_finds_valid_on_as_many_workers() -> None:
    """The twin of this test serves 6.5 requests/s on each worker."""

    def simulate(jobs: Sequence[Job]) -> list[list[Outcome]]:
        def enough(job: Job) -> bool:
            return sum(float(part.loads.rate.sum()) for part in job.parts) <= 6.5 * len(job.parts)

        return [[whole(part) if enough(job) else none(part) for part in job.parts] for job in jobs]

    found = largest(lambda rate: loads_of(SETTING, SIZES, rate), Offer(kind=KIND), 2, simulate, quick=False)
    assert len(found.made.workers) == 2 and found.made.valid
    assert 13.0 / 1.04 < found.rate <= 13.0
    assert found.made.loads.rate.sum() == pytest.approx(found.rate)
    assert "--max-running 32 --max-loras 64 --max-lora-rank 256" in found.flags


def test_flags_reach_live_workers_as_variables() -> None:
    assert variables("--max-loras 64 --kv-memory-gib 0.5") == {"MOTET_MAX_LORAS": "64", "MOTET_KV_MEMORY_GIB": "0.5"}


@pytest.mark.parametrize(("change", "same"), [({}, True), ({"kv_blocks_total": 8185}, True), ({"max_running": 16}, False)])
def test_live_workers_must_announce_what_was_planned(change: dict[str, int], same: bool) -> None:
    part = Part(setting=0, loads=loads_of(SETTING, SIZES, 1.0))
    assert as_planned(msgspec.structs.replace(LIMITS, **change), KIND, part) is same


def seen(ttft_ms: list[float], tpot_ms: list[float], done: list[bool]) -> Seen:
    loads = loads_of(SETTING, SIZES, 1.0)
    part = Part(setting=0, loads=loads)
    work = KIND.requests([part], seed=1, duration_s=60.0)
    rows = np.arange(len(done))
    return Seen.of(
        Workload(
            arrival_s=work.arrival_s[rows],
            adapter=work.adapter[rows],
            prompt_tokens=work.prompt_tokens[rows],
            output_tokens=work.output_tokens[rows],
            ranks=work.ranks,
            adapter_bytes=work.adapter_bytes,
        ),
        loads,
        0.0,
        done=np.array(done),
        ttft_ms=np.array(ttft_ms),
        tpot_ms=np.array(tpot_ms),
    )


def test_a_side_counts_refused_requests_as_missed_and_not_in_its_percentiles() -> None:
    side = Side.of(seen([100.0, 100.0, 1e6, np.inf], [10.0, np.nan, 10.0, np.inf], [True, True, True, False]))
    assert (side.attained, side.in_ttft, side.in_tpot) == (0.5, 0.5, 0.75)
    assert (side.unanswered, side.requests) == (0.25, 4)
    assert side.ttft_p99_ms < 1e6 and side.tpot_p99_ms == 10.0


def test_the_figures_are_named_by_the_load_and_the_worst_difference_counts() -> None:
    def side(attained: float) -> Side:
        return Side(attained=attained, in_ttft=1.0, in_tpot=1.0, ttft_p99_ms=1.0, tpot_p99_ms=1.0, unanswered=0.0, requests=10)

    answers = Answers(
        status=np.array([200, 429, 200]),
        whole=np.array([True, False, True]),
        ttft_ms=np.ones(3),
        tpot_ms=np.ones(3),
        busy=0.5,
        behind=0.0,
        lost=0.0,
    )
    found = figures(
        [
            Pair(factor=1.0, live=side(0.99), twin=side(0.98), answers=answers),
            Pair(factor=1.2, live=side(0.90), twin=side(0.925), answers=answers),
        ]
    )
    assert (found["attained_live_1"], found["attained_twin_1"]) == (0.99, 0.98)
    assert (found["attained_live_1_2"], found["attained_twin_1_2"]) == (0.9, 0.925)
    assert found["worst_difference_points"] == pytest.approx(2.5)
    assert found["loads"]["1.2"]["statuses"] == {"200": 2, "429": 1}
