"""Measures a live worker with any engine: steps of batches of many sizes, rank mixes and prompt lengths; adapter transfers;
network hops.

The worker is the whole service on a private NATS server, so the times include what its event loop, frames and state reports
take from the engine. The requests of a batch arrive together and decode for a while; then newcomers join, whose prefills share
steps with decodes. The adapters have random weights, since times do not depend on values.

    step           from its beginning to the beginning of the next step, while there is work
    load           an adapter from host memory to the device, by the engine's clock or the measured rate of its link
    disk, store    an adapter from disk or object store to host memory, while a small batch decodes
    hops           a request to the worker and a token frame from it, while a small batch decodes
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from motet.policies.memory.host_tier import DiskRoom, Evict
from motet.policies.step.cold_start import AssistRates
from motet.policies.times.step_record import Step
from motet.policies.worker.worker_events import CancelRequest
from motet.services.worker.adapter_files import AdapterFiles
from motet.services.worker.adapters import AdapterLoader
from motet.services.worker.config import MIB, WorkerConfig
from motet.services.worker.engines.request import StepReport
from motet.services.worker.service import WorkerService
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, write_blob
from motet.shared.base_shapes import ATTENTION, read_shapes
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.model import AdapterRef, AdapterVersion, SamplingParams, Slo, WorkerLimits
from motet.shared.profile import LinkFacts, MergeFacts
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import AssignReply, GenerateRequest, pack_tokens
from motet.shared.wire.stream import TokenFrame

if TYPE_CHECKING:
    from motet.services.worker.engines.adapter_weights import HostAdapter
    from motet.services.worker.engines.request import CopyStats, StepStats

RANKS = (8, 16, 32, 64)
ROWS = (1, 2, 4, 8, 16, 32, 64)
BETWEEN = (3, 6, 12, 24, 48)  # rows for every other prompt length
PROMPTS = (8, 32, 100, 300)  # tokens
LONG_PROMPT = 100  # prompts from here on are measured with fewer mixes of ranks: they take most of a profile's time
LONGEST = 2048  # prompt tokens of a batch
DECODES = 8  # steps of each batch
DEEP_ROWS = 8  # fewest rows of a deep batch, which decodes until its contexts are as long as a full worker's
DEEP_PROMPT, DEEP_DECODES = 32, 48
DEEP_TIMES = 2  # each deep batch is measured twice
ADAPTERS_PER_RANK = 8
LONGEST_TIMES, LONGEST_S = 3, 30.0  # a slow worker's profile takes at most so many times as long as was asked for, or so long
LINK_RANKS = (8, 64)  # ranks of the adapters whose transfers are timed
LINK_ADAPTERS = 8  # of each of those ranks
MOMENTS = (
    4  # times during a profile at which transfers and hops are measured, since a machine's speed changes, above all at first
)
REST_S = 0.3  # between fetches, so that caches are cold and threads asleep, as in a worker that fetches now and then
BESIDE = 4  # sequences that decode while transfers and hops are measured
HOPS = 10  # requests timed at each moment
KNOCK_S = 0.04  # longest pause between two of them
GATEWAY = "profile"
REPLY_S = 30.0
MERGE_S = 60.0  # time in which an adapter of all requests has to be merged


@dataclass(slots=True)
class Measured:
    """All measurements: steps without adapter loads, and adapter transfers as (MiB, ms)."""

    limits: WorkerLimits
    steps: list[Step] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)
    disk: list[tuple[float, float]] = field(default_factory=list)
    store: list[tuple[float, float]] = field(default_factory=list)
    assign_ms: list[float] = field(default_factory=list)  # a request, from its sender to the worker
    frame_ms: list[float] = field(default_factory=list)  # a step's tokens, from the step's end to a gateway
    merge: MergeFacts | None = None  # of a worker with `--merge on`
    link: LinkFacts | None = None  # where copies run beside the steps


async def measure(
    config: WorkerConfig, model_dir: Path, *, seconds: float, progress: Callable[[float], None] = lambda share: None
) -> Measured:
    """Profile the worker that `config` describes, for about `seconds`.

    It continues until every batch was measured once, but no longer than `LONGEST_TIMES` as long or `LONGEST_S`. Batches are in
    random order, so chance decides which ones are then left out. `config.bus.nats_url` is a NATS server with Motet's buckets
    and no other clients. `progress` gets the share that is done. Raises ConfigError for a pooling model, and
    errors of the engine's steps.
    """
    adapters = msgspec.structs.replace(config.adapters, merge="off")  # a profile says what steps with LoRA take
    measured = await _measure(msgspec.structs.replace(config, adapters=adapters), model_dir, seconds, progress)
    if config.options.merge == "on":
        measured.merge = await _merge_facts(config, model_dir)
    return measured


async def _measure(config: WorkerConfig, model_dir: Path, seconds: float, progress: Callable[[float], None]) -> Measured:
    worker = Observed(config)
    try:
        await worker.service.start()
        if "embeddings" in worker.limits.capabilities:
            raise ConfigError("--model: a pooling model decodes nothing; only models that generate text are measured")
        profiler = Profiler(worker, model_dir)
        await profiler.publish()
        began_s = now_s()
        batches = profiler.batches()
        moments, number, done, longest_s = 0, 0, 0.0, max(LONGEST_TIMES * seconds, LONGEST_S)
        while done < 1.0 or moments < MOMENTS:
            took_s = now_s() - began_s
            done = min(1.0, max(took_s / longest_s, min(number / len(batches), took_s / seconds)))
            if done >= (2 * moments + 1) / (2 * MOMENTS):
                await profiler.link_times(moments)
                await profiler.hop_times()
                moments += 1
            await profiler.run(batches[number % len(batches)], tell=number >= len(batches) // 8)  # the first ones warm up
            number += 1
            progress(done)
        return profiler.measured
    finally:
        await worker.service.stop()


async def _merge_facts(config: WorkerConfig, model_dir: Path) -> MergeFacts:
    """The merged copy of a worker whose requests all use one adapter. Raises ConfigError if none is made within `MERGE_S`."""
    worker = Observed(config)
    try:
        await worker.service.start()
        profiler = Profiler(worker, model_dir)
        await profiler.publish()
        until_s, took_s = now_s() + MERGE_S, 0.0
        while now_s() < until_s:
            worker.seen.clear()
            await profiler.run(_Batch(DEEP_ROWS, (RANKS[0],), DEEP_PROMPT, DEEP_DECODES, adapters=1), tell=False)
            for stats in (report.output.stats for report in worker.seen):
                took_s += stats.merge_s
                if stats.merging is not None and stats.merging.merged:
                    return MergeFacts(copy_mib=stats.merging.bytes / MIB, mib_ms=took_s * 1000 / (stats.merging.bytes / MIB))
        raise ConfigError(f"--merge on: no adapter was merged within {MERGE_S:g} s, though all requests used one")
    finally:
        await worker.service.stop()


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: int
    ranks: tuple[int, ...]  # of the requests in turn
    prompt: int  # tokens
    decodes: int = DECODES
    adapters: int = ADAPTERS_PER_RANK  # of each rank, at most


class Observed:
    """A worker and the reports of its steps."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.service = WorkerService(config, leave=lambda: None, observe=self._see)
        self.seen: list[StepReport] = []
        self.stepped = asyncio.Event()

    def _see(self, report: StepReport) -> None:
        if report.output.failure is not None:
            raise report.output.failure
        self.seen.append(report)
        self.stepped.set()

    @property
    def limits(self) -> WorkerLimits:
        return self.service.view.limits

    @property
    def vocab_size(self) -> int:
        return self.service.facts.vocab_size

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits. Requests end early where a step draws several tokens."""
        return self.service.shell.idle.is_set()

    async def idle(self) -> None:
        """Wait until nothing runs or waits."""
        await self.service.shell.idle.wait()

    def end_all(self) -> None:
        """Cancel every request."""
        for entry in list(self.service.core):
            self.service.shell.on(CancelRequest(*entry.key))

    async def load_times(self, adapters: Sequence[AdapterRef], directory: str, source: Literal["store", "disk"]) -> list[float]:
        """Load the adapters into host memory, one after another. Returns the milliseconds of each."""
        loads = _Loads()
        assert self.service.bus is not None, "the worker has started"
        store = AdapterLoader(self.service.bus, AdapterFiles(directory), loads, parse=self.service.facts.parse_adapter)
        times: list[float] = []
        for adapter in adapters:
            began_s = now_s()
            store.load(adapter, source)
            await loads.over()
            times.append((now_s() - began_s) * 1000)
            store.evict(Evict(adapter.digest, "host"))
            if source == "store":
                await asyncio.sleep(REST_S)
        return times


class _Loads:
    """Waits for one load at a time (an `adapters.Decider`)."""

    def __init__(self) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def over(self) -> None:
        """Wait until the load is over. Raises the reason if it failed."""
        await self._over
        self._over = asyncio.get_running_loop().create_future()

    def loaded(self, digest: str, adapter: HostAdapter) -> None:
        self._over.set_result(None)

    def failed(self, digest: str, error: Exception) -> None:
        self._over.set_exception(error)

    def file_lost(self, digest: str) -> None:
        pass

    def make_disk_room(self, missing_bytes: int) -> DiskRoom:
        return "never"


class Profiler:
    def __init__(self, worker: Observed, model_dir: Path) -> None:
        assert worker.service.bus is not None, "the worker has started"
        self._worker, self._bus, self._model_dir = worker, worker.service.bus, model_dir
        self._limits = worker.limits
        self._random = np.random.default_rng(0)
        self._requests = itertools.count()
        self._adapters: dict[int, list[AdapterRef]] = {}
        self._linked: list[AdapterRef] = []
        self.measured = Measured(self._limits)

    async def publish(self) -> None:
        """Publish adapters of every rank, as the registry would."""
        ranks = [rank for rank in RANKS if rank <= self._limits.max_lora_rank]
        room = self._limits.adapter_bytes_total // 2
        for rank in ranks:
            first = await self._publish(rank, 0)
            takes = self._worker.service.facts.slot_bytes or first.size_bytes
            count = min(ADAPTERS_PER_RANK, room // len(ranks) // takes)  # so that all of them stay loaded
            if takes <= room:
                self._adapters[rank] = [first, *[await self._publish(rank, number) for number in range(1, count)]]
        for number, rank in itertools.product(range(LINK_ADAPTERS), LINK_RANKS):
            if rank in self._adapters:
                self._linked.append(await self._publish(rank, ADAPTERS_PER_RANK + number))

    async def _publish(self, rank: int, number: int) -> AdapterRef:
        blob, version = random_adapter(self._model_dir, self._limits.base_model, rank, number)
        return await publish(self._bus, blob, version, f"profile-{rank}-{number}")

    # ---- steps

    def batches(self) -> list[_Batch]:
        """All batches in random order: a machine's speed drifts, and no kind of batch should meet only its slow times."""
        batches = list(self._kinds())
        return [batches[place] for place in self._random.permutation(len(batches))]

    def _kinds(self) -> Iterator[_Batch]:
        ranks = list(self._adapters)
        every = (0, *ranks)
        mixes = ((0,), *((rank,) for rank in ranks), tuple(ranks), every)
        few = ((0,), tuple(ranks[-1:]), every)
        deep = [_Batch(rows, every, DEEP_PROMPT, DEEP_DECODES) for rows in ROWS if rows >= DEEP_ROWS]
        yield from [batch for batch in deep if self._fits(batch)] * DEEP_TIMES
        for prompt, sizes in zip(PROMPTS, itertools.cycle((ROWS, BETWEEN)), strict=False):
            for mix, rows in itertools.product(few if prompt >= LONG_PROMPT else mixes, sizes):
                long = rows > 4 and rows * prompt > LONGEST  # steps of a long queue of prefills are like those of a short one
                batch = _Batch(rows, mix, prompt)
                if mix and not long and self._fits(batch):
                    yield batch

    def _fits(self, batch: _Batch) -> bool:
        limits, length = self._limits, batch.prompt + 2 * batch.decodes
        capacity = limits.kv_blocks_total * limits.block_size
        return (
            batch.rows <= limits.max_running
            and length < limits.max_model_len
            and 2 * batch.rows * (length + limits.block_size) <= capacity
        )

    async def run(self, batch: _Batch, *, tell: bool) -> None:
        """Prefill and decode the batch, then let a quarter as many new requests join. `tell`: record its steps."""
        seen, rows = self._worker.seen, batch.rows
        seen.clear()
        pick = self._pick
        await asyncio.gather(*(self._ask(pick(batch, i), batch.prompt, 2 * batch.decodes) for i in range(rows)))
        while sum(report.output.stats.time_ms > 0 for report in seen) < batch.decodes and not self._worker.is_idle:
            await self._next_step()
        newcomers = min(max(1, rows // 4), self._limits.max_running + self._limits.max_waiting - rows)
        await asyncio.gather(*(self._ask(pick(batch, i), batch.prompt, batch.decodes) for i in range(newcomers)))
        await self._worker.idle()
        if tell:
            self.measured.steps += timed_steps(seen)

    def _pick(self, batch: _Batch, place: int) -> AdapterRef | None:
        """The adapter of request `place`. Ranks take turns, and so do the adapters of a rank."""
        turn, place = divmod(place, len(batch.ranks))
        of_rank = self._adapters.get(batch.ranks[place], [])[: batch.adapters]
        return of_rank[turn % len(of_rank)] if of_rank else None

    def _request(self, adapter: AdapterRef | None, prompt: int, tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"profile-{next(self._requests)}",
            gateway_id=GATEWAY,
            base_model=self._limits.base_model,
            prompt=pack_tokens(self._random.integers(self._worker.vocab_size, size=prompt).tolist()),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            slo=Slo(),
            adapter=adapter,
        )

    async def _ask(self, adapter: AdapterRef | None, prompt: int, tokens: int) -> None:
        request = self._request(adapter, prompt, tokens)
        reply = await self._bus.request(
            subjects.assign(self._worker.service.worker_id), request, AssignReply, timeout_s=REPLY_S
        )
        if isinstance(reply, Refused):
            raise RuntimeError(f"the worker refuses a request of its profile: {reply.error.message}")

    async def _next_step(self) -> None:
        self._worker.stepped.clear()
        await asyncio.wait_for(self._worker.stepped.wait(), REPLY_S)

    # ---- adapters

    async def link_times(self, moment: int) -> None:
        """Fetch the adapters of this moment from the store, read them again from disk, and copy them to the device."""
        each = -(-len(self._linked) // MOMENTS)
        adapters = self._linked[moment * each : (moment + 1) * each]
        with tempfile.TemporaryDirectory(prefix="motet-profile-") as directory:
            await self._beside(self._load(adapters, directory, "store"))
            await self._beside(self._load(adapters, directory, "disk"))
        for adapter in adapters:
            self._worker.seen.clear()
            await self._ask(adapter, PROMPTS[0], 1)
            await self._worker.idle()
            for stats in (report.output.stats for report in self._worker.seen):
                if stats.adapters_loaded and stats.copies is not None:
                    self.measured.loads.append((adapter.size_bytes / MIB, adapter.size_bytes / stats.copies.bytes_per_s * 1000))
                    self.measured.link = self._link(stats.copies)
                elif stats.adapters_loaded:
                    self.measured.loads.append((adapter.size_bytes / MIB, stats.load_s * 1000))

    def _link(self, copies: CopyStats) -> LinkFacts:
        assist = copies.assist or AssistRates(0, mib_row_ms=0.0)
        return LinkFacts(
            gb_per_s=copies.bytes_per_s / 1e9,
            layers=read_shapes(self._model_dir).layers,
            assist_processes=assist.processes,
            assist_mib_ms=assist.mib_ms,
            assist_mib_row_ms=assist.mib_row_ms,
            assist_start_ms=assist.start_ms,
            assist_core_share=assist.core_share,
            assist_relief=assist.relief,
        )

    async def _load(self, adapters: Sequence[AdapterRef], directory: str, source: Literal["store", "disk"]) -> None:
        times_ms = await self._worker.load_times(adapters, directory, source)
        measured = self.measured.store if source == "store" else self.measured.disk
        measured += [(adapter.size_bytes / MIB, ms) for adapter, ms in zip(adapters, times_ms, strict=True)]

    async def hop_times(self) -> None:
        """Measure how long a request takes to the worker, and a frame from it. The worker refuses these requests."""
        asker = await Bus.connect(self._worker.config.bus, "profile")
        heard: dict[int, float] = {}  # step -> when

        def hear(frame: TokenFrame) -> None:
            heard[frame.step] = now_s()

        await asker.subscribe(subjects.stream(GATEWAY), TokenFrame, hear)
        self._worker.seen.clear()
        try:
            await self._beside(self._knock(asker))
        finally:
            await asker.close()
        ends = {report.step: report.began_s + report.output.stats.time_ms / 1000 for report in self._worker.seen}
        self.measured.frame_ms += [(heard[step] - end_s) * 1000 for step, end_s in ends.items() if step in heard]

    async def _knock(self, asker: Bus) -> None:
        for _ in range(HOPS):
            request = msgspec.structs.replace(self._request(None, PROMPTS[0], 1), base_model="")
            sent_s = now_s()
            await asker.request(subjects.assign(self._worker.service.worker_id), request, AssignReply, timeout_s=REPLY_S)
            self.measured.assign_ms.append((self._worker.service.asked_s - sent_s) * 1000)
            await asyncio.sleep(KNOCK_S * self._random.random())  # so that they arrive at random moments of a step

    async def _beside(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` while sequences decode."""
        most = self._limits.max_model_len - PROMPTS[0]
        sequences = min(BESIDE, self._limits.max_running)
        await asyncio.gather(*(self._ask(None, PROMPTS[0], most) for _ in range(sequences)))
        await work
        self._worker.end_all()
        await self._worker.idle()


def timed_steps(reports: Sequence[StepReport]) -> list[Step]:
    """The steps of `reports`, each with the time until the next one began while there was work.

    Steps beside which an adapter came to the device are left out. An engine may report the adapter between two steps, in a
    report without duration. Then it is unknown which of the two steps took longer, and both are left out.
    """
    found: list[Step] = []
    steps = [place for place, report in enumerate(reports) if report.output.stats.time_ms]
    for before, at, after in zip([-1, *steps], steps, steps[1:], strict=False):
        stats, took_s = reports[at].output.stats, reports[after].began_s - reports[at].began_s
        working = stats.running + stats.waiting > 0  # so the next step began at once
        if working and not any(copying(report.output.stats) for report in reports[before + 1 : after + 1]):
            found.append(msgspec.structs.replace(stats, time_ms=took_s * 1000))
    return found


def copying(stats: StepStats) -> bool:
    """Whether an adapter was copied beside the step."""
    return bool(stats.adapters_loaded or (stats.copies is not None and stats.copies.under_way))


def random_adapter(model_dir: Path, base_model: str, rank: int, number: int) -> tuple[bytes, AdapterVersion]:
    """A bfloat16 adapter of the attention's projections: its blob, and the registry's record of it."""
    shapes = read_shapes(model_dir)
    draw = np.random.default_rng((rank, number))
    pairs = {}
    for layer, module in itertools.product(range(shapes.layers), ATTENTION):
        fan_in, fan_out = shapes.linear(module)
        sizes = [(rank, fan_in), (fan_out, rank)]
        # the upper half of a float32 number is a bfloat16 number
        lora_a, lora_b = ((draw.standard_normal(size, np.float32) * 0.01).view(np.uint16)[..., 1::2] for size in sizes)
        pairs[layer, module] = (1.0, lora_a, lora_b)
    blob = write_blob(pairs, dtype="BF16", layers=shapes.layers)
    return blob, AdapterVersion(
        digest=digest_of(blob),
        base_model=base_model,
        rank=rank,
        modules=ATTENTION,
        layers=shapes.layers,
        dtype="BF16",
        size_bytes=len(blob),
        source="random",
        created_unix_ms=0,
    )


async def publish(bus: Bus, blob: bytes, version: AdapterVersion, name: str) -> AdapterRef:
    """Publish an adapter, as the registry would."""
    await (await bus.object_store(subjects.BLOBS)).put(version.digest, blob)
    await (await bus.key_value(subjects.KV_ADAPTERS)).put(f"version.{version.digest}", msgspec.json.encode(version))
    return AdapterRef(name=name, digest=version.digest, rank=version.rank, size_bytes=len(blob))
