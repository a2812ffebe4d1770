"""A registry in this process, on the test's NATS server, and helpers to send it requests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.js import errors as js_errors

from motet.services.registry.claims import Holds
from motet.services.registry.config import RegistryConfig
from motet.services.registry.service import RegistryService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, from_info
from motet.shared.kv import Bucket
from motet.shared.model import PerfModel, RequestBrief, WorkerLimits
from motet.shared.wire.registry import (
    AdapterInfo,
    AliasAdapter,
    DeleteAdapter,
    ListAdapters,
    RegisterAdapter,
    RegistryOk,
    RegistryReply,
    RollbackAdapter,
)
from motet.shared.wire.worker_state import WorkerSnapshot
from tests.support_adapters import write_base


class Client:
    """Sends requests to the registry as a gateway does. Refusals are raised as their errors."""

    def __init__(self, bus: Bus, roots: Path) -> None:
        self.bus, self.roots = bus, roots

    async def ask(self, verb: str, message: msgspec.Struct) -> list[AdapterInfo]:
        reply = await self.bus.request(subjects.registry(verb), message, RegistryReply, timeout_s=30)
        if isinstance(reply, RegistryOk):
            return reply.adapters
        raise from_info(reply.error)

    async def register(self, name: str, location: Path | str, *, kind: str = "path", replace: bool = False) -> AdapterInfo:
        ask = RegisterAdapter(name=name, kind=kind, location=str(location), replace=replace)
        return (await self.ask("register", ask))[0]

    async def delete(self, name: str, *, force: bool = False) -> AdapterInfo:
        return (await self.ask("delete", DeleteAdapter(name=name, force=force)))[0]

    async def alias(self, name: str, target: str, *, follows: bool = False) -> AdapterInfo:
        return (await self.ask("alias", AliasAdapter(name=name, target=target, follows=follows)))[0]

    async def rollback(self, name: str, version: int = 0) -> AdapterInfo:
        return (await self.ask("rollback", RollbackAdapter(name=name, version=version)))[0]

    async def names(self, **page: Any) -> list[str]:
        return [info.entry.name for info in await self.ask("list", ListAdapters(**page))]

    async def refused(self, name: str, location: Path | str, **how: Any) -> MotetError:
        try:
            await self.register(name, location, **how)
        except MotetError as error:
            return error
        raise AssertionError(f"{name} was registered")

    async def blobs(self) -> set[str]:
        """Digests in the object store."""
        store = await self.bus.object_store(subjects.BLOBS)
        try:
            return {info.name for info in await store.list(ignore_deletes=True)}
        except js_errors.NotFoundError:
            return set()

    async def claims(self, digest: str) -> dict[str, str]:
        """The claims on a version in the adapters bucket: {hold id: holder}."""
        found = await (await Bucket.open(self.bus, subjects.KV_ADAPTERS)).get(f"holds.{digest}")
        return msgspec.json.decode(found.value, type=Holds).holders if found is not None else {}

    async def claim(self, digest: str, holder: str) -> str:
        """Add a claim as a registration does that stops then; returns its hold id."""
        holders = await self.claims(digest) | {"of-a-crash": holder}
        record = msgspec.json.encode(Holds(digest, holders, since_unix_ms=0))
        await (await Bucket.open(self.bus, subjects.KV_ADAPTERS)).put(f"holds.{digest}", record)
        return "of-a-crash"

    async def keys(self) -> set[str]:
        """Keys in the adapters bucket.

        The client library's list would be empty when keys arrive before it asks how many there are.
        """
        prefix = f"$KV.{subjects.KV_ADAPTERS}."
        info = await self.bus.js.stream_info(f"KV_{subjects.KV_ADAPTERS}", subjects_filter=prefix + ">")
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        found = set()
        for key in (subject.removeprefix(prefix) for subject in info.state.subjects or {}):
            with contextlib.suppress(js_errors.KeyNotFoundError):  # deleted
                await kv.get(key)
                found.add(key)
        return found


def snapshot(*requests: RequestBrief, seq: int = 1, worker: str = "w1", incarnation: str = "first") -> WorkerSnapshot:
    """A worker's state in which only its requests matter."""
    return WorkerSnapshot(
        worker_id=worker,
        incarnation=incarnation,
        seq=seq,
        limits=WorkerLimits(
            base_model="tiny-base",
            max_model_len=128,
            max_running=8,
            max_waiting=8,
            block_size=16,
            kv_blocks_total=64,
            adapter_bytes_total=1 << 20,
            max_lora_rank=64,
        ),
        perf=PerfModel(
            prefill_base_ms=1,
            prefill_token_ms=1,
            prefill_lora_ms=1,
            decode_base_ms=1,
            decode_row_ms=1,
            decode_lora_ms=1,
            load_base_ms=1,
            load_ms_per_mib=1,
        ),
        kv_blocks_free=64,
        adapter_bytes_free=1 << 20,
        draining=False,
        requests=list(requests),
        adapters=[],
    )


def brief(request_id: str, digest: str) -> RequestBrief:
    return RequestBrief(
        request_id=request_id,
        epoch=0,
        adapter_digest=digest,
        rank=4,
        prompt_tokens=1,
        output_tokens=0,
        predicted_tokens=8,
        phase="running",
    )


StartRegistry = Callable[..., Awaitable[RegistryService]]


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """The allowed root of the test's registries."""
    path = tmp_path / "adapters"
    path.mkdir()
    return path


@pytest.fixture
async def start_registry(nats_url: str, tmp_path: Path, roots: Path) -> AsyncIterator[StartRegistry]:
    """Starts registries for the tiny base model; keyword arguments override their configuration."""
    running: list[RegistryService] = []

    async def start(**overrides: Any) -> RegistryService:
        settings = {"model": str(write_base(tmp_path / "tiny-base")), "adapter_roots": str(roots), "nats_url": nats_url}
        service = RegistryService(RegistryConfig.of(**(settings | overrides)))
        running.append(service)
        await service.start()
        return service

    yield start
    for service in running:
        await service.stop()


@pytest.fixture
async def registry(start_registry: StartRegistry) -> RegistryService:
    return await start_registry()


@pytest.fixture
async def client(connect: Callable[[str], Awaitable[Bus]], registry: RegistryService, roots: Path) -> Client:
    return Client(await connect("gateway"), roots)
