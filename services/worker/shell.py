"""Carries out the decisions of the worker's core, and tells it the results.

    WorkerService ──events──► Shell.on ──► WorkerCore ──actions──► engine thread, adapter store, frames
    adapter store ──loads that ended──► events

Everything here runs on the event loop and waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from motet.policies.memory.host_tier import DiskRoom, Evict, Forget, Load
from motet.policies.worker.request_life import Entry, Key
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import (
    Action,
    Answer,
    CopyIn,
    CopyOut,
    DiskFull,
    Event,
    Fetch,
    Fetched,
    FileLost,
    Loaded,
    LoadFailed,
    NotStarted,
    PinAdapters,
    Refuse,
    Start,
    Stop,
    TooLargeForHost,
)
from motet.services.worker.adapters import AdapterLoader
from motet.services.worker.engines.protocol import EngineProtocol
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.frames import FrameSender
from motet.services.worker.kv_transfer import KvTransfer
from motet.services.worker.observe import Observer
from motet.services.worker.probing import Prober
from motet.services.worker.reports import StateReporter
from motet.shared.clock import now_s
from motet.shared.errors import MotetError, TooLarge
from motet.shared.telemetry import logger

if TYPE_CHECKING:
    from motet.services.worker.engines.adapter_weights import HostAdapter

log = logger("motet.worker")


class Shell:
    """Passes events to the core and carries out its actions. It is the `adapters.Decider` of the adapter store.

    `store` is set before the first event, `travel` where KV blocks can be fetched, and `probes` where adapters are probed.
    """

    store: AdapterLoader[HostAdapter]
    travel: KvTransfer | None = None
    probes: Prober | None = None

    def __init__(
        self,
        core: WorkerCore[EngineRequest],
        engine: EngineProtocol,
        frames: FrameSender,
        reporter: StateReporter,
        observer: Observer,
    ) -> None:
        self.core, self.engine, self.frames = core, engine, frames
        self._reporter, self._observer = reporter, observer
        self.step = 0  # of the engine, for frames
        self._fetches: dict[Key, asyncio.Task[None]] = {}  # of KV blocks, by request
        self.idle = asyncio.Event()
        self.idle.set()

    def on(self, event: Event[EngineRequest]) -> Refuse | None:
        """Pass an event to the core and carry out its actions. Returns the core's refusal of an assignment, which the caller
        answers.

        Raises the engine's error if it takes no more requests; the assigned request is then forgotten.
        """
        refusal: Refuse | None = None
        untaken: MotetError | None = None
        for action in self.core.on(event, now_s()):
            match action:
                case Refuse():
                    refusal = action
                case Start():
                    untaken = self._start(action) or untaken
                case _:
                    self._perform(action)
        self._reporter.touch()
        if self.core:
            self.idle.clear()
        else:
            self.idle.set()
        if untaken is not None:
            raise untaken
        return refusal

    def _perform(self, action: Action[EngineRequest]) -> None:
        match action:
            case Fetch(entry):
                assert self.travel is not None, "it has said that blocks can be fetched"
                key, fetch = entry.key, self.travel.spawn(self._fetch(entry, self.travel))
                self._fetches[key] = fetch
                fetch.add_done_callback(lambda _: self._fetches.pop(key))
            case Stop(request_id, epoch):
                self.engine.cancel(request_id, epoch)
            case Answer():
                self._answer(action)
            case CopyIn(digest, over):
                self.engine.load_adapter(self.store.copy(digest), over)
            case PinAdapters(digests):
                self.engine.pin_adapters(digests)
            case CopyOut(digest):
                self.engine.unload_adapter(digest)
            case Load(adapter, source):
                if self.probes is not None:
                    self.probes.expect(adapter.digest)
                self.store.load(adapter, source)
            case Evict() | Forget():
                self.store.evict(action)
                self._observer.stored()

    def _start(self, action: Start[EngineRequest]) -> MotetError | None:
        """Give a request to the engine. Returns the error if its assignment is to be refused."""
        entry, request = action.entry, action.entry.payload
        if request.image is not None:
            request = replace(request, copies=tuple([self.store.copy(one.ref.digest) for one in request.weighted]))
        elif entry.adapters:
            request = replace(request, weights=self.store.copy(entry.adapters[0].digest))
        try:
            self.engine.add(request)
        except MotetError as error:
            taken = bool(entry.adapters) or request.kv_wait_s > 0  # its assignment may have been answered before
            self.on(NotStarted(entry.key, error if taken else None))
            return None if taken else error
        return None

    async def _fetch(self, entry: Entry[EngineRequest], travel: KvTransfer) -> None:
        request = entry.payload
        assert request.kv is not None, "there is something to fetch"
        try:
            await travel.fetch(request.kv, request, entry.brief.adapter_digest)
        finally:
            with contextlib.suppress(MotetError):  # it was answered
                self.on(Fetched(entry.key))
            travel.drop(request.kv)

    def _answer(self, answer: Answer[EngineRequest]) -> None:
        request, reason = answer.entry.payload, answer.reason
        if (fetch := self._fetches.get(answer.entry.key)) is not None:
            fetch.cancel()
        error = None if reason is None else _error_of(reason, answer)
        item = request.item(request.output_tokens, answer.finish, error=error)
        self._observer.answered(answer.finish)
        self.frames.put(request.gateway_id, self.step, [item])

    # ---- what the adapter store tells

    def loaded(self, digest: str, adapter: HostAdapter) -> None:
        """A load has succeeded: the copy is in host memory."""
        self.on(Loaded(digest, adapter.nbytes, adapter.blob_bytes))
        self._observer.stored()

    def failed(self, digest: str, error: Exception) -> None:
        """A load has failed. All requests that wait for the adapter fail."""
        self.on(LoadFailed(digest, error))

    def file_lost(self, digest: str) -> None:
        """The adapter's file is missing or wrong. It is fetched again."""
        self.on(FileLost(digest))

    def make_disk_room(self, missing_bytes: int) -> DiskRoom:
        """Delete files that are not in use, if they free as much."""
        self.on(DiskFull(missing_bytes))
        return self.core.disk_room


def _error_of(reason: object, answer: Answer[EngineRequest]) -> MotetError:
    """The error that the owner of a request gets with an answer."""
    match reason:
        case MotetError():
            return reason
        case TooLargeForHost(size_bytes, room_bytes):
            count = len(answer.entry.adapters)
            what = "adapter" if count == 1 else f"{count} adapters"
            verb = "does" if count == 1 else "do"
            return TooLarge(f"{what} of {size_bytes} bytes {verb} not fit in host_cache_mib ({room_bytes} bytes)")
        case _:
            adapter = next(one for one in answer.entry.adapters if one.digest == answer.failed)
            log.error("adapter load failed", extra={"digest": adapter.digest, "error": repr(reason)})
            return MotetError(f"adapter {adapter.name!r} cannot be loaded: {reason!r}")
