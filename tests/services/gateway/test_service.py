"""The gateway's life cycle and load: limits, drain, health, metrics, the names that Kubernetes gateways scrape."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
from pathlib import Path

import aiohttp
import openai
import pytest

from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.owner import observe
from motet.services.gateway.service import LINGER_S, GatewayService
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.errors import Overloaded, Unavailable
from motet.shared.keys import read_key_file
from motet.shared.model import Pin, RequestBrief, Residency
from motet.shared.telemetry import REGISTRY
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, cancelled, put_adapter, running_gateway
from tests.services.gateway.support_tokenizers import write_model_dir
from tests.support import eventually

TEXT = {"model": "demo", "prompt": "hello"}
BODY = json.dumps(TEXT).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(BODY)
)


async def scrape(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        return await answer.text()


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, series
    return float(found[1])


async def test_beyond_its_limit_clients_get_429_with_retry_after(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2", max_inflight=1) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        first = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=TEXT))
        request = await assigned(mesh.first)
        async with http.post(f"{url}/v1/completions", json=TEXT) as answer:
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert (await answer.json())["error"]["type"] == "rate_limit_error"
        await mesh.first.emit(request, 0, [40], "length")
        assert (await first).status == 200


async def test_an_overloaded_mesh_is_a_429_for_openai_clients(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    mesh.scheduler.refuse = Overloaded("every worker is full", retry_after_s=2.4)
    with pytest.raises(openai.RateLimitError, match="every worker is full") as refused:
        await client.completions.create(model="demo", prompt="x", stream=True)
    assert refused.value.response.headers["retry-after"] == "3"


async def test_when_one_of_several_choices_is_refused_the_others_are_cancelled(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    mesh.scheduler.refuse_choice = 5
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="demo", prompt="x", n=8)
    for request in list(mesh.first.assigned):
        await cancelled(mesh.first, request.request_id)
    assert mesh.gateway.owner.inflight == 0


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", HEAD, HEAD + BODY[:5]], ids=["nothing", "half a line", "head", "half a body"]
)
async def test_a_gateway_that_leaves_its_socket_to_a_successor_answers_what_has_begun_to_arrive(
    mesh: Mesh, nats_url: str, tmp_path: Path, sent: bytes
) -> None:
    mesh.say("hello")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running_gateway(nats_url, tmp_path, instance_id="g2", listen_fd=os.dup(listener.fileno())) as gateway:
            await eventually(lambda: not gateway.not_ready())
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(sent)
            server = gateway._server  # private: nothing else counts connections
            await eventually(lambda: server.server_state.connections)
            leaving = asyncio.ensure_future(gateway.drain())
            await eventually(lambda: gateway.not_ready() == ["draining"])
            told_s = now_s() + 2 * LINGER_S  # by then idle connections are closed
            await eventually(lambda: now_s() > told_s)
            writer.write((HEAD + BODY)[len(sent) :])
            answer = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            await asyncio.wait_for(leaving, 5)
            with pytest.raises(Unavailable, match="shutting down"):
                gateway.admit()
            writer.close()


async def test_a_drain_finishes_running_streams_and_refuses_new_ones(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="demo", prompt="x", stream=True)
    request = await assigned(mesh.first)
    draining = asyncio.ensure_future(mesh.gateway.drain())
    await eventually(lambda: mesh.gateway.not_ready() == ["draining"])
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        await client.completions.create(model="demo", prompt="x")
    assert not draining.done()
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("done").ids, "length")
    assert "".join([c.choices[0].text async for c in stream]) == "done"
    await asyncio.wait_for(draining, 5)


async def test_a_client_that_does_not_read_is_cut_off_and_no_other_is_affected(
    mesh: Mesh, nats_url: str, tmp_path: Path
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2", stream_buffer_tokens=16) as gateway:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", gateway.port))
        body = b'{"model": "demo", "prompt": "x", "stream": true, "max_tokens": 200}'
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        request = await assigned(mesh.first)
        index = 0

        async def flood() -> bool:
            nonlocal index
            for _ in range(500):
                await mesh.first.emit(request, index, [40] * 100)
                index += 100
            return gateway.owner.inflight == 0

        await eventually(flood, within_s=30)
        await cancelled(mesh.first, request.request_id)
        raw.close()
        text = REGISTRY.get_sample_value(
            "motet_requests_total", {"adapter": "base", "slo_class": "standard", "outcome": "slow_reader"}
        )
        assert text


async def test_readiness_names_what_is_missing(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/ready") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True, "reasons": []})
    for worker in mesh.workers:
        worker.mute()
        await worker.goodbye()
    await eventually(lambda: mesh.gateway.not_ready())
    async with http.get(f"{mesh.url}/ready") as answer:
        assert answer.status == 503
        assert "no worker" in (await answer.json())["reasons"][0]
    async with http.get(f"{mesh.url}/health") as answer:
        assert answer.status == 200


async def test_requests_are_measured_per_adapter_and_class(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("hello world")
    before = await scrape(http, mesh.url)
    headers = {"x-slo-class": "interactive"}
    async with http.post(f"{mesh.url}/v1/completions", json=TEXT | {"model": "upper"}, headers=headers) as answer:
        usage = (await answer.json())["usage"]
    text = await scrape(http, mesh.url)
    labels = 'adapter="upper",slo_class="interactive"'
    tokens = usage["completion_tokens"]
    assert f"motet_ttft_seconds_count{{{labels}}}" not in before
    assert value(text, f"motet_ttft_seconds_count{{{labels}}}") == 1
    assert value(text, f"motet_tpot_seconds_count{{{labels}}}") == 1
    assert value(text, f"motet_queue_seconds_count{{{labels}}}") == 1
    assert value(text, 'motet_tokens_total{adapter="upper",kind="output",slo_class="interactive"}') == tokens
    assert value(text, 'motet_requests_total{adapter="upper",outcome="length",slo_class="interactive"}') == 1
    assert value(text, 'motet_slo_requests_total{met="yes",objective="ttft",slo_class="interactive"}') >= 1


async def test_adapter_labels_are_bounded(mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.say("x")
    monkeypatch.setattr(observe, "ADAPTERS_MAX", len(observe.adapters_met))
    await put_adapter(mesh.bus, "late-comer")
    await eventually(lambda: mesh.gateway.adapters.resolve("late-comer"))
    async with http.post(f"{mesh.url}/v1/completions", json=TEXT | {"model": "late-comer"}) as answer:
        assert answer.status == 200
    text = await scrape(http, mesh.url)
    assert 'adapter="other"' in text
    assert "late-comer" not in text


async def test_kubernetes_gateways_find_the_names_they_scrape(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    await put_adapter(mesh.bus, "lower")
    await eventually(lambda: mesh.gateway.adapters.resolve("lower"))
    mesh.first.adapters = [Residency("digest-of-upper", 8, 4096, "device"), Residency("digest-of-lower", 8, 4096, "host")]
    mesh.first.requests = {
        "a": RequestBrief("a", 0, "digest-of-upper", 8, 1, 1, 1, "running"),
        "b": RequestBrief("b", 0, "digest-of-lower", 8, 1, 0, 1, "loading"),
        "c": RequestBrief("c", 0, "", 0, 1, 0, 1, "waiting"),
    }
    labels = '{model_name="demo"}'

    async def shown() -> str | None:
        text = await scrape(http, mesh.url)
        return text if f"vllm:num_requests_waiting{labels} 2.0" in text else None

    text = await eventually(shown)
    assert value(text, f"vllm:num_requests_running{labels}") == 1
    assert value(text, f"vllm:kv_cache_usage_perc{labels}") == 0
    info = re.search(r'^vllm:lora_requests_info\{max_lora="(\d+)",running_lora_adapters="upper",'
                     r'waiting_lora_adapters="lower"\} (\S+)$', text, re.MULTILINE)  # fmt: skip
    assert info, text
    assert int(info[1]) > 1
    assert float(info[2]) > 1.7e9
    loaded = set(re.findall(r"^vllm:lora_adapter_loaded\{(.*)\} 1.0$", text, re.MULTILINE))
    assert loaded == {
        'adapter_name="upper",level="gpu",model_name="demo",pinned="false",rank="8"',
        'adapter_name="lower",level="cpu",model_name="demo",pinned="false",rank="8"',
    }
    assert value(text, f"vllm:num_gpu_loaded_lora_adapters{labels}") == 1
    assert value(text, f"vllm:num_cpu_loaded_lora_adapters{labels}") == 1
    assert value(text, f"vllm:max_gpu_lora_adapters{labels}") == int(info[1])


async def test_an_adapter_is_listed_by_every_name_that_requests_use(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    await put_adapter(mesh.bus, "capitals", digest="digest-of-upper", alias_of="upper")
    await eventually(lambda: mesh.gateway.adapters.resolve("capitals"))
    mesh.first.adapters = [Residency("digest-of-upper", 8, 4096, "device")]

    async def shown() -> bool:
        return 'running_lora_adapters="capitals,upper"' in await scrape(http, mesh.url)

    await eventually(shown)


async def test_metrics_tell_where_known_adapters_are_and_where_they_are_pinned(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "adapters_met", {"upper"})
    await put_adapter(mesh.bus, "kept", pin=Pin(workers=("*",), since_unix_ms=0))
    await put_adapter(mesh.bus, "lower")
    await eventually(lambda: mesh.gateway.adapters.resolve("lower"))
    tiers = {"upper": "device", "kept": "host", "lower": "disk"}
    for worker in mesh.workers:
        worker.adapters = [Residency(f"digest-of-{name}", 8, 4096, tier) for name, tier in tiers.items()]  # type: ignore[arg-type]
    first, second = mesh.workers[:2]
    assert len(mesh.workers) == 2
    second.adapters.pop(0)
    await first.snapshot()
    await second.snapshot()
    every = {(name, tier): 2.0 for name, tier in tiers.items()} | {("upper", "device"): 1.0, ("other", "disk"): 2.0}
    del every["lower", "disk"]

    async def shown() -> dict[tuple[str, str], float]:
        found = re.findall(
            r'^motet_adapter_workers\{adapter="(.+)",tier="(.+)"\} (\S+)$', await scrape(http, mesh.url), re.MULTILINE
        )
        return {(name, tier): float(count) for name, tier, count in found}

    async def settled() -> bool:
        return await shown() == every

    await eventually(settled)
    assert value(await scrape(http, mesh.url), 'motet_adapter_pins{adapter="kept"}') == 2


async def test_tokens_and_texts_convert_both_ways(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{mesh.url}/tokenize", json={"prompt": "größere", "return_token_strs": True}) as answer:
        body = await answer.json()
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (len(body["tokens"]), 256, body["count"])
    async with http.post(f"{mesh.url}/detokenize", json={"tokens": body["tokens"]}) as answer:
        assert await answer.json() == {"prompt": "größere"}
    async with http.post(f"{mesh.url}/tokenize", json={"messages": [{"role": "user", "content": "x"}]}) as answer:
        assert (await answer.json())["count"] > 3
    async with http.post(f"{mesh.url}/tokenize", json={}) as answer:
        assert answer.status == 400


async def test_a_tokenize_of_megabytes_is_refused_or_done_beside_the_loop(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    large, kind = io.BytesIO(json.dumps({"prompt": "x" * (3 << 20)}).encode()), {"content-type": "application/json"}
    async with http.post(f"{mesh.url}/tokenize", data=large, headers=kind) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "prompt")
    body = io.BytesIO(json.dumps({"prompt": "ab " * (1 << 18), "return_token_strs": True}).encode())
    counting = asyncio.ensure_future(http.post(f"{mesh.url}/tokenize", data=body, headers=kind))
    gaps_s, last_s = [0.0], now_s()
    while not counting.done():
        await asyncio.sleep(0.005)  # time: what is measured is how late the loop wakes
        gaps_s.append(now_s() - last_s)
        last_s = now_s()
    async with await counting as answer:
        assert answer.status == 200
        assert (await answer.json())["count"] > 1 << 18
    assert max(gaps_s) < 2, "a lease is lost after 2.5 s"
    async with http.post(f"{mesh.url}/tokenize", json={"prompt": "x", "model": "nobody"}) as answer:
        assert answer.status == 404
    many = io.BytesIO(json.dumps({"tokens": [5] * (1 << 19)}).encode())
    async with http.post(f"{mesh.url}/detokenize", data=many, headers=kind) as answer:
        assert answer.status == 400


async def test_the_status_tells_this_gateway_and_why_there_is_no_scheduler(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/v1/status") as answer:
        body = await answer.json()
    assert (body["gateway"]["id"], body["base_model"], body["adapters"]) == ("g1", "demo", 1)
    assert "no service answers" in body["error"]
    async with http.get(f"{mesh.url}/version") as answer:
        assert (await answer.json())["version"]


async def test_generation_defaults_of_the_model_fill_what_a_request_leaves_out(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path
) -> None:
    mesh.say("x")
    write_model_dir(tmp_path / "other" / "demo", temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    async with running_gateway(nats_url, tmp_path, instance_id="g2", model=str(tmp_path / "other" / "demo")) as gateway:
        for body in (TEXT, TEXT | {"temperature": 0, "top_k": -1}):
            async with http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body) as answer:
                assert answer.status == 200
    first, second = (request.sampling for request in mesh.first.assigned)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (second.temperature, second.top_k) == (0.0, 0)


async def test_a_taken_port_is_a_clear_error(nats_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = GatewayConfig.of(nats_url=nats_url, model=str(write_model_dir(tmp_path / "demo")), port=taken.getsockname()[1])
        service = GatewayService(config)
        with pytest.raises(Unavailable, match="cannot listen"):
            await service.start()
        await service.stop()


def test_a_bad_key_file_is_a_configuration_error_with_its_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a b\nonly-a-key\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_key_file(str(keys))
    assert GatewayConfig.of(model="org/name").base.name == "name"
