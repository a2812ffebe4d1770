"""A simulated Motet worker: what services/worker does between two network messages, under the virtual clock.

    assign ─> WorkerCore ─> refused, or (adapter to host memory, KV blocks from another worker) ─> started ─> Engine

Like the live one it is a shell around `policies.worker.worker_core`: it passes events to the core, and carries out its actions
with the engine (`twin.engine`) and the links from disk and object store (`twin.storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from motet.policies.memory.host_tier import Load
from motet.policies.step.batch_state import due_s
from motet.policies.worker.assemble import worker_core
from motet.policies.worker.request_life import Entry, Key
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import (
    Action,
    Answer,
    Assign,
    CancelRequest,
    CopyIn,
    Fetch,
    Fetched,
    Loaded,
    PinAdapters,
    Pinned,
    Refuse,
    Registered,
    Start,
    Stepped,
    Stop,
    Tick,
)
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef, RequestBrief
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot
from motet.twin.content import NO_CONTENT, content
from motet.twin.engine import Engine
from motet.twin.events import PS_PER_S, STEP, Events
from motet.twin.image_engine import ImageEngine, drawn
from motet.twin.metrics import Metrics
from motet.twin.run import AnyLive, Live
from motet.twin.storage import Storage
from motet.twin.travel import Source, Travels
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Request

TICK_PS = PS_PER_S // 2


class Worker:
    """One worker in one cluster. `adapters`: all adapters of the workload, by digest.

    `on_change` is called when there is news for schedulers, `on_end` when a request has ended, and `on_tokens` after each step
    with the requests that have drawn a token; then no two steps are made in one go.
    """

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        events: Events,
        metrics: Metrics,
        adapters: Mapping[str, AdapterRef],
        *,
        on_change: Callable[[Worker], None],
        on_end: Callable[[Worker, AnyLive], None],
        on_tokens: Callable[[Worker, Sequence[AnyLive]], None] | None = None,
        incarnation: str = "",
    ) -> None:
        limits = replace(
            spec.limits,
            prefix_cache="tenant" if spec.options.prefix_cache else "",
        )
        self.index, self.spec, self.worker_id = index, spec, f"worker-{index:04d}"
        self._events, self._metrics, self._on_change, self._on_end = events, metrics, on_change, on_end
        self._on_tokens = on_tokens
        self.engine: Any = _engine(spec, events, metrics, self, seed=index)
        if on_tokens is not None:
            self.engine.max_run = 1
        self.view = View(self.worker_id, incarnation, limits)
        self.core: WorkerCore[AnyLive] = worker_core(
            self.view, spec.options, host_bytes=spec.storage.host_bytes, disk_bytes=spec.storage.disk_bytes
        )
        self.storage = Storage(spec.storage, events, self._loaded)
        self._adapters = adapters
        self.core.on(Registered(adapters), 0.0)
        self._max_length = min(limits.max_model_len, limits.kv_blocks_total * limits.block_size)
        self._ticks = False
        self.travels = Travels(self.worker_id, spec, events, self.engine, self._fetched)
        self._sources: dict[Key, Source] = {}  # of requests that are to fetch KV blocks
        self._landing: list[tuple[Entry[Any], int]] = []  # requests whose KV blocks have come, and how many have
        if spec.options.foresight != "off":
            self._tick(TICK_PS)

    # ---- requests

    def assign(
        self, request: Request, brief: RequestBrief, before: AnyLive | None = None, *, source: Source | None = None
    ) -> bool:
        """Accept a request, or refuse it for lack of room: in the queue, or for so many tokens at all.

        `before`: the state in which another worker handed it over. Its tokens so far are computed again, or their KV blocks are
        fetched from their `source`.
        """
        if request.prompt_tokens >= self._max_length:
            return False
        now_s = self._events.now_s
        live = self._live(request, brief, before)
        fetch = False
        if source is not None and isinstance(live, Live):
            blocks = self.travels.blocks(source, live)
            fetch = blocks.end > blocks.first
            if fetch:
                self._sources[brief.request_id, brief.epoch] = source
        actions = self.core.on(Assign(brief, "", request.adapters, live, fetch), now_s)
        first = actions[0] if actions else None
        if isinstance(first, Refuse):
            self._sources.pop((brief.request_id, brief.epoch), None)
            return False
        self._metrics.host_misses += not isinstance(first, Start)
        self._perform(actions)
        return True

    def _live(self, request: Request, brief: RequestBrief, before: AnyLive | None) -> AnyLive:
        """The request as its engine gets it."""
        now_s, adapter, merged_copy = self._events.now_s, request.adapter, self.spec.merged_copy
        if request.image is not None and self.spec.images is not None:
            return drawn(self.spec.images, request, request.image, brief, now_s, before)
        end_length = min(request.prompt_tokens + request.output_tokens, self._max_length)
        return Live(
            order=0,
            due_s=before.due_s if isinstance(before, Live) else due_s(now_s, brief.ttft_slo_ms),
            tokens=content(request, end_length) if self.spec.options.prefix_cache else NO_CONTENT,
            length=request.prompt_tokens + brief.output_tokens,
            last_token_ps=before.last_token_ps if before is not None else -1,
            expected_length=request.prompt_tokens + brief.predicted_tokens,
            rank=adapter.rank,
            adapter=adapter.digest,
            adapter_bytes=adapter.size_bytes,
            merged_bytes=merged_copy.size_bytes if merged_copy is not None and adapter.digest else 0,
            request=request,
            end_length=end_length,
            brief=brief,
        )

    def cancel(self, request_id: str, epoch: int) -> None:
        """Stop a request of this epoch or an older one; an unknown one is ignored."""
        self._perform(self.core.on(CancelRequest(request_id, epoch), self._events.now_s))

    def give(self, request_id: str, then: Callable[[AnyLive], None]) -> None:
        """Hand a request over, after the present step if it is in the engine.

        Ignored when it is not here or is leaving already.
        """
        entry = self.core.book.get(request_id)
        if entry is None or entry.phase == "leaving":
            return
        actions = self.core.on(CancelRequest(request_id, entry.brief.epoch), self._events.now_s)
        for action in actions:
            if isinstance(action, Stop):
                self.engine.stop(action.request_id, action.epoch, then)
        self._perform([action for action in actions if not isinstance(action, Stop)])
        for action in actions:
            if isinstance(action, Answer):  # it was still waiting for its adapter
                then(action.entry.payload)

    def kill(self) -> None:
        """Nothing that is under way has an effect from now on."""
        self.engine.dead = True

    # ---- adapters without a request

    def bring(self, digest: str, over: Collection[str]) -> None:
        """Copy an adapter to the device before a request asks for it, as `CopyIn` says."""
        self._perform([CopyIn(digest, over)])

    def pin(self, digests: Iterable[str], homes: Iterable[str] = ()) -> None:
        """Keep these adapters loaded, and no others; `homes` are at home here."""
        pinned, at_home = ([self._adapters[digest] for digest in names] for names in (digests, homes))
        self._perform(self.core.on(Pinned(pinned, at_home), self._events.now_s))
        if not self._ticks:
            self._tick()

    def preload(self, digests: Iterable[str]) -> None:
        """Put adapters on the device before the run begins, as far as there is room without evicting."""
        for digest in digests:
            self.engine.preload(self._adapters[digest])

    # ---- the core's actions

    def _perform(self, actions: list[Action[AnyLive]]) -> None:
        """Carry out the core's actions: requests go to the engine and loads to their links. Nothing else takes time."""
        if self.engine.dead:
            return
        for action in actions:
            match action:
                case Start(entry):
                    self.engine.add(entry.payload)
                case Fetch(entry):
                    self.travels.fetch(cast("Entry[Live]", entry), self._sources.pop(entry.key))
                case Load():
                    self.storage.load(action)
                case CopyIn(digest, over):
                    self.engine.load(self._adapters[digest], over)
                case Stop(request_id, epoch):
                    self.engine.stop(request_id, epoch)
                case PinAdapters(digests):
                    self.engine.pin(digests)
        self.engine.wake()
        self.announce_changes()

    def _fetched(self, landing: list[tuple[Entry[Any], int]]) -> None:
        self._landing += landing
        if self.engine.idle:
            self.between_steps()
        else:
            self.engine.shorten()

    def _tick(self, first_ps: int = 0) -> None:
        self._ticks = True
        self._events.at(self._events.now_ps + (first_ps or TICK_PS), STEP, self._tick)
        if not first_ps:
            self._perform(self.core.on(Tick(), self._events.now_s))

    def _loaded(self, adapter: AdapterRef) -> None:
        size_bytes = adapter.size_bytes
        self._perform(self.core.on(Loaded(adapter.digest, size_bytes, size_bytes), self._events.now_s))

    # ---- what the engine says (`twin.engine.Shell`)

    @property
    def busy(self) -> bool:
        """Whether there are requests, in the engine or on their way to it."""
        return bool(self.core.book)

    def report(self, stepped: Stepped) -> None:
        """Pass a report to the core. Nothing starts because of it, but room for a load may have come free."""
        for action in self.core.on(stepped, self._events.now_s):
            match action:
                case Load():
                    self.storage.load(action)
                case CopyIn(digest, over):
                    self.engine.load(self._adapters[digest], over)

    def drew(self, lives: Sequence[AnyLive]) -> None:
        """These requests have drawn a token in each step of the run."""
        if self._on_tokens is not None:
            self._on_tokens(self, lives)

    def ended(self, lives: Sequence[AnyLive]) -> None:
        """These requests have drawn their last token. Others may start now."""
        for live in lives:
            self._on_end(self, live)
        keys = [(live.brief.request_id, live.brief.epoch) for live in lives]
        if actions := self.core.on(Stepped(ended=keys), self._events.now_s):
            self._perform(actions)

    def between_steps(self) -> None:
        """Start the requests whose KV blocks have come."""
        if not self._landing:
            return
        landing, self._landing = [one for one in self._landing if self.core.entry(one[0].key) is one[0]], []

        def start() -> None:
            self._perform([action for entry, _ in landing for action in self.core.on(Fetched(entry.key), self._events.now_s)])

        self.engine.take_in([(entry.payload, blocks) for entry, blocks in landing], start)

    def announce(self) -> None:
        """There may be news for schedulers."""
        self._on_change(self)

    def announce_changes(self) -> None:
        """There is news for schedulers if the view has changed."""
        if self.view.changed:
            self._on_change(self)

    # ---- what schedulers hear

    def snapshot(self, *, lists_prefixes: bool = True) -> WorkerSnapshot:
        """The whole state, as a message. It includes all pending changes, and without `lists_prefixes` not all KV blocks."""
        self.report(self.engine.progress())
        return self.view.snapshot(self.spec.perf, lists_prefixes=lists_prefixes)

    def delta(self) -> WorkerDelta:
        """The changes since the last message, as a message."""
        self.report(self.engine.progress())
        return self.view.delta()


def _engine(spec: WorkerSpec, events: Events, metrics: Metrics, worker: Worker, *, seed: int) -> Any:
    """An `Engine`, or an `ImageEngine` of a worker that draws pictures; both have the same commands."""
    if spec.images is not None:
        return ImageEngine(spec, events, metrics, worker)
    return Engine(spec, events, metrics, worker, seed=seed)
