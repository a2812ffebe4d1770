"""Three workloads of `bench.adaptive` on two live workers of the demo model with paced steps (`bench.paced`).

LoRA takes some 27% of a full step (dLoRA measures 39% with einsum). The capacity is measured first. Settings run in turns, in
another order in each round, and each starts a mesh of its own: everything off, all on `auto`, and merging and moves on, which
the twin finds the best of the fixed settings where one adapter is hot and where memory binds. Adapters have rank 64.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from bench import paced, report
from bench.rig.answers import metric, wait_for
from bench.rig.arrivals import poisson_within
from bench.rig.mesh import demo_mesh
from bench.rig.requests import PATIENT, Asking, Kind, Request, play, served_per_s
from bench.watch import Watch
from motet.examples.demo import DEMO

TENANT = "bench"
HEADERS = {"authorization": f"Bearer key-{TENANT}"}
MODELS = ("rotate", "sort-letters", "word-order", "tool-caller")
HOT = MODELS[0]
WORKERS, SEATS = 2, 8
PACE = paced.Pace(step_ms=18.0, token_ms=0.2, row_ms=0.3, rank_ms=0.015)
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 64
SECONDS, ROUNDS = 20.0, 3
WANTED = Kind(name="standard", ttft_slo_ms=1000.0, tpot_slo_ms=70.0)
LOADS = {"one hot adapter": (0.8, "latency"), "burst on one adapter": (0.5, "goodput"), "overload 1.3 x": (1.3, "goodput")}
"""Share of the capacity, and the measure."""
BURST, BURST_S = 1.2, (0.4, 0.6)
"""What one adapter gets beside, of the capacity, between these shares of the time."""
SETTINGS = {
    "off": {"MERGE": "off", "REBALANCE": "off", "QUEUES": "fcfs", "ADAPTER_FORESIGHT": "off"},
    "auto": {"MERGE": "auto", "REBALANCE": "auto", "QUEUES": "auto", "ADAPTER_FORESIGHT": "auto", "ASSIST_PROCESSES": "auto"},
    "fixed": {"MERGE": "on", "REBALANCE": "on", "QUEUES": "fcfs", "ADAPTER_FORESIGHT": "off"},
}


def measure(watch: Watch, *, quick: bool) -> dict[str, Any]:
    """Run all, print the table, return the figures."""
    seconds, rounds = (2.0, 1) if quick else (SECONDS, ROUNDS)
    names = [*SETTINGS][: 2 if quick else None]
    vocabulary = json.loads((DEMO / "model" / "config.json").read_text())["vocab_size"]
    asking = Asking(vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, models=MODELS)
    rate = 0.0
    runs: dict[tuple[str, str], list[dict[str, float]]] = {(load, name): [] for load in LOADS for name in names}
    for number in watch.rounds(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            variables = {f"MOTET_{key}": value for key, value in SETTINGS[name].items()} | PACE.variables()
            variables |= {"MOTET_MAX_RUNNING": str(SEATS), "MOTET_MAX_WAITING": "4096"}
            with demo_mesh(variables, f"key-{TENANT} {TENANT} admin\n", workers=WORKERS, module="bench.paced") as mesh:
                wait_for(mesh.port, MODELS, HEADERS)
                warm = _capacity(mesh.port, asking, WORKERS * SEATS)
                rate = rate or (warm if quick else _capacity(mesh.port, asking, 4 * WORKERS * SEATS))
                for load in LOADS:
                    said = _requests(asking, load, rate, seconds, number)
                    play(mesh.port, said)
                    moved = metric(mesh.url, "motet_requests_moved_total", HEADERS)
                    runs[load, name].append(_outcome(load, said, seconds) | {"moved": moved})
                    watch.mark()
    return _figures(names, runs, rate)


def _capacity(port: int, asking: Asking, count: int) -> float:
    return served_per_s(port, [asking.request(0.0, PATIENT, TENANT) for _ in range(count)])


def _requests(asking: Asking, load: str, rate: float, seconds: float, seed: int) -> list[Request]:
    """The same arrivals and adapters in each setting of a round."""
    share, _ = LOADS[load]
    draw = random.Random(1000 + seed)
    hot = 0.97 if load == "one hot adapter" else 1.0 / len(MODELS)
    asked = [
        (at_s, HOT if draw.random() < hot else draw.choice(MODELS[1:]))
        for at_s in poisson_within(seconds, share * rate, seed=100 + seed)
    ]
    if load == "burst on one adapter":
        begin_s, end_s = (part * seconds for part in BURST_S)
        asked += [(begin_s + at_s, HOT) for at_s in poisson_within(end_s - begin_s, BURST * rate, seed=200 + seed)]
    return [asking.request(at_s, WANTED, TENANT, model, keep=True) for at_s, model in sorted(asked)]


def _outcome(load: str, said: Sequence[Request], seconds: float) -> dict[str, float]:
    whole = [one for one in said if one.whole]
    goodput = sum(one.kept for one in said) / seconds
    latency_ms = 1000.0 * sum(one.last_s - one.sent_s for one in whole) / len(whole)
    return {
        "value": goodput if LOADS[load][1] == "goodput" else 1000.0 / latency_ms,
        "goodput": goodput,
        "latency_ms": latency_ms,
        "ttft_ms": 1000.0 * sum(one.ttft_s for one in whole) / len(whole),
        "served": len(whole) / len(said),
    }


def _figures(names: Sequence[str], runs: dict[tuple[str, str], list[dict[str, float]]], rate: float) -> dict[str, Any]:
    rows: list[list[object]] = []
    live: dict[str, Any] = {}
    for load in LOADS:
        mean = {
            name: {key: sum(one[key] for one in runs[load, name]) / len(runs[load, name]) for key in runs[load, name][0]}
            for name in names
        }
        for name in names:
            one = mean[name]
            ratios = [a["value"] / b["value"] for a, b in zip(runs[load, name], runs[load, "off"], strict=True) if b["value"]]
            beside = [one["value"] / max(1e-9, mean["off"]["value"]), min(ratios, default=0.0), max(ratios, default=0.0)]
            seen = [one[key] for key in ("goodput", "latency_ms", "ttft_ms", "served", "moved")]
            rows.append([f"{load}, {name}", *beside, *seen])
        best = max((name for name in names if name != "auto"), key=lambda name: mean[name]["value"])
        live[load] = {
            "best_fixed": best,
            "auto_vs_best_fixed": round(mean["auto"]["value"] / max(1e-9, mean[best]["value"]), 4),
            "auto_vs_off": round(mean["auto"]["value"] / max(1e-9, mean["off"]["value"]), 4),
            "runs": {name: runs[load, name] for name in names},
        }
    columns = ("of off", "lowest", "highest", "goodput/s", "latency ms", "TTFT ms", "served", "moved so far")
    print(report.table(f"{WORKERS} live workers, capacity {rate:.1f} requests/s", ("", *columns), rows), flush=True)
    return {
        "live_auto_vs_best_fixed": min(one["auto_vs_best_fixed"] for one in live.values()),
        "live_auto_vs_off": min(one["auto_vs_off"] for one in live.values()),
        "live_capacity_per_s": round(rate, 2),
        "live": live,
    }
