"""Promise: /openapi.json is complete and true, and /docs shows it without the internet."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from motet.services.gateway.edge.app import build_app
from motet.services.gateway.edge.openapi import schemas, with_unserved
from motet.services.gateway.openai import fields, protocol
from motet.services.gateway.openai.schemas import ChatCompletion
from motet.shared.wire.stream import TokenLogprobs
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, running_gateway

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def described(mesh: Mesh, http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get(f"{mesh.url}/openapi.json") as answer:
        assert answer.status == 200
        document: dict[str, Any] = await answer.json()
    return document


def schema_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


async def test_every_field_has_a_meaning_and_every_route_its_errors(described: dict[str, Any]) -> None:
    structs = described["components"]["schemas"]
    for name in (
        "ChatRequest",
        "CompletionRequest",
        "EmbeddingRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
        "AdapterRequest",
        "LoadRequest",
    ):
        assert structs[name]["additionalProperties"] is False
        for field, schema in structs[name]["properties"].items():
            assert schema.get("description"), f"{name}.{field}"
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["tags"][0] in {tag["name"] for tag in described["tags"]}, where
            assert {"403", "431", "503", "default"} <= operation["responses"].keys(), where
            if "requestBody" in operation:
                assert {"400", "413", "415"} <= operation["responses"].keys(), where
    groups = {path: operation["tags"] for path, methods in described["paths"].items() for operation in methods.values()}
    assert (groups["/v1/chat/completions"], groups["/v1/keys"], groups["/metrics"]) == (["generate"], ["keys"], ["service"])
    assert re.findall(r'"\$ref": "([^"]+)"', str(described).replace("'", '"'))


async def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    for reference in set(re.findall(r"'\$ref': '#/([^']+)'", str(described))):
        at: Any = described
        for key in reference.split("/"):
            at = at[key]
    for name, schema in described["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema), name


async def test_the_description_has_every_route_that_is_served(mesh: Mesh, described: dict[str, Any]) -> None:
    served = set()
    entrance = build_app(mesh.gateway)
    app = entrance._app  # private: routes are inside the entrance
    for route in app.routes:
        for method in route.methods:
            served.add((method.lower(), re.sub(r"{name:\w+}", "{name}", route.path)))
    own = {("get", "/openapi.json"), *((m, p) for m, p in served if p.startswith("/docs"))}
    assert served - own == {(method, path) for path, methods in described["paths"].items() for method in methods}


async def test_answers_are_what_the_description_says(
    mesh: Mesh, http: aiohttp.ClientSession, described: dict[str, Any]
) -> None:
    mesh.say("hello world")
    cases: list[tuple[str, str, dict[str, Any] | None, str]] = [
        ("POST", "/v1/chat/completions", CHAT, "ChatCompletion"),
        ("POST", "/v1/chat/completions", CHAT | {"return_token_ids": True, "n": 2}, "ChatCompletion"),
        ("POST", "/v1/completions", {"prompt": "x", "stop": "wor"}, "Completion"),
        ("POST", "/v1/completions", {"prompt": ["x", "y"], "return_token_ids": True, "echo": True}, "Completion"),
        ("POST", "/tokenize", {"prompt": "x", "return_token_strs": True}, "Tokens"),
        ("POST", "/tokenize", CHAT, "Tokens"),
        ("POST", "/detokenize", {"tokens": [5, 6]}, "Text"),
        ("GET", "/v1/models", None, "Models"),
        ("GET", "/v1/models/upper", None, "Model"),
        ("GET", "/v1/adapters", None, "Adapters"),
        ("GET", "/v1/adapters/upper", None, "Adapter"),
        ("GET", "/v1/status", None, "Status"),
        ("GET", "/health", None, "Health"),
        ("GET", "/ready", None, "Ready"),
        ("GET", "/version", None, "Version"),
        ("GET", "/nothing", None, "ErrorAnswer"),
        ("GET", "/v1/adapters/nobody", None, "ErrorAnswer"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "nobody"}, "ErrorAnswer"),
        ("POST", "/v1/load_lora_adapter", {"lora_name": ""}, "ErrorAnswer"),
    ]
    for method, path, body, name in cases:
        async with http.request(method, mesh.url + path, json=body) as answer:
            jsonschema.Draft202012Validator(schema_of(described, name)).validate(await answer.json())


@pytest.mark.parametrize(
    ("path", "asked", "whole", "chunk"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}, "ChatCompletion", "ChatChunk"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "Completion", "TextChunk"),
    ],
)
async def test_log_probabilities_and_events_are_what_the_description_says(
    mesh: Mesh, http: aiohttp.ClientSession, described: dict[str, Any], path: str, asked: dict[str, Any], whole: str, chunk: str
) -> None:
    asked |= {"return_token_ids": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for number, body in enumerate((asked, asked | streamed), 1):
        asking = asyncio.ensure_future(http.post(mesh.url + path, json=body))
        request = await assigned(mesh.first, number)
        scores = [TokenLogprobs(-1.0, [40], [-1.0])]
        await mesh.first.emit(request, 0, [40], logprobs=scores)
        await mesh.first.emit(request, 1, [41], "length", logprobs=scores)
        async with await asking as answer:
            text = await answer.text()
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        assert len(events) == (4 if number == 2 else 0)  # the role or the prompt, two tokens, the usage
        for shown in events or [text]:
            jsonschema.Draft202012Validator(schema_of(described, chunk if events else whole)).validate(json.loads(shown))


def test_fields_that_an_answer_always_has_are_required_and_have_no_default() -> None:
    described = schemas({}, [ChatCompletion])["ChatCompletion"]
    assert {"id", "object", "usage"} <= set(described["required"]) and "prompt_logprobs" not in described["required"]
    assert described["properties"]["object"] == {"enum": ["chat.completion"]}
    assert described["additionalProperties"] is False


def test_what_the_schema_takes_the_parser_takes() -> None:
    described = {"components": {"schemas": schemas({protocol.ChatRequest: with_unserved(fields.CHAT)}, [])}}
    chat = jsonschema.Draft202012Validator(schema_of(described, "ChatRequest"))
    bodies: list[tuple[dict[str, Any], bool]] = [
        (CHAT, True),
        (CHAT | {"tools": [], "tool_choice": "auto", "user": "x", "metadata": {"a": 1}, "length_penalty": 1.0}, True),
        (CHAT | {"stop": ["a"] * 16, "logit_bias": {"5": 1}, "top_logprobs": 20, "logprobs": True}, True),
        (CHAT | {"tools": [{}]}, False),
        (CHAT | {"nonsense": 1}, False),
        (CHAT | {"stop": ["a"] * 17}, False),
        (CHAT | {"logit_bias": {"a": 1}}, False),
        (CHAT | {"response_format": {"type": "json_object"}}, True),
        (CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, True),
        (CHAT | {"response_format": {"type": "yaml"}}, False),
        (CHAT | {"structured_outputs": {"choice": ["a", "b"]}}, True),
        (CHAT | {"structured_outputs": {"choice": []}}, False),
        (CHAT | {"regex": ""}, False),
        (CHAT | {"allowed_token_ids": []}, False),
        ({"messages": [{"role": "user"}]}, False),
        ({"messages": [{"role": "assistant"}]}, True),
        ({}, False),
    ]
    for body, good in bodies:
        assert chat.is_valid(body) is good, body
        try:
            protocol.parse_chat(msgspec.json.encode(body)).conversation()
        except Exception:
            assert not good, body
        else:
            assert good, body


async def test_the_page_needs_nothing_from_elsewhere(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/docs") as answer:
        assert answer.status == 200
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        page = await answer.text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(loaded) == 3
    for address in [*loaded, "openapi.json"]:
        assert "//" not in address
        async with http.get(f"{mesh.url}/{address}") as answer:
            assert answer.status == 200


async def test_with_keys_the_description_says_so_and_needs_none(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret acme\n")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(tmp_path / "keys")) as gateway:
        async with http.get(f"http://127.0.0.1:{gateway.port}/openapi.json") as answer:
            described = await answer.json()
        async with http.get(f"http://127.0.0.1:{gateway.port}/v1/models") as answer:
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "401" in described["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in described["paths"]["/health"]["get"]
