"""Promise: what an adapter brings for chats is stored with its version, or refused by name, or left behind on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet.services.registry.chats import ChatReader
from motet.services.registry.claims import LOST_HOLD_S
from motet.shared import subjects
from motet.shared.adapter_chat import AdapterChat
from motet.shared.errors import Conflict, InvalidAdapter
from motet.shared.wire.registry import AdapterInfo, RegisterAdapter
from tests.services.registry.conftest import Client
from tests.support import eventually
from tests.support_adapters import write_adapter
from tests.support_malformed import malformed_chats

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
BASE = {"<s>": 0, "<|im_end|>": 7, "plain": 9}


def texts(directory: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


async def stored(client: Client, info: AdapterInfo) -> AdapterChat | None:
    if not info.version.chat:
        return None
    kv = await client.bus.key_value(subjects.KV_ADAPTERS)
    found = await kv.get(f"chat.{info.version.chat}")
    return msgspec.json.decode(found.value or b"", type=AdapterChat)


async def register(client: Client, name: str, path: Path, **how: Any) -> AdapterInfo:
    return (await client.ask("register", RegisterAdapter(name=name, kind="path", location=str(path), **how)))[0]


FILES: dict[str, object] = {
    "chat_template.jinja": TEMPLATE,
    "additional_chat_templates/tool_use.jinja": "tools" + TEMPLATE,
    "tokenizer_config.json": {"eos_token": "<|im_end|>", "model_max_length": 1},
    "generation_config.json": {"temperature": 0.6, "eos_token_id": 7, "do_sample": True},
    "README.md": "not read",
}


@pytest.mark.parametrize("packed", [False, True])
async def test_templates_tokens_and_defaults_are_stored_with_the_version(client: Client, roots: Path, packed: bool):
    directory = texts(write_adapter(roots / "mine"), FILES)
    location = Path(shutil.make_archive(str(roots / "mine"), "gztar", roots, "mine")) if packed else directory
    info = await register(client, "mine", location)
    chat = await stored(client, info)
    assert chat is not None
    assert {name: one.source for name, one in chat.templates.items()} == {"default": TEMPLATE, "tool_use": "tools" + TEMPLATE}
    assert chat.templates["default"].reads == ("eos_token", "messages")
    assert chat.special == {"eos_token": "<|im_end|>"} and chat.special_tokens == ("<|im_end|>",)
    assert chat.generation.temperature == 0.6 and chat.eos_token_ids == (7,)


async def test_another_template_is_another_version_and_without_it_the_weights_are_what_they_were(client: Client, roots: Path):
    plain = await register(client, "plain", write_adapter(roots / "plain"))
    directory = texts(write_adapter(roots / "chatty"), {"chat_template.jinja": TEMPLATE})
    first = await register(client, "chatty", directory)
    texts(directory, {"chat_template.jinja": TEMPLATE + "!"})
    second = await register(client, "chatty", directory, replace=True)
    third = await register(client, "chatty", directory, replace=True, chat=False)
    assert len({plain.entry.digest, first.entry.digest, second.entry.digest}) == 3
    assert second.entry.version == 2 and third.entry.digest == plain.entry.digest and third.version.chat == ""


async def test_what_no_version_brings_any_more_is_deleted(
    client: Client, registry: Any, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    info = await register(client, "mine", texts(write_adapter(roots / "mine"), FILES))
    store, key = registry.store, f"chat.{info.version.chat}"
    assert await store.sweep_chats([info.version.chat]) == 0 and key in await client.keys()
    clock = store.sweep_chats.__globals__["now_s"]
    monkeypatch.setitem(store.sweep_chats.__globals__, "now_s", lambda: clock() + LOST_HOLD_S + 1)
    again = await register(client, "again", roots / "mine")  # writes it again, so that it counts as used
    assert again.version.chat == info.version.chat
    assert await store.sweep_chats([info.version.chat]) == 0 and key in await client.keys()
    monkeypatch.setitem(store.sweep_chats.__globals__, "now_s", lambda: clock() + 2 * LOST_HOLD_S + 2)
    assert await store.sweep_chats([info.version.chat]) == 1
    await eventually(lambda: info.version.chat not in registry.adapters.chats)


async def test_different_templates_of_a_tenant_have_a_limit(
    start_registry: Any, connect: Any, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("motet.services.registry.service.TENANT_CHATS_BYTES_MAX", 600)
    registry = await start_registry()
    client = Client(await connect("gateway"), roots)
    directory = texts(write_adapter(roots / "mine"), {"chat_template.jinja": TEMPLATE})
    first = await register(client, "one", directory, tenant="acme")
    await eventually(lambda: first.version.chat in registry.adapters.chats and registry.adapters.owned("acme"))
    await register(client, "same", directory, tenant="acme")
    texts(directory, {"chat_template.jinja": TEMPLATE + "{# another #}" * 10})
    with pytest.raises(Conflict, match="this tenant's chat templates"):
        await register(client, "two", directory, tenant="acme")
    await register(client, "two", directory, tenant="other")


Read = Callable[[dict[str, Any]], AdapterChat | None]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads files for a base with the vocabulary `BASE`."""
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel(BASE, unk_token="plain"))
    tokenizer.add_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = ChatReader(tmp_path, vocab_size=16)

    def of(settings: dict[str, Any]) -> AdapterChat | None:
        return reader.read({"tokenizer_config.json": json.dumps(settings).encode()})

    return of


def test_special_tokens_that_are_plain_entries_of_the_base_are_honoured(read: Read):
    chat = read({"eos_token": "<|im_end|>", "bos_token": "<s>", "pad_token": "[PAD]", "additional_special_tokens": ["plain"]})
    assert chat is not None and chat.special["eos_token"] == "<|im_end|>"
    assert chat.special_tokens == ("<|im_end|>", "plain")  # not <s>, which the base leaves out; not [PAD], which nobody writes
    assert read({"eos_token": None}) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"eos_token": "<new>"}, "'<new>' is not in the base model's vocabulary"),
        ({"additional_special_tokens": ["<a>"]}, "'<a>' is not in the base model's vocabulary"),
        ({"added_tokens_decoder": {"10": {"content": "<b>"}}}, "'<b>' is not in the base model's vocabulary"),
        ({"added_tokens_decoder": {"3": {"content": "plain"}}}, "'plain' has the id 3"),
    ],
)
def test_tokens_that_the_base_does_not_have_are_refused_with_the_way_around(read: Read, settings: dict[str, Any], reason: str):
    with pytest.raises(InvalidAdapter, match=reason) as refused:
        read(settings)
    assert "--no-chat" in refused.value.message


CHATS = list(malformed_chats())


@pytest.mark.parametrize(("files", "reason"), [case[1:] for case in CHATS], ids=[case[0] for case in CHATS])
def test_hostile_and_broken_files_are_refused_by_name_within_the_limits(tmp_path: Path, files: dict[str, bytes], reason: str):
    with pytest.raises(InvalidAdapter) as refused:
        ChatReader(tmp_path, vocab_size=64).read(files)
    assert reason in refused.value.message and "--no-chat" in refused.value.message
