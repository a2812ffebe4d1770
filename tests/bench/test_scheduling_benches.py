"""The benches of scheduling run to their end and give the figures they promise."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench import cluster, scheduler
from motet.twin.workload import Workload


def test_the_scheduler_bench_measures_every_policy(capsys) -> None:
    figures = scheduler.run(Namespace(quick=True, seconds=0.1))
    assert 0 < figures["decision_p50_ms"] <= figures["decision_p99_ms"] and figures["decisions_per_s"] > 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in scheduler.POLICIES)


def test_another_seed_draws_other_requests_of_the_same_kind() -> None:
    def drawn(seed: int) -> Workload:
        setting = cluster.Setting.of(Namespace(quick=True, seconds=2.0, data=None, seed=seed))
        return setting.workload(34.0, 50.0)

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert first.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert first.ranks.tolist() == again.ranks.tolist() != other.ranks.tolist()
    assert sorted(set(first.ranks)) == sorted(set(other.ranks)) and len(other) == pytest.approx(len(first), rel=0.2)


def test_the_cluster_bench_compares_every_policy_and_motet_is_faster_than_chance(capsys) -> None:
    figures = cluster.run(Namespace(quick=True, seconds=2.0, data=None, seed=0))
    for kernel in ("", "_bgmv"):
        assert 0 <= figures[f"attainment{kernel}"] <= 1
        assert 0 < figures[f"least_tpot_vs_random{kernel}"] < figures[f"tpot_vs_random{kernel}"] < 1
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in cluster.POLICIES)


def test_the_breaking_load_is_found_from_both_sides() -> None:
    def falls_at(load: float):
        def measure(policy: str, rate: float) -> cluster.Outcome:
            attainment = min(1.0, max(0.0, 0.9 + (load - rate) / 400))
            return cluster.Outcome(attainment, 1.0, 1.0, 1.0, 1.0, 1.0)

        return measure

    for load in (120.0, 341.0, 500.0):
        assert abs(cluster._breaking_rate("motet", falls_at(load)) - load) < 1.0
