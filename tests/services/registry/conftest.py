"""A registry in this process, on the test's NATS server, and short words for asking it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.js import errors as js_errors

from services.registry.config import RegistryConfig
from services.registry.service import RegistryService
from shared import subjects
from shared.bus import Bus
from shared.errors import MotetError, from_info
from shared.messages import AdapterInfo, AliasAdapter, DeleteAdapter, ListAdapters, RegisterAdapter, RegistryOk, RegistryReply
from tests.support_adapters import write_base


class Client:
    """Asks the registry as a gateway does; refusals come back as the errors they were."""

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

    async def alias(self, name: str, target: str) -> AdapterInfo:
        return (await self.ask("alias", AliasAdapter(name=name, target=target)))[0]

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

    async def keys(self) -> set[str]:
        """Keys in the adapters bucket. The client library's list would be empty when keys arrive before it asks how many."""
        prefix = f"$KV.{subjects.KV_ADAPTERS}."
        info = await self.bus.js.stream_info(f"KV_{subjects.KV_ADAPTERS}", subjects_filter=prefix + ">")
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        found = set()
        for key in (subject.removeprefix(prefix) for subject in info.state.subjects or {}):
            with contextlib.suppress(js_errors.KeyNotFoundError):  # deleted
                await kv.get(key)
                found.add(key)
        return found


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
        service = RegistryService(RegistryConfig(**(settings | overrides)))
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
