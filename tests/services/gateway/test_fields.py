"""Promise: nothing that an OpenAI, vLLM, SGLang or LoRAX client sends is dropped silently; docs/api.md says what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import openai.types.embedding_create_params as openai_embeddings
import openai.types.image_edit_params as openai_edits
import openai.types.image_generate_params as openai_images
import pytest

from motet.services.gateway.openai import embeddings, fields, image_requests, protocol
from motet.shared.errors import BadRequest

ROOT = Path(__file__).resolve().parents[3]
CLIENTS: dict[str, dict[str, list[str]]] = json.loads((ROOT / "docs" / "client_fields.json").read_text())
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
URL = "data:image/png;base64,aGVsbG8="


def _parse_edit(body: bytes) -> Any:
    return image_requests.parse_edit(body).request


KINDS = {
    "chat/completions": (protocol.parse_chat, CHAT, protocol.ChatRequest, fields.CHAT),
    "completions": (protocol.parse_completion, TEXT, protocol.CompletionRequest, fields.COMPLETION),
    "embeddings": (embeddings.parse, {"input": "x"}, embeddings.EmbeddingRequest, fields.EMBEDDING),
    "images/generations": (image_requests.parse, TEXT, image_requests.ImageRequest, fields.IMAGE),
    "images/edits": (_parse_edit, TEXT | {"image": URL}, image_requests.ImageEditRequest, fields.IMAGE_EDIT),
}


def parse(kind: str, **more: Any) -> Any:
    parse, base, *_ = KINDS[kind]
    return parse(json.dumps(base | more).encode())


def served(kind: str) -> set[str]:
    return {field.name for field in msgspec.structs.fields(KINDS[kind][2])}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_every_client_is_served_or_has_its_answer(kind: str) -> None:
    known = served(kind) | set(KINDS[kind][3])
    for client, names in CLIENTS[kind].items():
        assert not set(names) - known, client
    assert not served(kind) & set(KINDS[kind][3]), "a field is either served or not"


def test_the_list_of_openai_fields_is_that_of_its_client() -> None:
    for kind, module in (("chat/completions", openai_chat), ("completions", openai_completions)):
        assert set(module.CompletionCreateParamsStreaming.__annotations__) | {
            name for base in module.CompletionCreateParamsBase.__mro__ for name in getattr(base, "__annotations__", {})
        } == set(CLIENTS[kind]["OpenAI"])
    for kind, base in (
        ("images/generations", openai_images.ImageGenerateParamsBase),
        ("images/edits", openai_edits.ImageEditParamsBase),
    ):
        assert {*base.__annotations__, "stream"} == set(CLIENTS[kind]["OpenAI"])
    assert set(openai_embeddings.EmbeddingCreateParams.__annotations__) == set(CLIENTS["embeddings"]["OpenAI"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_unserved_field_is_refused_by_name_unless_its_value_asks_for_nothing(kind: str) -> None:
    for name, field in KINDS[kind][3].items():
        for value in field.harmless if field.harmless is not None else (None, "x", 7, {"a": 1}, [1]):
            parse(kind, **{name: value})
        if field.harmless is not None:
            for value in ("something", 12345, {"a": 1}, [{"type": "x"}]):
                with pytest.raises(BadRequest, match="not supported") as refused:
                    parse(kind, **{name: value})
                assert refused.value.param == name


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused_by_name(kind: str) -> None:
    for more in ({"temprature": 0.1}, {"temprature": 0.1, "user": "me"}, {"temprature": None}):
        with pytest.raises(BadRequest, match="no such field") as refused:
            parse(kind, **more)
        assert refused.value.param == "temprature"
    if not kind.endswith("completions"):
        return
    assert "did you mean temperature?" in refused.value.message
    with pytest.raises(BadRequest) as refused:
        parse(kind, stream=True, stream_options={"x": 1})
    assert refused.value.param == "stream_options.x"


def test_zero_and_false_are_not_taken_for_each_other() -> None:
    for name, value in (("prompt_logprobs", False), ("use_beam_search", 0), ("routed_experts_prompt_start", False)):
        with pytest.raises(BadRequest):
            parse("chat/completions", **{name: value})


def test_fields_that_were_ignored_are_refused_or_served() -> None:
    for name, value in (("guided_regex", "a+"), ("structural_tag", {}), ("reasoning", {"effort": "low"})):
        with pytest.raises(BadRequest) as refused:
            parse("chat/completions", **{name: value})
        assert refused.value.param == name
    request = parse("completions", allowed_token_ids=[1], bad_words=["x"], truncate_prompt_tokens=3, priority=1, cache_salt="s")
    assert (request.allowed_token_ids, request.bad_words, request.priority, request.cache_salt) == ([1], ["x"], 1, "s")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [0] * 20_000),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 200),
        ("bad_words", ["x" * 300]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("priority", -1),
        ("cache_salt", ""),
        ("cache_salt", "x" * 2000),
        ("request_id", "two words"),
        ("rid", ["a"]),
        ("lora_path", ["a"]),
        ("stop_token_ids", [1] * 2000),
        ("return_token_ids", "yes"),
    ],
)
def test_limits_of_served_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        parse("completions", **{name: value})
    assert (refused.value.param or "").split("[")[0] == name
    assert len(refused.value.message) <= 2000
