from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from motet.shared.model import Slo
from motet.twin.events import PS_PER_MS, PS_PER_S
from motet.twin.metrics import Metrics, summary
from tests.twin.support import workload

MS = PS_PER_MS


def measured() -> dict:
    """Four requests at 1 s: in time, late to the first token, slow, refused."""
    load = workload().take(np.arange(4))
    load = replace(
        load,
        arrival_s=np.ones(4),
        adapter=np.array([0, 0, 1, -1]),
        prompt_tokens=np.full(4, 10),
        output_tokens=np.array([11, 11, 11, 1]),
        slo=np.array([0, 0, 1, 1]),
        slos=(Slo(slo_class="fast", ttft_slo_ms=100, tpot_slo_ms=50), Slo(slo_class="slow", ttft_slo_ms=1000, tpot_slo_ms=60)),
    )
    metrics = Metrics(4)
    for index, queue_ms, ttft_ms, tpot_ms in ((0, 5, 50, 50), (1, 150, 200, 10), (2, 20, 100, 61)):
        metrics.admitted(index, PS_PER_S + queue_ms * MS)
        metrics.first_token(index, PS_PER_S + ttft_ms * MS)
        metrics.ended(index, PS_PER_S + (ttft_ms + 10 * tpot_ms) * MS, 11)
        metrics.gaps(tpot_ms * MS, 0, 10, 1)
    metrics.refused[3] = True
    return summary(load, metrics, end_s=2.0, busy_s=1.0, workers=1)


def test_attainment_counts_requests_that_kept_both_objectives_of_all_that_asked() -> None:
    figures = measured()
    assert figures["slo_attainment"] == 0.25
    assert (figures["ttft_attainment"], figures["tpot_attainment"]) == (0.5, 0.5)
    assert figures["classes"]["fast"]["slo_attainment"] == 0.5 and figures["classes"]["slow"]["slo_attainment"] == 0.0


def test_latencies_are_counted_from_the_arrival() -> None:
    figures = measured()
    assert figures["ttft_ms"]["max"] == 200.0 and figures["ttft_ms"]["p50"] == 100.0
    assert figures["tpot_ms"]["max"] == 61.0
    assert figures["e2e_ms"]["max"] == 710.0
    assert figures["time_per_token_ms"]["max"] == pytest.approx(710.0 / 11)
    assert figures["classes"]["fast"]["queue_ms"]["max"] == 150.0 and figures["classes"]["slow"]["queue_ms"]["max"] == 20.0


def test_throughput_and_starvation_follow_the_tokens() -> None:
    figures = measured()
    assert figures["throughput"]["output_tokens_per_s"] == 33 / 2
    assert figures["throughput"]["total_tokens_per_s"] == 63 / 2
    assert figures["starvation"] == {"served_share": 63 / 74, "starved": True, "starved_adapters": 1, "adapters": 3}


def test_token_gaps_are_pooled_with_their_weights() -> None:
    metrics = Metrics(0)
    metrics.gaps(10 * MS, 0, 90, 1)
    metrics.gaps(20 * MS, 2 * MS, 5, 2)  # 20, 22, 24, 26, 28 ms, twice each
    itl = metrics.itl_ms()
    assert itl["mean"] == pytest.approx((900 + 240) / 100)
    assert itl["p50"] == pytest.approx(10.0, rel=0.002) and itl["p95"] == pytest.approx(24.0, rel=0.002)
    assert itl["p99"] == pytest.approx(28.0, rel=0.002)


def test_many_gaps_need_no_more_memory_than_few() -> None:
    metrics = Metrics(0)
    tracemalloc.start()
    for _ in range(3000):
        metrics.gaps(10 * MS, 1, 1000, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20  # twelve million gaps are 92 MiB
    assert metrics.itl_ms()["mean"] == pytest.approx(10.0)
