"""Promise: a tenant cannot find out another's prompts from the prefix cache, unless the operator shares it."""

from __future__ import annotations

from typing import Any

from motet.shared.wire.request import pack_tokens
from tests.services.worker.support_service import Running, generate

PROMPT = list(range(1, 81))  # ten blocks of 8 tokens


async def cached_tokens(worker: Running, **request: Any) -> int:
    """How many tokens of PROMPT the worker found in its cache for this request."""
    one = generate(PROMPT, max_tokens=2, **request)
    await worker.accepted(one)
    await worker.mesh.ended(one.request_id, one.epoch)
    return worker.mesh.items(one.request_id, one.epoch)[0].cached_tokens


async def test_a_guessed_prompt_of_another_tenant_is_not_in_the_cache(start):
    worker = await start()
    assert await cached_tokens(worker, tenant="acme") == 0
    assert await cached_tokens(worker, tenant="globex") == 0
    assert await cached_tokens(worker, tenant="acme") > 0


async def test_an_adapter_used_by_two_tenants_has_a_cache_for_each(start, adapters):
    worker = await start(share_prefix_cache=True)
    ref = await worker.mesh.publish_adapter(adapters[0])
    assert await cached_tokens(worker, tenant="acme", adapter=ref) == 0
    assert await cached_tokens(worker, tenant="globex", adapter=ref) == 0
    assert await cached_tokens(worker, tenant="acme", adapter=ref) > 0


async def test_a_cache_salt_divides_the_cache_of_one_tenant(start):
    worker = await start()
    assert await cached_tokens(worker, cache_salt="alice") == 0
    assert await cached_tokens(worker, cache_salt="bob") == 0
    assert await cached_tokens(worker) == 0
    assert await cached_tokens(worker, cache_salt="alice") > 0


async def test_tenants_share_prompts_of_the_base_model_when_the_operator_says_so(start):
    worker = await start(share_prefix_cache=True)
    assert await cached_tokens(worker, tenant="acme") == 0
    assert await cached_tokens(worker, tenant="globex") > 0
    assert await cached_tokens(worker, tenant="globex", cache_salt="mine") == 0


async def test_a_resumed_request_finds_its_own_tenants_blocks(start):
    worker = await start()
    await cached_tokens(worker, tenant="acme", cache_salt="alice")
    resumed = {"output": pack_tokens([3]), "epoch": 1}
    assert await cached_tokens(worker, tenant="acme", cache_salt="bob", **resumed) == 0
    assert await cached_tokens(worker, tenant="acme", cache_salt="alice", **resumed) > 0
