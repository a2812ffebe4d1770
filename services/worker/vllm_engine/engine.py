"""vLLM behind the worker's engine interface.

    add ──> EngineEntry (queue, adapter slots) ──requests that enter──> EngineCore, a process of vLLM's
                  ▲                            ──add_lora, remove_lora──>     │
                  └───────────── one EngineCoreOutputs per step ──────────────┘──> StepReport

Rules:
- everything here runs on the event loop; only the start of a core runs in a thread.
- adapters enter and leave vLLM's slots by the worker's commands only. So vLLM's LRU never evicts, and the residency that the
  worker reports is vLLM's. In host memory vLLM keeps the weights of further adapters: those of which the worker's host tier has
  a copy.
- vLLM takes commands and requests between two steps, in the order in which they are sent. So nothing waits for the answer to a
  command, which comes a step later (`adapters.py`).
- a paused request is aborted in vLLM. It enters again with its output as a part of the prompt.
- a request is sent only when its adapter has a slot. So vLLM never skips a request in its queue.
- which KV blocks are cached comes beside the outputs (`cache_events.py`), and is told with the next report.
- ids in vLLM are unique for every addition, so late outputs of a cancelled request are ignored.
- when a core dies, its requests end with WorkerLost and their gateways submit them again. A new core is started at once, and
  requests that come meanwhile wait for it. Requests that had not entered the core stay here if they were lost before, so that
  they are not lost again because of another request that kills cores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

from msgspec.structs import replace

from motet.policies.step.engine_entry import EngineEntry
from motet.policies.worker.assemble import DeviceMemory, engine_entry
from motet.services.worker import metrics
from motet.services.worker.engines.request import EngineRequest, ResidencyChange, StepOutput, StepReport, StepStats
from motet.services.worker.vllm_engine.adapters import CoreAdapters
from motet.services.worker.vllm_engine.cache_events import CacheEvents
from motet.services.worker.vllm_engine.cached_blocks import CachedBlocks
from motet.services.worker.vllm_engine.core import Core, VllmOptions, start_core, warm
from motet.services.worker.vllm_engine.peft_files import PeftAdapter
from motet.services.worker.vllm_engine.probing import CoreProbes
from motet.services.worker.vllm_engine.requests import (
    VllmSequence,
    core_request,
    ending,
    float32_bytes,
    refusal,
    sequence,
    token_logprobs,
)
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, MotetError, WorkerLost
from motet.shared.model import Capability, RequestBrief
from motet.shared.telemetry import logger
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import StreamItem
from motet.shared.worker_options import DEFAULTS, WorkerOptions

log = logger("motet.worker.vllm")
VLLM: frozenset[Capability] = frozenset({"structured", "prompt_logprobs"})
POOLING: frozenset[Capability] = frozenset({"embeddings"})
"""What a pooling model serves (`--runner pooling`)."""
AHEAD = 2
"""Requests in vLLM's queue beyond the sequences that it runs: a seat that becomes free is taken in the next step."""
RESTARTS = 3
"""After this many cores in a row that do not start, the engine is reported as failed for good."""
DEATHS = 8
"""After this many cores in a row that die without a token, too: then the deaths are not caused by a single request."""
STOP_S = 2.0


@dataclass(eq=False)
class VllmEngine:
    """Runs vLLM as a worker's engine (`EngineProtocol`). `deliver(report)` runs in the event loop.

    `slot_bytes`: device memory of one adapter slot.
    """

    options: VllmOptions
    deliver: Callable[[StepReport], None]
    slot_bytes: int = 1
    entry_options: WorkerOptions = DEFAULTS
    probing: bool = False
    """Every adapter that comes into a slot is read (`probing.py`)."""
    core: Core = field(init=False)
    _live: dict[str, VllmSequence] = field(default_factory=dict)  # by id at vLLM
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _events: CacheEvents = field(default_factory=CacheEvents)
    _rejections: dict[str, int] = field(default_factory=dict)  # of adapters: later requests find no blocks from before
    _probes: CoreProbes = field(default_factory=CoreProbes)
    _listener: asyncio.Task[None] | None = None
    _output: StepOutput = field(default_factory=StepOutput)
    _changed: dict[str, RequestBrief] = field(default_factory=dict)
    _ids: Any = field(default_factory=count)
    _step: int = 0
    _deaths: int = 0
    _failures: int = 0
    _usage: float = 0.0
    _flushing: bool = False
    _up: bool = False
    _stopping: bool = False
    _since_s: float | None = None

    kv = None
    """None: vLLM's blocks are in its own process."""

    def __post_init__(self) -> None:
        self._adapters = CoreAdapters(self._spawn, self._was_read)

    @property
    def serves(self) -> frozenset[Capability]:
        """What vLLM can do under this worker, known once it has started. Without a tokenizer it follows no constraint."""
        if self.core.pools:
            return POOLING
        if self.core.tokenizer is None:
            return VLLM - {"structured"}
        return VLLM | {"images"} if self.core.reader is not None else VLLM

    # ---- life

    async def start(self) -> None:
        self.core = await asyncio.to_thread(start_core, self.options, self._events.endpoint)
        self._cached = CachedBlocks(self.core.block_size)
        if self.core.tells_cached:
            self._listener = asyncio.create_task(self._events.listen(self._on_cache_events))
        await warm(self.core)
        if self.probing:
            await self._probes.start(self.core)
        slots = self.options.max_loras
        memory = DeviceMemory(
            kv_blocks=self.core.kv_blocks, block_size=self.core.block_size, adapter_bytes=slots * self.slot_bytes
        )
        self._entry: EngineEntry[VllmSequence] = engine_entry(
            memory, replace(self.entry_options, max_loras=slots), seats=self.options.max_running + AHEAD
        )
        self._up = True
        self._spawn(self._read(self.core))

    async def stop(self) -> None:
        self._stopping, self._up = True, False
        tasks = [*self._tasks] if self._listener is None else [*self._tasks, self._listener]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._events.close()
        if hasattr(self, "core"):
            await asyncio.to_thread(self.core.client.shutdown, STOP_S)

    def busy_s(self) -> float:
        """How long vLLM has had requests without reporting a step."""
        return now_s() - self._since_s if self._since_s is not None else 0.0

    async def check(self) -> None:
        """Check which requests and adapters vLLM should have, while it has no request. Raises what does not add up."""
        if self._up and not self._live:
            self._entry.check()
            assert not self._entry.state.running, "requests are in vLLM that it was not given"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, core: Core) -> None:
        while True:
            try:
                outputs = await core.client.get_output_async()
            except Exception as error:
                if not self._stopping:
                    log.error("vLLM's core is gone", extra={"error": repr(error)})
                    self._spawn(self._again(error))
                return
            try:
                self._on_outputs(outputs)
            except Exception:
                log.exception("a step of vLLM was not understood")

    async def _again(self, error: Exception) -> None:
        """The core died: end its requests with WorkerLost, and start another core."""
        self._up = False
        for task in [*self._tasks]:
            if task is not asyncio.current_task():
                task.cancel()
        self._output.residency += [ResidencyChange(digest, None) for digest in self._adapters.lost()]
        lost = WorkerLost(f"vLLM's core died: {error!r}")
        for live in [*self._entry.state.running, *(one for one in self._entry.state.waiting if not one.request.losses)]:
            self._fail(live, lost)
        self._entry.empty_slots()
        self._cached.forget()
        metrics.STEP_FAILURES.inc()
        self._deaths += 1
        self._failures = RESTARTS if self._deaths >= DEATHS else 0
        self._report(StepStats(), failure=error)
        while not self._stopping and self._failures < RESTARTS:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self.core.client.shutdown, 0.0)
            try:
                self.core = await asyncio.to_thread(start_core, self.options, self._events.endpoint)
                await warm(self.core)
                if self.probing:
                    await self._probes.start(self.core)
            except Exception as failed:
                log.exception("vLLM's core did not start again")
                self._failures += 1
                self._report(StepStats(), failure=failed)
                continue
            self._up, self._usage, self._failures = True, 0.0, 0
            self._spawn(self._read(self.core))
            self._pump()
            return

    # ---- commands

    def add(self, request: EngineRequest) -> None:
        sampling, live = request.sampling, sequence(request, self.core, self.slot_bytes)
        item = request.item(live.output_tokens)
        banned = {word[0] for word in sampling.bad_words if len(word) == 1}
        if sampling.allowed_token_ids and banned.issuperset(sampling.allowed_token_ids):
            item.finish = "error"
            item.error = BadRequest("bad_words leaves no token to draw", param="bad_words").info()
        elif request.output and live.tokens[-1] in ending(request, self.core):
            item.finish, item.stop_token = "stop", live.tokens[-1]
        elif live.length >= live.max_length:
            item.finish = "length"
        if item.finish is not None:
            self._emit(live, item)
            return
        self._entry.start(live, now_s())
        self._changed[request.request_id] = live.brief()
        self._pump()
        self._flush_soon()

    def cancel(self, request_id: str, epoch: int) -> None:
        state = self._entry.state
        for live in (*state.waiting, *state.running):
            if live.request.request_id == request_id and live.request.epoch <= epoch:
                self._drop(live)
                self._end(live, live.request.item(live.output_tokens, "cancelled"))
                self._pump()
                return

    def load_adapter(self, adapter: Any, over: Collection[str] | None = None) -> None:
        if not self._up or not self.core.takes_adapters:
            return
        entry, digest = self._entry, adapter.digest
        grant = entry.load(digest, self.slot_bytes) if over is None else entry.foresee(digest, self.slot_bytes, over)
        if grant is not None:
            self._free_slots([digest for digest, _ in grant.evicted])
            self._bring(adapter)

    def pin_adapters(self, digests: Collection[str]) -> None:
        self._entry.slots.pinned = digests

    def unload_adapter(self, digest: str) -> None:
        self._entry.doomed.add(digest)
        self._sweep()

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        state = self._entry.state
        for live in [one for one in (*state.waiting, *state.running) if one.adapter == digest]:
            self._drop(live)
            self._fail(live, error)
        self.unload_adapter(digest)
        self._rejections[digest] = self._rejections.get(digest, 0) + 1

    def abort_all(self, error: MotetError) -> None:
        for live in self._live.values():
            self._drop(live)
        self._end_all(error)

    # ---- requests into vLLM

    def _pump(self) -> None:
        """Let requests enter, and load the adapters of those that come next."""
        while self._up and not self._stopping and self._enter():
            pass

    def _enter(self) -> bool:
        """Carry out one decision: commands and requests reach vLLM in this order.

        Returns whether another decision may admit more.
        """
        entries = self._entry.decide(now_s(), self._blocks_free)
        if entries.pauses:
            self._spawn(self._abort(self.core, [live.core_id for live in entries.pauses]))
        for live in entries.pauses:
            del self._live[live.core_id]
            live.core_id, live.reported = "", False
            self._changed[live.request.request_id] = live.brief()
            self._output.stats.preempted += 1
        self._free_slots([digest for digest, _ in entries.evictions])
        arrived = [self._bring(cast(PeftAdapter, live.request.weights)) for live in entries.loads]
        for live in entries.entered:
            live.core_id = f"{live.request.request_id}/{live.request.epoch}/{next(self._ids)}"
            live.entered_s = now_s()
            self._live[live.core_id] = live
            self._changed[live.request.request_id] = live.brief()
            self._since_s = self._since_s or live.entered_s
            self._spawn(self._send(self.core, live))
        return any(arrived)

    async def _send(self, core: Core, live: VllmSequence) -> None:
        """Give a request to vLLM. Threads compile constraints and read images, so that other requests do not wait."""
        try:
            images = None
            if live.request.images and core.reader is not None:
                read = partial(core.reader.read, unpack_tokens(live.request.prompt), live.request.images)
                images = await asyncio.get_running_loop().run_in_executor(core.reader.thread, read)
                live.image_tokens = len(images.tokens) - live.prompt_tokens
                live.scheduled = self._entry.state.kv.blocks_for(live.length + live.image_tokens)
            number = self._adapters.number(live.adapter) if live.adapter else 0
            request = core_request(live, core, number, images, rejections=self._rejections.get(live.adapter, 0))
            if live.request.sampling.structured is None:
                core.check(request.params)
            else:
                await asyncio.to_thread(core.check, request.sampling_params)
        except Exception as error:
            if live.core_id in self._live:
                self._fail(live, refusal(error, live.request))
                self._pump()
            return
        if live.core_id in self._live:  # else it was cancelled meanwhile
            with contextlib.suppress(Exception):  # a core that has died is noticed where its outputs are read
                await core.client.add_request_async(request)

    def _drop(self, live: VllmSequence) -> None:
        """Tell vLLM to forget a request, if vLLM has it."""
        if live.core_id and self._up:
            self._spawn(self._abort(self.core, [live.core_id]))

    async def _abort(self, core: Core, core_ids: list[str]) -> None:
        with contextlib.suppress(Exception):  # a core that has died is noticed where its outputs are read
            await core.client.abort_requests_async(core_ids)

    # ---- what vLLM did

    def _on_outputs(self, outputs: Any) -> None:
        stats = StepStats()
        told = outputs.scheduler_stats
        if told is not None:
            self._usage = told.kv_cache_usage
            if (step := told.iteration_details) is not None:
                stats.time_ms = step.elapsed_ms
                stats.prefill_requests, stats.prefill_tokens = step.num_ctx_requests, step.num_ctx_tokens
                stats.decode_rows = step.num_generation_requests
        prefills: list[int] = []
        decodes: list[int] = []
        for output in outputs.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                if self._probes and (reading := self._probes.take(output)) is not None:
                    self._output.readings.append(reading)
                    self._flush_soon()
                continue
            (decodes if live.reported else prefills).append(live.rank)
            stats.sampled += 1
            stats.preempted += sum(event.type == 3 for event in output.events or ())
            try:
                self._take(live, output, stats)
            except Exception as error:
                log.exception("an output of vLLM was not understood")
                self._drop(live)
                self._fail(live, MotetError(f"the engine failed: {error!r}"))
        stats.decode_rank_sum, stats.decode_max_rank = sum(decodes), max(decodes, default=0)
        stats.prefill_rank_sum, stats.prefill_max_rank = sum(prefills), max(prefills, default=0)
        self._deaths = 0 if stats.sampled else self._deaths
        self._since_s = now_s() if self._live else None
        self._sweep()
        self._pump()
        self._report(stats, ended_s=outputs.timestamp)

    def _on_cache_events(self, number: int, payload: bytes) -> None:
        self._cached.receive(number, payload)
        if not self._live:  # else the next step's report tells it
            self._flush_soon()

    def _take(self, live: VllmSequence, output: Any, stats: StepStats) -> None:
        request, tokens = live.request, list(output.new_token_ids)
        item = StreamItem(request.request_id, request.epoch, live.output_tokens, tokens)
        live.scheduled = 0  # its blocks are in vLLM's own count now
        for token in tokens:
            live.append(token)
        if not live.reported:
            live.reported = True
            cached = output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0
            stats.cached_tokens += cached
            if item.index == request.output_tokens:  # else it was paused before
                item.queue_ms = max(0.0, live.entered_s - request.arrival_s) * 1000
                prompt_tokens = live.prompt_tokens + live.image_tokens
                item.cached_tokens = min(cached, prompt_tokens)
                item.prompt_tokens = prompt_tokens if request.images else 0
            if output.new_prompt_logprobs_tensors is not None:
                item.prompt_logprobs = [
                    None,
                    *token_logprobs(output.new_prompt_logprobs_tensors, request.sampling.prompt_logprobs or 0),
                ]
        if output.pooling_output is not None:
            item.embedding = float32_bytes(output.pooling_output)
        if output.new_logprobs is not None and request.sampling.logprobs is not None:
            item.logprobs = token_logprobs(output.new_logprobs, request.sampling.logprobs)
        match None if output.finish_reason is None else str(output.finish_reason):
            case None:
                self._emit(live, item)
                return
            case "length":
                item.finish = "length"
            case "stop" | "repetition":
                item.finish, item.stop_token = "stop", tokens[-1] if tokens else None
            case reason:
                failed = MotetError if request.sampling.structured is not None else WorkerLost
                item.finish, item.error = "error", failed(f"vLLM ended the request: {reason}").info()
        self._end(live, item)

    @property
    def _blocks_free(self) -> int:
        return int(self.core.kv_blocks * (1.0 - self._usage) + 0.5)

    # ---- adapters

    def _free_slots(self, digests: list[str]) -> None:
        """Take adapters out of their slots."""
        gone = self._adapters.free(self.core.client, digests)
        self._output.residency += [ResidencyChange(digest, None) for digest in gone]
        probes = [core_id for digest in digests for core_id in self._probes.left(digest)] if self._probes else []
        if probes:
            self._spawn(self._abort(self.core, probes))
        if digests:
            self._flush_soon()

    def _bring(self, adapter: PeftAdapter) -> bool:
        """Load an adapter into its slot. Returns whether requests for it may follow at once."""
        if self.probing:
            self._output.loading.append(adapter.digest)
            self._flush_soon()
        at_once = self._adapters.bring(self.core.client, adapter)
        if at_once:
            self._arrived(adapter.digest)
        return at_once

    def _was_read(self, digest: str, took_s: float, error: Exception | None) -> None:
        if error is not None:
            self._not_loaded(digest, error)
        else:
            self._output.stats.load_s += took_s
            self._arrived(digest)
        self._sweep()
        self._pump()

    def _arrived(self, digest: str) -> None:
        self._output.residency.append(ResidencyChange(digest, "device"))
        self._output.stats.adapters_loaded += 1
        if self.probing:
            self._spawn(self._probe(self.core, self._probes.begin(digest), self._adapters.number(digest)))
        if digest in self._entry.slots.loading:
            self._entry.slots.arrived(digest)
        self._flush_soon()

    async def _probe(self, core: Core, core_id: str, number: int) -> None:
        reading = await self._probes.ask(core, core_id, number)
        if reading is not None and core is self.core:
            self._output.readings.append(reading)
            self._flush_soon()

    def _not_loaded(self, digest: str, error: Exception) -> None:
        answer = MotetError(f"adapter {digest} could not be loaded: {error}", param="model")
        for live in [one for one in self._entry.state.waiting if one.adapter == digest]:
            self._fail(live, answer)
        if digest in self._entry.slots:
            self._entry.slots.drop(digest)

    def _sweep(self) -> None:
        if self._up:
            self._free_slots(self._entry.sweep())

    # ---- items and reports

    def _emit(self, live: VllmSequence, item: StreamItem) -> None:
        self._output.items.setdefault(live.request.gateway_id, []).append(item)
        self._flush_soon()

    def _end(self, live: VllmSequence, item: StreamItem) -> None:
        self._emit(live, item)
        self._entry.end(live)
        self._live.pop(live.core_id, None)
        self._changed.pop(live.request.request_id, None)
        if not self._live:
            self._since_s, self._usage = None, 0.0  # vLLM says nothing more until it runs again

    def _fail(self, live: VllmSequence, error: MotetError) -> None:
        self._end(live, live.request.item(live.output_tokens, "error", error=error))

    def _end_all(self, error: MotetError) -> None:
        state = self._entry.state
        for live in (*state.waiting, *state.running):
            self._fail(live, error)

    def _flush_soon(self) -> None:
        """Report what happened between two steps, outside of the command that caused it."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        output = self._output
        told = output.items or output.residency or output.loading or output.readings
        if told or self._changed or self._cached.news:
            self._report(self._output.stats)
        self._flushing = False

    def _report(self, stats: StepStats, failure: Exception | None = None, ended_s: float = 0.0) -> None:
        """Deliver a report. `ended_s`: when the step ended, by the core's clock.

        The core's clock is also ours, but several outputs may be read at once.
        """
        output, self._output = self._output, StepOutput()
        if stats is not output.stats:  # what happened between steps belongs to the step that follows
            stats.adapters_loaded += output.stats.adapters_loaded
            stats.load_s += output.stats.load_s
            stats.preempted += output.stats.preempted
        stats.mechanisms = self._entry.mechanisms
        output.stats, output.failure = stats, failure
        output.changed = list(self._changed.values())
        self._changed.clear()
        if output.empty and not self._cached.news:
            return
        state = self._entry.state
        stats.running, stats.waiting = len(state.running), len(state.waiting)
        self._step += 1
        self.deliver(
            StepReport(
                step=self._step,
                began_s=(ended_s or now_s()) - stats.time_ms / 1000,
                output=output,
                failures=self._failures,
                kv_blocks_free=self._blocks_free if self._up else 0,
                adapter_bytes_free=self._entry.slots.bytes_free,
                prefixes=self._cached.take_news(),
            )
        )
