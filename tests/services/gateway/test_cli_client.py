"""Promise: the command line's client streams and uploads, and its errors are one helpful line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from motet.cli.adapters import adapters, pack, upload
from motet.cli.client import ApiError, Client
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import put_adapter, running_gateway
from tests.services.gateway.test_adapters_api import FakeRegistry
from tests.support import eventually
from tests.support_adapters import write_adapter

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers every request with `data` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_answer_arrives_in_events_and_as_a_whole(mesh: Mesh) -> None:
    mesh.say("GOOD DAY")
    async with Client(mesh.url) as client:
        events = [event async for event in client.events("/v1/chat/completions", CHAT)]
        pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(pieces) == "GOOD DAY" and len(pieces) > 2
        whole = await client.call("POST", "/v1/chat/completions", json=CHAT)
        assert whole["choices"][0]["message"]["content"] == "GOOD DAY"
        with pytest.raises(ApiError, match="nobody") as refused:
            await client.call("POST", "/v1/chat/completions", json=CHAT | {"model": "nobody"})
        assert refused.value.status == 404


async def test_a_directory_and_an_archive_are_uploaded_as_a_form(mesh: Mesh, connect, tmp_path: Path) -> None:
    registry = FakeRegistry(await connect("registry"))
    await registry.start()
    adapter = write_adapter(tmp_path / "mine")
    archive = tmp_path / "mine.tar"
    archive.write_bytes(pack(adapter).read())
    async with Client(mesh.url) as client:
        assert (await upload(client, "from-directory", adapter))["name"] == "from-directory"
        assert (await upload(client, "from-archive", archive, replace=True, tenant=""))["name"] == "from-archive"
    assert registry.uploads == [archive.read_bytes()] * 2
    assert [(ask.name, ask.replace, ask.tenant) for ask in registry.asked] == [
        ("from-directory", False, ""),
        ("from-archive", True, ""),
    ]


async def test_a_lora_file_is_uploaded_as_it_is_alone_or_from_its_folder(mesh: Mesh, connect, tmp_path: Path) -> None:
    registry = FakeRegistry(await connect("registry"))
    await registry.start()
    folder = tmp_path / "style"
    folder.mkdir()
    (folder / "other.safetensors").write_bytes(b"other")
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    async with Client(mesh.url) as client:
        assert (await upload(client, "bare", folder / "other.safetensors"))["name"] == "bare"
        assert (await upload(client, "folder", folder))["name"] == "folder"
        (folder / "pytorch_lora_weights.safetensors").rename(folder / "second.safetensors")
        with pytest.raises(click.UsageError, match=r"holds 2 safetensors files \(other.safetensors, second.safetensors\)"):
            await upload(client, "several", folder)
        weights_alone = write_adapter(tmp_path / "peft")
        (weights_alone / "adapter_config.json").unlink()
        with pytest.raises(click.UsageError, match=r"has no adapter_config\.json"):
            await upload(client, "half", weights_alone)
    assert registry.uploads == [b"other", b"weights"]


async def test_lists_and_cards_show_what_an_image_adapter_changes(mesh: Mesh, bus) -> None:
    await put_adapter(bus, "ink", modules=("conv1", "to_q"), layers=0, family="sd15", sites=42)
    await eventually(lambda: mesh.gateway.adapters.resolve("ink", "") is not None)

    async def shown(*command: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, adapters, [*command, "--url", mesh.url], env={"COLUMNS": "250"})
        assert result.exit_code == 0, result.output
        return result.output

    listed = await shown("list")
    assert "sd15, 42 sites: conv1 to_q" in listed and "q v" in listed
    lines = dict(line.split(maxsplit=1) for line in (await shown("show", "ink")).splitlines() if " " in line.strip())
    assert (lines["family"], lines["sites"], lines["modules"]) == ("sd15", "42", "conv1, to_q")
    assert "family" not in await shown("show", "upper")


async def test_a_missing_key_is_named_with_the_variable_that_brings_it(mesh: Mesh, nats_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mtt_mine acme admin\n")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(keys)) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        async with Client(url, api_key="") as client:
            with pytest.raises(ApiError, match="MOTET_API_KEY") as refused:
                await client.models()
            assert refused.value.status == 401
        async with Client(url, api_key="mtt_mine") as client:
            assert (await client.models())[0]["id"] == "demo"


async def test_a_gateway_that_is_not_there_and_one_that_goes_away_are_told_apart() -> None:
    async with answering(b"") as url, Client(url) as client:
        with pytest.raises(ApiError, match=r"no gateway answers.*motet up"):
            await client.call("GET", "/v1/models")
    async with Client(url) as client:
        with pytest.raises(ApiError, match=r"no gateway answers.*motet up"):
            await client.call("GET", "/v1/models")
    half = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\ndata: {"choices":[]}\n\n'
    async with answering(half) as url, Client(url) as client:
        seen = []
        with pytest.raises(ApiError, match="broke"):
            async for event in client.events("/v1/completions", {}):
                seen += [event]
        assert seen == [{"choices": []}]


async def test_an_error_in_the_middle_of_a_stream_is_raised_with_its_status() -> None:
    body = b': keep-alive\n\ndata: {"choices":[]}\n\ndata: {"error":{"message":"no worker is left","status":503}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    async with answering(head + body) as url, Client(url) as client:
        with pytest.raises(ApiError, match="no worker is left") as failed:
            _ = [event async for event in client.events("/v1/completions", {})]
        assert failed.value.status == 503
