"""Kinds of workers: the flags to start them with, how their memory is divided, and what a simulation says of each part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from motet.shared.model import Slo
from motet.twin.planning.kinds import VLLM_SEATS, Part, Seen, joined
from motet.twin.planning.loads import Loads, Objective
from motet.twin.profile import a10_llama2_7b
from motet.twin.workload import Workload
from tests.twin.planning.support import KV_TOKEN_BYTES, loads, native, vllm

GIB, MIB = 1 << 30, 1 << 20


def flags(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


# ---- flags and memory


def test_a_vllm_worker_is_started_with_the_slots_and_the_rank_of_its_setting() -> None:
    kind = vllm()
    law, setting = kind.settings, 4
    found = flags(kind.flags(setting, 3).removeprefix("--enable-lora "))
    assert found == {
        "--max-loras": f"{law.slots[setting]:.0f}",
        "--max-lora-rank": f"{law.max_rank[setting]:.0f}",
        "--max-cpu-loras": f"{law.slots[setting]:.0f}",
        "--max-num-seqs": str(VLLM_SEATS),
    }


def test_adapters_without_a_slot_stay_in_the_memory_of_the_host() -> None:
    kind = vllm()
    assert flags(kind.flags(0, 500).removeprefix("--enable-lora "))["--max-cpu-loras"] == "500"


def test_seats_of_vllm_are_those_of_the_law_of_the_engine_and_of_its_flags() -> None:
    kind = vllm(seats=16)
    assert kind.settings.seats == 16
    assert kind.flags(0, 1).endswith("--max-num-seqs 16")


def test_few_seats_are_kept_by_the_simulated_engine() -> None:
    """16 requests at a time instead of 256: more than a worker with so few seats serves in time."""
    part = Part(setting=0, loads=loads([12.0]))
    many, few = (kind.simulate([part], seed=1, warm_s=5.0, duration_s=40.0)[0] for kind in (vllm(), vllm(seats=4)))
    assert few.ttft_p99_ms > 10 * many.ttft_p99_ms


def test_more_slots_leave_less_of_a_vllm_workers_memory_for_kv_blocks() -> None:
    kind = vllm()
    law = kind.settings
    same_rank = np.flatnonzero(law.max_rank == law.max_rank.max())
    shares = [kind.adapter_share(int(setting)) for setting in same_rank]
    assert all(share is not None and 0.0 < share < 1.0 for share in shares)
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_a_native_worker_is_started_with_its_setting_and_room_for_all_adapters() -> None:
    kind = native()
    limits = kind.profile.limits
    few, many = (flags(kind.flags(0, adapters)) for adapters in (3, 500))
    assert few == {
        "--max-running": "64",
        "--max-loras": "64",
        "--max-lora-rank": "128",
        "--lora-memory-mib": "2048",
        "--kv-memory-gib": f"{limits.kv_blocks_total * limits.block_size * KV_TOKEN_BYTES / GIB:.4g}",
    }
    assert many == few | {"--max-loras": "500"}


def test_where_the_bytes_of_a_token_are_not_known_kv_memory_is_what_adapters_leave() -> None:
    kind = replace(native(), profile=a10_llama2_7b())
    assert "--kv-memory-gib" not in kind.flags(0, 3)
    assert kind.adapter_share(0) is None and len(kind.settings) == 1


def test_a_native_workers_memory_is_divided_between_adapters_and_kv_blocks() -> None:
    """The parts differ, their sum does not, and the first one is the profile's own."""
    kind = native()
    law = kind.settings
    total = law.adapter_bytes + law.kv_tokens * KV_TOKEN_BYTES
    assert total == pytest.approx(np.full(len(law), total[0]))
    assert law.adapter_bytes[0] == kind.profile.limits.adapter_bytes_total
    for setting in range(len(law)):
        assert kind.adapter_share(setting) == pytest.approx(law.adapter_bytes[setting] / total[0])


def test_the_simulated_native_worker_is_the_one_that_the_flags_start() -> None:
    kind = native()
    setting = 3
    spec, text = kind.worker(setting, 200), flags(kind.flags(setting, 200))
    assert spec.options.max_loras == int(text["--max-loras"]) == 200
    assert spec.limits.adapter_bytes_total / MIB == pytest.approx(float(text["--lora-memory-mib"]), abs=1)
    kv_bytes = spec.limits.kv_blocks_total * spec.limits.block_size * KV_TOKEN_BYTES
    assert kv_bytes / GIB == pytest.approx(float(text["--kv-memory-gib"]), rel=1e-3)
    assert spec.limits.adapter_bytes_total != kind.profile.limits.adapter_bytes_total


# ---- several parts


def test_parts_are_joined_with_each_adapter_once_and_the_sum_of_its_rates() -> None:
    a, b = loads([1.0, 2.0], [8, 16]), replace(loads([3.0, 4.0], [16, 32]), names=("a1", "b"))
    found = joined([a, b])
    assert found.names == ("a0", "a1", "b")
    assert found.rate.tolist() == [1.0, 5.0, 4.0]
    assert found.rank.tolist() == [8, 16, 32]
    assert found.size_bytes.tolist() == [8 * MIB, 16 * MIB, 32 * MIB]


def test_a_native_clusters_outcome_is_told_by_part() -> None:
    """Each part has the requests of its own adapters, and all parts together have all that come after the warm-up."""
    kind = native()
    parts = [Part(setting=0, loads=loads([2.0, 1.0])), Part(setting=0, loads=replace(loads([0.5]), names=("b",)))]
    found = kind.simulate(parts, seed=3, warm_s=20.0, duration_s=80.0)
    work = kind.requests(parts, seed=3, duration_s=80.0)
    expected = np.bincount(work.adapter[work.arrival_s >= 20.0], minlength=3)
    assert [one.arrived.tolist() for one in found] == [expected[:2].tolist(), expected[2:].tolist()]
    assert all((one.attained <= one.served).all() and (one.served <= one.arrived).all() for one in found)
    assert found[0].in_tpot > 0.9 * found[0].arrived.sum()


def test_an_adapter_on_two_native_workers_counts_its_requests_on_both() -> None:
    """Schedulers choose the worker of each request, so a part says how the adapter did, not the worker."""
    kind = native()
    half = Part(setting=0, loads=loads([1.0]))
    first, second = kind.simulate([half, half], seed=3, warm_s=0.0, duration_s=60.0)
    assert first.arrived.tolist() == second.arrived.tolist()
    assert 60 < first.arrived[0] < 180, "two requests per second"


def test_the_base_model_has_an_outcome_like_any_adapter() -> None:
    kind = native()
    (found,) = kind.simulate([Part(setting=0, loads=loads([1.0, 2.0], [0, 8]))], seed=1, warm_s=0.0, duration_s=60.0)
    assert found.arrived[0] == pytest.approx(60, rel=0.4) and found.arrived[1] == pytest.approx(120, rel=0.4)
    assert found.served.tolist() == found.arrived.tolist()


def test_native_workers_beyond_their_capacity_serve_and_attain_less() -> None:
    kind = native()
    found = kind.simulate([Part(setting=0, loads=loads([30.0]))], seed=1, warm_s=10.0, duration_s=60.0)
    assert found[0].served[0] < found[0].arrived[0]
    assert found[0].attained[0] < 0.9 * found[0].arrived[0]


# ---- what was seen of each request


def seen(ttft_ms: list[float], tpot_ms: list[float], done: list[bool]) -> Seen:
    n, slo = len(done), Slo(ttft_slo_ms=100.0, tpot_slo_ms=10.0)
    work = Workload(
        arrival_s=np.arange(n) * 10.0,
        adapter=np.zeros(n, np.int64),
        prompt_tokens=np.ones(n, np.int64),
        output_tokens=np.ones(n, np.int64),
        ranks=np.array([8]),
        adapter_bytes=np.array([1]),
        slos=(slo,),
    )
    one: Loads = replace(loads([1.0]), objectives=(Objective(slo=slo),))
    return Seen.of(work, one, 10.0, done=np.array(done), ttft_ms=np.array(ttft_ms), tpot_ms=np.array(tpot_ms))


def test_a_request_attains_when_it_is_done_and_both_times_are_within_the_objectives() -> None:
    """The first one comes in the warm-up; a single token has no time per token to miss; the last one was refused."""
    found = seen(
        [1.0, 100.0, 101.0, 50.0, 50.0, np.nan],
        [1.0, 10.0, 5.0, 11.0, np.nan, np.nan],
        [True, True, True, True, True, False],
    ).outcome(["a0"])
    assert (found.arrived.tolist(), found.served.tolist(), found.attained.tolist()) == ([5], [4], [2])
    assert (found.in_ttft, found.in_tpot) == (3, 3)
    assert found.ttft_p99_ms == pytest.approx(np.percentile([100, 101, 50, 50], 99))
    assert found.tpot_p99_ms == pytest.approx(np.percentile([10, 5, 11], 99))


def test_without_any_answer_there_is_no_percentile() -> None:
    found = seen([np.nan, np.nan], [np.nan, np.nan], [False, False]).outcome(["a0"])
    assert np.isnan(found.ttft_p99_ms) and np.isnan(found.tpot_p99_ms)
