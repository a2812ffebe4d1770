"""Worker processes without the other services: the bench sends them requests as a scheduler and receives frames as a gateway.

Workers       NATS and any number of workers, request by request
LiveWorker    one of them, with a load and a client's record of it
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.rig.http import BASE
from bench.rig.nats import private_bus
from bench.rig.processes import START_S, ChildProcess, with_variables
from bench.rig.worker_process import StepSeen
from motet.services.worker.profiling import publish, random_adapter
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.errors import Unavailable
from motet.shared.model import AdapterRef, SamplingParams, Slo
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import AssignReply, GenerateRequest, pack_tokens
from motet.shared.wire.stream import TokenFrame
from motet.twin.workload import Ints, Workload

WORKER = "bench-worker"
GATEWAY = "bench-gateway"
ASK_AGAIN_S = 0.2
QUIET_S = 60.0  # without a frame, while some are expected


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> GenerateRequest:
    """A request of the bench's gateway for exactly `max_tokens`, and `more` fields of it."""
    return GenerateRequest(
        request_id=request_id,
        gateway_id=GATEWAY,
        base_model=BASE,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        slo=Slo(),
        **more,
    )


def workload(
    adapters: Sequence[AdapterRef], arrival_s: NDArray[Any], which: Ints, prompt_tokens: Ints, output_tokens: Ints
) -> Workload:
    """Requests for these adapters: request i for adapter `which[i]`, -1 for none."""
    return Workload(
        arrival_s=arrival_s,
        adapter=which,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ranks=np.array([adapter.rank for adapter in adapters], dtype=np.int64),
        adapter_bytes=np.array([adapter.size_bytes for adapter in adapters], dtype=np.int64),
    )


class Workers:
    """NATS, and workers with MOTET_* options that are ready for requests. An asynchronous context manager that ends all.

    `workers`: {name: options}. `hear` gets their frames. `words`: what Python runs instead of `motet worker`. `end_s`: how long
    a worker may take to end.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        workers: Mapping[str, Mapping[str, str]],
        hear: Callable[[TokenFrame], None],
        *,
        words: Sequence[str] = ("motet", "worker"),
        end_s: float = 30.0,
    ) -> None:
        self._model, self._directory, self._hear = model, directory, hear
        self._workers, self._words, self._end_s = workers, words, end_s
        self.processes: dict[str, ChildProcess] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            url, self.bus = await stack.enter_async_context(private_bus(self._directory))
            await self.bus.subscribe(subjects.stream(GATEWAY), TokenFrame, self._hear)
            for name, options in self._workers.items():
                own = {"model": str(self._model), "served_model_name": BASE, "instance_id": name, "nats_url": url}
                log, argv = self._directory / f"{name}.log", [sys.executable, "-m", *self._words]
                variables = with_variables({"ops_port": "0", **options, **own})
                process = ChildProcess(name, argv, variables, log=log, end_s=self._end_s)
                self.processes[name] = stack.enter_context(process)
            for name in self._workers:
                await self._ready(name)
            self._running = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self._running.aclose()

    async def _ready(self, name: str) -> None:
        """Wait until a worker answers. Raises RuntimeError with the end of its log."""
        process, deadline_s = self.processes[name], now_s() + START_S
        while True:
            try:
                await self.ping(name)
                return
            except Unavailable:
                if process.ended or now_s() > deadline_s:
                    raise RuntimeError(f"the worker did not start:\n{process.said()}") from None
                await asyncio.sleep(ASK_AGAIN_S)

    async def ping(self, name: str) -> None:
        """Send a request that is refused at once. Raises Unavailable when the worker does not answer."""
        no_such_base = msgspec.structs.replace(greedy("ping", [2], 1), base_model="")
        await self.bus.request(subjects.assign(name), no_such_base, AssignReply, timeout_s=5.0)

    async def assign(self, name: str, request: GenerateRequest) -> Refused | None:
        """Assign a request to a worker. Returns None when it has accepted, and its refusal when it has no room.

        Raises RuntimeError when it refuses for another reason.
        """
        reply = await self.bus.request(subjects.assign(name), request, AssignReply, timeout_s=30.0)
        if not isinstance(reply, Refused):
            return None
        if reply.error.code != "overloaded":
            raise RuntimeError(f"{name} refuses: {reply.error.message}")
        return reply


@dataclass(slots=True)
class Served:
    """One request as its client saw it, in seconds from the start of the run."""

    sent_s: float
    frames_s: list[float] = field(default_factory=list)  # when tokens came, those of one step together
    tokens: int = 0
    refused: bool = False
    over: bool = False

    @property
    def first_s(self) -> float:
        """When the first token came; 0 without tokens."""
        return self.frames_s[0] if self.frames_s else 0.0

    @property
    def end_s(self) -> float:
        """When the last token came; 0 without tokens."""
        return self.frames_s[-1] if self.frames_s else 0.0


class LiveWorker(Workers):
    """One worker with MOTET_* `options`, ready for requests. An asynchronous context manager.

    `link_bytes_per_s`: rate of adapter copies to the device; 0 for the speed of memory. `records`: `steps` has the records of
    steps.
    """

    def __init__(
        self,
        model: Path,
        options: Mapping[str, str],
        directory: Path,
        *,
        link_bytes_per_s: float = 0.0,
        records: bool = False,
    ) -> None:
        self._records = directory / "steps.jsonl" if records else None
        words = ["motet", "worker"]
        if link_bytes_per_s or self._records:
            words = ["bench.rig.worker_process", str(link_bytes_per_s), *([str(self._records)] if self._records else [])]
        super().__init__(model, directory, {WORKER: options}, self._note, words=words)
        self._vocabulary: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._served: dict[str, Served] = {}
        self._began_s = 0.0
        self._heard = asyncio.Event()
        self._runs = 0

    def pin(self, core: int) -> None:
        """From now on all threads of the worker run on this core. It is for workers with one compute thread."""
        self.processes[WORKER].pin(core)

    async def publish(self, rank: int, number: int) -> AdapterRef:
        """A new adapter in the registry's store."""
        blob, version = random_adapter(self._model, BASE, rank, number)
        return await publish(self.bus, blob, version, f"bench-{rank}-{number}")

    async def run(self, workload: Workload, adapters: Sequence[AdapterRef]) -> list[Served]:
        """Open loop: send each request at its time, and wait for the last token."""
        self._start()
        asking = []
        for one in workload:
            await asyncio.sleep(max(0.0, self._began_s + workload.arrival_s[one.index] - now_s()))
            adapter = adapters[workload.adapter[one.index]] if one.adapter.digest else None
            asking.append(asyncio.create_task(self._ask(str(one.index), one.prompt_tokens, one.output_tokens, adapter)))
        await asyncio.gather(*asking)
        await self._over(*self._served.values())
        return list(self._served.values())

    async def keep_busy(
        self, streams: int, seconds: float, draw: Callable[[], tuple[int, int, AdapterRef | None]]
    ) -> list[Served]:
        """Closed loop: keep `streams` requests running for `seconds`, then wait for their last tokens.

        Each draw gives the prompt tokens, the output tokens and the adapter of a request.
        """
        self._start()

        async def stream() -> None:
            while now_s() - self._began_s < seconds:
                name = str(len(self._served))
                await self._ask(name, *draw())
                await self._over(self._served[name])

        await asyncio.gather(*(stream() for _ in range(streams)))
        return list(self._served.values())

    @property
    def began_s(self) -> float:
        """When the last run began, on the clock of `StepSeen`."""
        return self._began_s

    def steps(self) -> list[StepSeen]:
        """All steps so far that computed at least one row."""
        assert self._records is not None, "they are not recorded"
        return [StepSeen(*json.loads(line)) for line in self._records.read_text().splitlines()]

    def _start(self) -> None:
        self._runs += 1
        self._served = {}
        self._began_s = now_s()

    async def _over(self, *served: Served) -> None:
        while not all(one.over for one in served):
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), QUIET_S)

    async def _ask(self, name: str, prompt_tokens: int, output_tokens: int, adapter: AdapterRef | None) -> None:
        draw = np.random.default_rng((self._runs, len(self._served)))
        prompt = draw.integers(2, self._vocabulary, size=prompt_tokens).tolist()
        request = greedy(f"{self._runs}-{name}", prompt, output_tokens, adapter=adapter)
        served = self._served[name] = Served(now_s() - self._began_s)
        if await self.assign(WORKER, request) is not None:
            served.refused = served.over = True
            self._heard.set()

    def _note(self, frame: TokenFrame) -> None:
        at_s = now_s() - self._began_s
        for item in frame.items:
            run, _, name = item.request_id.partition("-")
            served = self._served.get(name)
            if served is None or int(run) != self._runs:
                continue
            if item.error is not None:
                raise RuntimeError(f"request {item.request_id}: {item.error.message}")
            if item.tokens:
                served.frames_s.append(at_s)
                served.tokens += len(item.tokens)
            served.over = served.over or item.finish is not None
        self._heard.set()
