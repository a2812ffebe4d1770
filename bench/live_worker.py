"""A worker in a process of its own, and a client that sends it requests as a scheduler and receives frames as a gateway.

For `bench.twin_live`, `bench.worker_memory` and `bench.merge`. `python -m bench.live_worker BYTES_PER_S [FILE]` runs a worker
whose adapter copies take as long as over a link of that speed (0: as fast as memory), and records its steps in FILE.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from motet.cli.lifeline import dying_with_parent
from motet.cli.nats_server import NatsServer
from motet.cli.process import tail
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.request import StepReport
from motet.services.worker.profiling import publish, random_adapter
from motet.services.worker.service import WorkerService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.config import BusConfig, load
from motet.shared.errors import Unavailable
from motet.shared.model import AdapterRef, SamplingParams, Slo
from motet.shared.provision import provision
from motet.shared.service import run
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import AssignReply, GenerateRequest, pack_tokens
from motet.shared.wire.stream import TokenFrame
from motet.twin.workload import Workload

BASE = "bench"
WORKER = "bench-worker"
GATEWAY = "bench-gateway"
START_S = 120.0
QUIET_S = 60.0  # without a frame, while some are expected


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


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step as the worker reported it. `merge_s`: how long the merged copy was made before the step."""

    began_s: float
    time_ms: float
    merge_s: float
    merged: bool
    resting: int  # requests that it left out
    decoding: int  # requests that computed one token; 0 if others computed a prompt


def command(words: Sequence[str], options: Mapping[str, str], log: Path, module: str = "motet") -> subprocess.Popen[bytes]:
    """A process that runs `python -m MODULE WORDS` with MOTET_* variables.

    Its output goes to `log`; it ends with this process.
    """
    variables = {f"MOTET_{name.upper()}": value for name, value in options.items()}
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            preexec_fn=dying_with_parent(),
        )


class LiveWorker:
    """NATS and one worker with MOTET_* `options`, ready for requests. An asynchronous context manager that ends both.

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
        self._model, self._directory, self._link_bytes_per_s = model, directory, link_bytes_per_s
        self._vocabulary: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._options = {**options, "model": str(model), "served_model_name": BASE, "instance_id": WORKER}
        self._nats = NatsServer(directory / "nats")
        self._process: subprocess.Popen[bytes] | None = None
        self._served: dict[str, Served] = {}
        self._began_s = 0.0
        self._heard = asyncio.Event()
        self._runs = 0

    async def __aenter__(self) -> LiveWorker:
        url = await self._nats.start()
        self._bus = await Bus.connect(BusConfig(nats_url=url), "bench")
        await provision(self._bus)
        await self._bus.subscribe(subjects.stream(GATEWAY), TokenFrame, self._hear)
        log = self._directory / "worker.log"
        options = {"ops_port": "0", **self._options, "nats_url": url}
        if self._link_bytes_per_s or self._records:
            words = [str(self._link_bytes_per_s), *([str(self._records)] if self._records else [])]
            self._process = command(words, options, log, "bench.live_worker")
        else:
            self._process = command(["worker"], options, log)
        deadline_s = now_s() + START_S
        while True:
            try:
                await self.ping()
                return self
            except Unavailable:
                if self._process.poll() is not None or now_s() > deadline_s:
                    raise RuntimeError(f"the worker did not start:\n{tail(log)}") from None
                await asyncio.sleep(0.2)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 30)
        await self._bus.close()
        self._nats.stop()

    def pin(self, core: int) -> None:
        """From now on all threads of the worker run on this core. It is for workers with one compute thread."""
        assert self._process is not None
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})

    async def publish(self, rank: int, number: int) -> AdapterRef:
        """A new adapter in the registry's store."""
        blob, version = random_adapter(self._model, BASE, rank, number)
        return await publish(self._bus, blob, version, f"bench-{rank}-{number}")

    async def ping(self) -> None:
        """Send a request that is refused at once. Raises Unavailable when the worker does not answer."""
        await self._bus.request(subjects.assign(WORKER), self._request("ping", 1, 1, None, base=""), AssignReply, timeout_s=5.0)

    async def run(self, workload: Workload, adapters: Sequence[AdapterRef]) -> list[Served]:
        """Send each request at its time, and wait for the last token."""
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
        """Keep `streams` requests running for `seconds`, then wait for their last tokens.

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
        request = self._request(name, prompt_tokens, output_tokens, adapter)
        served = self._served[name] = Served(now_s() - self._began_s)
        reply = await self._bus.request(subjects.assign(WORKER), request, AssignReply, timeout_s=30.0)
        if isinstance(reply, Refused):
            if reply.error.code != "overloaded":
                raise RuntimeError(f"the worker refuses: {reply.error.message}")
            served.refused = served.over = True
            self._heard.set()

    def _request(
        self, name: str, prompt_tokens: int, output_tokens: int, adapter: AdapterRef | None, *, base: str = BASE
    ) -> GenerateRequest:
        draw = np.random.default_rng((self._runs, len(self._served)))
        return GenerateRequest(
            request_id=f"{self._runs}-{name}",
            gateway_id=GATEWAY,
            base_model=base,
            prompt=pack_tokens(draw.integers(2, self._vocabulary, size=prompt_tokens).tolist()),
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            slo=Slo(),
            adapter=adapter,
        )

    def _hear(self, frame: TokenFrame) -> None:
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


def main(link_bytes_per_s: float, records: str = "") -> int:
    """Run a worker as `motet worker` does, from MOTET_* variables, with an emulated link or with records of its steps."""
    config = load(WorkerConfig, {})
    with open(records or os.devnull, "w", buffering=1) as file:

        def record(report: StepReport) -> None:
            stats = report.output.stats
            if stats.time_ms:
                merging = stats.merging
                seen = StepSeen(
                    report.began_s,
                    stats.time_ms,
                    stats.merge_s,
                    merging is not None and bool(merging.merged),
                    merging.resting if merging is not None else 0,
                    0 if stats.prefill_requests else stats.decode_rows,
                )
                file.write(json.dumps(astuple(seen)) + "\n")

        observe: dict[str, Any] = {"observe": record} if records else {}
        return run(WorkerService(config, link_bytes_per_s=link_bytes_per_s, **observe), config)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
