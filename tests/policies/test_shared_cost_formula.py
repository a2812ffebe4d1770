"""Promise: the cost computed for all workers at once equals the formula of `policies.cluster.shared_cost` for each worker."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.cluster import shared_cost
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.times.perf_model import Kernel
from motet.shared.model import PerfModel, Phase, PictureBrief, RequestBrief
from motet.shared.wire.prefixes import PrefixKeys, pack_keys
from tests.policies.support_cost import Seen, cost_on
from tests.support_worker import worker_limits

NOW_S, L = 100.0, 120.0
MIB = 1 << 20
KEYS = list(range(1, 7))  # of the prompt, every 64 tokens


def drawn(draw: random.Random, kernels: list[Kernel]) -> Seen:
    """A random worker."""
    limits = worker_limits(
        max_running=draw.choice([4, 64]),
        kv_blocks_total=draw.choice([100, 900]),
        copies=draw.choice(["stall", "wait", "bridged"]),
        kv_format=draw.choice(["", "f", "f", "g"]),
        kv_token_bytes=1 << 17,
        adapter_slots=draw.choice([0, 1, 2, 4, 64]),
    )
    coefficients = {name: draw.uniform(0.01, 2.0) for name in PerfModel.__struct_fields__ if name != "kernel"}
    requests = []
    for number in range(draw.choice([0, 1, 4, 30])):
        phase: Phase = draw.choice(["running", "running", "waiting"])
        brief = RequestBrief(
            f"r{number}", 0, draw.choice(["", "d", "e"]), draw.choice([0, 8, 64]), draw.randint(1, 300), 0,
            draw.randint(1, 300), phase, draw.choice([0.0, 20.0, 60.0]),
        )  # fmt: skip
        if kernels == ["mbgmv"] and draw.random() < 0.5:  # image workers have that kernel
            more = ("e", "f") if brief.adapter_digest == "d" else ()
            brief.picture = PictureBrief(draw.choice([0.5, 2.0, 8.0]), more)
        requests.append((brief, NOW_S - draw.uniform(0.0, 0.2)))
    return Seen(
        limits=limits,
        perf=PerfModel(kernel=draw.choice(kernels), **coefficients),
        kv_blocks_free=draw.randint(0, limits.kv_blocks_total - 1),
        tier=draw.choice([None, "device", "host", "disk"]),
        cached_tokens=64 * draw.choice([0, 0, 1, 2, 6]),
        adapter_bytes_free=draw.choice([inf, 32.0 * MIB]),
        home=draw.choice([True, False]),
        requests=requests,
    )


def idle(**changes: Any) -> Seen:
    """A worker without requests, unless `changes` has some."""
    return replace(drawn(random.Random(1), ["mbgmv"]), **{"requests": []} | changes)


def told(workers: list[Seen]) -> ClusterState:
    """The same workers, as a scheduler knows them from messages."""
    state = ClusterState()
    for number, one in enumerate(workers):
        worker_id = f"w{number}"
        state.put_worker(worker_id, one.limits, one.perf)
        state.heard(
            worker_id, NOW_S, kv_blocks_free=one.kv_blocks_free, draining=False, adapter_bytes_free=one.adapter_bytes_free
        )
        for brief, since_s in one.requests:
            state.put_request(worker_id, brief, since_s)
        if one.tier is not None:
            state.put_adapter(worker_id, "d", one.tier)
        state.put_homes(worker_id, ["d"] if one.home else [])
        state.prefixes.add(state.row(worker_id), KEYS[: one.cached_tokens // 64])
    return state


@pytest.mark.parametrize("kernels", [["mbgmv"], ["bgmv"], ["mbgmv", "bgmv"]], ids="-".join)
@given(draw=st.randoms(use_true_random=True))
def test_all_workers_at_once_cost_what_the_formula_says_of_each(kernels: list[Kernel], draw: random.Random) -> None:
    workers = [drawn(draw, kernels) for _ in range(draw.randint(1, 20))]
    if not any(one.home for one in workers):
        workers = [replace(one, home=None) for one in workers]
    state = told(workers)
    tokens = draw.randint(161, 400)
    ask = Ask(
        base_model="demo",
        rank=draw.choice([0, 8, 64]),
        tokens=tokens,
        prefix_keys=(PrefixKeys(64, pack_keys(KEYS[: (tokens - 1) // 64])),),
        tpot_slo_ms=draw.choice([20.0, 1000.0]),
        ttft_slo_ms=draw.choice([100.0, inf]),
        out_tokens=draw.choice([0, 200]),
        adapter=draw.choice(["", "d"]),
        adapter_bytes=draw.randint(0, 64 * MIB),
        travels=draw.choice([True, False]),
        rows=draw.choice([1.0, 1.0, 4.0]) if kernels == ["mbgmv"] else 1.0,
        more=draw.choice([(), (("e", MIB), ("f", 2 * MIB))]),
        e2e_slo_ms=draw.choice([2000.0, inf]),
    )
    most = (tokens - 1) // 64 * 64
    workers = [replace(one, cached_tokens=min(one.cached_tokens, most)) for one in workers]
    cost, breaks = shared_cost.costs(state, ask, NOW_S, L)
    for number, worker in enumerate(workers):
        row = state.row(f"w{number}")
        lent = [one.cached_tokens for one in workers if ask.travels and one.limits.kv_format == worker.limits.kv_format]
        expected, missed = cost_on(replace(worker, lent_tokens=max(lent, default=0)), ask, NOW_S, L)
        assert cost[row] == pytest.approx(expected, rel=1e-9)
        assert breaks[row] == (missed > 0) or abs(missed) < 1e-9  # there rounding says which


@pytest.mark.parametrize("others", [0, 5])
def test_a_request_that_came_and_went_leaves_no_trace(others: int) -> None:
    requests = [(RequestBrief(f"r{n}", 0, "", 0, 10, 0, 5, "running"), NOW_S - 1.0) for n in range(others)]
    state, ask = told([idle(requests=requests)]), Ask(base_model="demo", rank=8, tokens=50, tpot_slo_ms=1000.0)
    before, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.put_request("w0", RequestBrief("a", 0, "", 0, 10, 0, 5, "waiting"), NOW_S)
    joinable, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.drop_request("w0", "a")
    after, _ = shared_cost.costs(state, ask, NOW_S, L)
    row = state.row("w0")
    assert after[row] == before[row] != joinable[row]


def test_an_idle_worker_has_no_young_request() -> None:
    state, ask = told([idle()]), Ask(base_model="demo", rank=8, tokens=50, tpot_slo_ms=1000.0)
    before, _ = shared_cost.costs(state, ask, NOW_S, L)
    state.put_request("w0", RequestBrief("a", 0, "", 0, 10, 0, 5, "running"), NOW_S)
    state.drop_request("w0", "a")
    after, _ = shared_cost.costs(state, ask, NOW_S, L)
    assert after[state.row("w0")] == before[state.row("w0")]
