"""Fits the vLLM flavour to calibration tables: overhead_*.csv and the calibration runs of vLLM 0.8.5. No served run is used.

Each table becomes rows (features of a step, milliseconds). Every kind of row has the same total weight, errors are relative,
and coefficients are not negative, since no term makes a step faster. The tables and what they contain:

    overhead_slots_itl_v085      batch of one, backbone only: unused slots by number and size
    overhead_steps_summary_v085  decodes and prefills without LoRA; one adapter by rank; loads (the slowest 1 % of steps)
    overhead_steps_binned_v085   batched tokens and distinct adapters, few and many, decodes and mixed
    overhead_latency_v085        what those runs were; full steps with long contexts (`find_max_batch`: median and p99 gap)
    overhead_memory              KV tokens by slots and their size
    overhead_scheduler           scheduler time by waiting requests
    runs                         only calib-memory (TTFT of one request) and calib-loading (TTFT of 50 adapters' first requests)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motet.policies.times.least_squares import not_negative
from motet.twin.vllm.client import ApiServer
from motet.twin.vllm.steps import TERMS, VllmStepModel, features
from motet.twin.vllm.tables import Row, rows

VERSION = "0.8.5"
STEP_TOKENS = 2048  # max_num_batched_tokens of all runs
DEFAULT_BATCH = 256  # max_num_seqs where a table leaves it out
SLOT_OUTPUT_TOKENS = 120
LOAD_PROMPT_TOKENS = 100
LOAD_ADAPTERS = 50
LISTED_US = 0.2  # per adapter in CPU memory: a copy of vLLM's list of them, on one core with Python 3.11
MIN_STEPS = 4  # bins with fewer steps are noise


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step duration, without the lists of adapters. `kind` names the kind of measurement."""

    kind: str
    x: NDArray[np.float64]
    step_ms: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model of one base model on one GPU type."""

    steps: VllmStepModel
    api: ApiServer
    kv_points: dict[int, list[tuple[int, float]]]  # by S_max: (A_max, KV tokens), A_max ascending
    errors: dict[str, float]  # mean relative error of the fit in percent, by kind of row

    def kv_tokens(self, a_max: int, s_max: int) -> int:
        """KV capacity in tokens, interpolated linearly between measured points. Raises ValueError outside of them."""
        points = self.kv_points.get(s_max)
        if not points or not points[0][0] <= a_max <= points[-1][0]:
            raise ValueError(f"no KV size was measured around A_max {a_max}, S_max {s_max}")
        return int(np.interp(a_max, [a for a, _ in points], [kv for _, kv in points]))


def calibrate(folder: Path) -> dict[str, Calibration]:
    """Fit every model in the tables of a folder. Raises FileError, FileNotFoundError."""
    samples = _samples(folder)
    loads = _loads(folder)
    scan_us = _scan_us(folder)
    memory = _memory(folder)
    single, first = _single_requests(folder), _first_requests(folder)
    fitted = {}
    for model in sorted(samples.keys() & loads.keys() & memory.keys() & single.keys() & first.keys()):
        ms, errors = fit(samples[model])
        full_ms, padded_ms = loads[model]
        steps = VllmStepModel(ms=ms, load_full_ms=full_ms, load_padded_ms=padded_ms, scan_us=scan_us, listed_us=LISTED_US)
        weights = np.array([ms[term] for term in TERMS])
        request_ms = _median([ttft_ms - float(x @ weights) for x, ttft_ms in single[model]])
        api = ApiServer(request_s=max(0.0, request_ms) * 1e-3, tokenizer_s=first[model] * 1e-3)
        fitted[model] = Calibration(steps, api, memory[model], errors)
    return fitted


def fit(samples: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """Non-negative least squares of relative errors: (milliseconds by term, mean error in percent by kind)."""
    sizes = Counter(sample.kind for sample in samples)
    measured = np.array([sample.step_ms for sample in samples])
    weights = np.array([1 / math.sqrt(sizes[sample.kind]) for sample in samples])
    x = np.stack([sample.x for sample in samples])
    coefficients = not_negative(x * (weights / measured)[:, None], weights)
    errors = np.abs(x @ coefficients / measured - 1) * 100
    by_kind = {kind: float(np.mean([e for e, s in zip(errors, samples, strict=True) if s.kind == kind])) for kind in sizes}
    return dict(zip(TERMS, coefficients.tolist(), strict=True)), by_kind


# ---- step samples


@dataclass(frozen=True, slots=True)
class _Setup:
    """A calibration run, as the table overhead_latency describes it."""

    kind: str
    batch: int  # max_num_seqs
    input_tokens: float
    output_tokens: float

    @property
    def decode_context(self) -> float:
        """Context tokens of a full batch whose requests are halfway through their outputs."""
        return self.input_tokens + self.output_tokens / 2


def _samples(folder: Path) -> dict[str, list[Sample]]:
    setups: dict[str, _Setup] = {}
    found: dict[str, list[Sample]] = {}
    for row in rows(folder, "overhead_latency_v085"):
        batch = row.optional("max_num_seqs")
        setup = _Setup(
            row.text("kind"),
            DEFAULT_BATCH if batch is None else int(batch),
            row.number("input_tokens_per_req"),
            row.number("output_tokens_per_req"),
        )
        setups[row.text("run_id")] = setup
        if setup.kind == "find_max_batch":
            found.setdefault(row.text("model"), []).extend(_full_steps(row, setup))
    for row in rows(folder, "overhead_slots_itl_v085"):
        x = features(1, 1, SLOT_OUTPUT_TOKENS / 2, row.integer("A_max"), row.integer("S_max"), 0, mixed=False)
        found.setdefault(row.text("model"), []).append(Sample("slots", x, row.number("itl_median_ms")))
    for row in rows(folder, "overhead_steps_summary_v085"):
        sample = _summary(row, setups.get(row.text("run_id")))
        if sample is not None:
            found.setdefault(row.text("model"), []).append(sample)
    for row in rows(folder, "overhead_steps_binned_v085"):
        if row.integer("n_steps") >= MIN_STEPS and row.text("run_id") in setups:
            found.setdefault(row.text("model"), []).append(_bin(row, setups[row.text("run_id")]))
    return found


def _full_steps(row: Row, setup: _Setup) -> Iterator[Sample]:
    """Steps with all slots busy, in which requests end and start all the time.

    The median gap between tokens is a decode step, the p99 gap a full mixed step.
    """
    a_max, s_max, batch = row.integer("A_max", at_least=1), row.integer("S_max"), setup.batch
    batch = min(batch, row.integer("batch_max", at_least=1))
    distinct = a_max * (1 - math.exp(-batch / a_max))  # adapters are drawn evenly
    context = batch * setup.decode_context
    for tokens, mixed, field in ((batch, False, "itl_median_ms"), (STEP_TOKENS, True, "itl_p99_ms")):
        step_ms = row.number(field) - LISTED_US * 1e-3 * distinct * a_max
        yield Sample("full", features(tokens, batch, context, a_max, s_max, distinct, mixed=mixed), step_ms)


def _summary(row: Row, setup: _Setup | None) -> Sample | None:
    step_ms = row.number("step_median_ms")
    if row.text("purpose") == "calib-loading":
        s_max = row.integer("S_max", at_least=1)
        x = features(1, 1, LOAD_PROMPT_TOKENS, row.integer("A_max", at_least=1), s_max, 1, mixed=False)
        return Sample("one adapter", x, step_ms - LISTED_US * 1e-3 * LOAD_ADAPTERS)
    if row.text("purpose") != "calib-latency" or setup is None:
        return None
    if setup.kind == "prefill":
        prompts = STEP_TOKENS / max(1.0, setup.input_tokens)
        return Sample("prefill", features(STEP_TOKENS, prompts, 0, 0, 0, 0, mixed=True), step_ms)
    batch = setup.batch
    return Sample("decode", features(batch, batch, batch * setup.decode_context, 0, 0, 0, mixed=False), step_ms)


def _bin(row: Row, setup: _Setup) -> Sample:
    tokens = row.number("batched_tokens_mean", at_least=1)
    mixed = tokens > setup.batch + 0.5
    running = min(tokens, setup.batch)
    # decode tests start and end all requests together, so prompts meet no context there
    context = 0.0 if mixed and setup.kind != "find_max_batch" else running * setup.decode_context
    if row.integer("lora_enabled"):
        a_max, s_max = row.integer("A_max", at_least=1), row.integer("S_max", at_least=1)
        distinct = row.number("unique_adapters_mean")
        x = features(tokens, running, context, a_max, s_max, distinct, mixed=mixed)
        return Sample("bins with LoRA", x, row.number("step_median_ms") - LISTED_US * 1e-3 * distinct * a_max)
    return Sample("bins without", features(tokens, running, context, 0, 0, 0, mixed=mixed), row.number("step_median_ms"))


# ---- loads, scheduler, memory


def _loads(folder: Path) -> dict[str, tuple[float, float]]:
    """For each model, how many ms longer a step with a load takes: (rank equal to S_max, rank below it).

    In these runs two steps in a hundred load an adapter, so the p99 step is one of them.
    """
    ranks: dict[str, int] = {}
    for row in rows(folder, "overhead_loading_summary_v085"):
        if row.text("phase") == "serving":
            ranks[row.text("run_id")] = row.integer("adapter_rank", at_least=1)
    extra: dict[tuple[str, bool], list[float]] = {}
    for row in rows(folder, "overhead_steps_summary_v085"):
        rank = ranks.get(row.text("run_id"))
        if row.text("purpose") == "calib-loading" and rank is not None:
            full = rank >= row.integer("S_max", at_least=1)
            extra_ms = row.number("step_p99_ms") - row.number("step_median_ms")
            extra.setdefault((row.text("model"), full), []).append(extra_ms)
    found = {}
    for model, _ in extra:
        at_full, below = extra.get((model, True), []), extra.get((model, False), [])
        found[model] = (_median(at_full or below), _median(below or at_full))
    return found


def _scan_us(folder: Path) -> float:
    """Scheduler microseconds per waiting request, where all slots are taken and the scheduler must look at all waiting
    requests.
    """
    x, y = [], []
    for row in rows(folder, "overhead_scheduler"):
        a_max, waiting = row.number("A_max"), row.number("waiting_mean")
        busy = row.number("mean_loras_by_batch") > 0.85 * a_max and row.number("n_adapters_served") > a_max
        if busy and waiting > 50 and a_max <= 64:
            time_us = row.number("sched_time_per_step_ms", at_least=1e-6) * 1e3
            x.append([row.number("batch_mean") / time_us, waiting / time_us])
            y.append(1.0)
    if not x:
        return 0.0
    return float(not_negative(np.array(x), np.array(y))[1])


def _memory(folder: Path) -> dict[str, dict[int, list[tuple[int, float]]]]:
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for row in rows(folder, "overhead_memory"):
        if row.text("vllm_version") != VERSION or row.text("purpose") != "calib-memory" or row.text("kv_tokens") == "":
            continue
        points = found.setdefault(row.text("model"), {}).setdefault(row.integer("S_max", at_least=1), [])
        point = (row.integer("A_max", at_least=1), row.number("kv_tokens", at_least=1))
        points.insert(bisect_left(points, point), point)
    return found


# ---- front end


def _calibration_runs(folder: Path, purpose: str) -> Iterator[Row]:
    for row in rows(folder, "runs"):
        if row.text("purpose") == purpose and row.text("vllm_version") == VERSION and row.text("status") == "ok":
            yield row


def _single_requests(folder: Path) -> dict[str, list[tuple[NDArray[np.float64], float]]]:
    """TTFT of one request to an idle server: for each model, (features of its only prefill step, ms)."""
    found: dict[str, list[tuple[NDArray[np.float64], float]]] = {}
    for row in _calibration_runs(folder, "calib-memory"):
        tokens = row.integer("total_input_tokens", at_least=1)
        x = features(tokens, 1, 0, row.integer("A_max", at_least=1), row.integer("S_max", at_least=1), 0, mixed=True)
        found.setdefault(row.text("model"), []).append((x, row.number("ttft_mean_ms")))
    return found


def _first_requests(folder: Path) -> dict[str, float]:
    """For each model, how many ms an adapter's first request blocks the front end.

    In these runs one request for each of `n` adapters comes at once, and they run one after another (A_max 1). So their TTFTs
    are evenly spaced, and the first starts when the front end is free again.
    """
    found: dict[str, list[float]] = {}
    for row in _calibration_runs(folder, "calib-loading"):
        n = row.integer("completed", at_least=2)
        median_ms = row.number("ttft_median_ms")
        half_ms = (row.number("ttft_p99_ms") - median_ms) * 0.5 / 0.49  # from the first to the median
        found.setdefault(row.text("model"), []).append(max(0.0, median_ms - half_ms) / n)
    return {model: _median(times_ms) for model, times_ms in found.items()}


def _median(values: list[float]) -> float:
    return float(np.median(values))
