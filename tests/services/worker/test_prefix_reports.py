"""Promise: a worker tells which KV blocks of prompts it can reuse, by the keys that gateways compute."""

from __future__ import annotations

from motet.policies.memory.kv_blocks import cache_scope, prompt_keys
from motet.shared.wire.prefixes import unpack_keys
from motet.shared.wire.request import ListPrefixes, pack_tokens
from motet.shared.wire.worker_state import WorkerSnapshot
from tests.services.worker.support_service import Running, generate
from tests.support import eventually

PROMPT = list(range(1, 194))  # 24 blocks of 8 tokens, at every eighth of which is a key, and one more token


def told(worker: Running) -> set[int]:
    """The keys of cached blocks by all messages so far."""
    known: set[int] = set()
    for state in worker.mesh.states:
        if isinstance(state, WorkerSnapshot) and state.prefixes is not None:
            known = set(unpack_keys(state.prefixes))
        known = (known | set(unpack_keys(state.cached))) - set(unpack_keys(state.uncached))
    return known


def keys(digest: str = "", **scope: str) -> set[int]:
    return set(prompt_keys(pack_tokens(PROMPT), 8, digest, cache_scope(**{"tenant": "default"} | scope)))


async def test_blocks_of_a_prompt_are_told_by_adapter_tenant_and_salt(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0])
    await worker.accepted(
        generate(PROMPT), generate(PROMPT, tenant="acme", cache_salt="alice"), generate(PROMPT, tenant="acme", adapter=ref)
    )
    wanted = keys() | keys(tenant="acme", cache_salt="alice") | keys(ref.digest, tenant="acme")
    assert len(wanted) == 9
    await eventually(lambda: wanted <= told(worker))
    assert not told(worker) & keys(tenant="acme"), "nobody asked for these"


async def test_evicted_blocks_are_told_too(start):
    worker = await start(kv_blocks=30, max_model_len=210, device_memory="fixed")
    await worker.accepted(generate(PROMPT, max_tokens=1))
    await eventually(lambda: keys() <= told(worker))
    for first in range(100, 125, 5):
        request = generate(list(range(first, first + 81)), max_tokens=1)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: not keys() & told(worker))


async def test_all_are_listed_on_request_and_not_with_every_heartbeat(start):
    worker = await start()
    await worker.accepted(generate(PROMPT))
    await eventually(lambda: keys() <= told(worker))

    def lists() -> list[WorkerSnapshot]:
        return [one for one in worker.mesh.states if isinstance(one, WorkerSnapshot) and one.prefixes is not None]

    before = len(lists())
    await worker.control(ListPrefixes())
    await eventually(lambda: len(lists()) == before + 1)
    assert keys() <= set(unpack_keys(lists()[-1].prefixes))
    beats = len(worker.mesh.states)
    await eventually(lambda: len(worker.mesh.states) >= beats + 3)
    assert len(lists()) == before + 1


async def test_a_worker_without_a_prefix_cache_announces_none(start):
    worker = await start(prefix_cache=False)
    await worker.accepted(generate(PROMPT))
    assert worker.service.view.limits.prefix_cache == ""
    assert told(worker) == set()
