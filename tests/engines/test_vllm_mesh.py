"""Promise: a mesh on vLLM answers what the API offers. It loses no request when core, worker or engine is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from motet.examples.demo import BASE, DEMO
from motet.examples.demo.tasks import TASKS
from tests.docs.support_pages import MIGRATION, table
from tests.e2e.asking import PROMPT, answered
from tests.e2e.live import LiveStack
from tests.engines.conftest import NO_WHITESPACE
from tests.engines.support_mesh import START_S, core_of, go_on_through, native_worker, said, serving, vllm_stack, workers
from tests.support import eventually

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")
SCHEMA = {"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A mesh whose model has a chat template that reads tools."""
    model = shutil.copytree(DEMO / "model", tmp_path_factory.mktemp("vllm-model") / BASE)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{%- for tool in tools or [] %}{%- endfor %}" + tokenizer["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with vllm_stack(tmp_path_factory.mktemp("vllm-stack"), model, NO_WHITESPACE) as live:
        yield live


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[Client]:
    async with Client(stack.facts().urls[0], timeout_s=120.0) as client:
        yield client


async def test_chat_adapters_and_streams_are_answered(client: Client) -> None:
    for model in ("upper-case", "reverse", "rot13", "title-case", "swap-case"):  # more than slots
        task = next(one for one in TASKS if one.adapter == model)
        assert await answered(client, model, "hello there") == task.expected("hello there")
    body = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
    assert (await client.call("POST", "/v1/chat/completions", json=body))["usage"]["completion_tokens"] == 4
    [worker] = await workers(client)
    assert (worker["engine"], worker["capabilities"]) == ("vllm", ["prompt_logprobs", "structured"])


async def test_structured_outputs_are_what_was_asked_for(client: Client) -> None:
    formatted = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
    assert set(json.loads(await said(client, response_format=formatted))) == {"big"}
    assert re.fullmatch("[ab]{3}-[0-9]", await said(client, structured_outputs={"regex": "[ab]{3}-[0-9]"}))
    assert await said(client, model="upper-case", structured_outputs={"choice": ["left", "right"]}) in ("left", "right")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "measure"}}], ids=["any", "named"])
async def test_a_tool_is_called_where_one_must_be(client: Client, choice: Any) -> None:
    body = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "temperature": 0}
    body |= {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    message = (await client.call("POST", "/v1/chat/completions", json=body))["choices"][0]["message"]
    assert message.get("tool_calls"), message
    function = message["tool_calls"][0]["function"]
    assert function["name"] == "measure" and set(json.loads(function["arguments"])) == {"big"}


async def test_log_probabilities_of_the_prompt_are_returned(client: Client) -> None:
    body = {"model": "upper-case", "prompt": PROMPT("hello"), "max_tokens": 1, "prompt_logprobs": 2}
    choice = (await client.call("POST", "/v1/completions", json=body))["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and others and all(2 <= len(one) <= 3 for one in others)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "upper-case", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"model": BASE, "prompt": "x", "max_tokens": 1},
    "/v1/load_lora_adapter": {"lora_name": "loaded", "lora_path": str(DEMO / "adapters" / "upper-case")},
    "/v1/unload_lora_adapter": {"lora_name": "loaded"},
    "/v1/embeddings": {"model": BASE, "input": "x"},
    "/tokenize": {"model": BASE, "prompt": "x"},
    "/detokenize": {"model": BASE, "tokens": [90]},
}


async def test_every_endpoint_of_the_migration_page_answers_as_it_says(client: Client) -> None:
    rows = table(MIGRATION, "## Endpoints")
    assert BODIES.keys() <= {row[0].strip("`").split(" ")[1] for row in rows}
    for endpoint, served, _ in rows:
        method, path = endpoint.strip("`").split(" ")
        asked = client.call(method, path, **({"json": BODIES.get(path, {})} if method == "POST" else {}))
        if served == "served":
            await asked
        else:
            with pytest.raises(ApiError) as refused:
                await asked
            assert str(refused.value.status) == served, endpoint


def test_every_flag_on_the_left_of_the_migration_page_is_one_of_vllm_serve() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    actions = parser._actions  # private: argparse lists its options nowhere else
    theirs = {f"`{option}`" for action in actions for option in action.option_strings}
    assert {row[0] for row in table(MIGRATION, "## Flags")} <= theirs


async def test_no_stream_is_lost_when_the_core_is_killed(stack: LiveStack, client: Client) -> None:
    async def kill() -> None:
        [core] = core_of(stack.pid("worker-1"))
        os.kill(core, signal.SIGKILL)

    await go_on_through(client, kill)
    [worker] = await workers(client)
    assert worker["worker_id"] == "worker-1" and stack.facts().services["worker-1"]["restarts"] == 0


async def test_adapters_come_and_go_under_load(client: Client) -> None:
    async def load(number: int) -> list[str]:
        return [await answered(client, TASKS[number].adapter, "hello there") for _ in range(6)]

    async def change() -> None:
        for turn in range(4):
            await upload(client, f"added-{turn}", DEMO / "adapters" / "upper-case")
            assert await answered(client, f"added-{turn}", "hello there") == "HELLO THERE"
            await client.call("DELETE", f"/v1/adapters/added-{turn}")

    *answers, _ = await asyncio.gather(*(load(number) for number in range(5)), change())
    assert answers == [[TASKS[number].expected("hello there")] * 6 for number in range(5)]


async def test_no_stream_is_lost_when_the_worker_is_killed(stack: LiveStack, client: Client) -> None:
    async def kill() -> None:
        [core] = core_of(stack.pid("worker-1"))
        stack.kill("worker-1")
        await eventually(lambda: not Path(f"/proc/{core}").exists(), within_s=20)  # vLLM does not outlive its worker

    await go_on_through(client, kill)


async def test_greedy_streams_move_to_another_engine_and_back(stack: LiveStack, client: Client) -> None:
    """They continue exactly as they would have. Requests that need vLLM never go to the native worker."""
    async with native_worker(stack) as start:

        async def to_native() -> None:
            await start()
            await eventually(lambda: serving(client, "native"), within_s=60, every_s=0.1)
            os.kill(stack.pid("worker-1"), signal.SIGTERM)  # the stack starts another one

        await go_on_through(client, to_native, tokens=1500)
        await eventually(lambda: serving(client, "worker-1"), within_s=START_S, every_s=0.5)
        assert {worker["engine"] for worker in await workers(client)} == {"vllm", "native"}
        for _ in range(6):
            assert await said(client, structured_outputs={"choice": ["left", "right"]}) in ("left", "right")

        async def to_vllm() -> None:
            assert any(worker["running"] for worker in await workers(client) if worker["engine"] == "native")
            (await start()).send_signal(signal.SIGTERM)

        await go_on_through(client, to_vllm, tokens=1500)
        assert not await serving(client, "native")
