"""Measured runs: the description of a run (`Run`), separate from its results (`Measured`), which a prediction never sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.twin.vllm.calibrate import VERSION, Calibration
from motet.twin.vllm.client import Outcome, Requests
from motet.twin.vllm.engine import EngineConfig, SimulatedVllm
from motet.twin.vllm.tables import Row, find, rows
from motet.twin.vllm.workload import PROMPT_MAX_TOKENS, REQUEST_MAX_TOKENS, arrivals, lengths

CLIENT_SEED = 0  # of all runs
# Completions end before the length that was asked for when the model says so; the data's README gives these shares.
ANSWERED_SHARE = {"llama-3.1-8b-instruct": 0.99, "qwen-2.5-7b-instruct": 0.96}
FLAG_PORTS = "client_port_exhaustion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The configuration of a run."""

    run_id: str
    model: str
    a_max: int
    s_max: int
    max_num_seqs: int
    duration_s: float
    prompt_mean_tokens: float  # of the pool that the client draws from
    output_mean_tokens: float
    rates_req_s: list[float]  # by adapter
    ranks: list[int]  # which adapter has which was not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the client of a run measured."""

    total_tok_s: float
    itl_mean_ms: float
    ttft_mean_ms: float
    ttft_median_ms: float
    ttft_p99_ms: float
    ttft_penalised_ms: float | None  # see `Outcome`; None where the number of requests sent was not recorded
    starved: bool
    ports_exhausted: bool


def read_runs(folder: Path, purpose: str) -> list[tuple[Run, Measured]]:
    """All runs of a purpose that have results. Errors: `FileError`, FileNotFoundError."""
    adapters = {row.text("run_id"): row for row in rows(folder, "adapters")}
    found = []
    for row in rows(folder, "runs"):
        if row.text("purpose") != purpose or row.text("status") != "ok":
            continue
        if row.text("vllm_version") != VERSION:
            raise row.error("vllm_version", f"{row.text('vllm_version')!r}; only {VERSION} is modelled")
        if row.text("arrival_process") != "poisson_per_adapter":
            raise row.error("arrival_process", f"{row.text('arrival_process')!r} is not known")
        if row.text("run_id") not in adapters:
            raise row.error("run_id", "the table of adapters does not have it")
        found.append((_run(row, adapters[row.text("run_id")]), _measured(row)))
    return found


def _run(row: Row, adapter_row: Row) -> Run:
    count = row.integer("n_adapters_served", at_least=1)
    words = adapter_row.text("rates_req_s_in_adapter_order").split()
    rates = [_positive(adapter_row, "rates_req_s_in_adapter_order", word) for word in words]
    if len(rates) != count:
        raise adapter_row.error("rates_req_s_in_adapter_order", f"{len(rates)} rates for {count} adapters")
    ranks: list[int] = []
    for part in adapter_row.text("ranks_multiset").split(";"):
        rank, _, times = part.partition(":")
        ranks += [int(_positive(adapter_row, "ranks_multiset", rank))] * int(_positive(adapter_row, "ranks_multiset", times))
    if len(ranks) != count:
        raise adapter_row.error("ranks_multiset", f"{len(ranks)} ranks for {count} adapters")
    return Run(
        run_id=row.text("run_id"),
        model=row.text("model"),
        a_max=row.integer("A_max", at_least=1),
        s_max=row.integer("S_max", at_least=1),
        max_num_seqs=row.integer("max_num_seqs", at_least=1),
        duration_s=row.number("planned_duration_s", at_least=1),
        prompt_mean_tokens=row.number("pool_mean_input_tokens", at_least=1),
        output_mean_tokens=row.number("pool_mean_output_tokens", at_least=1),
        rates_req_s=rates,
        ranks=ranks,
    )


def _measured(row: Row) -> Measured:
    return Measured(
        total_tok_s=row.number("total_tok_s", at_least=1e-9),
        itl_mean_ms=row.number("itl_mean_ms", at_least=1e-9),
        ttft_mean_ms=row.number("ttft_mean_ms", at_least=1e-9),
        ttft_median_ms=row.number("ttft_median_ms", at_least=1e-9),
        ttft_p99_ms=row.number("ttft_p99_ms", at_least=1e-9),
        ttft_penalised_ms=row.optional("ttft_penalised_ms"),
        starved=row.text("starved") == "1",
        ports_exhausted=FLAG_PORTS in row.text("flags"),
    )


def _positive(row: Row, field: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise row.error(field, f"{word!r} is not a number") from None
    if not 0 < value < 1e6:
        raise row.error(field, f"{word!r} is not a positive, finite number")
    return value


def requests(run: Run) -> Requests:
    """The requests of a run, computed from its description alone."""
    times, adapters = arrivals(run.rates_req_s, run.duration_s, CLIENT_SEED)
    rng = np.random.default_rng(CLIENT_SEED)
    ranks = rng.permutation(run.ranks).tolist()
    share = ANSWERED_SHARE.get(run.model, 1.0)
    prompts = lengths(len(times), run.prompt_mean_tokens, PROMPT_MAX_TOKENS, rng)
    outputs = lengths(len(times), run.output_mean_tokens * share, REQUEST_MAX_TOKENS, rng)
    return Requests(
        arrival_s=times,
        adapter=adapters,
        prompt_tokens=prompts,
        output_tokens=[min(output, REQUEST_MAX_TOKENS - prompt) for prompt, output in zip(prompts, outputs, strict=True)],
        ranks=ranks,
        duration_s=run.duration_s,
    )


def predict(run: Run, calibration: Calibration) -> Outcome:
    """Simulate a run. Raises ValueError when its KV size lies outside of what was measured."""
    config = EngineConfig(
        a_max=run.a_max,
        s_max=run.s_max,
        kv_tokens=calibration.kv_tokens(run.a_max, run.s_max),
        max_num_seqs=run.max_num_seqs,
    )
    return SimulatedVllm(config, calibration.steps, requests(run), calibration.api).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTwin:
    """What the paper's own twin predicted for a run."""

    total_tok_s: float
    itl_mean_ms: float
    ttft_penalised_ms: float | None  # see `Outcome`


def published_twin(folder: Path) -> dict[str, PaperTwin]:
    """The predictions of the paper's own twin, by run; empty if the folder has no such table."""
    if find(folder, "twin_reference") is None:
        return {}
    return {
        row.text("run_id"): PaperTwin(
            total_tok_s=row.number("twin_total_tok_s"),
            itl_mean_ms=row.number("twin_itl_ms"),
            ttft_penalised_ms=row.optional("twin_ttft_ms"),
        )
        for row in rows(folder, "twin_reference")
    }
