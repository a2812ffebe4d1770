"""Promise: the cost computed for all workers at once is the one that `policies.shared_cost` states, worker by worker."""

from __future__ import annotations

import random
from math import exp, inf

import pytest

from motet.policies import shared_cost
from motet.policies.candidates import Ask
from motet.policies.cluster_state import ClusterState
from motet.policies.perf_model import Kernel, decode_ms, lora_load, prefill_ms
from motet.policies.shared_cost import LASTING, PENALTY_MS, YOUNG, YOUNG_STEPS
from motet.policies.worker_load import tokens_left, tokens_to_prefill
from motet.shared.model import PerfModel, RequestBrief, WorkerLimits
from tests.support_worker import worker_limits

NOW_S, L = 100.0, 120.0
MIB = 1 << 20


class One:
    """A worker as the formula sees it: what it has and since when, without any column."""

    def __init__(self, draw: random.Random, kernels: list[Kernel]) -> None:
        self.limits: WorkerLimits = worker_limits(
            max_running=draw.choice([4, 64]),
            kv_blocks_total=draw.choice([100, 900]),
            copies=draw.choice(["stall", "wait", "bridged"]),
        )
        coefficients = {name: draw.uniform(0.01, 2.0) for name in PerfModel.__struct_fields__ if name != "kernel"}
        self.perf = PerfModel(kernel=draw.choice(kernels), **coefficients)
        self.kv_blocks_free = draw.randrange(self.limits.kv_blocks_total)
        self.tier = draw.choice([None, "device", "host", "disk"])
        self.requests: list[RequestBrief] = []
        self.times: list[float] = []  # since when each is as it is
        for number in range(draw.choice([0, 1, 4, 30])):
            running = draw.random() < 0.7
            self.times.append(NOW_S - draw.uniform(0.0, 0.2))
            self.requests.append(
                RequestBrief(
                    f"r{number}", 0, draw.choice(["", "d", "e"]), draw.choice([0, 8, 64]), draw.randint(1, 300), 0,
                    draw.randint(1, 300), "running" if running else "waiting", draw.choice([0.0, 20.0, 60.0]),
                )
            )  # fmt: skip

    def cost(self, ask: Ask) -> tuple[float, bool]:
        """The formula of the module, term by term."""
        perf, limits, kernel, rank = self.perf, self.limits, self.perf.kernel, ask.rank
        queue = [r for r in self.requests if r.phase != "running"]
        running = [r for r in self.requests if r.phase == "running"]
        n, ranks, out = len(self.requests), [r.rank for r in self.requests], float(ask.out_tokens) or L
        left, queue_tokens = sum(map(tokens_left, running)), sum(map(tokens_to_prefill, queue))
        since = list(zip(self.requests, self.times, strict=True))
        opened_s = next((time_s for r, time_s in since if r.phase != "running"), -inf)
        began_s = next((time_s for r, time_s in reversed(since) if r.phase == "running"), -inf)

        step = decode_ms(perf, n + 1.0, lora_load(kernel, [*ranks, rank]))
        d_step = step - decode_ms(perf, float(n), lora_load(kernel, ranks))
        queued_ms = prefill_ms(perf, float(queue_tokens), lora_load(kernel, [r.rank for r in queue]))
        joined = prefill_ms(perf, float(queue_tokens + ask.tokens), lora_load(kernel, [*(r.rank for r in queue), rank]))
        alone = prefill_ms(perf, float(ask.tokens), float(rank))
        joins = max(0.0, 1.0 - (NOW_S - opened_s) * 1000 / step)

        used = any(r.adapter_digest == ask.adapter for r in self.requests)
        copy = fetch = 0.0
        if ask.adapter and self.tier != "device" and not used:
            copy = perf.load_base_ms + perf.load_ms_per_mib * ask.adapter_bytes / MIB
        if ask.adapter and self.tier in (None, "disk") and not used:
            fetch = perf.fetch_base_ms + perf.fetch_ms_per_mib * ask.adapter_bytes / MIB
        stall = alone + joins * (joined - queued_ms - alone) + (copy if limits.copies == "stall" else 0.0)
        young = YOUNG * exp((max(began_s, opened_s) - NOW_S) * 1000 / (YOUNG_STEPS * step))
        others = n * (stall / L + LASTING * d_step) + young * stall * (1 - joins)

        wait = joined + (copy if limits.copies != "bridged" else 0.0) + fetch
        wait += max(0.0, n + 1 - limits.max_running) * step * left / max(1, len(running)) ** 2
        total, free = (blocks * limits.block_size for blocks in (limits.kv_blocks_total, self.kv_blocks_free))
        needed = ask.tokens + out + queue_tokens + sum(map(tokens_left, queue)) + 0.5 * left
        wait += step * max(0.0, needed - free) / max(1, total - free) * 2 * left / max(1, len(running))

        tpot = step + n * perf.prefill_base_ms / L
        tightest = min((r.tpot_slo_ms for r in self.requests if r.tpot_slo_ms), default=inf)
        missed = [(wait + 0.5 * step) / ask.ttft_slo_ms - 1, tpot / ask.tpot_slo_ms - 1, tpot / tightest - 1]
        penalty = PENALTY_MS * sum(max(0.0, share) for share in missed)
        return others + tpot + wait / out + penalty, max(missed) > 0


def told(workers: list[One]) -> ClusterState:
    """The same workers as a scheduler has heard of them."""
    state = ClusterState()
    for number, one in enumerate(workers):
        worker_id = f"w{number}"
        state.put_worker(worker_id, one.limits, one.perf)
        state.heard(worker_id, NOW_S, kv_blocks_free=one.kv_blocks_free, draining=False)
        for brief, since_s in zip(one.requests, one.times, strict=True):
            state.put_request(worker_id, brief, since_s)
        if one.tier is not None:
            state.put_adapter(worker_id, "d", one.tier)
    return state


@pytest.mark.parametrize("kernels", [["mbgmv"], ["bgmv"], ["mbgmv", "bgmv"]], ids="-".join)
def test_all_workers_at_once_cost_what_the_formula_says_of_each(kernels: list[Kernel]) -> None:
    draw = random.Random(3)
    broken = 0
    for _ in range(40):
        workers = [One(draw, kernels) for _ in range(draw.randint(1, 20))]
        state = told(workers)
        ask = Ask(
            base_model="demo",
            rank=draw.choice([0, 8, 64]),
            tokens=draw.randint(1, 400),
            tpot_slo_ms=draw.choice([20.0, 1000.0]),
            ttft_slo_ms=draw.choice([100.0, inf]),
            out_tokens=draw.choice([0, 200]),
            adapter=draw.choice(["", "d"]),
            adapter_bytes=draw.randrange(64 * MIB),
        )
        cost, breaks = shared_cost.costs(state, ask, NOW_S, L)
        for number, one in enumerate(workers):
            row = state.row(f"w{number}")
            expected, breaking = one.cost(ask)
            assert (cost[row], breaks[row]) == (pytest.approx(expected, rel=1e-9), breaking)
            broken += breaking
    assert broken


@pytest.mark.parametrize("others", [0, 5])
def test_a_request_that_came_and_went_leaves_no_trace(others: int) -> None:
    one = One(random.Random(1), ["mbgmv"])
    one.requests = [RequestBrief(f"r{n}", 0, "", 0, 10, 0, 5, "running") for n in range(others)]
    one.times = [NOW_S - 1.0] * others
    state, ask = told([one]), Ask(base_model="demo", rank=8, tokens=50, tpot_slo_ms=1000.0)
    before, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.put_request("w0", RequestBrief("a", 0, "", 0, 10, 0, 5, "waiting"), NOW_S)
    joinable, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.drop_request("w0", "a")
    after, _ = shared_cost.costs(state, ask, NOW_S, L)
    row = state.row("w0")
    assert after[row] == before[row] != joinable[row]


def test_an_idle_worker_has_nobody_young() -> None:
    one = One(random.Random(1), ["mbgmv"])
    one.requests, one.times = [], []
    state, ask = told([one]), Ask(base_model="demo", rank=8, tokens=50, tpot_slo_ms=1000.0)
    before, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.put_request("w0", RequestBrief("a", 0, "", 0, 10, 0, 5, "running"), NOW_S)
    state.drop_request("w0", "a")
    after, _ = shared_cost.costs(state, ask, NOW_S, L)
    assert after[state.row("w0")] == before[state.row("w0")]
