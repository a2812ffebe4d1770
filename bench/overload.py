"""Overload: goodput and attainment of a mesh when more requests arrive than it can serve.

One of each service, the worker with the demo model. Requests arrive as a Poisson process that waits for no answer, at 0.5
to 3 times the capacity; a fifth of them is interactive, three tenths standard, half batch. The capacity is measured first, with
every seat taken all the time; where a load shows more goodput, that counts for the loads after it. Batch requests have 10 s to
their first token here, so that a run ends soon. Twice: with admission by objective and with admission by room. Then five
tenants share half the capacity with and without a sixth that sends 20 times what one of them sends.

The share of the peak that is kept at the largest load is the median of pairs: that load and the one with the most goodput, in
turns.

Goodput counts the requests that ended inside their objectives within the measured part of a run, per second. Attainment is of
all requests that were sent in that part, refused ones included. The engine computes on one core: with both of two it would
share them with the gateway, the broker and the client, whose work grows with the load, and lose speed for that reason alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from bench import report
from bench.rig.answers import wait_for
from bench.rig.arrivals import poisson_within
from bench.rig.mesh import demo_mesh
from bench.rig.percentiles import quantile
from bench.rig.requests import PATIENT, Asking, Kind, Request, play, served_per_s
from bench.watch import Watch
from motet.examples.demo import BASE, DEMO

KINDS = (
    Kind(name="interactive", ttft_slo_ms=500.0, tpot_slo_ms=50.0, share=0.2),
    Kind(name="standard", ttft_slo_ms=2000.0, tpot_slo_ms=200.0, share=0.3),
    Kind(name="batch", ttft_slo_ms=10_000.0, tpot_slo_ms=2000.0, share=0.5),
)
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
SEATS = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 192
SECONDS, WARM_S = 18.0, 4.0
PAIRS = 4
QUIET, LOUD = ("a", "b", "c", "d", "e"), "loud"
QUIET_LOAD, TIMES = 0.5, 20.0  # of the capacity, all of them; what the loud one sends, in shares of a quiet one


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    seconds = args.seconds or (2.0 if args.quick else SECONDS)
    loads = (3.0,) if args.quick else LOADS
    warm_s = min(WARM_S, seconds / 4)
    rows: list[dict[str, Any]] = []
    refusals: list[Request] = []
    tenants: dict[str, float] = {}
    pairs: list[float] = []
    vocabulary = json.loads((DEMO / "model" / "config.json").read_text())["vocab_size"]
    keys = "".join(f"key-{tenant} {tenant}\n" for tenant in (*QUIET, LOUD))
    models = (BASE, "upper-case", "reverse", "rot13")
    asking = Asking(vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, models=models)
    capacity = 0.0
    for admission in ("objective",) if args.quick else ("objective", "room"):
        with demo_mesh({"MOTET_ADMISSION": admission, "MOTET_MAX_RUNNING": str(SEATS)}, keys) as mesh:
            port = mesh.port
            wait_for(port, models, {"authorization": f"Bearer key-{QUIET[0]}"})
            measured = _capacity(port, asking, 2 if args.quick else 8)
            capacity = capacity or measured
            for number in args.watch.rounds(len(loads), f"loads, {admission}"):
                load = loads[number]
                times = poisson_within(seconds, load * capacity, seed=number)
                requests = asking.mixed(times, KINDS, QUIET[0], seed=100 + number)
                play(port, requests)
                rows.append({"admission": admission, "load": load} | measures(requests, warm_s, seconds))
                capacity = max(capacity, rows[-1]["goodput_per_s"])
                print(json.dumps(rows[-1]), flush=True)
                if admission == "objective":
                    refusals += [request for request in requests if request.status == 429]
            if admission == "objective" and not args.quick:
                pairs = _pairs(args.watch, port, asking, rows, capacity, seconds, warm_s)
            if admission == "objective":
                tenants = _tenants(port, asking, capacity, seconds, warm_s)
                print(json.dumps(tenants), flush=True)
    print(_table(rows, capacity))
    if pairs:
        print(f"goodput at {LOADS[-1]:g} x over that at its peak, in pairs: {pairs}")
    return _figures(rows, refusals, tenants, capacity, pairs)


def _pairs(
    watch: Watch, port: int, asking: Asking, rows: Sequence[dict[str, Any]], capacity: float, seconds: float, warm_s: float
) -> list[float]:
    """Goodput at the largest load over that at the load with the most, in turns: a machine's speed moves between runs."""
    peak = max(rows, key=lambda row: row["goodput_per_s"])["load"]
    found = []
    for number in watch.rounds(PAIRS, "pairs of peak and most load"):
        loads = (peak, LOADS[-1]) if number % 2 else (LOADS[-1], peak)
        good = {}
        for load in loads:
            requests = asking.mixed(
                poisson_within(seconds, load * capacity, seed=50 + number), KINDS, QUIET[0], seed=60 + number
            )
            play(port, requests)
            good[load] = measures(requests, warm_s, seconds)["goodput_per_s"]
        found.append(round(good[LOADS[-1]] / max(good[peak], 1e-9), 4))
    return found


def _capacity(port: int, asking: Asking, turns: int) -> float:
    """Requests per second while every seat is taken."""
    for number in (1, turns):  # the first one warms up
        per_s = served_per_s(port, [asking.request(0.0, PATIENT, QUIET[0]) for _ in range(number * SEATS)])
    return per_s


def measures(requests: Sequence[Request], warm_s: float, seconds: float) -> dict[str, Any]:
    sent = [request for request in requests if request.sent_s >= warm_s]
    good = sum(request.kept and warm_s <= request.last_s < seconds for request in requests)
    refused = [request for request in sent if request.status == 429]
    unknown = {request.status for request in requests} - {200, 429}
    if unknown:
        raise RuntimeError(f"answers with status {unknown}")
    return {
        "offered_per_s": round(len(sent) / (seconds - warm_s), 2),
        "goodput_per_s": round(good / (seconds - warm_s), 2),
        **{f"{kind.name}_attainment": _attainment([r for r in sent if r.kind.name == kind.name]) for kind in KINDS},
        "refused": round(len(refused) / max(1, len(sent)), 4),
        "late": round(sum(request.status == 200 and not request.kept for request in sent) / max(1, len(sent)), 4),
        "refusal_p50_ms": _refusal_ms(refused, 0.5),
        "refusal_p99_ms": _refusal_ms(refused, 0.99),
        "retry_after_mean_s": round(statistics.fmean([r.retry_after_s for r in refused]), 2) if refused else 0.0,
    }


def _attainment(requests: Sequence[Request]) -> float:
    return round(sum(request.kept for request in requests) / max(1, len(requests)), 4)


def _refusal_ms(refused: Sequence[Request], share: float) -> float:
    times_ms = [1000.0 * (request.answered_s - request.sent_s) for request in refused]
    return round(quantile(times_ms, share), 2) if times_ms else 0.0


def _tenants(port: int, asking: Asking, capacity: float, seconds: float, warm_s: float) -> dict[str, float]:
    """Attainment of the quiet tenants with and without the loud one."""
    each = QUIET_LOAD * capacity / len(QUIET)

    def quiet() -> list[Request]:
        return [
            request
            for number, tenant in enumerate(QUIET)
            for request in asking.mixed(poisson_within(seconds, each, seed=200 + number), KINDS, tenant, seed=300 + number)
        ]

    alone, beside = quiet(), quiet()
    loud = asking.mixed(poisson_within(seconds, TIMES * each, seed=400), KINDS, LOUD, seed=401)
    play(port, alone)
    play(port, [*beside, *loud])
    return {
        "quiet_alone": _attainment([request for request in alone if request.sent_s >= warm_s]),
        "quiet_beside_loud": _attainment([request for request in beside if request.sent_s >= warm_s]),
        "loud": _attainment([request for request in loud if request.sent_s >= warm_s]),
        "loud_offered_per_s": round(len(loud) / seconds, 2),
    }


def _table(rows: Sequence[dict[str, Any]], capacity: float) -> str:
    columns = ["", "offered/s", "goodput/s", *(kind.name for kind in KINDS), "refused", "late", "refusal p99 ms"]
    names = [
        "offered_per_s",
        "goodput_per_s",
        *(f"{kind.name}_attainment" for kind in KINDS),
        "refused",
        "late",
        "refusal_p99_ms",
    ]
    cells = [[f"{row['admission']}, {row['load']:g}x", *(row[name] for name in names)] for row in rows]
    title = f"One worker, demo model, {SEATS} seats; capacity {capacity:.1f} requests/s of {OUTPUT_TOKENS} tokens"
    return report.table(title, columns, cells)


def _figures(
    rows: list[dict[str, Any]], refusals: Sequence[Request], tenants: dict[str, float], capacity: float, pairs: Sequence[float]
) -> dict[str, Any]:
    def vs_peak(admission: str) -> float:
        own = [row for row in rows if row["admission"] == admission] or rows
        return round(own[-1]["goodput_per_s"] / max(max(row["goodput_per_s"] for row in own), 1e-9), 4)

    at_most = max((row for row in rows if row["admission"] == "objective"), key=lambda row: row["load"])
    return {
        "goodput_at_3x_vs_peak": round(statistics.median(pairs), 4) if pairs else vs_peak("objective"),
        "goodput_at_3x_vs_peak_in_pairs": list(pairs),
        "goodput_at_3x_vs_peak_of_the_table": vs_peak("objective"),
        "refusal_p99_ms": _refusal_ms(refusals, 0.99),
        "interactive_attainment_at_3x": at_most["interactive_attainment"],
        "other_tenants_attainment_loss": round(tenants["quiet_alone"] - tenants["quiet_beside_loud"], 4),
        "goodput_at_3x_vs_peak_by_room": vs_peak("room"),
        "capacity_per_s": round(capacity, 2),
        "loads": rows,
        "tenants": tenants,
    }
