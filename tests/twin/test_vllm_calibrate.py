"""Calibration and runs from small hand-made tables: known coefficients come back, bad cells are named."""

from __future__ import annotations

import csv
import gzip
import io
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import twin_vllm
from bench.watch import Watch
from motet.shared.json_files import FileError
from motet.twin.vllm.calibrate import LISTED_US, Sample, calibrate, fit
from motet.twin.vllm.runs import predict, published_twin, read_runs, requests
from motet.twin.vllm.steps import TERMS, VllmStepModel, features

MODEL = "llama-3.1-8b-instruct"
TRUE_MS = dict.fromkeys(TERMS, 0.0) | {
    "constant": 12.5,
    "tokens": 0.008,
    "tokens_above_128": 0.013,
    "rows": 0.006,
    "context_ktokens": 0.06,
    "mixed_context_ktokens": 0.08,
    "lora": 1.2,
    "slot_expand": 0.011,
    "slot_shrink": 0.01,
    "adapter": 0.3,
    "adapter_expand": 0.005,
    "adapter_shrink": 0.1,
}


def truth(
    tokens: float,
    rows: float,
    context: float,
    a_max: int,
    s_max: int,
    distinct: float,
    *,
    mixed: bool,
    in_memory: int | None = None,
) -> float:
    """Milliseconds of a step; by default as many adapters are in CPU memory as there are slots."""
    x = features(tokens, rows, context, a_max, s_max, distinct, mixed=mixed)
    listed = distinct * (a_max if in_memory is None else in_memory)
    return float(x @ np.array([TRUE_MS[term] for term in TERMS])) + LISTED_US * 1e-3 * listed


def write(folder: Path, name: str, columns: str, lines: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns.split(","))
    writer.writerows(lines)
    data = text.getvalue().encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables of one model that match `TRUE_MS` exactly, and one run."""
    slots = [(f"s{a}-{s}", MODEL, a, s, truth(1, 1, 60, a, s, 0, mixed=False)) for a in (8, 64, 256) for s in (8, 16, 32)]
    write(tmp_path, "overhead_slots_itl_v085.csv", "run_id,model,A_max,S_max,itl_median_ms", slots)
    latency, summary, bins = [], [], []
    for batch, output in ((50, 100), (50, 400), (400, 100), (400, 400), (1000, 400)):
        name = f"d{batch}-{output}"
        latency.append((name, "decode", MODEL, 0, 0, batch, 5, output, batch, "", ""))
        context = batch * (5 + output / 2)
        summary.append((name, MODEL, "calib-latency", 0, 0, "", truth(batch, batch, context, 0, 0, 0, mixed=False), 0))
    latency.append(("p", "prefill", MODEL, 0, 0, 100, 200, 1, 1, "", ""))
    summary.append(("p", MODEL, "calib-latency", 0, 0, "", truth(2048, 2048 / 200, 0, 0, 0, 0, mixed=True), 0))
    for a_max in (100, 300):
        distinct = a_max * (1 - np.exp(-256 / a_max))
        for prompt in (100, 400):
            context = 256 * (prompt + 50)
            decode_ms = truth(256, 256, context, a_max, 8, distinct, mixed=False)
            full_ms = truth(2048, 256, context, a_max, 8, distinct, mixed=True)
            name = f"f{a_max}-{prompt}"
            latency.append((name, "find_max_batch", MODEL, a_max, 8, "", prompt, 100, 256, decode_ms, full_ms))
    loading = []
    for rank, s_max, load_ms in ((8, 8, 9), (8, 16, 10), (16, 16, 9), (8, 32, 10)):
        step_ms = truth(1, 1, 100, 1, s_max, 1, mixed=False, in_memory=50)
        summary.append((f"l{rank}-{s_max}", MODEL, "calib-loading", 1, 1, s_max, step_ms, step_ms + load_ms))
        loading.append((f"l{rank}-{s_max}", rank, "serving"))
    latency.append(("b", "decode_adapters", MODEL, 300, 8, 220, 5, 100, 220, "", ""))
    for tokens in (40, 96, 136, 220, 400, 900):
        for distinct in (1, 32, 100):
            mixed = tokens > 220
            running = min(tokens, 220)
            context = 0 if mixed else running * 55
            bins.append(
                ("b", MODEL, 1, 300, 8, 50, tokens, distinct, truth(tokens, running, context, 300, 8, distinct, mixed=mixed))
            )
    write(
        tmp_path,
        "overhead_latency_v085.csv",
        "run_id,kind,model,A_max,S_max,max_num_seqs,input_tokens_per_req,"
        "output_tokens_per_req,batch_max,itl_median_ms,itl_p99_ms",
        latency,
    )
    write(
        tmp_path,
        "overhead_steps_summary_v085.csv",
        "run_id,model,purpose,lora_enabled,A_max,S_max,step_median_ms,step_p99_ms",
        summary,
    )
    write(
        tmp_path,
        "overhead_steps_binned_v085.csv.gz",
        "run_id,model,lora_enabled,A_max,S_max,n_steps,batched_tokens_mean,unique_adapters_mean,step_median_ms",
        bins,
    )
    write(tmp_path, "overhead_loading_summary_v085.csv", "run_id,adapter_rank,phase", loading)
    write(
        tmp_path,
        "overhead_scheduler.csv.gz",
        "A_max,n_adapters_served,batch_mean,waiting_mean,mean_loras_by_batch,sched_time_per_step_ms",
        [(8, 64, b, w, 7.9, (2.0 * b + 0.3 * w) / 1e3) for b in (20, 80) for w in (100, 2_000)],
    )
    write(
        tmp_path,
        "overhead_memory.csv",
        "model,vllm_version,purpose,A_max,S_max,kv_tokens",
        [(MODEL, "0.8.5", "calib-memory", a, 16, 310_000 - 1_000 * a) for a in (32, 8)],
    )
    write_runs(tmp_path)
    return tmp_path


RUN = {
    "run_id": "r", "purpose": "dt-validation", "model": MODEL, "vllm_version": "0.8.5", "status": "ok", "flags": "",
    "planned_duration_s": 60, "n_adapters_served": 4, "A_max": 8, "S_max": 16, "max_num_seqs": 2048,
    "arrival_process": "poisson_per_adapter", "pool_mean_input_tokens": 220, "pool_mean_output_tokens": 190,
    "total_tok_s": 1600, "starved": 0, "itl_mean_ms": 20, "completed": 220, "total_input_tokens": 48_000,
    "ttft_mean_ms": 40, "ttft_median_ms": 30, "ttft_p99_ms": 300, "ttft_penalised_ms": 900,
}  # fmt: skip
REQUEST_MS, TOKENIZER_MS = 7.0, 200.0


def write_runs(folder: Path, rates: str = "1 1 0.5 1.5", ranks: str = "8:2;16:2", **changes: object) -> None:
    """One served run, and two of the calibration: a single request, and the first requests of 50 adapters, 700 ms each."""
    one_ms = REQUEST_MS + truth(13, 1, 0, 64, 16, 0, mixed=True)
    one = RUN | {"purpose": "calib-memory", "A_max": 64, "completed": 1, "total_input_tokens": 13, "ttft_mean_ms": one_ms}
    ttft_ms = 50 * TOKENIZER_MS + 700 * np.arange(50)
    median_ms, p99_ms = np.percentile(ttft_ms, [50, 99])
    first = RUN | {"purpose": "calib-loading", "completed": 50, "ttft_median_ms": median_ms, "ttft_p99_ms": p99_ms}
    lines = [list(cells.values()) for cells in (RUN | changes, one, first)]
    write(folder, "runs.csv.gz", ",".join(RUN), lines)
    write(folder, "adapters.csv", "run_id,ranks_multiset,rates_req_s_in_adapter_order", [("r", ranks, rates)])


def test_the_fit_recovers_known_coefficients(folder: Path) -> None:
    found = calibrate(folder)[MODEL]
    assert found.steps.ms == pytest.approx(TRUE_MS, abs=1e-4)
    assert max(found.errors.values()) < 0.01
    assert (found.steps.load_full_ms, found.steps.load_padded_ms) == pytest.approx((9, 10))
    assert found.steps.scan_us == pytest.approx(0.3)
    assert (found.api.request_s * 1e3, found.api.tokenizer_s * 1e3) == pytest.approx((REQUEST_MS, TOKENIZER_MS), rel=1e-3)


def test_a_cost_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for tokens in (1, 50, 200, 800):
        x = features(tokens, tokens, 0, 0, 0, 0, mixed=False)
        samples.append(Sample("a", x, 12.0 - 0.001 * tokens + rng.uniform(0, 0.01)))
    ms, _ = fit(samples)
    assert min(ms.values()) == 0.0
    assert ms["constant"] == pytest.approx(12, rel=0.1)


def test_kv_size_is_interpolated_and_not_guessed(folder: Path) -> None:
    found = calibrate(folder)[MODEL]
    assert found.kv_tokens(20, 16) == 290_000
    with pytest.raises(ValueError, match="A_max 64, S_max 16"):
        found.kv_tokens(64, 16)
    with pytest.raises(ValueError, match="S_max 32"):
        found.kv_tokens(8, 32)


def test_a_table_of_step_times_says_what_the_linear_model_says() -> None:
    steps = VllmStepModel(ms=TRUE_MS, load_full_ms=1, load_padded_ms=2, scan_us=0, listed_us=LISTED_US)
    table = steps.table(64, 32, 2048, in_memory=300)
    for tokens, rows, context, distinct, mixed in ((1, 1, 100, 0, False), (7, 7, 900, 3, False), (700, 60, 9_000, 20, True)):
        expected_ms = truth(tokens, rows, context, 64, 32, distinct, mixed=mixed, in_memory=300)
        assert table.seconds(tokens, rows, context, distinct, mixed=mixed) * 1e3 == pytest.approx(expected_ms)


def test_a_run_is_predicted_from_its_description_alone(folder: Path) -> None:
    [(run, measured)] = read_runs(folder, "dt-validation")
    outcome = predict(run, calibrate(folder)[MODEL])
    write_runs(folder, total_tok_s=7, itl_mean_ms=7, ttft_mean_ms=7)
    [(same, other)] = read_runs(folder, "dt-validation")
    assert same == run
    assert other != measured
    assert predict(same, calibrate(folder)[MODEL]) == outcome
    assert outcome.total_tok_s == pytest.approx(4 * 410, rel=0.25)
    assert outcome.itl_mean_ms > 12


def test_lengths_keep_the_limits_of_the_client(folder: Path) -> None:
    [(run, _)] = read_runs(folder, "dt-validation")
    work = requests(replace(run, duration_s=3_600.0))
    assert max(work.prompt_tokens) <= 1024 < max(work.output_tokens)
    assert max(p + o for p, o in zip(work.prompt_tokens, work.output_tokens, strict=True)) <= 2048
    assert np.mean(work.output_tokens) == pytest.approx(0.99 * run.output_mean_tokens, rel=0.01)


def test_the_bench_compares_times_to_first_token_of_runs_that_count(folder: Path) -> None:
    [(run, _)] = read_runs(folder, "dt-validation")
    outcome = predict(run, calibrate(folder)[MODEL])
    measured = {
        "ttft_mean_ms": outcome.ttft_mean_ms / 1.25,
        "ttft_median_ms": outcome.ttft_median_ms / 0.9,
        "ttft_p99_ms": outcome.ttft_p99_ms / 0.5,
        "ttft_penalised_ms": outcome.ttft_penalised_ms / 3,
    }
    write_runs(folder, **measured)
    args = Namespace(runs=folder, calibration=None, purpose="dt-validation", quick=False)
    figures = twin_vllm.run(Namespace(**vars(args), watch=Watch()))
    assert (figures["ttft_error_p50"], figures["ttft_error_p99"]) == pytest.approx((25, 25), abs=0.01)
    assert figures["ttft_median_error_p50"] == pytest.approx(10, abs=0.01)
    assert figures["ttft_p99_error_p50"] == pytest.approx(50, abs=0.01)
    assert figures["ttft_penalised_error_p50"] == pytest.approx(200, abs=0.01)
    assert figures["ttft_penalised_smape"] == pytest.approx(50, abs=0.01)
    write_runs(folder, **measured | {"ttft_penalised_ms": ""})
    assert twin_vllm.run(Namespace(**vars(args), watch=Watch()))["ttft_penalised_smape"] is None
    write_runs(folder, flags="client_port_exhaustion")
    assert twin_vllm.run(Namespace(**vars(args), watch=Watch()))["ttft_error_p50"] is None


def test_other_purposes_and_failed_runs_are_left_out(folder: Path) -> None:
    assert read_runs(folder, "ml-test") == []
    write_runs(folder, status="infeasible_memory", total_tok_s="")
    assert read_runs(folder, "dt-validation") == []


@pytest.mark.parametrize(
    ("changes", "file", "field", "reason"),
    [
        ({"vllm_version": "0.9.0"}, "runs.csv.gz", "vllm_version", "only 0.8.5 is modelled"),
        ({"A_max": "many"}, "runs.csv.gz", "A_max", "not a number"),
        ({"A_max": 8.5}, "runs.csv.gz", "A_max", "not a whole number"),
        ({"itl_mean_ms": "nan"}, "runs.csv.gz", "itl_mean_ms", "not finite"),
        ({"ttft_mean_ms": 0}, "runs.csv.gz", "ttft_mean_ms", "below"),
        ({"ttft_penalised_ms": "x"}, "runs.csv.gz", "ttft_penalised_ms", "not a number"),
        ({"planned_duration_s": -1}, "runs.csv.gz", "planned_duration_s", "below 1"),
        ({"arrival_process": "all_at_once"}, "runs.csv.gz", "arrival_process", "not known"),
        ({"rates": "1 1 inf 1"}, "adapters.csv", "rates_req_s_in_adapter_order", "positive, finite"),
        ({"rates": "1 1 1"}, "adapters.csv", "rates_req_s_in_adapter_order", "3 rates for 4 adapters"),
        ({"ranks": "8:2;x:2"}, "adapters.csv", "ranks_multiset", "'x' is not a number"),
        ({"ranks": "8:3"}, "adapters.csv", "ranks_multiset", "3 ranks for 4 adapters"),
        ({"run_id": "unknown"}, "runs.csv.gz", "run_id", "does not have it"),
    ],
)
def test_a_bad_cell_is_refused_with_file_line_and_field(
    folder: Path, changes: dict[str, str], file: str, field: str, reason: str
) -> None:
    write_runs(folder, **changes)
    with pytest.raises(FileError, match=reason) as caught:
        read_runs(folder, "dt-validation")
    assert (caught.value.path.name, caught.value.line, caught.value.field) == (file, 2, field)
    assert str(caught.value).startswith(f"{file}:2: {field}: ")


def test_a_torn_file_and_a_missing_column_are_refused(folder: Path) -> None:
    whole = (folder / "runs.csv.gz").read_bytes()
    (folder / "runs.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"runs\.csv\.gz:\d"):
        read_runs(folder, "dt-validation")
    write(folder, "runs.csv.gz", "run_id,purpose", [("r", "dt-validation")])
    with pytest.raises(FileError, match="status: missing"):
        read_runs(folder, "dt-validation")


def test_missing_tables_are_named_and_optional_ones_may_be_absent(folder: Path) -> None:
    assert published_twin(folder) == {}
    (folder / "overhead_memory.csv").unlink()
    with pytest.raises(FileNotFoundError, match="overhead_memory"):
        calibrate(folder)
