"""Serving outcomes of the vLLM flavour: which requests count, what an unfinished one is, and the published calibrations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.twin.vllm.client import ApiServer, Requests
from motet.twin.vllm.engine import EngineConfig
from motet.twin.vllm.published import FILE, published, with_linear_memory
from motet.twin.vllm.serving import Objectives, Served, percentile_by_group, serve
from motet.twin.vllm.steps import TERMS
from tests.twin.support_vllm import TEN_MS, drawn
from tests.twin.support_vllm import work as requests_at


def work(*requests: tuple[float, int, int, int], adapters: int = 2, duration_s: float = 10.0) -> Requests:
    """Requests as (arrival in seconds, adapter, prompt tokens, output tokens)."""
    return requests_at(*requests, ranks=(8,) * adapters, duration_s=duration_s)


def served(asked: Requests, ttft_ms: float = 1e3, tpot_ms: float = 50.0, warm_s: float = 0.0, **options: float) -> Served:
    seats = int(options.pop("seats", 256))
    config = EngineConfig(a_max=2, s_max=8, kv_tokens=1 << 20, max_num_seqs=seats)
    return serve(config, TEN_MS, asked, Objectives.same(len(asked.ranks), ttft_ms, tpot_ms), warm_s, **options)


def test_requests_count_from_the_warm_up_to_the_windows_end() -> None:
    found = served(work((0.5, 0, 10, 5), (1.0, 0, 10, 5), (2.0, 1, 10, 5), (10.0, 1, 10, 5)), warm_s=1.0)
    assert found.arrived.tolist() == [1, 1]
    assert found.tok_s == pytest.approx(2 * 15 / 9)


def test_a_request_that_arrives_just_before_the_end_is_not_cut_off() -> None:
    found = served(work((0.0, 0, 10, 5), (9.99, 1, 10, 5)))
    assert found.served.tolist() == found.attained.tolist() == [1, 1]


def test_what_is_unfinished_after_the_drain_is_missed() -> None:
    found = served(work((0.0, 0, 10, 5), (9.0, 1, 10, 500)), drain_s=1.0)  # the second would need 5 s
    assert found.served.tolist() == found.attained.tolist() == [1, 0]
    assert found.tpot_p99_ms < 10.0  # of the unfinished request only the time so far is known
    assert served(work((0.0, 0, 10, 5), (9.0, 1, 10, 500)), drain_s=6.0).served.tolist() == [1, 1]


def test_each_adapter_has_its_own_objectives() -> None:
    asked = work((0.0, 0, 10, 5), (5.0, 1, 10, 5))  # TTFT 15 ms, a step and a load; TPOT 10 ms
    config = EngineConfig(a_max=2, s_max=8, kv_tokens=1 << 20)
    for ttft_ms, tpot_ms, attained in (
        ((14, 16), (11, 11), [0, 1]),
        ((16, 16), (11, 9), [1, 0]),
        ((math.inf,) * 2, (11, 11), [1, 1]),
    ):
        found = serve(config, TEN_MS, asked, Objectives(np.array(ttft_ms, float), np.array(tpot_ms, float)), 0.0)
        assert found.attained.tolist() == attained


def test_the_front_ends_time_is_part_of_a_ttft() -> None:
    assert served(work((0.0, 0, 10, 5))).ttft_p99_ms == pytest.approx(15)
    assert served(work((0.0, 0, 10, 5)), request_s=0.007).ttft_p99_ms == pytest.approx(22)


def test_a_waiting_request_counts_in_percentiles_with_its_wait_so_far() -> None:
    found = served(work((0.0, 0, 10, 5_000), (1.0, 1, 10, 5)), seats=1, drain_s=0.0)
    assert found.adapter_ttft_p99_ms[1] == pytest.approx(9_000, abs=20)
    assert found.served.tolist() == [0, 0]
    assert math.isnan(found.adapter_tpot_p99_ms[1])


def test_the_served_share_is_what_did_not_lengthen_the_queue() -> None:
    # one seat and requests of 1 s, one every 0.5 s: half of what arrives is served, however long the window
    asked = [(0.5 * i, 0, 10, 100) for i in range(400)]
    for duration_s in (50.0, 200.0):
        found = served(work(*asked, duration_s=duration_s), seats=1, warm_s=20.0, drain_s=1e4)
        assert found.served_share == pytest.approx(0.5, abs=0.02)
        assert found.served.sum() == found.arrived.sum()  # an endless drain serves all of them, and nearly all too late
        assert found.attained_share < 0.01


def test_a_request_that_runs_at_the_windows_end_is_not_starved() -> None:
    assert served(work((9.5, 0, 10, 200))).served_share == 1.0


def test_scrapes_tokenizers_and_ports_are_those_of_a_measurement_only() -> None:
    measured = ApiServer(request_s=0.01, tokenizer_s=1.0, ports=1)
    serving = measured.serving()
    assert (serving.request_s, serving.tokenizer_s, serving.series_s, serving.name_s) == (0.01, 0.0, 0.0, 0.0)
    assert serving.ports > 1e9


def test_a_warm_up_of_the_whole_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a warm-up of 10 s leaves nothing"):
        served(work((0.0, 0, 10, 5)), warm_s=10.0)


def test_totals_agree_with_the_simulated_run() -> None:
    asked = drawn(0.6, 6, 200.0)
    found = served(asked)
    tokens = sum(asked.prompt_tokens) + sum(asked.output_tokens)
    assert found.tok_s == pytest.approx(tokens / 200.0, rel=0.03)
    assert found.arrived.sum() == len(asked.arrival_s)
    assert found.running_mean == pytest.approx(3.6 * 150 * 0.010, rel=0.15)  # Little's law: rate x time in the batch
    assert found.loads > 6  # two slots for six adapters


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e6)), max_size=60),
    st.sampled_from([0.0, 50.0, 99.0, 100.0]),
)
def test_percentiles_by_group_are_those_of_numpy(pairs: list[tuple[int, float]], percent: float) -> None:
    group = np.array([one for one, _ in pairs], np.int64)
    values = np.array([value for _, value in pairs])
    found = percentile_by_group(values, group, 5, percent)
    for number in range(5):
        mine = values[group == number]
        expected = np.percentile(mine, percent) if len(mine) else math.nan
        assert found[number] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("name", ["llama-3.1-8b@h100", "qwen2.5-7b@h100"])
def test_a_published_calibration_has_every_term_and_kv_sizes_that_fall(name: str) -> None:
    found = published(name)
    assert set(found.steps.ms) == set(TERMS)
    assert 10 < found.steps.ms["constant"] < 20
    assert 0 < found.api.request_s < 0.02
    for s_max, points in found.kv_points.items():
        (few, most_kv), (many, least_kv) = points
        assert few < many
        assert most_kv > least_kv > 0
        assert found.kv_tokens((few + many) // 2, s_max) == pytest.approx((most_kv + least_kv) / 2, rel=0.01)
    assert len(json.dumps(json.loads(FILE.read_text()))) < 5_000  # coefficients, not tables


def test_an_unknown_calibration_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b@h100, qwen2\.5-7b@h100"):
        published("llama-2@h100")


def test_the_kv_line_of_a_published_calibration_is_its_own_fit() -> None:
    exact = published("llama-3.1-8b@h100")
    assert with_linear_memory(exact).kv_points == exact.kv_points
