"""A scheduler's index of cached KV blocks at its limits: memory per block, time of a decision, cost of reports to a worker."""

from __future__ import annotations

import gc
import random
import resource
import time
from typing import Any

import numpy as np

from bench import report
from bench.rivals import POLICIES
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import decide
from motet.policies.cluster.prefix_index import KEYS_MAX
from motet.policies.cluster.worker_table import hash_of
from motet.policies.memory.kv_blocks import told_tokens
from motet.shared.model import PerfModel, RequestBrief, WorkerLimits
from motet.shared.wire.prefixes import PrefixKeys, pack_keys

WORKERS, RUNNING = 1_000, 256
SHARED = 8  # workers that have each shared chain
CHAIN = 125  # keys: a chat of 8,000 tokens
PROMPTS = (15, 60, 125)  # keys
LIMITS = WorkerLimits(
    base_model="bench", max_model_len=65_536, max_running=512, max_waiting=256, block_size=16, kv_blocks_total=65_536,
    adapter_bytes_total=16 << 30, max_lora_rank=128, prefix_cache="tenant",
)  # fmt: skip
PERF = PerfModel(
    prefill_base_ms=10.0, prefill_token_ms=0.05, prefill_lora_ms=0.001, decode_base_ms=15.0, decode_row_ms=0.05,
    decode_lora_ms=0.001, load_base_ms=1.0, load_ms_per_mib=0.1,
)  # fmt: skip


def measure(*, quick: bool) -> dict[str, Any]:
    """The figures; prints a table."""
    workers, blocks, asks = (100, 200_000, 300) if quick else (WORKERS, KEYS_MAX, 3_000)
    draw, state = random.Random(2), _loaded(workers)
    gc.collect()
    before = _rss()
    chains = _fill(state, draw, blocks, workers)
    gc.collect()
    per_block = (_rss() - before) / len(state.prefixes)
    gc.freeze()
    times = [_timed(state, draw, chains, number) for number in range(asks)]
    p50_ms, p99_ms = (float(np.quantile(times, q)) * 1e3 for q in (0.5, 0.99))
    rows = [[workers, len(state.prefixes), per_block, p50_ms, p99_ms]]
    print(report.table("the index of one scheduler", ("workers", "blocks", "bytes/block", "decision p50 ms", "p99 ms"), rows))
    gc.unfreeze()
    return {
        "decision_p50_ms": round(p50_ms, 4),
        "decision_p99_ms": round(p99_ms, 4),
        "index_bytes_per_block": round(per_block, 1),
        "index_blocks": len(state.prefixes),
        "index_workers": workers,
    }


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _loaded(workers: int) -> ClusterState:
    state = ClusterState()
    for number in range(workers):
        worker_id = f"w{number:04}"
        state.put_worker(worker_id, LIMITS, PERF)
        state.heard(worker_id, 0.0, kv_blocks_free=30_000, draining=False)
        briefs = [RequestBrief(f"{number}-{n}", 0, "", 0, 500, n, 300, "running", 100.0, 2_000.0) for n in range(RUNNING)]
        state.change_requests(worker_id, briefs, (), 0.0)
    return state


def _fill(state: ClusterState, draw: random.Random, blocks: int, workers: int) -> list[list[int]]:
    """Chains of keys, each on one worker or on some. Returns a sample of them."""
    kept: list[list[int]] = []
    while len(state.prefixes) < blocks:
        chain = [draw.getrandbits(60) for _ in range(CHAIN)]
        holders = draw.sample(range(workers), SHARED) if draw.random() < 0.1 else [draw.randrange(workers)]
        for holder in holders:
            state.prefixes.add(state.row(f"w{holder:04}"), chain[: draw.randrange(CHAIN // 2, CHAIN + 1)])
        if draw.random() < 0.05:
            kept.append(chain)
    return kept


def _timed(state: ClusterState, draw: random.Random, chains: list[list[int]], number: int) -> float:
    """CPU seconds of one decision."""
    length = draw.choice(PROMPTS)
    keys = draw.choice(chains)[: draw.randrange(length // 2, length + 1)]
    keys = keys + [draw.getrandbits(60) for _ in range(length - len(keys))]
    ask = Ask(
        base_model="bench",
        rank=0,
        tokens=length * told_tokens(LIMITS.block_size) + 1,
        tpot_slo_ms=100.0,
        ttft_slo_ms=2_000.0,
        out_tokens=300,
        key=hash_of(str(number)),
        prefix_keys=(PrefixKeys(told_tokens(LIMITS.block_size), pack_keys(keys)),),
    )
    choose = POLICIES["motet"]()
    began_s = time.thread_time()
    decide(choose, state, ask, 0.1, stale_s=3.0, avg_resp_len=300.0, admission="objective")
    return time.thread_time() - began_s
