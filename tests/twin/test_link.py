"""Promise: copies beside the steps delay their own requests only, and a simulated history stays the same to the bit."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from motet.policies.step.cold_start import AssistRates, ColdStartName
from motet.twin.link import DeviceLink, LinkModel
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Workload
from tests.twin.support import history, run, spec, workload

LAYERS = 32
RATES = AssistRates(2, mib_row_ms=0.002)
MS = 10**9  # picoseconds


def worker(cold_start: ColdStartName = "auto", *, assist: AssistRates | None = RATES, **options) -> WorkerSpec:
    plain = spec(**options)
    link = LinkModel(bytes_per_s=1e9, layers=LAYERS, assist=assist)
    return replace(plain, link=link, options=msgspec.structs.replace(plain.options, cold_start=cold_start))


def test_copies_share_the_link_in_the_order_in_which_they_began() -> None:
    link = DeviceLink(LinkModel(bytes_per_s=1e9, layers=10))
    link.begin("a", 1_000_000, 5 * MS)
    link.begin("b", 2_000_000, 5 * MS)
    assert link.advance(5 * MS + MS // 2) == [] and (link.loaded("a"), link.loaded("b")) == (5, 0)
    assert (link.ahead_bytes("a"), link.ahead_bytes("b"), link.queued_bytes) == (500_000, 2_500_000, 2_500_000)
    assert link.advance(7 * MS) == ["a"] and link.loaded("b") == 5 and link.first_whole_ps == MS
    link.begin("c", 1_000_000, 7 * MS)
    link.cancel("b")
    assert link.advance(8 * MS) == ["c"] and link.queued_bytes == 0
    link.begin("d", 1_000_000, 100 * MS)
    assert link.advance(100 * MS) == [], "an idle link saves no time up"


@pytest.mark.parametrize("cold_start", ["auto", "blocking", "layerwise", "assist"])
def test_equal_seeds_give_equal_histories_and_runs_of_steps_change_nothing(cold_start: ColdStartName) -> None:
    load = workload(3)
    whole = history(run(load, worker(cold_start, max_loras=4)))
    assert history(run(load, worker(cold_start, max_loras=4))) == whole
    assert history(run(load, worker(cold_start, max_loras=4), max_run=1)) == whole
    assert whole["figures"]["adapters"]["cold_starts"] and whole["figures"]["finished"] > 0


def test_assist_hides_what_waiting_for_copies_costs_and_the_free_choice_is_as_good() -> None:
    """On one worker, so that every mode has the same requests there."""
    loads = [workload(seed, rate=3.0) for seed in range(5, 9)]

    def mean_ttft_ms(load: Workload, mode: ColdStartName) -> float:
        alone = run(load, worker(mode, max_loras=6), workers=1, scheduler=None)
        return float(alone.summary()["ttft_ms"]["mean"])

    modes: tuple[ColdStartName, ...] = ("auto", "blocking", "layerwise", "assist")
    total = {mode: sum(mean_ttft_ms(load, mode) for load in loads) for mode in modes}
    assert total["assist"] < total["layerwise"] <= total["blocking"]
    assert total["auto"] <= 1.03 * min(total.values())


def test_without_processes_no_request_is_assisted() -> None:
    figures = run(workload(3), worker("assist", assist=None, max_loras=4)).summary()
    assert set(figures["adapters"]["cold_starts"]) == {"layerwise"}
