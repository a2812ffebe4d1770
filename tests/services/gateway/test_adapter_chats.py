"""Promise: chats with an adapter are what transformers makes of its files, and its template cannot hold up the gateway."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from motet.services.gateway.openai.profiles import ForeignTemplate, Profiles
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.openai.rendering import TENANT_WAITING_MAX, Renderers
from motet.services.gateway.service import GatewayService
from motet.shared import subjects
from motet.shared.adapter_chat import AdapterChat, Template, read_chat
from motet.shared.bus import Bus
from motet.shared.chat_sandbox import Render
from motet.shared.chat_templates import ChatTemplate
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, Overloaded
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import put_adapter, running_gateway
from tests.services.gateway.support_tokenizers import write_model_dir
from tests.support import eventually
from tests.support_templates import FOREVER, HOSTILE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

USER = [{"role": "user", "content": "hello world"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}{% if tools %}T{% endif %}"
)
FILES: dict[str, Any] = {
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps({"eos_token": "hell"}),  # a plain entry of the base's vocabulary
    "generation_config.json": json.dumps({"temperature": 0.25, "top_k": 7, "eos_token_id": [1, 5]}),
}


def chat_of(files: dict[str, str], model: Path) -> AdapterChat:
    """What the registry stores for these files."""
    tokenizer = Prompts(model).tokenizer
    chat = read_chat(files, tokenizer.get_vocab(with_added_tokens=True), [], 512)
    assert chat is not None
    return chat


class Stored:
    """What `AdapterWatch` finds."""

    def __init__(self, chat: AdapterChat) -> None:
        self._chat = chat

    def chat(self, digest: str) -> AdapterChat | None:
        return self._chat if digest == self._chat.digest else None


@pytest.fixture
async def renderers() -> AsyncIterator[Renderers]:
    made = Renderers()
    yield made
    await made.close()


@pytest.mark.parametrize(
    "files",
    [
        FILES,
        {"chat_template.jinja": TEMPLATE},
        {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "bos_token": "</s>", "eos_token": "<s>"})},
        {"additional_chat_templates/tool_use.jinja": "tools: {{ tools | tojson }}", "chat_template.jinja": TEMPLATE},
    ],
    ids=["all", "template", "settings", "two"],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
async def test_prompts_are_those_of_transformers_for_the_adapters_files(tmp_path: Path, files: dict[str, str], tools: Any):
    model = write_model_dir(tmp_path / "base")
    both = shutil.copytree(model, tmp_path / "both")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    for name, text in files.items():
        (both / name).parent.mkdir(exist_ok=True)
        (both / name).write_text(text)
    if "tokenizer_config.json" in files:
        (both / "tokenizer_config.json").write_text(json.dumps(settings | json.loads(files["tokenizer_config.json"])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(both))
    expected = tokenizer.apply_chat_template(USER, tools=tools, return_dict=False)

    prompts, chat = Prompts(model), chat_of(files, model)
    profiles = Profiles(prompts, Stored(chat), enabled=True)
    try:
        profile = profiles.of(chat.digest)
        template = profiles.template(profile, tools=bool(tools), tenant="a")
        assert isinstance(template, ForeignTemplate)
        found = prompts.rendered(
            await template.render(USER, variables={"tools": tools} if tools else None), whole=profile.whole
        )
    finally:
        await profiles.close()
    assert found == expected


async def test_a_template_that_the_base_has_too_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model_dir(tmp_path, chat_template=TEMPLATE)
    monkeypatch.setattr("asyncio.create_subprocess_exec", lambda *_, **__: pytest.fail("a process was started"))
    prompts, chat = Prompts(model), chat_of(FILES, model)
    profiles = Profiles(prompts, Stored(chat), enabled=True)
    template = profiles.template(profiles.of(chat.digest), tools=False, tenant="a")
    assert isinstance(template, ChatTemplate)
    own = prompts.chat(USER, template=template)
    assert prompts.tokenizer.decode(own, skip_special_tokens=False) == "<s>[user]hello worldhell"
    assert own != prompts.chat(USER)  # the base's template with the adapter's eos_token


async def test_each_hostile_template_is_refused_while_another_tenant_is_served_and_the_loop_runs(
    renderers: Renderers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("motet.services.gateway.openai.rendering.WALL_S", 60.0)  # the machine may be busy with other tests
    good = Render(source=TEMPLATE, special={}, messages=USER)
    assert await renderers.render("good", good) == "[user]hello world"  # the processes have started
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worst_s, done = 0.0, False

    async def watch() -> None:
        nonlocal worst_s
        while not done:
            began = now_s()
            await asyncio.sleep(0.01)  # time: what is measured is how late the loop wakes
            worst_s = max(worst_s, now_s() - began - 0.01)

    async def serve() -> int:
        served = 0
        while not done:
            assert await renderers.render("good", good) == "[user]hello world"
            served += 1
            await asyncio.sleep(0.02)  # time: between two chats of a tenant
        return served

    watching, serving = asyncio.create_task(watch()), asyncio.create_task(serve())
    try:
        for source in HOSTILE:
            with pytest.raises(BadRequest, match="chat template") as refused:
                await renderers.render("bad", Render(source=source, special={}, messages=USER))
            assert refused.value.param in ("messages", "model")
    finally:
        done = True
    await watching
    assert await serving > len(HOSTILE)
    assert worst_s < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024


async def test_one_tenant_can_only_have_so_many_chats_waiting(renderers: Renderers):
    task = Render(source=TEMPLATE, special={}, messages=USER)
    answers = await asyncio.gather(
        *(renderers.render("a", task) for _ in range(TENANT_WAITING_MAX + 3)),
        renderers.render("b", task),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 3
    assert answers[-1] == "[user]hello world"


async def test_a_chat_that_is_given_up_leaves_no_answer_behind(renderers: Renderers):
    slow = asyncio.create_task(renderers.render("a", Render(source=FOREVER, special={}, messages=USER)))
    await asyncio.sleep(0)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert await renderers.render("a", Render(source=TEMPLATE, special={}, messages=USER)) == "[user]hello world"


async def adapter_with(bus: Bus, gateway: GatewayService, model: Path, files: dict[str, str], name: str = "own") -> None:
    """What the registry writes for an adapter with these files."""
    chat = chat_of(files, model)
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    await kv.put(f"chat.{chat.digest}", msgspec.json.encode(chat))
    await put_adapter(bus, name, chat=chat.digest)
    await eventually(lambda: gateway.adapters.resolve(name))


async def test_requests_on_the_adapter_use_its_template_tokens_and_defaults_and_others_do_not(
    mesh: Mesh, http: aiohttp.ClientSession, tmp_path: Path
):
    await adapter_with(mesh.bus, mesh.gateway, tmp_path / "demo", FILES)
    tokenizer = mesh.gateway.prompts.tokenizer
    eos = tokenizer.token_to_id("hell")
    mesh.say("ab")
    for model in ("own", "upper"):
        async with http.post(f"{mesh.url}/v1/chat/completions", json={"model": model, "messages": USER, "top_k": 3}) as answer:
            assert answer.status == 200, await answer.text()
    own, upper = mesh.scheduler.submitted
    assert tokenizer.decode(unpack_tokens(own.prompt), skip_special_tokens=False).startswith("<s>[user]hello world")
    assert own.sampling.stop_token_ids == (eos, 1, 5) and own.sampling.temperature == 0.25 and own.sampling.top_k == 3
    assert upper.sampling.stop_token_ids == () and upper.sampling.temperature == 1.0
    assert own.prompt != upper.prompt
    async with http.post(f"{mesh.url}/tokenize", json={"model": "own", "messages": USER}) as answer:
        assert (await answer.json())["tokens"] == unpack_tokens(own.prompt)
    async with http.get(f"{mesh.url}/v1/adapters/own") as answer:
        shown = (await answer.json())["chat"]
    assert shown["templates"] == {"default": TEMPLATE} and shown["special_tokens"]["eos_token"] == "hell"
    assert shown["generation"] == {"temperature": 0.25, "top_k": 7} and shown["eos_token_ids"] == [1, 5]


async def test_special_tokens_of_the_adapter_are_left_out_of_its_texts_and_end_answers_without_a_reason(
    mesh: Mesh, http: aiohttp.ClientSession, tmp_path: Path
):
    files = {"tokenizer_config.json": json.dumps({"eos_token": "hello", "additional_special_tokens": ["Ġworld"]})}
    assert " world" in mesh.gateway.prompts.tokenizer.decode([mesh.gateway.prompts.tokenizer.token_to_id("Ġworld")])
    await adapter_with(mesh.bus, mesh.gateway, tmp_path / "demo", files)
    mesh.say("ab world ab")
    async with http.post(f"{mesh.url}/v1/chat/completions", json={"model": "own", "messages": USER}) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == "ab ab"


async def test_without_adapter_chats_the_base_models_template_is_used(
    mesh: Mesh, http: aiohttp.ClientSession, tmp_path: Path, nats_url: str
):
    await adapter_with(mesh.bus, mesh.gateway, tmp_path / "demo", FILES)
    mesh.say("ab")
    async with running_gateway(nats_url, tmp_path, adapter_chats=False, instance_id="g2") as other:
        await eventually(lambda: not other.not_ready() and other.adapters.resolve("own"))
        url = f"http://127.0.0.1:{other.port}/v1/chat/completions"
        for model in ("own", "upper"):
            async with http.post(url, json={"model": model, "messages": USER}) as answer:
                assert answer.status == 200
    own, upper = mesh.scheduler.submitted
    assert own.prompt == upper.prompt and own.sampling.stop_token_ids == ()


async def test_a_hostile_template_is_a_400_for_its_request(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("motet.services.gateway.openai.rendering.WALL_S", 60.0)
    chat = AdapterChat(templates={"default": Template(source="{{ 9 ** (9 ** 9) }}", reads=(), takes_images=False)})
    kv = await mesh.bus.key_value(subjects.KV_ADAPTERS)
    await kv.put(f"chat.{chat.digest}", msgspec.json.encode(chat))
    await put_adapter(mesh.bus, "bad", chat=chat.digest)
    await eventually(lambda: mesh.gateway.adapters.resolve("bad"))
    async with http.post(f"{mesh.url}/v1/chat/completions", json={"model": "bad", "messages": USER}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "messages") and "takes more than 1 s" in error["message"]
