from __future__ import annotations

import gc
from dataclasses import replace

import msgspec
import numpy as np
import pytest

import bench.rivals  # noqa: F401 (most-idle)
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.events import MESSAGE, to_ps
from motet.twin.link import LinkModel
from motet.twin.metrics import NEVER
from motet.twin.scheduler import SchedulerSpec
from motet.twin.workload import Workload
from tests.twin.support import RANK_BYTES, history, run, spec, workload

SHARED = {"kv_blocks": 64, "adapter_bytes": 160 * RANK_BYTES, "kv_block_bytes": 8 * RANK_BYTES, "max_loras": 16}
SETTINGS = {
    "plain": ({}, {}),
    "short of memory, with preemptions": ({"kv_blocks": 70}, {}),
    "no part in proportion to the context": ({"context_token_ps": 0}, {}),
    "prefix cache": ({"prefix_cache": True, "kv_blocks": 150}, {"prefixes": True}),
    "prefix cache short of memory": ({"prefix_cache": True, "kv_blocks": 70, "host_bytes": 1 << 30}, {"prefixes": True}),
    "host memory for a few adapters": ({"host_bytes": 512 * RANK_BYTES}, {}),
    "steps by what they read": ({"measured": True}, {}),
    "shared memory": (SHARED, {}),
    "shared memory with a prefix cache": (SHARED | {"prefix_cache": True}, {"prefixes": True}),
    "copies beside the steps": ({"link": LinkModel(bytes_per_s=1e7, layers=4), "max_loras": 64}, {}),
    "more requests than room": ({"max_running": 4, "max_waiting": 6}, {"rate": 20.0}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(2))
def test_steps_advanced_in_one_go_give_the_history_of_single_steps(setting: str, seed: int) -> None:
    worker, load = SETTINGS[setting]
    at_once = run(workload(seed, **load), spec(**worker), scheduler=SchedulerSpec(copies=2))
    one_by_one = run(workload(seed, **load), spec(**worker), scheduler=SchedulerSpec(copies=2), max_run=1)
    assert history(at_once) == history(one_by_one)


def test_the_settings_of_the_test_above_do_what_they_say() -> None:
    worker, load = SETTINGS["prefix cache short of memory"]
    metrics = run(workload(0, **load), spec(**worker)).metrics
    assert metrics.preemptions and metrics.prefix_tokens and metrics.host_misses and metrics.evictions
    for name in ("shared memory", "shared memory with a prefix cache"):
        worker, load = SETTINGS[name]
        cluster = run(workload(0, **load), spec(**worker))
        assert cluster.metrics.preemptions and cluster.metrics.evictions
        assert any(one.engine.batches.state.kv.total != worker["kv_blocks"] for one in cluster.workers)
    worker, load = SETTINGS["more requests than room"]
    assert run(workload(0, **load), spec(**worker)).metrics.refused.any()


def test_overloaded_workers_that_share_their_memory_serve_more_requests() -> None:
    worker, load = SETTINGS["shared memory"]
    stay = SchedulerSpec(rebalance="off")
    fixed, shared = (
        run(workload(0, **load), spec(**worker | change), scheduler=stay).summary() for change in ({"kv_block_bytes": 0}, {})
    )
    assert shared["finished"] > fixed["finished"]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_leaves_the_garbage_collector_as_it_was(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    before, thresholds, counts = gc.get_threshold(), [], []

    def look(_: float) -> None:
        thresholds.append(gc.get_threshold())
        counts.append(gc.get_freeze_count())

    Cluster(workload(0, seconds=3.0), [spec()], SchedulerSpec()).run(progress=look)
    assert gc.get_threshold() == before and (gc.get_freeze_count() > 0) == frozen
    assert all(threshold[0] > before[0] for threshold in thresholds) and thresholds
    assert all(counts), "the collector never looks at what was there before"


def test_the_same_arguments_give_the_same_history_and_another_seed_does_not() -> None:
    first, again, other = (run(workload(3), spec(), scheduler=SchedulerSpec(copies=3), seed=seed) for seed in (1, 1, 2))
    assert history(first) == history(again)
    assert history(first) != history(other)


def test_every_request_ends_once_and_gets_all_its_tokens() -> None:
    load = workload(1)
    cluster = run(load, spec())
    metrics = cluster.metrics
    done = metrics.end_ps != NEVER
    assert (done ^ metrics.refused).all()
    assert (metrics.output_tokens[done] == load.output_tokens[done]).all()
    assert (metrics.first_ps[done] <= metrics.end_ps[done]).all()
    assert (metrics.admitted_ps[done] >= np.rint(load.arrival_s[done] * 1e12)).all()


def test_workers_come_and_go_and_what_a_leaving_one_has_it_ends() -> None:
    load = workload(1)
    cluster = Cluster(load, [spec()] * 3, SchedulerSpec(), first=1)
    first, second, third = (worker.worker_id for worker in cluster.workers)
    half_ps = to_ps(load.duration_s * 500.0)
    cluster.events.at(half_ps, MESSAGE, cluster.come, second)
    cluster.events.at(half_ps, MESSAGE, cluster.leave, first)
    cluster.run()
    metrics, arrival_ps = cluster.metrics, np.rint(load.arrival_s * 1e12)
    assert set(metrics.worker[arrival_ps < half_ps].tolist()) <= {-1, 0}
    assert set(metrics.worker[arrival_ps > half_ps].tolist()) <= {-1, 1}
    assert {0, 1} <= set(metrics.worker.tolist()), f"{third} was never there"
    assert ((metrics.end_ps != NEVER) ^ metrics.refused).all()


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    load = workload(0).take(np.arange(1))
    load = replace(load, arrival_s=np.zeros(1), prompt_tokens=np.array([600]), output_tokens=np.array([11]))
    load = replace(load, adapter=np.array([-1]))
    worker = spec(context_token_ps=0)
    cluster = run(load, worker, workers=1, scheduler=None, bus=BusDelays())
    perf = worker.perf
    prefill = 2 * perf.prefill_base_ms + 600 * perf.prefill_token_ms  # in two chunks: a step takes 512 tokens
    figures = cluster.summary()
    assert figures["ttft_ms"]["p50"] == pytest.approx(prefill)
    assert figures["tpot_ms"]["p50"] == pytest.approx(perf.decode_base_ms + perf.decode_row_ms)
    assert figures["itl_ms"]["mean"] == pytest.approx(perf.decode_base_ms + perf.decode_row_ms)


def test_a_cold_adapter_is_loaded_once_for_all_waiting_requests() -> None:
    load = workload(0).take(np.arange(6))
    load = replace(load, arrival_s=np.zeros(6), adapter=np.zeros(6, np.int64))
    cluster = run(load, spec(host_bytes=1 << 30), workers=1, scheduler=None)
    host = cluster.workers[0].storage
    assert (host.fetches, host.reads, cluster.metrics.host_misses, cluster.metrics.device_loads) == (1, 0, 6, 1)


def test_a_second_scheduler_learns_from_the_workers_states() -> None:
    """With states seconds apart two schedulers do not see each other's assignments, and the load gets uneven."""
    load = workload(5, rate=30.0, cv=1.0)

    def unevenness(bus: BusDelays) -> float:
        cluster = run(load, spec(kv_blocks=2000), workers=4, bus=bus, scheduler=SchedulerSpec(policy="most-idle", copies=4))
        return cluster.summary()["tpot_ms"]["p99"]

    fresh, late = unevenness(BusDelays(state_ms=0.1)), unevenness(BusDelays(state_ms=2500.0))
    assert fresh < late


def test_time_can_be_stopped_and_continues() -> None:
    load = workload(2)
    whole = run(load, spec())
    cluster = Cluster(load, [spec()] * 3, SchedulerSpec(), bus=BusDelays(submit_ms=0.5, assign_ms=1.0, stream_ms=0.2))
    seen: list[float] = []
    cluster.run(until_s=7.5)
    assert cluster.events.now_s == 7.5
    half = cluster.summary()
    assert 0 < half["finished"] < len(load) and half["duration_s"] == 7.5
    cluster.run(progress=seen.append)
    assert history(cluster) == history(whole)
    assert seen == sorted(seen) and len(seen) > 1


def test_several_workers_need_a_scheduler() -> None:
    with pytest.raises(ValueError, match="2 workers need a scheduler"):
        Cluster(workload(), [spec()] * 2, None)


@pytest.mark.parametrize("host_bytes", [None, 100 * RANK_BYTES])
def test_an_adapter_that_never_fits_is_refused_before_the_run(host_bytes: int | None) -> None:
    load = workload()
    load = replace(load, adapter_bytes=load.adapter_bytes * (1000 if host_bytes is None else 1))
    with pytest.raises(ValueError, match="device memory" if host_bytes is None else "host memory"):
        Cluster(load, [spec(host_bytes=host_bytes)], None)


def test_no_requests_are_a_result_too() -> None:
    empty: Workload = workload().take(np.arange(0))
    figures = run(empty, spec()).summary()
    assert figures["requests"] == 0 and figures["ttft_ms"] == {} and figures["duration_s"] == 0.0


def test_schedulers_that_know_the_caches_compute_fewer_prompt_tokens_again() -> None:
    n = 240
    whose = np.random.default_rng(1).integers(20, size=n).tolist()
    load = Workload(
        arrival_s=np.arange(n) / 5.0,
        adapter=np.full(n, -1),
        prompt_tokens=np.full(n, 290),
        output_tokens=np.full(n, 20),
        ranks=np.zeros(0, np.int64),
        adapter_bytes=np.zeros(0, np.int64),
        prefix=[(prompt, prompt + 100) for prompt in whose],
        prefix_tokens=128,
    )
    aware, blind = (
        run(load, spec(prefix_cache=True, kv_blocks=150), scheduler=SchedulerSpec(prefix_aware=aware)).metrics
        for aware in (True, False)
    )
    assert aware.prefix_tokens > 1.5 * blind.prefix_tokens
    assert (aware.end_ps != NEVER).all()


def test_a_prefix_that_covers_the_answer_is_found_by_the_next_turn() -> None:
    turns = Workload(
        arrival_s=np.array([0.0, 20.0]),
        adapter=np.array([-1, -1]),
        prompt_tokens=np.array([40, 100]),
        output_tokens=np.array([40, 10]),
        ranks=np.zeros(0, np.int64),
        adapter_bytes=np.zeros(0, np.int64),
        prefix=[(1, 2, 3, 4, 5), (1, 2, 3, 4, 5)],
        prefix_tokens=16,
    )
    assert run(turns, spec(prefix_cache=True)).metrics.prefix_tokens == 64  # 79 tokens have K and V: four full blocks


def test_a_simulated_worker_fetches_the_prompt_that_another_one_has() -> None:
    """Ten prompts of 512 tokens, each of one request and then of two at a time, which compute it again or fetch it."""
    n = 30
    load = Workload(
        arrival_s=np.arange(n) // 3 * 4.0 + 2.0 * (np.arange(n) % 3 > 0),
        adapter=np.full(n, -1),
        prompt_tokens=np.full(n, 520),
        output_tokens=np.where(np.arange(n) % 3, 60, 300),
        ranks=np.zeros(0, np.int64),
        adapter_bytes=np.zeros(0, np.int64),
        prefix=[tuple(range(number // 3 * 4, number // 3 * 4 + 4)) for number in range(n)],
        prefix_tokens=128,
    )
    worker = spec(prefix_cache=True, kv_blocks=150, max_running=3)
    worker = replace(
        worker,
        limits=msgspec.structs.replace(worker.limits, kv_format="x", kv_token_bytes=4096),
        perf=msgspec.structs.replace(worker.perf, kv_base_ms=1.0, kv_ms_per_mib=1.0),
    )
    fetching, computing = (
        run(load, worker, scheduler=SchedulerSpec(kv_travel=travels, admission="room")) for travels in (True, False)
    )
    assert fetching.metrics.kv_travels >= 1 and not computing.metrics.kv_travels
    assert fetching.metrics.kv_blocks_moved >= 4 * fetching.metrics.kv_travels
    assert fetching.metrics.prefix_tokens == computing.metrics.prefix_tokens == 20 * 512
    assert fetching.metrics.first_ps.sum() < computing.metrics.first_ps.sum(), "the idle worker takes them"
    for cluster in (fetching, computing):
        assert (cluster.metrics.end_ps != NEVER).all()
        for one in cluster.workers:
            one.core.check()
            one.engine.batches.state.kv.check([])
            assert not list(one.engine.batches.travelling.lists) and not one.travels.coming and not one.travels.lent
