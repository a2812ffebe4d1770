"""The client of the benches over HTTP, and the mesh bench's rival: the engine alone in a process of its own."""

from __future__ import annotations

import json
import random
import select
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.models import SHAPES
from motet.shared.clock import now_s

BASE = "bench"
VOCABULARY = SHAPES["S"].vocabulary
PATIENT = "x-slo-ttft-ms: 3600000\r\nx-slo-tpot-ms: 3600000\r\n"  # nothing is refused for being late

_laps = count()  # request ids never repeat


def prompts(streams: int, tokens: int, *, seed: int) -> list[list[int]]:
    """One random prompt per stream. Prompts of different seeds share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(streams)]


@dataclass(slots=True)
class Lap:
    """One round of concurrent streams: seconds from the start to the first and to the last token of each."""

    first_s: list[float]
    last_s: list[float]
    tokens: int  # per stream
    gaps_s: list[float] = field(default_factory=list)  # between the tokens of each stream, where the client looked at them

    @property
    def tokens_per_s(self) -> float:
        return len(self.last_s) * self.tokens / max(self.last_s)

    @property
    def tpot_s(self) -> list[float]:
        return [(last - first) / (self.tokens - 1) for first, last in zip(self.first_s, self.last_s, strict=True)]


def stream(port: int, prompts_: list[list[int]], max_tokens: int, models: Sequence[str] = (BASE,)) -> Lap:
    """Send all prompts at once over HTTP and read the streams, over plain sockets, because the client shares the machine with
    the mesh.

    Prompt i asks for model i of `models`, which repeat. Raises RuntimeError when an answer is an error or is not `max_tokens`
    long.
    """
    poll = select.epoll()
    streams: dict[int, _Stream] = {}
    for i, prompt in enumerate(prompts_):
        body: dict[str, Any] = {"model": models[i % len(models)], "prompt": prompt, "max_tokens": max_tokens, "seed": i}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        text = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{PATIENT}"
        head += "content-type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams[connection.fileno()] = _Stream(connection, f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
    began = now_s()
    for number, one in streams.items():
        one.connection.sendall(one.request)
        poll.register(number, select.EPOLLIN)
    live = len(streams)
    while live:
        for number, _ in poll.poll():
            one = streams[number]
            data = one.connection.recv(1 << 18)
            now = now_s() - began
            if not data:
                poll.unregister(number)
                live -= 1
                one.connection.close()
                continue
            one.data += data
            if events := data.count(b'"text"'):
                if one.first_s:
                    one.gaps_s += [(now - one.last_s) / events] * events
                one.first_s = one.first_s or now
                one.last_s = now
    poll.close()
    for one in streams.values():
        if f'"completion_tokens":{max_tokens}'.encode() not in one.data.replace(b": ", b":"):
            raise RuntimeError(f"not {max_tokens} tokens: {bytes(one.data[:600])!r} ... {bytes(one.data[-600:])!r}")
    every = list(streams.values())
    gaps_s = [gap for one in every for gap in one.gaps_s]
    return Lap([one.first_s for one in every], [one.last_s for one in every], max_tokens, gaps_s)


class _Stream:
    __slots__ = ("connection", "data", "first_s", "gaps_s", "last_s", "request")

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self.connection, self.request = connection, request
        self.data = bytearray()
        self.first_s = self.last_s = 0.0
        self.gaps_s: list[float] = []


def wait_for(port: int, models: Sequence[str], headers: Mapping[str, str] | None = None) -> None:
    """Wait until the gateway knows all `models`. Raises RuntimeError if it never does."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=dict(headers or {}))
    for _ in range(600):
        with urllib.request.urlopen(asked, timeout=10) as answer:
            if set(models) <= {card["id"] for card in json.load(answer)["data"]}:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the mesh does not serve {', '.join(models)}")


def engine_alone(pipe: Connection, model: str, adapters: Sequence[str], threads: int) -> None:
    """Serve laps of the engine over a pipe. It receives (prompts, max_tokens, adapter of each or -1), or None to end, and sends
    a Lap.

    `adapters` are PEFT directories.
    """
    from bench.stored_adapters import stored_adapter
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    config = WorkerConfig.of(model=model, threads=threads)
    assembly = assemble(config, Path(model), StepTimes(START_PERF))
    loaded = []
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:  # mapped: adapters outlive it
        for adapter in adapters:
            stored = stored_adapter(Path(model), Path(adapter))
            file = Path(directory) / stored.digest
            file.write_bytes(stored.blob)
            loaded.append(assembly.parse_adapter(file, stored.digest))
    pipe.send("ready")
    while (lap := pipe.recv()) is not None:
        prompts_, max_tokens, chosen = lap
        pipe.send(_engine_lap(assembly.engine, prompts_, max_tokens, [None if i < 0 else loaded[i] for i in chosen]))


def _engine_lap(engine: Any, prompts_: list[list[int]], max_tokens: int, adapters: Sequence[Any]) -> Lap:
    began = now_s()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for i, _ in run_engine(engine, prompts_, max_tokens, adapters):
        last[i] = now_s() - began
        first.setdefault(i, last[i])
    return Lap(list(first.values()), list(last.values()), max_tokens)


def run_engine(
    engine: Any, prompts_: list[list[int]], max_tokens: int, adapters: Sequence[Any]
) -> Iterator[tuple[int, list[int]]]:
    """Give the engine all prompts, each with its adapter or None, and step until all have ended.

    Yields (index of the prompt, new tokens). Raises the error of a request that ends before its `max_tokens`.
    """
    from motet.services.worker.engines.request import EngineRequest
    from motet.shared.model import SamplingParams

    lap, now = next(_laps), now_s()
    for i, (prompt, adapter) in enumerate(zip(prompts_, adapters, strict=True)):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=i, ignore_eos=True)
        request = EngineRequest.local(f"{lap}-{i}", prompt, sampling, weights=adapter, gateway_id="g", arrival_s=now)
        engine.add(request, now)
    while engine.has_work():
        output = engine.step(now_s())
        if output.failure is not None:
            raise output.failure
        for item in output.items.get("g", []):
            if item.error is not None:
                raise RuntimeError(f"request {item.request_id}: {item.error.message}")
            yield int(item.request_id.partition("-")[2]), item.tokens
