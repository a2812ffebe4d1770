"""Promise: a request goes where its prompt's blocks are cached, by what workers say now, however messages are lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from motet.policies.memory.kv_blocks import merged_short, prompt_keys
from motet.shared.model import AdapterRef, KvOffer
from motet.shared.wire.prefixes import PrefixKeys, pack_keys
from motet.shared.wire.request import Assigned, GenerateRequest
from tests.services.scheduler.support import knows, submit
from tests.support import eventually
from tests.support_worker import PERF, FakeWorker, generate_request, worker_limits

ADAPTER = AdapterRef(name="a", digest="digest-a", rank=8, size_bytes=1 << 20)
LIMITS = worker_limits(prefix_cache="tenant")


def asked(request_id: str, *, blocks: int = 7, adapter: AdapterRef | None = None, scope: bytes = b"acme") -> GenerateRequest:
    """A prompt of `blocks` times 64 tokens and one more."""
    request = generate_request(request_id, prompt=range(64 * blocks + 1), adapter=adapter)
    keys = prompt_keys(request.prompt, 16, adapter.digest if adapter else "", scope)
    return replace(request, prefix_keys=(PrefixKeys(64, pack_keys(keys)),))


def keys_of(request: GenerateRequest) -> list[int]:
    return prompt_keys(request.prompt, 16, request.adapter.digest if request.adapter else "", b"acme")


async def test_the_worker_that_has_the_prompt_gets_the_request_and_is_told_how_much_of_it(bus, schedule, hire):
    workers = {name: await hire(name, limits=LIMITS) for name in ("w0", "w1", "w2")}
    service = await schedule()
    await knows(service, *workers)
    state = service.cluster.state
    for number, home in enumerate(("w2", "w0", "w1")):
        request = asked(f"r{number}", blocks=7 + number, scope=b"acme" if number else b"globex")
        keys = prompt_keys(request.prompt, 16, "", b"acme" if number else b"globex")
        await workers[home].delta(cached=keys)
        await eventually(lambda home=home, keys=keys: state.prefixes.has(state.row(home), keys[-1]))
        assert await submit(bus, request) == Assigned(worker_id=home, predicted_tokens=64)
        [taken] = [one for one in workers[home].assigned if one.request_id == request.request_id]
        assert taken.cached_tokens == 64 * (7 + number)
        assert taken.prefix_keys == (), "a worker makes its own"


async def test_a_scheduler_that_starts_learns_what_is_cached_within_a_heartbeat(bus, schedule, hire):
    worker = await hire("w1", limits=LIMITS)
    await hire("w0", limits=LIMITS)
    request = asked("r")
    worker.prefixes, worker.lists_prefixes = set(keys_of(request)), False  # it listed them before, to others
    service = await schedule()
    await eventually(lambda: not service.cluster.unlisted())
    assert await submit(bus, request) == Assigned(worker_id="w1", predicted_tokens=64)


async def test_after_a_lost_message_the_scheduler_asks_for_a_list(bus, schedule, hire):
    worker = await hire("w1", limits=LIMITS)
    service, request = await schedule(), asked("r")
    await knows(service, "w1")
    await worker.delta(cached=keys_of(request)[:3], skip=1)
    state = service.cluster.state
    await eventually(lambda: state.prefixes.has(state.row("w1"), keys_of(request)[2]))


async def test_blocks_that_a_worker_has_evicted_count_no_longer(bus, schedule, hire):
    worker = await hire("w1", limits=LIMITS)
    service, request = await schedule(), asked("r")
    await knows(service, "w1")
    state, keys = service.cluster.state, keys_of(request)
    await worker.delta(cached=keys)
    await eventually(lambda: state.prefixes.has(state.row("w1"), keys[-1]))
    await worker.delta(uncached=keys[2:])
    await eventually(lambda: not state.prefixes.has(state.row("w1"), keys[2]))
    [found] = state.beginnings(request.prefix_keys, "")
    assert found.tokens == 128


async def test_a_worker_without_a_prefix_cache_is_asked_for_nothing(bus, schedule, hire):
    worker = await hire("w1")
    service = await schedule()
    await knows(service, "w1")
    await worker.delta(skip=1)
    await eventually(lambda: worker.seq > 5)
    assert not worker.controls


@pytest.mark.parametrize("merged", [False, True])
async def test_blocks_of_a_merged_adapter_are_found_where_it_is_merged_alone(bus, schedule, hire, merged):
    workers = [await hire(f"w{number}", limits=LIMITS) for number in range(2)]
    request = asked("r", adapter=ADAPTER)
    workers[1].merged = ADAPTER.digest if merged else ""
    workers[1].prefixes, workers[1].lists_prefixes = {merged_short(key) for key in keys_of(request)}, True
    service = await schedule()
    await knows(service, "w0", "w1")
    await eventually(lambda: not service.cluster.unlisted())
    state = service.cluster.state
    found = [(one.rows.tolist(), one.tokens) for one in state.beginnings(request.prefix_keys, ADAPTER.digest)]
    assert found == ([([state.row("w1")], 64 * 7)] if merged else [])


async def test_blocks_of_a_request_count_from_its_assignment_on(bus, schedule, hire):
    service = await schedule()
    worker = await hire("w1", limits=LIMITS, heartbeat_s=30.0)
    await knows(service, "w1")
    for number in range(2):
        await submit(bus, asked(f"r{number}", blocks=15))
    assert [one.cached_tokens for one in worker.assigned] == [0, 960]


async def test_without_the_option_caches_count_nothing(bus, schedule, hire):
    worker = await hire("w1", limits=LIMITS)
    service, request = await schedule(prefix_aware=False), asked("r")
    await knows(service, "w1")
    await worker.delta(cached=keys_of(request))
    await submit(bus, request)
    assert worker.assigned[0].cached_tokens == 0


@pytest.mark.parametrize("kv_travel", ["on", "off"])
async def test_a_worker_is_told_where_to_fetch_what_it_lacks(bus, schedule, hire, kv_travel):
    limits = worker_limits(prefix_cache="tenant", kv_format="f", kv_token_bytes=1024, max_running=1, max_waiting=4)
    perf = replace(PERF, kv_base_ms=0.5, kv_ms_per_mib=1.0)
    holder, idle = [await hire(name, limits=limits, perf=perf) for name in ("w0", "w1")]
    service, request = await schedule(kv_travel=kv_travel, admission="room"), asked("r")
    await knows(service, "w0", "w1")
    state = service.cluster.state
    await holder.delta(cached=keys_of(request))
    await eventually(lambda: state.prefixes.has(state.row("w0"), keys_of(request)[-1]))
    for number in range(8):
        await submit(bus, replace(asked("other"), request_id=f"o{number}"))
        if idle.assigned:
            break
    told = idle.assigned[0]
    offer = KvOffer(worker_id="w0", to_tokens=448)
    assert (told.kv, told.cached_tokens) == ((offer, 448) if kv_travel == "on" else (None, 0))
    assert all(one.kv is None and one.cached_tokens == 448 for one in holder.assigned)


async def test_a_moved_request_fetches_its_own_blocks_and_no_others(bus, schedule, hire):
    limits = worker_limits(prefix_cache="tenant", kv_format="f", kv_token_bytes=1024)
    perf = replace(PERF, kv_base_ms=0.5, kv_ms_per_mib=1.0)
    _, other = [await hire(name, limits=limits, perf=perf, prepare=has(asked("r"), name == "w0")) for name in ("w0", "w1")]
    service = await schedule()
    await knows(service, "w0", "w1")
    await eventually(lambda: not service.cluster.unlisted())
    own = KvOffer(worker_id="w9", token="t")
    await submit(bus, replace(asked("r"), epoch=1, kv=own, move_to="w1"))
    assert (other.assigned[0].kv, other.assigned[0].cached_tokens) == (own, 0)
    await submit(bus, replace(asked("s"), epoch=1, move_to="w1"))
    assert other.assigned[1].kv == KvOffer(worker_id="w0", to_tokens=448), "this one has none"


def has(request: GenerateRequest, really: bool):
    """Prepares a worker with this prompt cached."""

    def prepare(worker: FakeWorker) -> None:
        worker.prefixes = set(keys_of(request)) if really else set()

    return prepare
