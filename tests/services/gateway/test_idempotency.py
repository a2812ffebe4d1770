"""Promise: a request with an Idempotency-Key runs once, and repetitions get its answer or a clear refusal."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from motet.services.gateway.edge import idempotency
from motet.shared.errors import Conflict, Overloaded
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned
from tests.support import eventually

BODY = {"prompt": "hello", "max_tokens": 3}


async def post(http: aiohttp.ClientSession, mesh: Mesh, key: str = "k1", **changed) -> tuple[int, dict, bool]:
    headers = {"Idempotency-Key": key}
    async with http.post(f"{mesh.url}/v1/completions", json=BODY | changed, headers=headers) as answer:
        return answer.status, await answer.json(), "idempotent-replayed" in answer.headers


async def test_the_same_key_gets_the_stored_answer_and_another_key_a_new_one(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("a b c")
    status, first, replayed = await post(http, mesh)
    assert (status, replayed) == (200, False)
    assert await post(http, mesh) == (200, first, True)
    assert (await post(http, mesh, "k2"))[1]["id"] != first["id"]
    assert len(mesh.scheduler.submitted) == 2


async def test_a_repeated_request_with_a_bad_objective_is_refused_like_the_first(
    mesh: Mesh, http: aiohttp.ClientSession
) -> None:
    mesh.say("a b c")
    assert (await post(http, mesh))[0] == 200
    headers = {"Idempotency-Key": "k1", "x-slo-tpot-ms": "never"}
    async with http.post(f"{mesh.url}/v1/completions", json=BODY, headers=headers) as answer:
        assert answer.status == 400 and (await answer.json())["error"]["param"] == "x-slo-tpot-ms"


async def test_a_request_sent_twice_at_once_runs_once_and_both_get_the_answer(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    both = [asyncio.create_task(post(http, mesh)) for _ in range(2)]
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("hello").ids[:1], finish="length")
    (_, one, first), (_, two, second) = await asyncio.gather(*both)
    assert one == two and first != second and len(mesh.scheduler.submitted) == 1


async def test_a_client_that_gave_up_finds_its_answer_when_it_asks_again(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    lost = asyncio.create_task(post(http, mesh))
    request = await assigned(mesh.first)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("hello").ids[:1], finish="length")
    await eventually(lambda: mesh.gateway.owner.inflight == 0)
    status, _, replayed = await post(http, mesh)
    assert (status, replayed) == (200, True) and len(mesh.scheduler.submitted) == 1


async def test_what_failed_runs_again(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.scheduler.refuse = Overloaded("full", retry_after_s=0.1)
    assert (await post(http, mesh))[0] == 429
    mesh.scheduler.refuse = None
    mesh.say("a")
    assert (await post(http, mesh))[::2] == (200, False)


async def test_a_key_stands_for_one_body(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("a")
    await post(http, mesh)
    status, body, _ = await post(http, mesh, max_tokens=2)
    assert status == 422 and body["error"]["param"] == "idempotency-key"


async def test_a_streamed_answer_is_not_repeated(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("a b c")
    headers = {"Idempotency-Key": "s"}
    async with http.post(f"{mesh.url}/v1/completions", json=BODY | {"stream": True}, headers=headers) as answer:
        assert answer.status == 200 and (await answer.read()).endswith(b"[DONE]\n\n")
    status, body, _ = await post(http, mesh, "s", stream=True)
    assert status == 409 and "streamed" in body["error"]["message"] and len(mesh.scheduler.submitted) == 1


async def test_a_key_that_is_no_key_is_refused_by_name(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    status, body, _ = await post(http, mesh, "x" * 256)
    assert status == 400 and body["error"]["param"] == "idempotency-key"


async def fill(once: idempotency.Once, tenant: str, keys: int, size: int = 1, begin: int = 0) -> None:
    """Answer so many requests of a tenant, each with `size` bytes."""
    for i in range(begin, begin + keys):
        await once.whole(asked(tenant, i), b"digest", lambda: answer(size))
        await asyncio.sleep(0)


async def answer(size: int) -> idempotency.Answered:
    return idempotency.Answered(b"x" * size, {})


def asked(tenant: str, key: int) -> Any:
    return SimpleNamespace(
        headers={"idempotency-key": str(key)}, state=SimpleNamespace(tenant=tenant), url=SimpleNamespace(path="/")
    )


async def stored(once: idempotency.Once, tenant: str, keys: int) -> int:
    """How many of the tenant's first keys are still answered without running again."""
    runs = 0

    async def again() -> idempotency.Answered:
        nonlocal runs
        runs += 1
        raise Overloaded("not stored")

    for i in range(keys):
        await asyncio.gather(once.whole(asked(tenant, i), b"digest", again), return_exceptions=True)
    return keys - runs


async def test_no_tenant_loses_its_answers_to_the_many_or_large_ones_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "ANSWERS_MAX", 64)
    monkeypatch.setattr(idempotency, "BYTES_MAX", 64_000)
    once = idempotency.Once()
    await fill(once, "modest", 20, size=500)
    await fill(once, "many", 500)
    assert await stored(once, "modest", 20) == 20
    await fill(once, "large", 20, size=50_000)
    assert await stored(once, "modest", 20) == 20
    await fill(once, "many", 30, begin=1000)  # room for the last ones of the others too
    assert await stored(once, "modest", 20) == 20


async def test_one_large_answer_costs_its_tenant_no_other_and_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "ANSWER_BYTES_MAX", 1000)
    monkeypatch.setattr(idempotency, "BYTES_MAX", 4000)
    once = idempotency.Once()
    await fill(once, "acme", 5, size=700)
    assert (await once.whole(asked("acme", 9), b"digest", lambda: answer(3000)))[0].body == b"x" * 3000
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="not kept"):
        await once.whole(asked("acme", 9), b"digest", lambda: answer(3000))
    assert await stored(once, "acme", 5) == 5


async def test_answers_are_bounded_in_number_and_bytes_and_age(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.say("a")
    monkeypatch.setattr(idempotency, "ANSWERS_MAX", 2)
    for key in ("1", "2", "3"):
        await post(http, mesh, key)
    assert (await post(http, mesh, "3"))[2] and not (await post(http, mesh, "1"))[2]
    monkeypatch.setattr(idempotency, "BYTES_MAX", 10)
    assert not (await post(http, mesh, "4"))[2] and not (await post(http, mesh, "4"))[2]
    monkeypatch.setattr(idempotency, "BYTES_MAX", 1 << 20)
    await post(http, mesh, "5")
    monkeypatch.setattr(idempotency, "AGE_S", -1.0)
    assert not (await post(http, mesh, "5"))[2]
