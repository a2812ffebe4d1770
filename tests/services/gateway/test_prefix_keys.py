"""Promise: a request carries the keys by which cached blocks of its prompt are found, other ones for each tenant."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from motet.policies.memory.kv_blocks import cache_scope, prompt_keys
from motet.shared.wire.prefixes import unpack_keys
from motet.shared.wire.request import GenerateRequest, pack_tokens
from tests.services.gateway.support import FakeScheduler, put_adapter, running_gateway, start_workers
from tests.support import eventually

PROMPT = [40 + n % 100 for n in range(200)]


@pytest.fixture
async def ask(connect, bus, nats_url, tmp_path):
    """Asks a gateway for a token in front of workers with these limits; returns what it submits."""

    async def send(limits: list[dict[str, Any]], **body: Any) -> GenerateRequest:
        names = [f"w{number}" for number in range(len(limits))]
        workers = [(await start_workers(connect, name, **one))[0] for name, one in zip(names, limits, strict=True)]
        for worker in workers:
            worker.speak = lambda _: [50]
        scheduler = FakeScheduler(await connect("scheduler"), names)
        await scheduler.start()
        await put_adapter(bus, "upper", digest="digest-upper")
        async with running_gateway(nats_url, tmp_path) as gateway, aiohttp.ClientSession() as session:
            await eventually(lambda: len(gateway.fleet.workers()) == len(limits))
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            async with session.post(url, json={"model": "demo", "prompt": PROMPT, "max_tokens": 1} | body) as answer:
                assert answer.status == 200, await answer.text()
        [request] = scheduler.submitted
        return request

    return send


def keys(size: int, *, digest: str = "", **scope: Any) -> list[int]:
    return prompt_keys(pack_tokens(PROMPT), size, digest, cache_scope("default", **scope))


async def test_there_are_keys_for_every_block_size_that_workers_have(ask):
    request = await ask([{"prefix_cache": "tenant"}, {"prefix_cache": "tenant", "block_size": 128}, {"block_size": 8}])
    assert {part.tokens: list(unpack_keys(part.keys)) for part in request.prefix_keys} == {64: keys(16), 128: keys(128)}
    assert len(keys(16)) == 3 and len(keys(128)) == 1


async def test_an_adapters_keys_and_those_of_a_salt_are_its_own(ask):
    request = await ask([{"prefix_cache": "base"}], model="upper", cache_salt="alice")
    [part] = request.prefix_keys
    assert list(unpack_keys(part.keys)) == keys(16, digest="digest-upper", cache_salt="alice")


async def test_where_tenants_share_the_base_models_blocks_its_keys_are_all_tenants(ask):
    [part] = (await ask([{"prefix_cache": "base"}])).prefix_keys
    assert list(unpack_keys(part.keys)) == keys(16, shared=True) != keys(16)


async def test_without_a_prefix_cache_nothing_is_hashed(ask):
    assert (await ask([{}])).prefix_keys == ()


def test_the_last_token_is_never_taken_from_a_cache():
    tokens = pack_tokens(range(129))
    assert len(prompt_keys(tokens, 16, "", b"")) == 2
    assert len(prompt_keys(tokens[:-4], 16, "", b"")) == 1


def test_a_key_stands_for_all_tokens_before_it():
    one, other = list(range(200)), [7, *range(1, 200)]
    assert not set(prompt_keys(pack_tokens(one), 16, "", b"")) & set(prompt_keys(pack_tokens(other), 16, "", b""))
    assert prompt_keys(pack_tokens(one[:130]), 16, "", b"") == prompt_keys(pack_tokens(one), 16, "", b"")[:2]
