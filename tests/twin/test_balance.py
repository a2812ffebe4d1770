"""Promise: requests that move between simulated workers lose nothing, and a rebalancer moves them where they end sooner."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.migration_plan import PlanConfig
from motet.policies.cluster.rebalance import RebalanceConfig
from motet.twin.cluster import BalanceSpec, Cluster
from motet.twin.link import LinkModel
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import Link
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import WorkerSpec
from tests.twin.support import history, run, spec, workload

EAGER = BalanceSpec(config=RebalanceConfig(wait_ms=50.0, every_s=0.1, rest_s=0.5, plan=PlanConfig(top=2, least_gain=0.02)))


def always_the_first(state: ClusterState, ask: Ask, fit: np.ndarray, now_s: float, avg_resp_len: float) -> Choice:
    """A policy that always takes the first worker, so that a rebalancer has work to do."""
    return Choice(min(np.flatnonzero(fit).tolist(), key=state.ids.__getitem__))


FIRST = SchedulerSpec(choose=always_the_first, admission="room", rebalance="off")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_request_ends_once_with_all_its_tokens(prefix_cache: bool) -> None:
    load = workload(seconds=10.0, rate=8.0, prefixes=prefix_cache)
    worker = spec(max_running=4, kv_blocks=120, prefix_cache=prefix_cache)
    cluster = run(load, worker, scheduler=FIRST, balance=EAGER)
    assert cluster.metrics.moves > 20
    assert cluster.summary()["finished"] == len(load)
    assert (cluster.metrics.output_tokens == np.minimum(load.output_tokens, 1024 - load.prompt_tokens)).all()
    assert (cluster.metrics.first_ps <= cluster.metrics.end_ps).all()
    assert len(set(cluster.metrics.worker.tolist())) == 3, "work went to every worker"


def test_a_request_moves_in_every_phase() -> None:
    """The phases are: waiting for its adapter, in the queue, in its prompt and in its output; also in the middle of a run of
    steps.
    """
    load = workload(seconds=4.0, rate=10.0)
    worker = replace(spec(max_running=4), storage=StorageModel(host_bytes=1 << 30, store=Link(200.0, 0.1)))
    cluster = Cluster(load, [worker] * 3, SchedulerSpec(admission="room"))
    draw = np.random.default_rng(3)
    phases: set[str] = set()
    while cluster.unfinished:
        cluster.run(until_s=cluster.events.now_s + 0.03)
        for source in cluster.workers:
            for request_id, entry in list(source.core.book.items()):
                if draw.random() < 0.05:
                    phases.add(entry.phase)
                    cluster.move(request_id, f"worker-{draw.integers(3):04d}")
        for one in cluster.workers:
            one.core.check()
    assert phases >= {"loading", "waiting", "running"}
    assert cluster.summary()["finished"] == len(load)
    assert cluster.metrics.moves > 20
    for one in cluster.workers:
        assert not len(one.core) and not one.engine.batches.state.running and not one.engine.batches.state.waiting
        one.engine.batches.state.kv.check([])


def linked() -> WorkerSpec:
    """A worker whose blocks travel at 100 MB/s."""
    worker = spec(max_running=4, prefix_cache=True)
    return replace(
        worker,
        limits=msgspec.structs.replace(worker.limits, kv_format="x", kv_token_bytes=4096),
        perf=msgspec.structs.replace(worker.perf, kv_base_ms=2.0, kv_ms_per_mib=10.0),
    )


def test_blocks_that_travel_save_prefills_and_lose_nothing() -> None:
    load = workload(seconds=10.0, rate=8.0)
    stays = BalanceSpec(config=replace(EAGER.config, kv_travel=False))
    off = run(load, linked(), scheduler=msgspec.structs.replace(FIRST, kv_travel=False), balance=stays)
    on = run(load, linked(), scheduler=FIRST, balance=EAGER)
    assert on.metrics.kv_travels > 5 and not off.metrics.kv_travels
    assert on.summary()["finished"] == len(load)
    for one in on.workers:
        assert not list(one.engine.batches.travelling.lists)
    assert history(run(load, linked(), scheduler=FIRST, balance=EAGER)) == history(on)


def test_a_moved_request_finds_its_full_blocks_where_it_goes() -> None:
    load = workload(seconds=0.3, rate=4.0)

    def move(fetch: bool) -> tuple[int, int]:
        """(tokens of the request when it moved, tokens found in the prefix cache)"""
        cluster = Cluster(load, [linked()] * 2, FIRST)
        cluster.run(until_s=1.0)
        (request_id,) = list(cluster.workers[0].core.book)[:1]
        live = cluster.workers[0].core.book[request_id].payload
        cluster.move(request_id, "worker-0001", fetch=fetch)
        cluster.run(until_s=1.0 + 0.5)
        moved = cluster.workers[1].core.book[request_id].payload
        before, prefilled = live.length, cluster.metrics.prefix_tokens
        cluster.run()
        assert cluster.summary()["finished"] == len(load) and moved.length > before
        return before, prefilled

    (length, cached), (_, nothing) = move(True), move(False)
    assert cached == (length - 1) // 16 * 16 > 0 and nothing == 0


def test_requests_wait_less_where_a_rebalancer_moves_them() -> None:
    load = workload(seconds=20.0, rate=8.0)
    worker = spec(max_running=8)

    def wait_ms(balance: BalanceSpec | None) -> float:
        return float(Latencies.of(load, run(load, worker, scheduler=FIRST, balance=balance).metrics).queue_ms.mean())

    assert wait_ms(EAGER) < 0.5 * wait_ms(None)


def test_waiting_requests_wait_less_where_they_move_by_themselves() -> None:
    load = workload(seconds=20.0, rate=8.0)
    runs = [
        run(load, spec(max_running=8), scheduler=msgspec.structs.replace(FIRST, rebalance=mode)) for mode in ("off", "auto")
    ]
    off, auto = (float(Latencies.of(load, one.metrics).queue_ms.mean()) for one in runs)
    assert auto < 0.5 * off and runs[1].metrics.moves > 10
    assert runs[1].summary()["finished"] == len(load)


def test_an_adapter_that_begins_to_come_before_a_decision_is_known_to_it() -> None:
    """Its pin is looked at between two steps, in which a request for it waits."""
    load = workload(seconds=4.0, rate=12.0)
    linked = spec()
    linked = replace(
        linked,
        link=LinkModel(bytes_per_s=1e9, layers=4),
        limits=msgspec.structs.replace(linked.limits, pin_slots=4, pin_bytes=1 << 30),
    )
    cluster = Cluster(load, [linked], SchedulerSpec(rebalance="off", admission="room"))
    (worker,), pinned = cluster.workers, 0
    while cluster.unfinished:
        cluster.run(until_s=cluster.events.now_s + 0.005)
        batches = worker.engine.batches
        coming = [live.adapter for live in batches.state.waiting if live.adapter and live.adapter not in batches.slots]
        worker.pin(coming[:1])
        pinned += len(coming[:1])
    assert pinned
    assert cluster.summary()["finished"] == len(load)


def test_a_run_with_moves_repeats_to_the_bit() -> None:
    load = workload(seconds=6.0, rate=8.0)
    one, other = (run(load, spec(max_running=4), scheduler=FIRST, balance=EAGER) for _ in range(2))
    assert history(one) == history(other) and one.metrics.moves == other.metrics.moves > 0


def test_a_balanced_cluster_is_left_alone() -> None:
    load = workload(seconds=10.0, rate=4.0, cv=1.0)
    cluster = run(load, spec(), balance=BalanceSpec())
    assert cluster.metrics.moves == 0


def test_preloaded_adapters_are_on_the_device_at_once() -> None:
    load = workload(seconds=2.0)
    names = [adapter.digest for adapter in load.adapters[:3]]
    cluster = Cluster(load, [spec()] * 2, SchedulerSpec(), preload={"worker-0001": names})
    assert set(cluster.workers[1].engine.batches.slots.digests()) == set(names)
    held = cluster.schedulers[0].state.holders(names[0])
    assert held is not None and held.loaded.tolist() == [True]
