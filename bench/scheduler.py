"""Decisions per second of one scheduler with a large fleet, updates of its state included.

1,000 workers run 256 requests each and are told 3,000 new ones per second. Everything a live scheduler computes for that is
computed and timed on one core, on the messages that real workers would send and in their order:

    per request     decide, expect, accepted           and on its worker: delta (it loads), delta (it runs, another ended)
    per heartbeat   every worker, twice a second       a delta, or the snapshot that `services.worker.reports` sends then

Messages are encoded outside the timed part and decoded inside. Not in it: NATS, the event loop, the workers.
"""

from __future__ import annotations

import argparse
import gc
import random
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.rivals import POLICIES
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.dispatch import decide
from motet.policies.cluster.worker_book import DELTA_S, HEARTBEAT_S, MAX_BEATS, Cadence
from motet.policies.cluster.worker_table import hash_of
from motet.policies.worker.worker_view import View
from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.events import Assigning, Heard, Taken
from motet.shared.model import PerfModel, Phase, RequestBrief, Residency, WorkerLimits
from motet.shared.wire.worker_state import WorkerState

WORKERS, RUNNING, RATE = 1000, 256, 3000.0  # workers; requests on each; new requests per second
ADAPTERS, ON_DEVICE = 2000, 64  # known; resident per worker
RANKS = (8, 16, 32, 64, 128)
PROMPT, OUTPUT = 128, 256  # tokens, mean
LIMITS = WorkerLimits(
    base_model="bench", max_model_len=4096, max_running=512, max_waiting=256, block_size=16, kv_blocks_total=16_384,
    adapter_bytes_total=16 << 30, max_lora_rank=128,
)  # fmt: skip
PERF = PerfModel(
    kernel="mbgmv", prefill_base_ms=10.0, prefill_token_ms=0.05, prefill_lora_ms=0.001, decode_base_ms=15.0,
    decode_row_ms=0.05, decode_lora_ms=0.001, load_base_ms=1.0, load_ms_per_mib=0.1,
)  # fmt: skip
STALE_S = 3.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    workers = 100 if args.quick else WORKERS
    seconds = args.seconds or (0.5 if args.quick else 3.0)
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    policies = list(POLICIES.items())  # motet's own is the first
    for number in args.watch.rounds(len(policies), "policies"):
        name, make = policies[number]
        fleet = _Fleet(workers)
        fleet.live(make(), 0.2 * seconds)  # warm-up, and a mix of states in their usual order
        decisions_s, updates_s = fleet.live(make(), seconds if name == "motet" else 0.3 * seconds)
        total_s = decisions_s.sum() + updates_s
        p50_ms, p99_ms = (float(np.quantile(decisions_s, q)) * 1e3 for q in (0.5, 0.99))
        per_s = len(decisions_s) / total_s
        update_us = updates_s / len(decisions_s) * 1e6
        rows.append([name, p50_ms, p99_ms, update_us, per_s])
        if name == "motet":
            figures = {
                "decision_p99_ms": round(p99_ms, 4),
                "decisions_per_s": round(per_s),
                "decision_p50_ms": round(p50_ms, 4),
                "update_us_per_decision": round(update_us, 1),
                "workers": workers,
                "running_per_worker": RUNNING,
                "seconds": seconds,
            }
    title = f"{workers} workers with {RUNNING} requests each; state updates at the rate of {RATE:,.0f} requests/s"
    print(report.table(title, ("policy", "decision p50 ms", "p99 ms", "updates us each", "decisions/s, one core"), rows))
    return figures


class _Fleet:
    """The workers' side, with exact states of all requests, and the scheduler under test."""

    def __init__(self, workers: int) -> None:
        self.draw = random.Random(1)
        self.views: list[View] = []
        self.running: list[list[str]] = []
        self.scheduler = WatchedCluster(stale_s=STALE_S, drop_s=10.0, in_flight_s=3.0)
        self.decode = msgspec.msgpack.Decoder(WorkerState).decode
        self.requests = 0
        self.now_s = 0.0
        self.cadences = [Cadence(self.draw.randrange(MAX_BEATS)) for _ in range(workers)]
        for number in range(workers):
            view = View(f"w{number:04}", "first", LIMITS)
            self.views.append(view)
            self.running.append([])
            for adapter in self.draw.sample(range(ADAPTERS), ON_DEVICE):
                view.place(f"a{adapter}", Residency(f"a{adapter}", _rank(adapter), _bytes(adapter), "device"))
            for _ in range(RUNNING):
                brief = self._request("running", output=self.draw.randrange(OUTPUT))
                self.running[number].append(brief.request_id)
                view.put(brief)
            view.kv_blocks_free = LIMITS.kv_blocks_total // 2
            self._hear(view, snapshot=True)

    def live(self, choose: Choose, seconds: float) -> tuple[np.ndarray, float]:
        """Let `seconds` pass. Returns the time of each decision, and the time of all updates, in seconds."""
        cluster, draw = self.scheduler, self.draw
        number_of = {view.worker_id: number for number, view in enumerate(self.views)}
        end_s, updates_s, decisions_s = self.now_s + seconds, 0.0, []
        # (time, sequence, worker, what): None: a heartbeat, else the request that shows up as loading or as running
        sequence = len(self.views)
        events: list[tuple[float, int, int, RequestBrief | None]] = [
            (self.now_s + HEARTBEAT_S * draw.random(), n, n, None) for n in range(len(self.views))
        ]
        events.sort()
        rate = RATE * len(self.views) / WORKERS
        gc.collect()
        gc.freeze()  # what is alive before the measurement, the workers' side of it above all, is not the scheduler's garbage
        while self.now_s < end_s:
            self.now_s += draw.expovariate(rate)
            while events[0][0] <= self.now_s:
                due_s, _, number, brief = heappop(events)
                view = self.views[number]
                if brief is None:
                    snapshot = self.cadences[number].whole(len(view.requests))
                    updates_s += self._hear(view, snapshot=snapshot)
                    again_s = due_s + HEARTBEAT_S
                elif brief.phase == "loading":
                    view.put(brief)
                    updates_s += self._hear(view)
                    brief, again_s = msgspec.structs.replace(brief, phase="running"), due_s + 2 * DELTA_S
                else:
                    view.put(brief)
                    self.running[number].append(brief.request_id)
                    view.remove(self.running[number].pop(draw.randrange(RUNNING)))
                    updates_s += self._hear(view)
                    continue
                sequence += 1
                heappush(events, (again_s, sequence, number, brief))
            brief = self._request("loading")
            ask = Ask(
                base_model=LIMITS.base_model, rank=brief.rank, tokens=brief.prompt_tokens, tpot_slo_ms=brief.tpot_slo_ms,
                ttft_slo_ms=500.0, out_tokens=brief.predicted_tokens, adapter=brief.adapter_digest,
                adapter_bytes=_bytes(int(brief.adapter_digest[1:])), key=hash_of(brief.request_id),
            )  # fmt: skip
            began = perf_counter()
            decision = decide(choose, cluster.state, ask, self.now_s, stale_s=STALE_S, avg_resp_len=float(OUTPUT))
            assert decision.worker_id is not None
            cluster.on(Assigning(decision.worker_id, brief, self.now_s))
            cluster.on(Taken(decision.worker_id, brief.request_id, self.now_s))
            decisions_s.append(perf_counter() - began)
            sequence += 1
            heappush(events, (self.now_s + DELTA_S, sequence, number_of[decision.worker_id], brief))
        gc.unfreeze()
        return np.array(decisions_s), updates_s

    def _hear(self, view: View, *, snapshot: bool = False) -> float:
        """Give the scheduler the worker's next message. Returns how long it took."""
        message = msgspec.msgpack.encode(view.snapshot(PERF, lists_prefixes=False) if snapshot else view.delta())
        began = perf_counter()
        self.scheduler.on(Heard(self.decode(message), self.now_s, True))
        return perf_counter() - began

    def _request(self, phase: Phase, output: int = 0) -> RequestBrief:
        self.requests += 1
        adapter = min(int(self.draw.paretovariate(0.5)) - 1, ADAPTERS - 1)
        tokens = self.draw.randrange(1, 2 * OUTPUT)
        slo_ms = self.draw.choice([50.0, 200.0])
        return RequestBrief(f"r{self.requests}", 0, f"a{adapter}", _rank(adapter), PROMPT, output, tokens, phase, slo_ms)


def _rank(adapter: int) -> int:
    return RANKS[adapter % len(RANKS)]


def _bytes(adapter: int) -> int:
    return _rank(adapter) << 20
