"""Promise: without API keys no web page and no foreign host name gets in; every answer says which request it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.datastructures import Headers

from motet.services.gateway.edge.guard import Guard
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway

BODY = json.dumps({"prompt": "x"}).encode()
JSON = {"content-type": "application/json"}


def guard(**changes: Any) -> Guard:
    return Guard(**({"keyless": True, "bound_host": "127.0.0.1", "hosts": (), "origins": ()} | changes))


def refused(guard: Guard, method: str = "POST", **headers: str) -> str | None:
    """The field for which a request is refused."""
    error = guard.refusal(method, Headers({"host": "localhost:8000"} | headers))
    return error.param if error else None


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_that_a_page_could_send_unasked_is_a_415(mesh: Mesh, http: aiohttp.ClientSession, kind: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize"):
        async with http.post(mesh.url + path, data=BODY, headers={"content-type": kind} if kind else {}) as answer:
            assert answer.status == 415, path
            error = (await answer.json())["error"]
            assert error["param"] == "content-type"
            assert "Content-Type: application/json" in error["message"]
    async with http.post(f"{mesh.url}/v1/adapters", data=BODY, headers={"content-type": "text/plain"}) as answer:
        assert answer.status == 415
    assert not mesh.first.assigned


async def test_json_is_taken_however_its_type_is_written(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("x")
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        async with http.post(f"{mesh.url}/v1/completions", data=BODY, headers={"content-type": kind}) as answer:
            assert answer.status == 200


async def test_a_page_of_another_site_changes_and_generates_nothing(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("x")
    foreign = {"origin": "https://evil.example"} | JSON
    async with http.post(f"{mesh.url}/v1/completions", data=BODY, headers=foreign) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (403, "origin")
    async with http.delete(f"{mesh.url}/v1/adapters/upper", headers=foreign) as answer:
        assert answer.status == 403
    form = aiohttp.FormData({"name": "x"})
    form.add_field("file", b"x", filename="x.zip")
    async with http.post(f"{mesh.url}/v1/adapters", data=form, headers={"origin": "null"}) as answer:
        assert answer.status == 403
    assert mesh.gateway.adapters.resolve("upper")
    async with http.post(f"{mesh.url}/v1/completions", data=BODY, headers={"origin": mesh.url} | JSON) as answer:
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_whose_name_was_made_to_point_here_is_refused(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/openapi.json")):
        headers = {"host": f"evil.example:{mesh.gateway.port}", "origin": f"http://evil.example:{mesh.gateway.port}"} | JSON
        async with http.request(method, mesh.url + path, data=BODY if method == "POST" else None, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (403, "host")


def test_hosts_are_loopback_names_and_those_that_are_listed() -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "127.8.8.8", "[::1]:8000", "LOCALHOST"):
        assert refused(guard(), "GET", host=host) is None, host
    for host in ("evil.example", "", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "[::1", "a b"):
        assert refused(guard(), "GET", host=host) == "host", host
    assert refused(guard(hosts=["llm.example"]), "GET", host="LLM.example:443") is None
    assert refused(guard(hosts=["*"]), "GET", host="evil.example") is None
    assert refused(guard(bound_host="192.168.1.5"), "GET", host="any.example") is None, (
        "who listens to all is asked by any name"
    )
    assert refused(guard(keyless=False), "GET", host="any.example") is None
    assert refused(guard(keyless=False, hosts=["llm.example"]), "GET", host="evil.example") == "host"


def test_origins_are_this_host_and_those_that_are_listed() -> None:
    assert refused(guard()) is None, "no browser"
    assert refused(guard(), origin="http://localhost:8000") is None
    for origin in ("http://localhost:9000", "null", "", "http://", "file://", "https://evil.example"):
        assert refused(guard(), origin=origin) == "origin", origin
        assert refused(guard(), "DELETE", origin=origin) == "origin", origin
        assert refused(guard(), "GET", origin=origin) is None
    assert refused(guard(origins=["https://chat.example/"]), origin="https://Chat.example") is None
    assert refused(guard(origins=["*"]), origin="https://evil.example") is None
    assert refused(guard(keyless=False), origin="https://evil.example") is None, "a page does not have the key"


async def test_listed_origins_get_cors_headers_streams_too(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path
) -> None:
    mesh.say("hello world")
    origin = {"origin": "https://chat.example"}
    async with running_gateway(nats_url, tmp_path, instance_id="g2", allowed_origins="https://chat.example") as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        async with http.options(url, headers=origin | asks) as answer:
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        async with http.post(url, json={"prompt": "x", "stream": True}, headers=origin) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert "[DONE]" in await answer.text()
        async with http.post(url, json={"prompt": "x"}, headers={"origin": "https://evil.example"}) as answer:
            assert answer.status == 403


async def test_every_answer_has_the_request_id_that_came_or_a_new_one(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say("x")
    url = f"{mesh.url}/v1/completions"
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", url, {"json": {"prompt": "x"}}),
        ("POST", url, {"json": {"prompt": "x", "stream": True}}),
        ("POST", url, {"json": {"prompt": 7}}),
        ("POST", url, {"data": b"x"}),
        ("GET", f"{mesh.url}/nothing", {}),
        ("GET", url, {}),
        ("GET", f"{mesh.url}/health", {}),
        ("DELETE", f"{mesh.url}/v1/adapters/a%20b", {}),
    ]
    for method, where, body in cases:
        async with http.request(method, where, headers={"x-request-id": "trace/1:a"}, **body) as answer:
            assert answer.headers.getall("x-request-id") == ["trace/1:a"], where
        seen = set()
        for given in ({}, {"x-request-id": "two words"}, {"x-request-id": "x" * 129}):
            async with http.request(method, where, headers=given, **body) as answer:
                [drawn] = answer.headers.getall("x-request-id")
                seen.add(drawn)
        assert len(seen) == 3
        assert not seen & {"two words", "x" * 129}


async def test_error_texts_are_short_whatever_is_quoted(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    long = "x" * 100_000
    form = aiohttp.FormData({"name": "x", "replace": "y" * 4000})
    form.add_field("file", b"x", filename="x.zip")
    cases: list[dict[str, Any]] = [
        {"json": {"prompt": "x", "model": long}},
        {"json": {"prompt": "x", long: 1}},
        {"json": {"prompt": "x", "logit_bias": {long: 1}}},
        {"json": {"prompt": "x", "n": long}},
        {"json": {"prompt": "x"}, "headers": {"x-slo-class": "x" * 8000}},
    ]
    asked = [http.post(f"{mesh.url}/v1/completions", **case) for case in cases]
    asked.append(http.post(f"{mesh.url}/v1/adapters", data=form))
    asked.append(http.post(f"{mesh.url}/v1/load_lora_adapter", json={"lora_name": long, "lora_path": "x"}))
    asked.append(http.get(f"{mesh.url}/{'x' * 8000}"))
    for request in asked:
        async with request as answer:
            assert 400 <= answer.status < 500
            assert len(await answer.read()) < 2500


async def test_paths_on_the_server_are_not_shown(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for path in ("/v1/models", "/v1/adapters", "/v1/adapters/upper", "/v1/models/upper", "/v1/models/demo"):
        async with http.get(mesh.url + path) as answer:
            assert '"/' not in (text := await answer.text()) and ":/" not in text, path


async def test_names_that_no_adapter_can_have_are_a_4xx(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for name in ("a b", "..", "a..b", "-", "x" * 200, "a*", "a>", "ä", ".a", "a/"):
        async with http.post(f"{mesh.url}/v1/adapters", json={"name": name, "hub_id": "a/b"}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "name"), name
        async with http.post(f"{mesh.url}/v1/adapters", json={"name": "ok", "alias_of": name}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (404, "alias_of"), name
        async with http.post(f"{mesh.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "a/b"}) as answer:
            assert answer.status == 400, name
        async with http.post(f"{mesh.url}/v1/unload_lora_adapter", json={"lora_name": name}) as answer:
            assert answer.status == 404, name
    for name in ("a%20b", "a%2A", "%C3%A4", "a%0Ab", "x" * 200):
        async with http.delete(f"{mesh.url}/v1/adapters/{name}") as answer:
            assert answer.status in (400, 404), name


async def test_an_unserved_method_names_all_that_are(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.put(f"{mesh.url}/v1/adapters/upper") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET, PATCH")
    for method in ("OPTIONS", "PATCH", "GET"):
        async with http.request(method, f"{mesh.url}/v1/adapters/upper/pin", json={"workers": None}) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "DELETE, POST")
    async with http.options(f"{mesh.url}/v1/adapters/upper/pin") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "DELETE, POST")
    async with http.post(f"{mesh.url}/health", data=b"x") as answer:
        assert answer.status == 405
