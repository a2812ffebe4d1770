"""Promise: logs, metrics and files of a mesh contain no prompts, answers or keys.

A mesh with keys and with log level debug gets valid and invalid requests over HTTP and NATS; then its files are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from motet.cli.client import ApiError, Client
from motet.cli.credentials import password_file
from motet.cli.stack import StackFacts
from motet.shared import subjects
from tests.e2e.live import BASE, LiveStack

MARK = "zebrafinch"  # in every prompt
KEY = "mtt_quokka-of-the-administrator"
WRONG = "mtt_wombat-of-nobody"
TENANT = "acme"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    directory = tmp_path_factory.mktemp("guarded")
    keys = directory / "keys.txt"
    keys.write_text(f"{KEY} ops admin\n")
    live = LiveStack(directory, "--api-keys-file", str(keys), "--tenants", TENANT, "--verbose")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOTET_LOG_LEVEL", "debug")
        live.launch()
    try:
        live.wait_ready()
        yield live
    finally:
        live.stop()


def test_a_mesh_that_others_can_reach_does_not_start_without_keys(tmp_path: Path) -> None:
    live = LiveStack(tmp_path, "--host", "0.0.0.0")
    live.launch()
    assert live.process is not None and live.process.wait(60) == 1
    said = live.output.read_text()
    assert "gateway-1 cannot start: " in said and "motet keys create" in said and "--api-keys off" in said


async def ask_well_and_badly(facts: StackFacts, key: str) -> None:
    """Valid and invalid requests of every kind, with MARK wherever a client puts its text."""
    chat = {"model": "upper-case", "messages": [{"role": "user", "content": MARK}], "max_tokens": 8}
    bad: list[dict[str, Any]] = [
        chat | {"temperature": -1},
        chat | {"model": "nobody"},
        chat | {"messages": [{"role": "user", "content": [MARK]}]},
        chat | {"messages": MARK},
        chat | {"messages": [{"role": "user", "content": f"{MARK} " * 20_000}]},
        chat | {"stop": [MARK] * 1000},
        chat | {"logit_bias": {MARK: 1}},
    ]
    async with Client(facts.urls[0], api_key=key) as client:
        await client.call("POST", "/v1/chat/completions", json=chat)
        await client.call("POST", "/v1/completions", json={"model": BASE, "prompt": MARK, "max_tokens": 4, "logprobs": 2})
        await client.call("POST", "/tokenize", json={"prompt": MARK})
        async for _ in client.events("/v1/chat/completions", chat):
            break  # this client leaves
        for body in bad:
            with contextlib.suppress(ApiError):
                await client.call("POST", "/v1/chat/completions", json=body)
        with contextlib.suppress(ApiError):
            await client.call("POST", "/v1/chat/completions", content=f'{{"messages": "{MARK}')
    async with Client(facts.urls[0], api_key=WRONG) as client:
        for path in ("/v1/chat/completions", "/v1/keys"):
            with pytest.raises(ApiError):
                await client.call("POST", path, json=chat)


async def publish_well_and_badly(facts: StackFacts) -> None:
    secret = password_file(Path(facts.credentials_dir), f"upstream-{TENANT}").read_text().strip()
    inbox = f"_INBOX_upstream-{TENANT}".encode()
    client = await nats.connect(facts.nats_url, user=f"upstream-{TENANT}", password=secret, inbox_prefix=inbox)
    results = await client.subscribe(subjects.results(TENANT, "*"))
    good = {"request_id": "good", "model": "upper-case", "prompt": MARK, "max_tokens": 4}
    bodies = [json.dumps(good), json.dumps(good | {"request_id": "bad", "temperature": MARK}), f"{MARK}, no JSON"]
    for body in bodies:
        await client.jetstream().publish(subjects.requests(TENANT), body.encode())
    for _ in bodies:
        await results.next_msg(timeout=30)
    await client.close()


async def test_no_log_and_no_file_contains_a_prompt_an_answer_or_a_key(guarded: LiveStack) -> None:
    facts = guarded.facts()
    async with Client(facts.urls[0], api_key=KEY) as client:
        made = await client.call("POST", "/v1/keys", json={"tenant": TENANT, "name": "the test"})
    await ask_well_and_badly(facts, made["key"])
    await publish_well_and_badly(facts)
    guarded.stop()
    jetstream = guarded.data_dir / "nats" / "jetstream"  # holds the durable requests: that is what it is for
    read = [path for path in guarded.data_dir.rglob("*") if path.is_file() and jetstream not in path.parents]
    assert {"gateway-1.log", "worker-1.log", "nats.log", "scheduler-1.log", "registry.log"} <= {path.name for path in read}
    for path in [*read, guarded.output]:
        text = path.read_bytes().lower()
        for word in (MARK, MARK.upper(), KEY, WRONG, made["key"]):
            assert word.lower().encode() not in text, f"{path} tells {word}"
    stored = b"".join(path.read_bytes() for path in jetstream.rglob("*") if path.is_file())
    assert made["id"].encode() in stored and made["key"].encode() not in stored and KEY.encode() not in stored
