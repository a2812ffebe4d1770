"""Promise: a worker with `--merge on` merges the adapter of all its requests, and they can continue on another such worker."""

from __future__ import annotations

from dataclasses import replace

from motet.policies.step import paying_merge
from motet.policies.step.merge_decision import MergeCosts
from motet.services.worker import metrics
from motet.shared.model import AdapterRef
from motet.shared.wire.request import pack_tokens
from motet.shared.wire.worker_state import WorkerSnapshot
from tests.services.worker.support_service import Running, generate
from tests.support import eventually, reading
from tests.support_models import AdapterFixture

PROMPT, TOKENS = [5, 6, 7], 40
PAYS = MergeCosts(switch_ms=0.0, step_ms=1.0, row_ms=0.0, lora=1.0)
MERGED = 2  # the adapter of all modules


async def merged(worker: Running, adapter: AdapterFixture) -> AdapterRef:
    """Send requests for one adapter until it is merged.

    Thresholds and costs are fixed, because a tiny model's step times are noisy.
    """
    modes = worker.engine.core.modes
    modes.config = replace(modes.config, decrement=0.0, multiply=1.0)
    modes.costs, worker.engine.core.copy.weigh = PAYS, lambda running: None
    ref = await worker.mesh.publish_adapter(adapter)
    for number in range(50):
        asked = generate([8, 9, number + 3], adapter=ref, max_tokens=TOKENS)
        await worker.accepted(asked)
        assert (await worker.mesh.ended(asked.request_id)).finish == "length"
        if modes.merged == ref.digest:
            return ref
    raise AssertionError("it was not merged")


async def test_the_adapter_of_all_requests_is_merged_and_metrics_say_so(start, adapters, oracle):
    worker = await start(merge="on")
    steps, seconds = reading(metrics.MERGED_STEPS), reading(metrics.MERGE_S)
    ref = await merged(worker, adapters[MERGED])
    asked = generate(PROMPT, adapter=ref, max_tokens=TOKENS)
    await worker.accepted(asked)
    await worker.mesh.ended(asked.request_id)
    assert worker.mesh.tokens(asked.request_id) == oracle.greedy(PROMPT, TOKENS, adapters[MERGED])
    assert reading(metrics.MERGED_STEPS) - steps >= TOKENS and reading(metrics.MERGE_S) > seconds
    assert reading(metrics.MERGED_BYTES) > 0


async def test_the_next_snapshot_names_the_merged_adapter(start, adapters):
    worker = await start(merge="on")
    ref = await merged(worker, adapters[MERGED])
    states = worker.mesh.states
    await eventually(lambda: any(isinstance(state, WorkerSnapshot) and state.merged == ref.digest for state in states))


async def test_a_request_continues_at_another_worker_of_the_same_mode_as_it_would_have(start, adapters):
    first, second = await start(merge="on"), await start(merge="on")
    for worker in (first, second):
        ref = await merged(worker, adapters[MERGED])
    whole = generate(PROMPT, adapter=ref, max_tokens=TOKENS)
    await first.accepted(whole)
    await first.mesh.ended(whole.request_id)
    tokens = first.mesh.tokens(whole.request_id)
    rest = generate(PROMPT, adapter=ref, max_tokens=TOKENS, output=pack_tokens(tokens[:9]), epoch=1)
    await second.accepted(rest)
    await second.mesh.ended(rest.request_id, 1)
    assert second.mesh.tokens(rest.request_id, 1) == tokens[9:]


async def test_without_the_option_nothing_is_merged(start, adapters):
    worker = await start()
    assert worker.engine.core.modes is None


async def auto_merged(start, adapters, monkeypatch) -> tuple[Running, AdapterRef]:
    """A worker with `--merge auto` that has merged an adapter. Costs and the verdict are fixed, as in `merged`."""
    monkeypatch.setattr(paying_merge, "LEAST", -10.0)
    worker = await start(merge="auto")
    modes = worker.engine.core.modes
    modes.costs, worker.engine.core.copy.weigh = PAYS, lambda running: None
    ref = await worker.mesh.publish_adapter(adapters[MERGED])
    for number in range(50):
        asked = generate([8, 9, number + 3], adapter=ref, max_tokens=TOKENS)
        await worker.accepted(asked)
        await worker.mesh.ended(asked.request_id)
        if modes.merged == ref.digest and modes.gain is not None:
            return worker, ref
    raise AssertionError("it was not merged")


async def test_auto_merges_under_one_hot_adapter_and_stops_when_traffic_is_mixed(start, adapters, oracle, monkeypatch):
    worker, ref = await auto_merged(start, adapters, monkeypatch)
    steps = reading(metrics.MERGED_STEPS)
    alone = generate(PROMPT, adapter=ref, max_tokens=TOKENS)
    await worker.accepted(alone)
    await worker.mesh.ended(alone.request_id)
    assert worker.mesh.tokens(alone.request_id) == oracle.greedy(PROMPT, TOKENS, adapters[MERGED])
    assert reading(metrics.MERGED_STEPS) - steps >= TOKENS - 2
    other, switches = await worker.mesh.publish_adapter(adapters[0]), reading(metrics.MERGE_SWITCHES)
    mixed = [generate(PROMPT, adapter=one, max_tokens=TOKENS) for one in (other, ref, other, None)]
    for asked in mixed:
        await worker.accepted(asked)
    for asked in mixed:
        assert (await worker.mesh.ended(asked.request_id)).finish == "length"
    assert worker.mesh.tokens(mixed[0].request_id) == oracle.greedy(PROMPT, TOKENS, adapters[0])
    assert reading(metrics.MERGE_SWITCHES) > switches, "they ran without it, whichever came last"


async def test_metrics_and_snapshots_say_that_auto_merges_and_why(start, adapters, monkeypatch):
    worker, _ = await auto_merged(start, adapters, monkeypatch)
    states = worker.mesh.states

    def told() -> bool:
        merging = [one.mechanisms.get("merge") for one in states if isinstance(one, WorkerSnapshot)]
        return any(one is not None and "faster" in one.why for one in merging)

    await eventually(told)
    assert reading(metrics.MECHANISM.labels("merge", "on")) == 1 and reading(metrics.MECHANISM.labels("merge", "waiting")) == 0


async def test_auto_drops_a_copy_whose_steps_are_not_faster(start, adapters, monkeypatch):
    monkeypatch.setattr(paying_merge, "LEAST", 10.0)
    worker = await start(merge="auto")
    modes = worker.engine.core.modes
    modes.costs, worker.engine.core.copy.weigh = replace(PAYS, lora=20.0), lambda running: None
    ref = await worker.mesh.publish_adapter(adapters[MERGED])
    for number in range(50):
        asked = generate([8, 9, number + 3], adapter=ref, max_tokens=TOKENS)
        await worker.accepted(asked)
        await worker.mesh.ended(asked.request_id)
        if modes.gives_up and not worker.engine.core.copy.claimed_bytes:
            break
    assert modes.gain is not None and modes.merged == "" and modes.gives_up
    assert worker.engine.core.copy.claimed_bytes == 0, "its memory is free again"
