"""Promise: a decision knows what each worker has of a prompt and what it could fetch, and asks a worker that can give it."""

from __future__ import annotations

from typing import Any

import pytest

from motet.policies.cluster import cached_prompt, shared_cost
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import POLICIES, Decision, decide
from motet.policies.memory import kv_travel
from motet.policies.memory.kv_blocks import merged_short
from motet.policies.memory.kv_travel import stretch, wait_ms
from motet.shared.model import KvOffer, PerfModel, RequestBrief, WorkerLimits
from motet.shared.wire.prefixes import PrefixKeys, pack_keys
from tests.support_worker import worker_limits

NOW_S, L = 100.0, 100.0
KEYS = list(range(1, 11))  # of a prompt of 641 tokens
TOKEN_MS, KV_TOKEN_MS, KV_BASE_MS = 1.0, 0.5, 20.0
LIMITS = worker_limits(prefix_cache="tenant", kv_format="f", kv_token_bytes=1 << 18)


def perf(**changed: float) -> PerfModel:
    fields = {
        "prefill_base_ms": 4.0, "prefill_token_ms": TOKEN_MS, "prefill_lora_ms": 0.0, "decode_base_ms": 10.0,
        "decode_row_ms": 0.2, "decode_lora_ms": 0.0, "load_base_ms": 0.0, "load_ms_per_mib": 0.0,
        "kv_base_ms": KV_BASE_MS, "kv_ms_per_mib": 4 * KV_TOKEN_MS,
    }  # fmt: skip
    return PerfModel(**fields | changed)


def cluster(have: dict[str, int], *, limits: WorkerLimits = LIMITS, **changed: float) -> ClusterState:
    """Idle workers with so many of the prompt's keys."""
    state = ClusterState()
    for name, keys in have.items():
        state.put_worker(name, limits, perf(**changed))
        state.heard(name, NOW_S, kv_blocks_free=500, draining=False)
        state.list_prefixes(name, KEYS[:keys])
    return state


def ask(**changed: Any) -> Ask:
    fields: dict[str, Any] = {
        "base_model": "demo", "rank": 0, "tokens": 641, "tpot_slo_ms": 1e6, "out_tokens": 100, "key": 5, "travels": True,
        "prefix_keys": (PrefixKeys(64, pack_keys(KEYS)),),
    }  # fmt: skip
    return Ask(**fields | changed)


def spared(state: ClusterState, asked: Ask | None = None) -> dict[str, int]:
    found = cached_prompt.find(state, asked or ask(), NOW_S)
    return {name: int(found.spared[state.row(name)]) if found is not None else 0 for name in state.workers()}


def offer_to(state: ClusterState, worker_id: str, asked: Ask | None = None) -> KvOffer | None:
    asked = asked or ask()
    return cached_prompt.offer(state, asked, cached_prompt.find(state, asked, NOW_S), state.row(worker_id), NOW_S)


def test_a_worker_fetches_what_another_one_has_and_it_lacks():
    state = cluster({"a": 8, "b": 2, "c": 0})
    assert spared(state) == {"a": 512, "b": 512, "c": 512}
    assert offer_to(state, "a") is None
    assert offer_to(state, "b") == KvOffer(worker_id="a", from_tokens=128, to_tokens=512)
    assert offer_to(state, "c") == KvOffer(worker_id="a", from_tokens=0, to_tokens=512)


def test_what_a_worker_saves_is_its_own_prefill_less_a_margin():
    """A fetched token saves 0.7 - 0.5 ms, the fetch takes 20 ms beside: more than 100 tokens pay."""
    assert spared(cluster({"a": 1, "b": 0})) == {"a": 64, "b": 0}
    assert spared(cluster({"a": 2, "b": 0})) == {"a": 128, "b": 128}
    assert spared(cluster({"a": 10, "b": 0}, kv_ms_per_mib=2.8)) == {"a": 640, "b": 0}
    assert spared(cluster({"a": 10, "b": 0}, kv_ms_per_mib=0.0)) == {"a": 640, "b": 0}, "the link is not measured"


def test_one_fetch_brings_no_more_than_is_allowed(monkeypatch):
    monkeypatch.setattr("motet.policies.cluster.cluster_state.MOST_BYTES", 300 << 18)
    state = cluster({"a": 10, "b": 2})
    assert offer_to(state, "b") == KvOffer(worker_id="a", from_tokens=128, to_tokens=428)


@pytest.mark.parametrize("why", ["draining", "silent", "expected", "gone", "another format", "no format", "off"])
def test_a_worker_that_cannot_lend_is_not_asked(why):
    state, asked = cluster({"a": 10, "b": 3, "c": 0}), ask(travels=why != "off")
    match why:
        case "draining":
            state.set_draining("a")
        case "silent":
            state.set_heard("a", NOW_S - 4.0)
        case "expected":
            state.list_prefixes("a", [])
            state.prefixes.expect(state.row("a"), KEYS, NOW_S)
        case "gone":
            state.drop_worker("a")
        case "another format":
            state.put_worker("a", worker_limits(prefix_cache="tenant", kv_format="g", kv_token_bytes=1 << 18), perf())
        case "no format":
            state.put_worker("a", worker_limits(prefix_cache="tenant"), perf())
    assert offer_to(state, "a", asked) == (KvOffer(worker_id="b", to_tokens=192) if why == "expected" else None)
    assert offer_to(state, "c", asked) == (None if why == "off" else KvOffer(worker_id="b", to_tokens=192))


def test_workers_without_a_format_of_their_own_fetch_nothing():
    assert spared(cluster({"a": 10, "b": 0}, limits=worker_limits(prefix_cache="tenant"))) == {"a": 640, "b": 0}


def test_workers_of_two_formats_fetch_from_their_own_kind():
    state = cluster({"a": 10, "b": 5, "c": 0, "d": 0})
    for name in ("b", "c"):
        state.put_worker(name, worker_limits(prefix_cache="tenant", kv_format="g", kv_token_bytes=1 << 18), perf())
    assert offer_to(state, "c") == KvOffer(worker_id="b", to_tokens=320)
    assert offer_to(state, "d") == KvOffer(worker_id="a", to_tokens=640)


def test_a_merged_adapter_lends_and_fetches_nothing():
    adapted = ask(adapter="d")
    state = cluster({"a": 0, "b": 6, "c": 0, "d": 0})
    state.merge("a", "d")
    state.list_prefixes("a", [merged_short(key) for key in KEYS])
    state.merge("c", "d")
    assert spared(state, adapted) == {"a": 640, "b": 384, "c": 0, "d": 384}
    assert offer_to(state, "d", adapted) == KvOffer(worker_id="b", to_tokens=384)
    assert spared(state, ask(adapter="e"))["c"] == 384, "another adapter is beside the weights there"


def test_the_lender_with_the_fewest_requests_is_asked_and_equal_ones_take_turns():
    state = cluster({"a": 10, "b": 10, "c": 10, "d": 0})
    asked = {offer_to(state, "d", ask(key=1 << number)).worker_id for number in range(64)}
    assert asked == {"a", "b", "c"}
    for name in ("a", "c"):
        state.put_request(name, RequestBrief("r" + name, 0, "", 0, 10, 0, 10, "running"), NOW_S)
    assert {offer_to(state, "d", ask(key=1 << number)).worker_id for number in range(64)} == {"b"}


def test_requests_that_come_together_wait_for_the_blocks_of_the_first():
    state = cluster({"a": 9, "b": 0})
    state.prefixes.expect(state.row("b"), KEYS, NOW_S)
    assert spared(state) == {"a": 576, "b": 640}
    assert offer_to(state, "b") == KvOffer(worker_id="a", to_tokens=576)
    state.prefixes.add(state.row("b"), KEYS)
    assert offer_to(state, "b") is None, "they are there"


def test_the_answer_follows_what_workers_report():
    state, asked = cluster({"a": 4, "b": 0}), ask()
    assert spared(state, asked) == {"a": 256, "b": 256}
    state.prefixes.add(state.row("a"), KEYS[4:6])
    assert spared(state, asked) == {"a": 384, "b": 384}
    state.prefixes.remove(state.row("a"), KEYS[1:6])
    assert spared(state, asked) == {"a": 64, "b": 0}
    state.merge("a", "d")
    assert spared(state, ask(adapter="d", prefix_keys=asked.prefix_keys)) == {"a": 0, "b": 0}


# ---- what it costs


def placed(state: ClusterState, asked: Ask) -> Decision:
    return decide(POLICIES.named("motet")(), state, asked, NOW_S, stale_s=3.0, avg_resp_len=L)


def test_a_fetch_is_a_wait_for_the_request_and_costs_others_what_computing_costs():
    state = cluster({"a": 10, "b": 0})
    cost, _ = shared_cost.costs(state, ask(), NOW_S, L)
    computes, _ = shared_cost.costs(state, ask(travels=False), NOW_S, L)
    a, b = state.row("a"), state.row("b")
    assert cost[a] == computes[a]
    step, fetch = 10.2, KV_BASE_MS + 640 * KV_TOKEN_MS
    assert cost[b] == pytest.approx(step + (fetch + 4.0 + 1.0) / 100)
    assert computes[b] == pytest.approx(step + (4.0 + 641.0) / 100)
    for number in range(10):
        state.put_request("b", RequestBrief(f"r{number}", 0, "", 0, 10, 0, 10, "running"), 0.0)
    busy, _ = shared_cost.costs(state, ask(), NOW_S, L)
    alone, _ = shared_cost.costs(state, ask(travels=False), NOW_S, L)
    assert alone[b] - busy[b] == pytest.approx(computes[b] - cost[b]), "the others are not spared"


def test_a_request_whose_blocks_come_before_its_turn_waits_for_its_turn_alone():
    state = cluster({"a": 10, "b": 0})
    state.put_request("b", RequestBrief("q", 0, "", 0, 2_000, 0, 10, "waiting"), 0.0)
    row, queue = state.row("b"), 4.0 + 2_000.0
    cost, _ = shared_cost.costs(state, ask(ttft_slo_ms=queue + 1.0 + 0.5 * 10.4 + 0.01), NOW_S, L)
    _, late = shared_cost.costs(state, ask(ttft_slo_ms=queue + 1.0 + 0.5 * 10.4 - 0.01), NOW_S, L)
    _, in_time = shared_cost.costs(state, ask(ttft_slo_ms=queue + 1.0 + 0.5 * 10.4 + 0.01), NOW_S, L)
    assert late[row] and not in_time[row] and cost[row] > 0


def test_a_prompt_that_many_ask_for_spreads_when_its_holder_is_busy():
    state = cluster({"a": 10, "b": 0})
    assert placed(state, ask()).worker_id == "a" and placed(state, ask()).cached_tokens == 640
    for number in range(30):
        state.put_request("a", RequestBrief(f"r{number}", 0, "", 0, 10, 0, 10, "running"), 0.0)
    decision = placed(state, ask())
    assert decision.worker_id == "b" and decision.cached_tokens == 640
    assert decision.kv == KvOffer(worker_id="a", to_tokens=640)
    assert placed(state, ask(travels=False)).kv is None


# ---- how much of it a worker fetches


@pytest.mark.parametrize(
    ("tokens", "from_tokens", "to_tokens", "first", "end"),
    [(641, 0, 640, 0, 40), (640, 0, 640, 0, 39), (641, 128, 512, 8, 32), (641, 600, 100, 37, 37), (100, 0, 640, 0, 6)],
)
def test_full_blocks_are_fetched_without_the_last_token(tokens, from_tokens, to_tokens, first, end):
    assert stretch(tokens, from_tokens, to_tokens, block_size=16, block_bytes=1 << 20) == (first, end)


def test_a_request_waits_as_long_as_its_blocks_would_take_to_compute(monkeypatch):
    monkeypatch.setattr(kv_travel, "MOST_BYTES", 4 << 20)
    blocks = stretch(641, 64, 640, block_size=16, block_bytes=1 << 20)
    assert blocks == (4, 8)
    assert wait_ms(perf(), blocks, 16, 0) == 4.0 + 64.0
    assert wait_ms(perf(), stretch(641, 64, 64, block_size=16, block_bytes=1 << 20), 16, 0) == 0.0
