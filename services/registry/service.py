"""The registry: validates, stores and publishes adapters. It is the only writer of adapters on the bus.

    register   claim a slot -> fetch (`sources`) -> validate -> blob, version, name -> watchers see it
    delete     refused while requests run on it unless forced; the weights are removed when no other name points at them
    rollback   a name points at one of its kept earlier versions again
    alias      a second name for the version that another name points at, kept or followed
    quarantine a worker's probe found that a version must not answer; `release` and a new registration end it
    pin        workers keep what a name points at loaded, in this version and the next ones
    list       every name, in pages

Files are read and checked in threads, with a small limit per kind of source, so a slow hub delays hub adapters only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from motet.policies.worker import pins
from motet.services.registry.bases import BASE_FILES, Base, open_base
from motet.services.registry.config import RegistryConfig
from motet.services.registry.files import IMAGE, PeftFiles, quoted, shown
from motet.services.registry.followers import Followers
from motet.services.registry.metrics import ADAPTERS, BLOB_BYTES, QUARANTINED, REGISTRATIONS, VALIDATION_S, VERSIONS
from motet.services.registry.own_directory import OwnDirectory
from motet.services.registry.paths import open_found
from motet.services.registry.sources import Sources
from motet.services.registry.store import AdapterStore, check_name
from motet.services.registry.threads import in_thread
from motet.services.registry.usage import IDLE_S, Usage
from motet.shared import subjects
from motet.shared.adapter_watch import AdapterWatch, ref_of
from motet.shared.audit import Audit, AuditEvent
from motet.shared.base_layers import missing
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.config import ConfigError
from motet.shared.errors import (
    AdapterNotFound,
    BadRequest,
    Conflict,
    InvalidAdapter,
    MotetError,
    Overloaded,
    TooLarge,
    Unavailable,
)
from motet.shared.hf_config import UnsupportedModel
from motet.shared.hub import resolve_model
from motet.shared.malloc import return_large_buffers
from motet.shared.model import EVERY_WORKER, AdapterVersion, Pin, Quarantine
from motet.shared.provision import provision
from motet.shared.refused_adapters import RefusedAdapters
from motet.shared.service import BusService, run
from motet.shared.telemetry import logger
from motet.shared.tenancy import SHARED, check_tenant
from motet.shared.text_files import WITHOUT
from motet.shared.wire.registry import (
    AdapterInfo,
    AliasAdapter,
    DeleteAdapter,
    ListAdapters,
    PinAdapter,
    QuarantineAdapter,
    RegisterAdapter,
    RegistryOk,
    ReleaseAdapter,
    RollbackAdapter,
)
from motet.shared.wire.worker_state import WorkerState

log = logger("motet.registry")

CHATS_BYTES_MAX, TENANT_CHATS_BYTES_MAX = 64 << 20, 4 << 20  # of different ones; a usual chat template has 4 KiB
MAX_WAITING = 64  # registrations that may wait for a slot; more are refused
SWEEP_S = 5.0
SETTLE_S = IDLE_S + 15.0  # after start nothing is swept until every worker has spoken, and every resumed request runs
ORPHANS_EVERY_S = 300.0
PAGE = 1000


class RegistryService(BusService):
    """A registry process (`shared.service.Service`)."""

    name = "registry"

    def __init__(self, config: RegistryConfig) -> None:
        super().__init__(config)
        self._config = config
        self.usage = Usage()
        self._waiting = 0
        self._starting = "connecting to NATS"

    async def start(self) -> None:
        config = self._config
        model = await in_thread(lambda: resolve_model(config.base.model, files=BASE_FILES))
        limits = config.limits
        try:
            self._base: Base = open_base(model, max_rank=limits.max_lora_rank, max_bytes=limits.max_adapter_bytes)
        except UnsupportedModel as error:
            raise ConfigError(f"--model: {error}") from None
        self._bus = bus = await Bus.connect(config.bus, config.process.identity("registry"), inbox="registry")
        try:
            await provision(
                bus,
                replicas=config.bus.nats_replicas,
                tenants=config.publishers.names,
                tenant_bytes=config.publishers.tenant_stream_mib << 20,
                picture_ttl_s=config.publishers.picture_ttl_s if self._base.layout is IMAGE else 0.0,
            )
        except Exception as error:
            raise Unavailable(f"JetStream cannot be provisioned: {str(error) or repr(error)}") from error
        self.store = AdapterStore(bus, lambda digest: self.usage.idle(digest, now_s()), config.limits.older_versions)
        await self.store.start()
        self._sources = Sources(config, self.store, layout := self._base.layout)
        self._audit = Audit(bus)
        self.adapters = AdapterWatch(bus, chats=True)
        await self.adapters.start()
        self.followers = Followers(self.store, self.adapters)
        self._own = OwnDirectory(config.sources.adapters_dir, self.store, self.adapters, self._register_from, layout)
        if foreign := sorted({v.base_model for v in self.adapters.versions()} - {config.base.name}):
            log.warning("adapters of other base models are stored here", extra={"base_models": ", ".join(foreign)})
        ADAPTERS.set_function(self.adapters.names)
        VERSIONS.set_function(lambda: len(self.adapters.versions()))
        BLOB_BYTES.set_function(self.adapters.stored_bytes)
        QUARANTINED.set_function(lambda: len(self.adapters.quarantined))
        await bus.subscribe(subjects.WORKER_STATES, WorkerState, lambda state: self.usage.apply(state, now_s()))
        for verb, kind, handler in (
            ("register", RegisterAdapter, self.register),
            ("delete", DeleteAdapter, self.delete),
            ("alias", AliasAdapter, self.alias),
            ("rollback", RollbackAdapter, self.rollback),
            ("pin", PinAdapter, self.pin),
            ("quarantine", QuarantineAdapter, self.quarantine),
            ("release", ReleaseAdapter, self.release),
            ("list", ListAdapters, self.page),
        ):
            await bus.serve(verb, subjects.registry(verb), kind, handler, queue="registry")
        self._starting = ""
        if config.sources.adapters_dir:
            bus.spawn(self._own.register_all())
        elif self.adapters.refused.total:
            bus.spawn(self._own.publish_refused(RefusedAdapters()))
        bus.spawn(self._sweep())

    def not_ready(self) -> list[str]:
        if starting := self._starting or self._own.starting:
            return [starting]
        return self._bus.troubles() if self._bus is not None and self._bus.connected else ["NATS is not reachable"]

    # ---- verbs

    async def register(self, ask: RegisterAdapter) -> RegistryOk:
        """Validate and publish. Raises BadRequest, InvalidAdapter, AdapterExists, TooLarge, Overloaded or Unavailable."""
        try:
            info, outcome = await self._register(ask)
        except MotetError as error:
            if isinstance(error, InvalidAdapter | TooLarge) and error.param is None:
                error.param = "location"
            REGISTRATIONS.labels("refused" if error.status < 500 else "failed").inc()
            log.info("adapter refused", extra={"adapter": ask.name, "from": ask.location, "reason": error.message})
            raise
        except Exception:
            REGISTRATIONS.labels("failed").inc()
            raise
        entry = info.entry
        facts = {"tenant": ask.tenant, "digest": entry.digest[:12], "version": entry.version, "rank": info.version.rank}
        await self._registered(ask, info, outcome, facts)
        if ask.tenant == SHARED and self._config.sources.adapters_dir:
            await self.store.forget(ask.name, forget=False)
        if self._bus is not None and ask.tenant == SHARED and self.adapters.refused.reason(ask.name) is not None:
            self._bus.spawn(self._own.publish_refused(self.adapters.refused.without(ask.name)))
        return RegistryOk(adapters=[info])

    async def _register(self, ask: RegisterAdapter) -> tuple[AdapterInfo, str]:
        self._check_name(ask)
        ask = msgspec.structs.replace(ask, kind=await self._sources.kind_of(ask.kind, ask.location))
        self._check_room(ask)
        if not ask.replace:
            await self.store.check_free(ask.name, ask.tenant)
        async with self._slot(), self._sources.fetched(ask) as files:
            return await self._take_in(ask, files)

    async def _take_in(self, ask: RegisterAdapter, files: PeftFiles) -> tuple[AdapterInfo, str]:
        told = [limits.base_tensors for limits in self.usage.workers(now_s()).values() if limits.base_tensors]
        with files, VALIDATION_S.time():
            chat = await in_thread(lambda: self._base.chat(files.texts))
            chat_digest = chat.digest if chat is not None else ""
            converted = await in_thread(lambda: self._base.convert(files, told, chat_digest))
        version = AdapterVersion(
            digest=converted.digest,
            base_model=self._config.base.name,
            rank=converted.rank,
            modules=converted.modules,
            layers=converted.layers,
            dtype=converted.dtype,
            size_bytes=len(converted.blob),
            source=files.source,
            created_unix_ms=unix_ms(),
            chat=chat_digest,
            family=converted.family,
            sites=converted.sites,
            targets=converted.targets,
        )
        self._check_runs(version)
        self._check_storage(ask, version)
        if chat is not None:
            self._check_chats(ask, chat_digest, len(msgspec.json.encode(chat)))
        await self.store.release(version.digest)  # what is registered again is tried again
        return await self.store.publish(
            ask.name,
            version,
            converted.blob,
            replace=ask.replace,
            tenant=ask.tenant,
            left_out=converted.left_out,
            chat=chat,
        )

    async def delete(self, ask: DeleteAdapter) -> RegistryOk:
        """Remove a name. Raises AdapterNotFound, or AdapterInUse unless forced."""
        if ask.tenant:
            check_tenant(ask.tenant)
        lies_there = ask.tenant == SHARED and await in_thread(lambda: self._own.holds(ask.name))
        forget = lies_there and ask.forget
        if forget and self.adapters.exactly(ask.name, ask.tenant) is None:  # it was removed before
            await self.store.forget(ask.name)
            return RegistryOk(adapters=[])
        gone = await self.store.remove(ask.name, requests=self._requests, force=ask.force, tenant=ask.tenant)
        log.info("adapter deleted", extra={"adapter": ask.name, "tenant": ask.tenant, "forced": ask.force})
        await self._note("adapter.deleted", ask, gone)
        if forget:
            await self.store.forget(ask.name)
        return RegistryOk(adapters=[gone] if gone is not None else [], returns=lies_there and not forget)

    async def rollback(self, ask: RollbackAdapter) -> RegistryOk:
        """Make an earlier version current. Raises AdapterNotFound (the name or the version) or BadRequest (an alias)."""
        if ask.tenant:
            check_tenant(ask.tenant)
        info, changed = await self.store.rollback(ask.name, ask.version, ask.tenant)
        if changed:
            log.info("adapter rolled back", extra={"adapter": ask.name, "tenant": ask.tenant, "version": info.entry.version})
            await self.followers.after(ask.name)
            await self._note("adapter.rolled_back", ask, info)
        return RegistryOk(adapters=[info])

    async def alias(self, ask: AliasAdapter) -> RegistryOk:
        """Add a second name. Raises BadRequest, AdapterNotFound (the target), AdapterExists (the name is an adapter's own)."""
        self._check_name(ask)
        if ask.name == ask.target:
            raise BadRequest(f"{quoted(ask.name)} cannot be an alias of itself", param="target")
        self._check_room(ask)
        info = await self.store.alias(ask.name, ask.target, ask.tenant, follows=ask.follows)
        await self.followers.after(ask.name)
        await self._note("adapter.aliased", ask, info)
        return RegistryOk(adapters=[info])

    async def pin(self, ask: PinAdapter) -> RegistryOk:
        """Pin or unpin a name. Raises AdapterNotFound, BadRequest (unknown workers) or Conflict (no room for another pin)."""
        if ask.tenant:
            check_tenant(ask.tenant)
        workers = (EVERY_WORKER,) if EVERY_WORKER in ask.workers else tuple(dict.fromkeys(ask.workers))
        if workers:
            self._check_pin(ask, workers)
        info, changed = await self.store.pin(ask.name, workers, ask.tenant)
        if changed:
            log.info("adapter pinned" if workers else "adapter unpinned", extra={"adapter": ask.name, "tenant": ask.tenant})
            where = f"workers {', '.join(workers)}; " if workers else ""
            await self._note("adapter.pinned" if workers else "adapter.unpinned", ask, info, where)
        return RegistryOk(adapters=[info])

    async def quarantine(self, ask: QuarantineAdapter) -> RegistryOk:
        """Keep a version from answering, because of a worker's probe. Raises AdapterNotFound."""
        facts = {"verdict": ask.verdict, "reason": ask.reason, "worker_id": ask.worker_id}
        if await self.store.quarantine(Quarantine(digest=ask.digest, since_unix_ms=unix_ms(), **facts)):
            log.error("adapter quarantined", extra={"adapter": ask.name, "digest": ask.digest[:12]} | facts)
            event = AuditEvent(
                action="adapter.quarantined", actor=f"worker {ask.worker_id}", object=ask.name, detail=ask.reason
            )
            await self._audit.record(event)
        return RegistryOk(adapters=[])

    async def release(self, ask: ReleaseAdapter) -> RegistryOk:
        """End a quarantine. Raises AdapterNotFound."""
        info = self.adapters.exactly(ask.name, ask.tenant)
        if info is None:
            raise AdapterNotFound(f"there is no adapter {quoted(ask.name)}", param="name")
        if await self.store.release(info.entry.digest):
            log.info("adapter released", extra={"adapter": ask.name, "tenant": ask.tenant, "actor": ask.actor})
            await self._note("adapter.released", ask, info)
        return RegistryOk(adapters=[info])

    async def page(self, ask: ListAdapters) -> RegistryOk:
        """One page of names."""
        found = [info for info in self.adapters.visible(ask.tenant) if info.entry.name > ask.after]
        return RegistryOk(adapters=found[: max(0, min(ask.limit, PAGE))])

    # ---- helpers

    def _requests(self, digest: str) -> int:
        return self.usage.requests(digest, now_s())

    def _check_name(self, ask: RegisterAdapter | AliasAdapter) -> None:
        if ask.tenant:
            check_tenant(ask.tenant)
        check_name(ask.name, self._config.base.name)

    def _check_room(self, ask: RegisterAdapter | AliasAdapter) -> None:
        if self.adapters.exactly(ask.name, ask.tenant) is not None:
            return
        limit = self._config.limits.max_adapters
        if self.adapters.names() >= limit:
            raise Conflict(f"there are {limit} adapters, which is the limit (--max-adapters): delete one first", param="name")
        limit = self._config.limits.max_tenant_adapters
        if ask.tenant and self.adapters.owned(ask.tenant) >= limit:
            raise Conflict(
                f"this tenant has {limit} adapters, which is its limit (--max-tenant-adapters): delete one first", param="name"
            )

    def _check_runs(self, version: AdapterVersion) -> None:
        """Raise for layers that no worker can change, if one tells what it can change. Else requests will tell."""
        told = [limits.lora_targets for limits in self.usage.workers(now_s()).values() if limits.lora_targets]
        lacking = [missing(version.targets, takes) for takes in told]
        if lacking and all(lacking):
            raise InvalidAdapter(
                f"no worker's engine can change {shown(min(lacking, key=len)[0])} of the base model with an adapter"
            )

    def _check_storage(self, ask: RegisterAdapter, version: AdapterVersion) -> None:
        """Raise if the version does not fit the limits. A version that is stored already counts only for its tenant's limit."""
        known = self.adapters.by_digest(version.digest) is not None
        limit_mib = self._config.limits.max_stored_mib
        if not known and self.adapters.stored_bytes() + version.size_bytes > limit_mib << 20:
            raise Conflict(
                f"the stored adapters would take more than {limit_mib} MiB, which is the limit (--max-stored-mib): "
                "delete one first"
            )
        limit_mib = self._config.limits.max_tenant_stored_mib
        if ask.tenant and self.adapters.owned_bytes(ask.tenant) + version.size_bytes > limit_mib << 20:
            raise Conflict(
                f"this tenant's adapters would take more than {limit_mib} MiB, which is its limit (--max-tenant-stored-mib): "
                "delete one first"
            )

    def _check_chats(self, ask: RegisterAdapter, digest: str, size_bytes: int) -> None:
        """Raise if what it brings for chats takes more room than there is: every gateway keeps all of it in memory."""
        chats, owned = self.adapters.chats, self.adapters.owned_chats(ask.tenant) - {digest}
        if digest not in chats and sum(map(len, chats.values())) + size_bytes > CHATS_BYTES_MAX:
            raise Conflict(f"different chat templates take more than {CHATS_BYTES_MAX} bytes, which is the limit; {WITHOUT}")
        if ask.tenant and sum(len(chats.get(one, b"")) for one in owned) + size_bytes > TENANT_CHATS_BYTES_MAX:
            raise Conflict(
                f"this tenant's chat templates take more than {TENANT_CHATS_BYTES_MAX} bytes, which is its limit; {WITHOUT}"
            )

    def _check_pin(self, ask: PinAdapter, workers: tuple[str, ...]) -> None:
        """Raise if a worker is unknown or has no room for the pin, or if the tenant has too many pins."""
        info = self.adapters.exactly(ask.name, ask.tenant)
        if info is None:
            raise AdapterNotFound(f"there is no adapter {quoted(ask.name)}", param="name")
        pinned = [one for one in self.adapters.pinned() if (one.entry.name, one.entry.tenant) != (ask.name, ask.tenant)]
        limit = self._config.limits.max_tenant_pins
        if ask.tenant and sum(one.entry.tenant == ask.tenant for one in pinned) >= limit:
            raise Conflict(
                f"this tenant has {limit} pinned adapters, which is its limit (--max-tenant-pins): unpin one first",
                param="name",
            )
        present = self.usage.workers(now_s())
        if unknown := sorted(set(workers) - present.keys() - {EVERY_WORKER}):
            known = ", ".join(sorted(present)) or "none"
            raise BadRequest(f"workers: {', '.join(map(quoted, unknown))} not found; there are: {known}", param="workers")
        asked = Pin(workers=workers, since_unix_ms=0)
        for worker_id, limits in sorted(present.items()):
            if not asked.covers(worker_id):
                continue
            others = [one for one in pinned if one.entry.pin is not None and one.entry.pin.covers(worker_id)]
            if info.entry.digest not in pins.within([*map(ref_of, others), ref_of(info)], limits):
                raise Conflict(
                    f"workers: {worker_id} has room for {limits.pin_slots} pins of {limits.pin_bytes} bytes together, and"
                    f" {len(others)} are there: unpin one first",
                    param="workers",
                )

    async def _note(
        self,
        action: str,
        ask: RegisterAdapter | AliasAdapter | DeleteAdapter | PinAdapter | RollbackAdapter | ReleaseAdapter,
        info: AdapterInfo | None,
        detail: str = "",
    ) -> None:
        """Add an entry to the audit log."""
        detail += f"version {info.entry.version}, digest {info.entry.digest[:12]}" if info is not None else ""
        await self._audit.record(AuditEvent(action=action, actor=ask.actor, tenant=ask.tenant, object=ask.name, detail=detail))

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} registrations are under way", retry_after_s=2.0)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _sweep(self) -> None:
        await asyncio.sleep(SETTLE_S)
        orphans_looked_for_s = -ORPHANS_EVERY_S
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.store.sweep()
                await self.followers.sweep()
                if now_s() - orphans_looked_for_s > ORPHANS_EVERY_S:
                    await self.store.sweep_orphans()
                    used = {version.chat for version in self.adapters.versions()}
                    await self.store.sweep_chats([digest for digest in self.adapters.chats if digest not in used])
                    orphans_looked_for_s = now_s()
            except MotetError as error:
                log.info("sweep interrupted", extra={"error": error.message})

    async def _register_from(self, name: str, path: str, root: str, source: str, *, replace: bool) -> None:
        ask = RegisterAdapter(name=name, kind="path", location=path, replace=replace, actor="registry --adapters-dir")
        self._check_name(ask)
        self._check_room(ask)
        async with self._sources.local:
            max_bytes, layout = self._config.limits.max_adapter_bytes, self._base.layout
            files = await in_thread(lambda: open_found(path, [root], max_bytes, source=source, layout=layout))
            info, outcome = await self._take_in(ask, files)
        await self._registered(ask, info, outcome, {})

    async def _registered(self, ask: RegisterAdapter, info: AdapterInfo, outcome: str, facts: dict[str, object]) -> None:
        """Count, log and audit a registration, and let aliases follow it."""
        REGISTRATIONS.labels(outcome).inc()
        left_out = {"left_out": ", ".join(info.entry.left_out)} if info.entry.left_out else {}
        log.info(f"adapter {outcome}", extra={"adapter": ask.name} | facts | left_out)
        if outcome != "unchanged":
            await self.followers.after(ask.name)
            await self._note(f"adapter.{outcome}", ask, info)


def main(config: RegistryConfig) -> int:
    """Run a registry until it is told to stop; returns the exit status."""
    return_large_buffers()
    return run(RegistryService(config), config)
