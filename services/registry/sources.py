"""Where adapters come from. Each kind of places is an entry of `SOURCES`, by which clients name it.

    path     a directory, an archive or a weights file below one of --adapter-roots
    hub      a repository of a Hugging Face hub
    upload   an archive or a weights file that a gateway has put into the uploads bucket

A plug-in adds another kind, which clients then name as `"source": "s3:<location>"` (docs/extending.md).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from motet.services.registry.archives import read_archive
from motet.services.registry.config import RegistryConfig
from motet.services.registry.files import Layout, PeftFiles, Source, quoted
from motet.services.registry.hub import HubSource
from motet.services.registry.paths import is_there, open_path
from motet.services.registry.store import AdapterStore
from motet.services.registry.threads import in_thread
from motet.services.registry.unpack import MAX_OTHER_BYTES
from motet.shared.errors import BadRequest
from motet.shared.tables import Table
from motet.shared.wire.registry import RegisterAdapter

LOCAL_SLOTS = 2  # adapters being read, checked and stored at once: each needs about twice its size in memory
REMOTE_SLOTS = 2  # adapters being fetched at once from one kind of places on other machines


class PathSource(Source):
    """Directories and files on the registry's machine."""

    def __init__(self, config: RegistryConfig) -> None:
        self._roots, self._max_bytes = config.sources.roots, config.limits.max_adapter_bytes

    async def fetch(self, location: str, *, chat: bool) -> PeftFiles:
        return await in_thread(lambda: open_path(location, self._roots, self._max_bytes, chat=chat, layout=self.layout))


class UploadSource(Source):
    """Files in the uploads bucket. Each is deleted when it has been read."""

    def __init__(self, config: RegistryConfig, store: AdapterStore) -> None:
        self._max_bytes, self._store = config.limits.max_adapter_bytes, store

    async def fetch(self, location: str, *, chat: bool) -> PeftFiles:
        with await self._store.fetch_upload(location, self._max_bytes + MAX_OTHER_BYTES) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            try:
                return await in_thread(
                    lambda: read_archive(
                        file, size_bytes, self._max_bytes, source=f"upload:{location}", chat=chat, layout=self.layout
                    )
                )
            finally:
                await self._store.drop_upload(location)


SOURCES: Table[Callable[[RegistryConfig, AdapterStore], Source]] = Table(
    {
        "path": lambda config, _: PathSource(config),
        "hub": lambda config, _: HubSource(config.hub),
        "upload": UploadSource,
    }
)
"""What opens the source of each kind, when a registry starts."""
ANY = "any"
"""A path where there is one, else a repository of the hub."""


class Sources:
    """The sources of a registry, and the slots in which adapters are fetched, checked and stored."""

    def __init__(self, config: RegistryConfig, store: AdapterStore, layout: Layout) -> None:
        self._roots = config.sources.roots
        self._opened = {kind: opening(config, store) for kind, opening in SOURCES.items()}
        for source in self._opened.values():
            source.layout = layout
        self._remote = {kind: asyncio.Semaphore(REMOTE_SLOTS) for kind in self._opened}
        self.local = asyncio.Semaphore(LOCAL_SLOTS)

    async def kind_of(self, kind: str, location: str) -> str:
        """The kind of an adapter that a client asks for. Raises BadRequest for one that this registry does not take."""
        if kind == ANY:
            kind = "path" if await in_thread(lambda: is_there(location, self._roots)) else "hub"
        if kind not in self._opened:
            raise BadRequest(f"kind {quoted(kind)}: one of {', '.join(self._opened)}, {ANY} is expected", param="kind")
        if refusal := self._opened[kind].refusal:
            raise BadRequest(refusal, param="kind")
        return kind

    @asynccontextmanager
    async def fetched(self, ask: RegisterAdapter) -> AsyncIterator[PeftFiles]:
        """The files of an adapter, and a slot to check and store it in. Raises what `Source.fetch` raises."""
        source = self._opened[ask.kind]
        if not source.remote:
            async with self.local:
                yield await source.fetch(ask.location, chat=ask.chat)
            return
        async with self._remote[ask.kind]:
            files = await source.fetch(ask.location, chat=ask.chat)
        async with self.local:
            yield files
