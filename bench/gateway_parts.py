"""The processes of the gateway bench: a gateway, a bare Starlette server, and an engine without a model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.rig.closed_loop import Counters
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.service import GatewayService
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.clock import unix_ms
from motet.shared.config import BusConfig
from motet.shared.leases import LeaseHolder
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.provision import provision
from motet.shared.wire.request import Assigned, Cancel, Control, GenerateRequest
from motet.shared.wire.stream import StreamItem, TokenFrame
from motet.shared.wire.worker_state import WorkerSnapshot

STREAM_TOKENS = 2000
VOCABULARY = 1000
IDLE_S = 0.001  # uvloop knows no shorter sleep
WORKER = "synthetic"
LIMITS = WorkerLimits(
    base_model="bench",
    engine="synthetic",
    max_model_len=4096,
    max_running=1024,
    max_waiting=1024,
    block_size=16,
    kv_blocks_total=65536,
    adapter_bytes_total=1 << 30,
    max_lora_rank=64,
)
PERF = PerfModel(
    prefill_base_ms=1, prefill_token_ms=0, prefill_lora_ms=0, decode_base_ms=1, decode_row_ms=0, decode_lora_ms=0,
    load_base_ms=0, load_ms_per_mib=0,
)  # fmt: skip


def words() -> list[str]:
    """The texts of the tokens: words of four letters after a space."""
    letters = "abcdefghij"
    return [" " + letters[i // 100] + letters[i // 10 % 10] + letters[i % 10] + "n" for i in range(VOCABULARY)]


def write_model(path: Path) -> None:
    """A byte-level tokenizer of `words`, and the configuration files the gateway reads."""
    path.mkdir(parents=True)
    vocabulary = {word.replace(" ", "Ġ"): i for i, word in enumerate(words())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 4096}))


def gateway_server(ready: Connection, url: str, model: str, core: int) -> None:
    """One gateway on `core`, until terminated."""
    os.sched_setaffinity(0, {core})
    config = GatewayConfig.of(nats_url=url, model=model, port=0, instance_id="bench", log_level="warning")

    async def serve() -> None:
        service = GatewayService(config)
        await service.start()
        ready.send(service.port)
        await asyncio.Event().wait()

    uvloop.run(serve())


class Pace:
    """Limits the engine to `window` steps ahead of what the client has seen."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen = counters.seen.value
        self._owed = 0  # tokens sent that the client has not seen

    def forget(self) -> None:
        """A client has left before it had seen everything."""
        self._owed = 0

    def may_step(self, streams: int) -> bool:
        """Whether one more token for each of `streams` may be sent. If so, it counts as sent."""
        seen = self._counters.seen.value
        self._owed = max(self._owed - (seen - self._seen), 0)
        self._seen = seen
        if not streams or self._owed > (self._counters.window.value - 1) * streams:
            return False
        self._owed += streams
        return True


def starlette_server(ready: Connection, core: int, counters: Counters, paced: bool) -> None:
    """A StreamingResponse over a generator of ready-made events like the gateway's, on `core`, until terminated.

    `paced`: the generators wait for a step before each event, as with an engine; otherwise they never wait.
    """
    os.sched_setaffinity(0, {core})
    texts = words()
    event = {
        "id": "cmpl-" + "0" * 24,
        "object": "text_completion",
        "created": unix_ms() // 1000,
        "model": "bench",
        "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}],
    }
    head, tail = (b"data: " + orjson.dumps(event) + b"\n\n").split(b'""', 1)
    events = [head + orjson.dumps(texts[i % VOCABULARY]) + tail for i in range(STREAM_TOKENS)]
    events[-1] += b"data: [DONE]\n\n"
    step, pace, running = asyncio.Event(), Pace(counters), 0

    async def completions(request: Request) -> StreamingResponse:
        await request.body()

        async def chunks() -> AsyncIterator[bytes]:
            for chunk in events:
                yield chunk

        async def paced_chunks() -> AsyncIterator[bytes]:
            nonlocal running
            running += 1
            try:
                for chunk in events:
                    await step.wait()
                    yield chunk
            finally:
                running -= 1
                pace.forget()

        return StreamingResponse(paced_chunks() if paced else chunks(), media_type="text/event-stream")

    async def walk() -> None:
        while True:
            if pace.may_step(running):
                step.set()
                step.clear()
            await asyncio.sleep(IDLE_S)

    async def is_ready(_: Request) -> JSONResponse:
        return JSONResponse({"ready": True})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/ready", is_ready)]
    config = uvicorn.Config(Starlette(routes=routes), port=0, http="httptools", lifespan="off", log_level="error")
    listener = config.bind_socket()
    ready.send(listener.getsockname()[1])

    async def serve() -> None:
        walking = asyncio.ensure_future(walk())
        await uvicorn.Server(config).serve(sockets=[listener])
        walking.cancel()

    uvloop.run(serve())


class Progress:
    """A running request: the beginning of its encoded items (array header, id, epoch) and the index of its next token."""

    def __init__(self, request: GenerateRequest) -> None:
        item = encode(StreamItem(request.request_id, request.epoch, 0, []))
        rest = encode(StreamItem("", 0, 0, []))[3:]
        self.head = item.removesuffix(rest)
        self.index = 0


def item_tails() -> list[bytes]:
    """What follows the request id and epoch in an encoded item, by token index."""
    last = STREAM_TOKENS - 1
    items = [StreamItem("", 0, i, [i % VOCABULARY], "length" if i == last else None) for i in range(STREAM_TOKENS)]
    return [encode(item)[3:] for item in items]


def next_frame(step: int, running: list[Progress], tails: list[bytes]) -> bytes:
    """An encoded TokenFrame with the next token of every stream.

    It is made of prepared bytes, so that the engine costs little.
    """
    frame = encode(TokenFrame(WORKER, step, []))  # ends with an empty list
    parts = [frame[:-1], b"\xdd", len(running).to_bytes(4, "big")]
    for progress in running:
        parts.append(progress.head)
        parts.append(tails[progress.index])
        progress.index += 1
    return b"".join(parts)


def engine(ready: Connection, url: str, counters: Counters) -> None:
    """A scheduler and worker in one process. It answers every request with the same tokens, until terminated."""

    async def serve() -> None:
        bus = await Bus.connect(BusConfig(nats_url=url), "engine")
        await provision(bus)
        running: dict[str, Progress] = {}
        pace = Pace(counters)

        async def submit(request: GenerateRequest) -> Assigned:
            running[request.request_id] = Progress(request)
            return Assigned(worker_id=WORKER, predicted_tokens=STREAM_TOKENS)

        def control(message: Control) -> None:
            if isinstance(message, Cancel):
                running.pop(message.request_id, None)
                pace.forget()

        await bus.serve("submit", subjects.SUBMIT, GenerateRequest, submit, queue="scheduler")
        await bus.subscribe(subjects.control(WORKER), Control, control)
        await LeaseHolder(bus, "worker", WORKER, "1").start()
        bus.spawn(_heartbeat(bus))
        ready.send(0)
        await _steps(bus, running, pace)

    uvloop.run(serve())


async def _steps(bus: Bus, running: dict[str, Progress], pace: Pace) -> None:
    """Send one frame per step, with one token of every stream."""
    step, tails = 0, item_tails()
    while True:
        if not pace.may_step(len(running)):
            await asyncio.sleep(IDLE_S)
            continue
        step += 1
        frame = next_frame(step, list(running.values()), tails)
        for request_id in [r for r, progress in running.items() if progress.index == STREAM_TOKENS]:
            del running[request_id]
        await bus.publish_encoded(subjects.stream("bench"), frame)
        await bus.flush() if step % 64 == 0 else await asyncio.sleep(0)


async def _heartbeat(bus: Bus) -> None:
    sequence = 0
    while True:
        sequence += 1
        snapshot = WorkerSnapshot(
            worker_id=WORKER, incarnation="1", seq=sequence, limits=LIMITS, perf=PERF,
            kv_blocks_free=1, adapter_bytes_free=1, draining=False, requests=[], adapters=[],
        )  # fmt: skip
        await bus.publish(subjects.state(WORKER), snapshot)
        await asyncio.sleep(0.5)
