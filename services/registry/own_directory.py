"""The operator's adapters: --adapters-dir, whose adapters are registered at start under their relative paths."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Protocol

from motet.services.registry.files import PICKLES, SUFFIX, Layout, is_lora_file
from motet.services.registry.metrics import REGISTRATIONS
from motet.services.registry.paths import relative_source
from motet.services.registry.store import AdapterStore
from motet.services.registry.threads import in_thread
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.errors import AdapterExists, MotetError, Unavailable
from motet.shared.model import is_adapter_name
from motet.shared.refused_adapters import RefusedAdapters, refused
from motet.shared.telemetry import logger
from motet.shared.tenancy import SHARED

log = logger("motet.registry")
RETRY_S = 1.0


class Register(Protocol):
    """Validates and publishes the adapter in `path`, which is below `root`."""

    async def __call__(self, name: str, path: str, root: str, source: str, *, replace: bool) -> None: ...


class OwnDirectory:
    """The adapters below `directory`; "" for none. The ones that cannot be served are published with the reason."""

    def __init__(self, directory: str, store: AdapterStore, adapters: AdapterWatch, register: Register, layout: Layout) -> None:
        self._directory, self._root = directory, os.path.realpath(os.path.expanduser(directory))
        self._store, self._adapters, self._register, self._layout = store, adapters, register, layout
        self.starting = f"registering the adapters in {directory}" if directory else ""  # how far it is; "" when it is done

    def holds(self, name: str) -> bool:
        """Whether the directory has an adapter of this name. Reads the disk."""
        if not self._directory or not is_adapter_name(name):
            return False
        path = os.path.join(self._root, name)
        if self._layout.configuration:
            return os.path.exists(os.path.join(path, self._layout.configuration))
        if "/" not in name and os.path.isfile(path + SUFFIX):
            return True
        with contextlib.suppress(OSError):
            return bool(_loras(os.listdir(path)))
        return False

    async def register_all(self) -> None:
        """Register every adapter. A bad one is skipped and published with the reason; a name replaced since is kept."""
        bad: list[tuple[str, str]] = []
        try:
            found = await in_thread(lambda: adapters_below(self._root, self._layout))
            log.info("adapters found", extra={"adapters_dir": self._directory, "count": len(found)})
            if forgotten := {name for name, _ in found} & await self._forgotten():
                log.info("removed adapters are not registered again", extra={"adapters": ", ".join(sorted(forgotten)[:20])})
                found = [(name, path) for name, path in found if name not in forgotten]
            for number, (name, path) in enumerate(found, start=1):
                self.starting = f"registering adapter {number} of {len(found)} from {self._directory}"
                if (reason := await self._register_own(name, path)) is not None:
                    bad.append((name, reason))
            await self.publish_refused(refused(bad))
        finally:
            self.starting = ""

    async def _forgotten(self) -> frozenset[str]:
        """The names not to register from the directory; retries while NATS is away."""
        while True:
            try:
                return await self._store.forgotten()
            except Unavailable as error:
                log.warning("forgotten adapters not read yet", extra={"reason": error.message})
                await asyncio.sleep(RETRY_S)

    async def publish_refused(self, refused: RefusedAdapters) -> None:
        """Replace the list of refused adapters; retries while NATS is away."""
        while refused != self._adapters.refused:
            try:
                return await self._store.put_refused(refused)
            except Unavailable as error:
                log.warning("refused adapters not published yet", extra={"reason": error.message})
                await asyncio.sleep(RETRY_S)

    async def _register_own(self, name: str, path: str) -> str | None:
        """Register one adapter; retries while NATS is away. Returns why it was refused, or None."""
        source = relative_source(path, [self._root])
        while True:
            present = self._adapters.exactly(name, SHARED)
            if present is not None and present.version.source not in (source, f"path:{path}"):  # the latter: as it once was
                log.info("adapter kept, it came from elsewhere", extra={"adapter": name, "source": present.version.source})
                return None
            try:
                await self._register(name, path, self._root, source, replace=present is not None)
                return None
            except AdapterExists:
                log.info("adapter registered by another registry", extra={"adapter": name})
                return None
            except Unavailable as error:
                log.warning("adapter not registered yet", extra={"adapter": name, "reason": error.message})
                await asyncio.sleep(RETRY_S)
            except (MotetError, OSError) as error:
                REGISTRATIONS.labels("refused").inc()
                reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
                log.error("adapter refused", extra={"adapter": name, "reason": reason})
                return reason if present is None else f"{reason} (its earlier version {present.entry.version} is still served)"


def adapters_below(root: str, layout: Layout) -> list[tuple[str, str]]:
    """(name, path) of every adapter below `root`, sorted; the name is the path relative to `root`.

    An adapter is a directory. Image adapters may also lie in `root` itself, one file each, whose name has no suffix then.
    """
    found = []
    for path, _, files in os.walk(root, followlinks=False):
        name = os.path.relpath(path, root).replace(os.sep, "/")
        if path != root:
            is_adapter = layout.configuration in files if layout.configuration else bool(_loras(files))
            found += [(name, path)] if is_adapter else []
        elif layout.bare:
            found += [(os.path.splitext(file)[0], os.path.join(path, file)) for file in _loras(files)]
    return sorted(found)


def _loras(names: list[str]) -> list[str]:
    """The files of image adapters, also pickles, so that they are refused by name."""
    return [name for name in names if is_lora_file(name) or (name.endswith(PICKLES) and not name.startswith("."))]
