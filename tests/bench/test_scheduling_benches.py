"""The benches of scheduling run to their end and give the figures they promise."""

from __future__ import annotations

import gzip
from argparse import Namespace
from dataclasses import replace

import pytest

from bench import cluster, scheduler
from bench.watch import Watch
from motet.twin.traces import read_popularity
from motet.twin.workload import Workload


@pytest.mark.bench
def test_the_scheduler_bench_measures_every_policy(capsys) -> None:
    figures = scheduler.run(Namespace(quick=True, seconds=0.1, watch=Watch()))
    assert 0 < figures["decision_p50_ms"] <= figures["decision_p99_ms"] and figures["decisions_per_s"] > 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in scheduler.POLICIES)


def test_another_seed_draws_other_requests_of_the_same_kind() -> None:
    def drawn(seed: int) -> Workload:
        setting = cluster.Setting.of(Namespace(quick=True, seconds=2.0, data=None, seed=seed, minutes=""))
        return setting.workload(34.0, 50.0)

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert first.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert first.ranks.tolist() == again.ranks.tolist() != other.ranks.tolist()
    assert sorted(set(first.ranks)) == sorted(set(other.ranks)) and len(other) == pytest.approx(len(first), rel=0.2)


@pytest.mark.bench
def test_the_cluster_bench_compares_every_policy_and_motet_is_faster_than_chance(capsys) -> None:
    figures = cluster.run(Namespace(quick=True, seconds=2.0, data=None, seed=0, minutes="", watch=Watch()))
    for kernel in ("", "_bgmv"):
        assert 0 <= figures[f"attainment{kernel}"] <= 1
        assert 0 < figures[f"least_tpot_vs_random{kernel}"] < figures[f"tpot_vs_random{kernel}"] < 1
    for table in ("policies", "policies_bgmv", "policies_cached"):
        assert figures[table].keys() >= {*cluster.POLICIES, cluster.BOUND}
    assert figures["gain_of_bound_vs_random_cached"] > 0.5
    assert figures["ablation"].keys() == {"motet", *cluster.ABLATIONS}
    outcomes = [tuple(outcome.values()) for outcome in figures["ablation"].values()]
    assert len({*outcomes}) == len(outcomes), "without any of its parts the policy decides otherwise"
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in cluster.POLICIES)


def test_cached_adapters_cost_no_time() -> None:
    setting = cluster.Setting.of(Namespace(quick=True, seconds=4.0, data=None, seed=0, minutes=""))
    loaded, cached = (cluster.measure(setting, cluster.Case(policy="rank-aware", cached=there)) for there in (False, True))
    assert cached.tpot_ms < loaded.tpot_ms and cached.attainment >= loaded.attainment


def test_recorded_minutes_have_their_own_popularity_and_arrivals(tmp_path) -> None:
    counts = tmp_path / cluster.POPULARITY
    with gzip.open(counts, "wt") as file:
        file.write("function,minute_1,minute_2,minute_3\na,100,0,0\nb,0,10,30\n")
    window = read_popularity(counts, minutes=range(2, 4))
    assert window.shares.tolist() == [0.0, 1.0] and window.intensity.edges_s.tolist() == [0.0, 60.0, 120.0]
    setting = replace(cluster.Setting.of(Namespace(quick=True, seconds=4.0, data=None, seed=0, minutes="")), window=window)
    at = setting.workload(10.0, 50.0, recorded=True).arrival_s
    assert (at >= 60.0).sum() == pytest.approx(3 * (at < 60.0).sum(), rel=0.3)


def test_a_search_that_runs_out_of_time_finds_nothing() -> None:
    assert cluster.breaking_rate(lambda policy, rate: None, "motet") is None


def test_the_breaking_load_is_found_from_both_sides() -> None:
    def falls_at(load: float):
        def measure(policy: str, rate: float) -> cluster.Outcome:
            attainment = min(1.0, max(0.0, 0.9 + (load - rate) / 400))
            return cluster.Outcome(attainment, 1.0, 1.0, 1.0, 1.0, 1.0)

        return measure

    for load in (120.0, 341.0, 500.0):
        assert abs(cluster.breaking_rate(falls_at(load), "motet") - load) < 1.0
