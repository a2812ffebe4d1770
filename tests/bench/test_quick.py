"""Every bench runs to its end in its quick form, as a user starts it, and gives the figures that pages and README name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import names

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "engine": ["--model", "XS", "--no-peers"],
    "cpu_assist": ["--model", "XS"],
    "twin_live": ["--seconds", "1"],
    "chameleon": ["--seconds", "4"],
    "chameleon_queues": ["--seconds", "4"],
    "cluster": ["--seconds", "2"],
    "dlora": ["--seconds", "8"],
    "rebalance": ["--seconds", "1"],
    "start": ["--model", "XS"],
}
FIGURES = {
    "structured": {"structured_cost", "schemas", "outputs_invalid", "hostile_ms_max", "hostile_mask_ms_max"},
    "autoscale": {"worker_hours_vs_oracle", "attainment", "flaps_per_day", "late_minutes", "days"},
    "adaptive": {"auto_vs_best_fixed", "auto_vs_off", "worst_workload", "live_auto_vs_off", "live_auto_vs_best_fixed"},
    "cluster": {
        "attainment",
        "attainment_cached",
        "rank_aware_attainment",
        "rank_aware_tpot_vs_mostidle",
        "policies",
        "ablation",
    },
    "cluster_live": {"attainment", "attainment_best_rival", "tpot_vs_mostidle", "twin_rank_order", "twin_error_p50"},
    "chameleon": {
        "load_vs_slora",
        "ttft_p99_vs_slora",
        "ttft_p50_vs_slora",
        "hit_rate",
        "best_other_policy_p99_vs_ours",
        "prediction",
    },
    "chameleon_queues": {"7 GiB, 8/s", "14 GiB, 9/s", "sizes", "size_with_the_papers_hit_rate"},
    "dlora": {"vs_merged_only", "vs_unmerged_only", "queueing_vs_rr", "queueing_vs_perfect", "plan_ms_32"},
    "cpu_assist": {"ttft_vs_cached", "ttft_vs_cached_all_cores", "auto_vs_best", "twin"},
    "engine": {"lora32_vs_own_base", "share_of_machine", "machine_limits"},
    "gateway": {"gateway_vs_starlette_lockstep_per_cpu_s", "gateway_vs_starlette"},
    "homes": {
        "tail_ttft_p99_gain",
        "loads_per_request",
        "loads_vs_affinity",
        "bytes_per_replan_vs_rendezvous",
        "bytes_per_replan_vs_min_cost_flow",
    },
    "kernels": {"lora_decode_bandwidth_fraction", "gemm_b32_peak_fraction", "attention_int8_vs_bf16"},
    "merge": {"gap_recovered", "mixed_vs_unmerged", "worst_itl_ratio", "by_model"},
    "mesh": {"mesh_vs_engine", "mesh_vs_engine_32"},
    "overload": {"goodput_at_3x_vs_peak", "refusal_p99_ms"},
    "prefix": {
        "tokens_reused_vs_oracle",
        "goodput_vs_best_rival",
        "no_prefix_cost",
        "decision_p99_ms",
        "index_bytes_per_block",
        "live_ttft_p50_vs_today",
        "fetch_ttft_mean_vs_none",
        "fetch.gain",
        "reports.step_cpu_with_reports",
    },
    "images": {
        "mixed_vs_set_adapters_32",
        "mixed_vs_fuse_32",
        "mixed_vs_no_lora_32",
        "latents_error",
        "cold_vs_cached",
        "styles_right",
        "plain_right",
    },
    "planner": {"workers_vs_bound", "most_above_bound", "valid", "starved_adapters", "plan_s_law", "plan_s_twin"},
    "planner_live": {
        "attained_live_1",
        "attained_twin_1",
        "attained_live_1_2",
        "attained_twin_1_2",
        "worst_difference_points",
    },
    "planner_models": {"f1_rf_qwen", "smape_small_tree_llama", "f1_boundary_ours_llama", "us_per_prediction"},
    "planner_samples": {"runs", "of"},
    "predictor": {"accuracy_3", "accuracy_3_default", "accuracy_3_baseline", "spearman", "p99_ms_batch32"},
    "quantization": {"exact", "exact_int8", "exact_int4", "perplexity_ratio_int8", "perplexity_ratio_int4", "exact_kv_int8"},
    "probe": {
        "probe_found",
        "planted",
        "false_alarms",
        "loads",
        "probe_vs_prefill",
        "cold_start_added_ms",
        "found_by_answers_alone",
    },
    "rebalance": {"ttft_p99_gain", "lost", "changed", "kv_gain", "kv_changed"},
    "rock": {
        "latency_vs_rrod",
        "latency_vs_lrums",
        "latency_vs_proactive",
        "hit_rate",
        "updates",
        "motet_latency_vs_rrod",
        "motet_latency_vs_lrums",
        "motet_latency_vs_proactive",
        "motet_hit_rate",
        "motet_updates",
        "bound_latency_vs_rrod",
    },
    "scale_live": {"requests", "resumed", "lost", "changed", "errors", "first_token_after_wake_s"},
    "scheduler": {"decisions_per_s", "decision_p50_ms", "decision_p99_ms"},
    "start": {"start_bf16_s", "start_int8_s", "start_int4_s", "start_int8_file_s", "start_bf16_kept_s", "parts_bf16_s"},
    "twin_live": {"ttft_p50_error", "tpot_p50_error", "tpot_p99_error", "throughput_error", "decode_r2", "step_r2"},
    "twin_speed": {"gpu_hour_s", "cluster_10min_s", "rss_mib"},
    "worker_memory": {"ttft_p99_ondemand_vs_ours", "worst_stall_vs_median_itl"},
}
ELSEWHERE = {
    "engines": "tests/bench/test_engines.py",
    "gpu": "tests/bench/test_gpu.py",
    "twin_vllm": "tests/twin/test_vllm_calibrate.py",
    "vllm_lora": "tests/engines/test_vllm_lora.py",
}
"""Benches that need something to run on, and where their code is tested without it."""


def test_every_bench_has_a_test_of_its_quick_form() -> None:
    assert set(names()) == FIGURES.keys() | ELSEWHERE.keys()
    assert all((ROOT / place).exists() for place in ELSEWHERE.values())


@pytest.mark.bench
@pytest.mark.parametrize("name", sorted(FIGURES))
def test_the_quick_form_gives_its_figures_and_says_how_the_machine_was(name: str) -> None:
    found = bench(name, "--quick", *OPTIONS.get(name, []))
    assert FIGURES[name] <= json.loads(found[-1]).keys()
    assert any(line.startswith("The machine ") for line in found)


@pytest.mark.bench
def test_over_http_the_engine_bench_gives_latencies_and_memory() -> None:
    figures = json.loads(bench("engine", "--quick", "--serve", *OPTIONS["engine"])[-1])
    assert figures["motet"]["ttft_p50_ms_c32"] > 0 and figures["motet"]["rss_mib"] > 0


def bench(*words: str) -> list[str]:
    """The lines that a bench prints."""
    environment = {key: value for key, value in os.environ.items() if key != "MOTET_DATA"}
    command = [sys.executable, "-m", "bench", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.bench
def test_the_order_of_image_steps_is_compared_in_the_twin() -> None:
    figures = json.loads(bench("images", "--arrivals", "--quick")[-1])
    assert {"mean_vs_equal", "p99_vs_equal", "worst_mean_vs_equal", "worst_p99_vs_equal"} <= figures.keys()
    assert figures["mean_vs_equal"] < 0.7 and figures["p99_vs_equal"] < 0.5, "mixed batches where launches bind"


@pytest.mark.bench
def test_a_live_image_worker_is_compared_with_the_twin_of_its_profile() -> None:
    figures = json.loads(bench("images", "--live-vs-twin", "--quick")[-1])
    assert abs(figures["e2e_p50_error"]) < 1.0 and len(figures["rounds"]) == 1
