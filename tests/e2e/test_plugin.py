"""Promise: one file adds a policy, an eviction, a source of adapters, an endpoint, a kind of requests and an engine."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from motet.cli.client import ApiError, Client
from tests.e2e.live import ROOT, LiveStack

PLUGIN = ROOT / "examples" / "plugin.py"
PAGE = ROOT / "docs" / "extending.md"
CHOSEN = ("--plugins", str(PLUGIN), "--policy", "last-by-name", "--adapter-eviction", "largest-first", "--engine", "echo")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    live = LiveStack(tmp_path_factory.mktemp("plugin"), *CHOSEN, workers=2)
    live.launch()
    try:
        live.wait_ready()
        yield live
    finally:
        live.stop()


async def finished(stack: LiveStack, worker: str) -> float:
    """The requests that ended on a worker."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(stack.facts().services[worker]["ops_url"] + "/metrics") as answer,
    ):
        lines = re.findall(r"^motet_worker_finished_total\{.*\} (.*)$", await answer.text(), re.MULTILINE)
    return sum(map(float, lines))


async def test_all_six_work_in_one_running_mesh(stack: LiveStack) -> None:
    async with Client(stack.facts().urls[0]) as client:
        for n in range(6):
            answer = await client.call("POST", "/v1/echoes", json={"text": f"hello {n}"})
            assert answer["object"] == "echo" and answer["text"].strip() == f"hello {n}"
            assert answer["usage"]["completion_tokens"] == answer["usage"]["prompt_tokens"] > 0
        assert [await finished(stack, worker) for worker in ("worker-1", "worker-2")] == [0, 6], "the policy takes the last one"

        before = (await client.call("GET", "/v1/adapter-count"))["adapters"]
        card = await client.call("POST", "/v1/adapters", json={"name": "mine", "source": "sample:upper-case"})
        assert card["source"] == "sample:upper-case"
        assert (await client.call("GET", "/v1/adapter-count"))["adapters"] == before + 1

        status = await client.call("GET", "/v1/status")
        assert {worker["engine"] for worker in status["workers"]} == {"echo"}
        paths = (await client.call("GET", "/openapi.json"))["paths"]
        assert paths["/v1/echoes"]["post"]["summary"] == "Say it again."
        assert paths["/v1/adapter-count"]["get"]["summary"] == "Count the adapters."


async def test_what_a_plugin_adds_refuses_as_the_rest_does(stack: LiveStack) -> None:
    async with Client(stack.facts().urls[0]) as client:
        for path, body, wrong in (
            ("/v1/echoes", {"txt": "hello"}, "txt"),
            ("/v1/echoes", {"text": 1}, "text"),
            ("/v1/echoes", {"text": "hello", "model": "nobody"}, "nobody"),
            ("/v1/adapters", {"name": "other", "source": "sample:nothing"}, "nothing"),
            ("/v1/adapters", {"name": "other", "source": "shelf:nothing"}, "shelf"),
        ):
            with pytest.raises(ApiError) as refused:
                await client.call("POST", path, json=body)
            assert refused.value.status in (400, 404) and wrong in str(refused.value)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "motet", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)


async def test_the_simulator_knows_what_a_plugin_adds() -> None:
    short = (
        "simulate",
        "--json",
        "--workers",
        "2",
        "--duration-s",
        "30",
        "--rate",
        "6",
        "--adapters",
        "60",
        "--set",
        "max_loras=4",
    )
    added = ("--plugins", str(PLUGIN), "--policy", "last-by-name", "--set", "eviction=largest-first")
    known, unknown = await asyncio.gather(*(asyncio.to_thread(run, *short, *words) for words in (added, added[2:])))
    assert known.returncode == 0, known.stderr
    assert json.loads(known.stdout)["runs"]["last-by-name"]
    assert unknown.returncode == 2 and "--policy: 'last-by-name' is not one of motet" in unknown.stderr


def test_the_page_shows_the_code_of_the_plugin() -> None:
    code = PLUGIN.read_text()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        for part in block.strip().split("\n...\n"):
            assert part.strip() in code, part
