"""Moves between live workers: four workers of the demo model, and one adapter gets 20 times its load.

A worker's step takes STEP_MS (`bench.paced`), as on a device of its own: of workers that share the cores of a machine,
one with a long queue simply gets what the idle ones leave, and moves would have nothing to gain.

Requests arrive as a Poisson process that waits for no answer, at a share of the capacity of all workers, which is measured
first. At the start every adapter is on one worker alone. Two thirds of the time every adapter gets as much as any other; in the
last third one adapter gets 20 times as many requests as each other one, and the total stays the same. It runs once with
dispatch by adapter affinity, as gateways of other systems do it, and once with Motet's own; each without moves and with
`--rebalance on`. The requests are the same in every run, so their answers must be, too.

`rebalance_kv` then moves a request with a long context, with its KV blocks and without.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

from bench import paced, rebalance_kv, report
from bench.rig.answers import get, metric, wait_for
from bench.rig.arrivals import poisson_within
from bench.rig.mesh import Mesh, demo_mesh
from bench.rig.percentiles import quantile_ms
from bench.rig.requests import PATIENT, Asking, Request, play, served_per_s
from bench.rig.waiting import until
from motet.examples.demo import DEMO

TENANT = "bench"
HEADERS = {"authorization": f"Bearer key-{TENANT}"}
HOT, TIMES = "upper-case", 20.0
MODELS = (HOT, "reverse", "rot13", "title-case")
WORKERS, QUICK_WORKERS, SEATS = 4, 2, 4
LOAD = 0.6  # of the capacity
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 96
STEP_MS = 20.0
SECONDS = 45.0
PIN_S = 30.0
POLICIES = ("lora-affinity", "motet")
VARIABLES = {
    "MOTET_ADMISSION": "room",
    "MOTET_MAX_RUNNING": str(SEATS),
    "MOTET_MAX_WAITING": "4096",
    **paced.Pace(step_ms=STEP_MS).variables(),
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    seconds = args.seconds or (3.0 if args.quick else SECONDS)
    policies, workers = (POLICIES[:1], QUICK_WORKERS) if args.quick else (POLICIES, WORKERS)
    vocabulary = json.loads((DEMO / "model" / "config.json").read_text())["vocab_size"]
    asking = Asking(vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, models=MODELS)
    rate, answers, rows = 0.0, [""], []
    requests: list[Request] = []
    for policy in policies:
        for moves in ("off", "on"):
            variables = VARIABLES | {"MOTET_PLUGINS": "bench.rivals", "MOTET_POLICY": policy, "MOTET_REBALANCE": moves}
            with demo_mesh(variables, f"key-{TENANT} {TENANT} admin\n", workers=workers, module="bench.paced") as mesh:
                port = mesh.port
                wait_for(port, MODELS, HEADERS)
                _pin(mesh, workers)
                _capacity(port, asking, workers * SEATS)  # warms up
                if not requests:
                    rate = LOAD * _capacity(port, asking, (1 if args.quick else 3) * workers * SEATS)
                    requests = _requests(asking, rate, seconds)
                said = [request.again() for request in requests]
                play(port, said)
                texts = [request.text for request in said]
                if len(answers) != len(texts):
                    answers = texts
                rows.append({"policy": policy, "moves": moves} | _measures(said, texts, answers, mesh))
            print(json.dumps(rows[-1]), flush=True)
            args.watch.mark()
    names = ["ttft_p50_ms", "ttft_p99_ms", "moved", "lost", "changed"]
    cells = [[f"{row['policy']}, moves {row['moves']}", *(row[name] for name in names)] for row in rows]
    print(report.table(f"{workers} workers, {rate:.1f} requests/s", ["", *names], cells))
    figures: dict[str, Any] = {
        "ttft_p99_gain": round(rows[0]["ttft_p99_ms"] / rows[1]["ttft_p99_ms"], 3),
        "lost": sum(row["lost"] for row in rows),
        "changed": sum(row["changed"] for row in rows),
        "moved": rows[1]["moved"],
        "requests_per_s": round(rate, 2),
        "runs": rows,
    }
    figures |= _kv(args.quick)
    args.watch.mark()
    if len(rows) == 4:
        figures["ttft_p99_gain_own_dispatch"] = round(rows[2]["ttft_p99_ms"] / rows[3]["ttft_p99_ms"], 3)
    return figures


def _pin(mesh: Mesh, workers: int) -> None:
    """Pin each adapter to a worker of its own. Raises RuntimeError if one does not arrive there."""
    for number, model in enumerate(MODELS):
        _pin_to(mesh, model, f"worker-{number % workers + 1}")


def _pin_to(mesh: Mesh, model: str, home: str) -> None:
    url = f"{mesh.url}/v1/adapters/{model}"
    get(f"{url}/pin", HEADERS, body={"workers": [home]})

    def arrived() -> bool:
        return bool(json.loads(get(url, HEADERS))["resident"].get(home) == "device")

    until(arrived, lambda: f"{model} is not on {home}", within_s=PIN_S)


def _kv(quick: bool) -> dict[str, Any]:
    found = rebalance_kv.measure(quick=quick)
    print(report.table("a moved request's next token", [*found], [[*found.values()]]))
    return {"kv_gain": found["gain"], "kv_changed": found["changed"], "kv": found}


def _requests(asking: Asking, rate: float, seconds: float) -> list[Request]:
    """The same load for every adapter, and additional requests for the hot one."""
    draw, found = random.Random(5), []
    for at_s in poisson_within(seconds, rate, seed=4):
        weights = [TIMES if model == HOT and at_s > 2 * seconds / 3 else 1.0 for model in MODELS]
        found.append(asking.request(at_s, PATIENT, TENANT, draw.choices(MODELS, weights)[0], keep=True))
    return found


def _capacity(port: int, asking: Asking, count: int) -> float:
    """Requests per second while every seat of every worker is taken, with each model on a quarter of them."""
    return served_per_s(port, [asking.request(0.0, PATIENT, TENANT) for _ in range(count)])


def _measures(said: Sequence[Request], texts: Sequence[str], answers: Sequence[str], mesh: Mesh) -> dict[str, Any]:
    times_s = [request.ttft_s for request in said if request.whole]
    return {
        "ttft_p50_ms": round(quantile_ms(times_s, 0.5), 1),
        "ttft_p99_ms": round(quantile_ms(times_s, 0.99), 1),
        "moved": int(metric(mesh.url, "motet_requests_moved_total", HEADERS)),
        "lost": sum(not request.whole for request in said),
        "changed": sum(text != right for text, right in zip(texts, answers, strict=True)),
        "requests": len(said),
    }
