"""Promise: a request stored in JetStream gets exactly one stored result, whatever process dies; nothing blocks the queue."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import ClientSession
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from motet.services.gateway.intake import intake
from motet.services.gateway.openai import texts
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import Overloaded, Unavailable
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import FakeScheduler, assigned, cancelled, put_adapter, running_gateway, start_workers
from tests.support import eventually

TENANTS = ("acme", "globex")  # with streams of their own
SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "nats"


async def publish(bus: Bus, body: Any, *, message_id: str = "", tenant: str = "acme") -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if not isinstance(body, bytes) and "model" in body and "messages" in body:
        jsonschema.validate(body, json.loads((SCHEMAS / "request.schema.json").read_text()))
    headers = {"Nats-Msg-Id": message_id} if message_id else None
    ack = await bus.js.publish(subjects.requests(tenant), data, headers=headers)
    return ack.seq


async def result(bus: Bus, request_id: str, *, tenant: str = "acme", within_s: float = 15.0) -> dict[str, Any]:
    async def stored() -> dict[str, Any] | None:
        try:
            stream = subjects.results_stream(tenant)
            message = await bus.js.get_last_msg(stream, subjects.results(tenant, request_id), direct=True)
        except NotFoundError:
            return None
        return json.loads(message.data or b"")

    found: dict[str, Any] = await eventually(stored, within_s=within_s)
    jsonschema.validate(found, json.loads((SCHEMAS / "result.schema.json").read_text()))
    return found


async def queue_is_empty(bus: Bus, *, tenant: str = "acme") -> None:
    async def empty() -> bool:
        return (await bus.js.stream_info(subjects.requests_stream(tenant))).state.messages == 0

    await eventually(empty)


async def results_stored(bus: Bus, *, tenant: str = "acme") -> int:
    return (await bus.js.stream_info(subjects.results_stream(tenant))).state.messages


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "upper", "messages": [{"role": "user", "content": text}], "max_tokens": 32} | fields


async def test_a_published_request_gets_its_result_with_usage_and_leaves_the_queue(mesh: Mesh, bus: Bus):
    mesh.say("HELLO WORLD")
    await publish(bus, chat(), message_id="first")
    answer = await result(bus, "first")
    assert answer["status"] == "ok" and answer["request_id"] == "first"
    assert answer["made_by"]["base"] == "demo" and answer["made_by"]["engine"].startswith("native ")
    assert answer["response"]["choices"][0]["message"]["content"] == "HELLO WORLD"
    assert answer["response"]["usage"]["completion_tokens"] > 0
    assert (await assigned(mesh.first)).tenant == "acme"
    await queue_is_empty(bus)


@pytest.mark.parametrize("depth", [240, 253, 300, 600, 2000])
async def test_nested_json_gets_the_answer_that_http_gives_it(mesh: Mesh, bus: Bus, http: ClientSession, depth: int):
    mesh.say("fine")
    nested = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"model":"upper","messages":[{{"role":"user","content":"hi","j":{nested}}}]}}'
    async with http.post(f"{mesh.url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}) as answer:
        over_http = await answer.json()
        assert answer.status in (200, 400), over_http
    await publish(bus, body.encode(), message_id="deep")
    durable = await result(bus, "deep")
    if answer.status == 200:
        assert durable["response"]["choices"][0]["message"]["content"] == "fine", durable
    else:
        assert durable["error"]["message"] == over_http["error"]["message"]


async def test_a_request_that_meets_a_bug_is_told_so_at_once(mesh: Mesh, bus: Bus, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(texts, "prepare", broken)
    await publish(bus, chat(), message_id="unlucky")
    assert (await result(bus, "unlucky"))["error"]["message"] == "internal error: ZeroDivisionError"


async def test_a_completion_prompt_works_too_and_the_id_may_stand_in_the_body(mesh: Mesh, bus: Bus):
    mesh.say("and so on")
    sequence = await publish(bus, {"model": "demo", "prompt": "once", "request_id": "mine"}, message_id="other")
    assert (await result(bus, "mine"))["response"]["object"] == "text_completion"
    sequence = await publish(bus, {"model": "demo", "prompt": "once"})
    assert (await result(bus, f"seq-{sequence}"))["status"] == "ok"


async def test_an_equal_message_id_is_one_request_and_a_repeated_request_id_is_answered_once(mesh: Mesh, bus: Bus):
    mesh.say("ONE")
    first = await publish(bus, chat(), message_id="same")
    assert await publish(bus, chat(), message_id="same") == first
    await result(bus, "same")
    await publish(bus, chat(request_id="same"), message_id="a-different-message")
    await queue_is_empty(bus)
    assert await results_stored(bus) == 1 and len(mesh.first.assigned) == 1


async def test_live_tokens_arrive_on_their_subject_and_end_with_an_empty_message(mesh: Mesh, bus: Bus):
    mesh.say("some text to stream")
    seen: list[bytes] = []

    async def keep(message: Msg) -> None:
        seen.append(message.data)

    await bus.nc.subscribe(subjects.tokens("acme", "live"), cb=keep)
    await bus.flush()
    await publish(bus, chat(stream=True), message_id="live")
    answer = await result(bus, "live")
    await eventually(lambda: seen and seen[-1] == b"")
    text = "".join(json.loads(data)["choices"][0]["delta"]["content"] for data in seen[:-1])
    assert text == answer["response"]["choices"][0]["message"]["content"] == "some text to stream"


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (b"{not json", "invalid_value", "not valid JSON"),
        (b"[1, 2]", "invalid_value", "Expected `object`"),
        (chat(model="nobody"), "model_not_found", "nobody"),
        (chat(temperature=-1), "invalid_value", "temperature"),
        (chat(stream="yes"), "invalid_value", "stream"),
        (chat(slo={"class": "urgent"}), "invalid_value", "urgent"),
        (json.dumps(chat(slo={"class": "batch", "tftt_ms": 5})).encode(), "invalid_value", "slo.tftt_ms"),
        (json.dumps(chat(slo={"x" * 9000: 1})).encode(), "invalid_value", "slo"),
        ({"model": "upper"}, "invalid_value", ""),
        (chat(request_id="not a word"), "invalid_value", "request_id"),
    ],
)
async def test_poison_becomes_a_dead_letter_with_the_reason_and_the_next_request_runs(
    mesh: Mesh, bus: Bus, body: Any, code: str, reason: str
):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sequence = await publish(bus, data, message_id="bad")
    answer = await result(bus, "bad")
    assert answer["status"] == "error" and answer["error"]["code"] == code and reason in answer["error"]["message"]
    dead = await bus.js.get_last_msg(subjects.dead_stream("acme"), subjects.dead("acme"))
    assert dead.data == data
    assert dead.headers is not None
    assert dead.headers["Motet-Code"] == code and reason in dead.headers["Motet-Reason"]
    assert dead.headers["Motet-Sequence"] == str(sequence)
    mesh.say("fine")
    await publish(bus, chat(), message_id="good")
    assert (await result(bus, "good"))["status"] == "ok"
    await queue_is_empty(bus)


@pytest.mark.parametrize("refusal", [Overloaded("full", retry_after_s=0.2), Unavailable("no worker")])
async def test_overload_is_no_answer_the_request_waits_for_its_turn(mesh: Mesh, bus: Bus, refusal: Exception):
    mesh.say("LATER")
    mesh.scheduler.refuse = refusal  # type: ignore[assignment]
    await publish(bus, chat(), message_id="patient")
    await eventually(lambda: len(mesh.scheduler.submitted) >= 2)
    assert await results_stored(bus) == 0
    mesh.scheduler.refuse = None
    assert (await result(bus, "patient"))["response"]["choices"][0]["message"]["content"] == "LATER"
    await queue_is_empty(bus)


async def test_an_intake_that_goes_with_a_request_leaves_it_to_the_next_one(mesh: Mesh, bus: Bus):
    await publish(bus, chat(), message_id="inherited")
    unfinished = await assigned(mesh.first)
    mesh.say("DONE")
    await mesh.gateway.intake.stop()
    await cancelled(mesh.first, unfinished.request_id)
    gateway = mesh.gateway
    second = intake.Intake(gateway.bus, gateway.owner, gateway.preparer, gateway.lanes.durable, gateway.config, gateway.limits)
    await second.start()
    try:
        assert (await result(bus, "inherited"))["response"]["choices"][0]["message"]["content"] == "DONE"
        await queue_is_empty(bus)
        assert await results_stored(bus) == 1
    finally:
        await second.stop()


async def test_a_result_stored_before_the_crash_is_not_produced_again(mesh: Mesh, bus: Bus):
    await bus.js.publish(subjects.results("acme", "known"), b'{"request_id":"known","status":"ok","response":{}}')
    await publish(bus, chat(), message_id="known")
    await queue_is_empty(bus)
    assert mesh.first.assigned == [] and await results_stored(bus) == 1


async def test_no_more_than_its_limit_is_pulled_at_once(connect, nats_url: str, bus: Bus, tmp_path: Path):
    workers = await start_workers(connect, "w1")
    await FakeScheduler(await connect("scheduler"), ["w1"]).start()
    await put_adapter(bus, "upper")
    for i in range(5):
        await publish(bus, chat(), message_id=f"m{i}")
    async with running_gateway(nats_url, tmp_path, intake_concurrency=2) as gateway:
        await assigned(workers[0], 2)
        await asyncio.sleep(intake.ACK_WAIT_S / 100)  # time: a third request would have come by then
        assert len({request.request_id for request in workers[0].assigned}) == 2, "a silent worker may be asked twice"
        tokens = gateway.prompts.tokenizer.encode("ok").ids
        workers[0].speak = lambda _: tokens
        for request in list(workers[0].assigned):
            await workers[0].emit(request, 0, tokens, "length")
        for i in range(5):
            assert (await result(bus, f"m{i}"))["status"] == "ok"
