"""A request with a long context moves between two live workers: its next token, with KV blocks that travel and without.

    old worker   prompt, `BEFORE` tokens ──Cancel──┐ others go on
    new worker                                     └─assign──> first token      this time, KV computed again or fetched

The bench is gateway and scheduler. Both workers are processes with one thread; the old one serves other requests meanwhile, as
a worker does that requests move away from. Moves with and without blocks take turns, each with a prompt of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.live_worker import BASE, GATEWAY, START_S, command
from bench.models import model_and_adapters
from motet.cli.nats_server import NatsServer
from motet.cli.process import tail
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.config import BusConfig
from motet.shared.errors import Unavailable
from motet.shared.model import SamplingParams, Slo
from motet.shared.provision import provision
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import AssignReply, Cancel, GenerateRequest, KvOffer, pack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame

MODEL, QUICK_MODEL = "S", "XS"
CONTEXT, QUICK_CONTEXT = 1800, 400
PAIRS, QUICK_PAIRS = 5, 1
OTHERS = 2  # requests that stay on the old worker
BEFORE, AFTER = 8, 8  # tokens of the moved request before the move and after it
WAIT_S = 120.0


def measure(*, quick: bool) -> dict[str, Any]:
    """Median time from a move to the next token in milliseconds, and whether the tokens were the same."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        return asyncio.run(_measure(Path(directory), quick))


async def _measure(directory: Path, quick: bool) -> dict[str, Any]:
    model, _ = model_and_adapters(QUICK_MODEL if quick else MODEL)
    context, pairs = (QUICK_CONTEXT, QUICK_PAIRS) if quick else (CONTEXT, PAIRS)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    draw = np.random.default_rng(3)
    async with contextlib.AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(_Workers(model, directory))
        for _ in range(OTHERS):
            await mesh.send("old", _request(draw.integers(2, vocabulary, size=64).tolist(), 1500))
        times: dict[bool, list[float]] = defaultdict(list)
        same = 0
        for _ in range(pairs + 1):  # the first pair warms up
            prompt = draw.integers(2, vocabulary, size=context).tolist()
            said = []
            for travels in (False, True):
                took_ms, tokens = await mesh.move(_request(prompt, BEFORE + AFTER), travels=travels)
                times[travels].append(took_ms)
                said.append(tokens)
            same += said[0] == said[1]
    again_ms, travel_ms = (median(times[travels][1:]) for travels in (False, True))
    return {
        "context_tokens": context,
        "next_token_ms_computed": round(again_ms, 1),
        "next_token_ms_travelled": round(travel_ms, 1),
        "gain": round(again_ms / travel_ms, 3),
        "changed": pairs + 1 - same,
    }


class _Workers:
    """NATS and two workers, and the gateway's side of both. An asynchronous context manager."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._nats = NatsServer(directory / "nats")
        self._items: dict[tuple[str, int], list[tuple[float, StreamItem]]] = defaultdict(list)
        self._heard = asyncio.Event()

    async def __aenter__(self) -> _Workers:
        url = await self._nats.start()
        self._bus = await Bus.connect(BusConfig(nats_url=url), "bench")
        await provision(self._bus)
        await self._bus.subscribe(subjects.stream(GATEWAY), TokenFrame, self._hear)
        options = {"model": str(self._model), "served_model_name": BASE, "threads": "1", "nats_url": url, "ops_port": "0"}
        logs = {name: self._directory / f"{name}.log" for name in ("old", "new")}
        self._processes = {name: command(["worker"], {**options, "instance_id": name}, log) for name, log in logs.items()}
        deadline_s = now_s() + START_S
        for name, process in self._processes.items():
            while not await self._serves(name):
                if process.poll() is not None or now_s() > deadline_s:
                    raise RuntimeError(f"the worker did not start:\n{tail(logs[name])}")
                await asyncio.sleep(0.2)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            await asyncio.to_thread(process.wait, 30)
        await self._bus.close()
        self._nats.stop()

    async def _serves(self, worker: str) -> bool:
        try:
            await self.send(worker, _request([5], 1))
        except Unavailable:
            return False
        return True

    async def send(self, worker: str, request: GenerateRequest) -> None:
        """Assign a request to a worker, as a scheduler does."""
        reply = await self._bus.request(subjects.assign(worker), request, AssignReply, timeout_s=30.0)
        if isinstance(reply, Refused):
            raise RuntimeError(f"{worker} refuses: {reply.error.message}")

    async def move(self, request: GenerateRequest, *, travels: bool) -> tuple[float, list[int]]:
        """Returns the milliseconds from the move to the next token, and all tokens."""
        name = request.request_id
        await self.send("old", request)
        await self._until(lambda: len(self._tokens(name, 0)) >= BEFORE)
        before, began_s = self._tokens(name, 0)[:BEFORE], now_s()
        offer = KvOffer(worker_id="old", token=secrets.token_hex(8)) if travels else None
        cancel = Cancel(request_id=name, epoch=0, kv_token=offer.token if offer is not None else "")
        await self._bus.publish(subjects.control("old"), cancel)
        await self.send("new", msgspec.structs.replace(request, epoch=1, output=pack_tokens(before), kv=offer))
        await self._until(lambda: bool(self._tokens(name, 1)))
        took_s = self._items[name, 1][0][0] - began_s
        await self._until(lambda: len(self._tokens(name, 1)) >= AFTER)
        return 1000.0 * took_s, [*before, *self._tokens(name, 1)]

    def _hear(self, frame: TokenFrame) -> None:
        at_s = now_s()
        for item in frame.items:
            self._items[item.request_id, item.epoch].append((at_s, item))
        self._heard.set()

    def _tokens(self, request_id: str, epoch: int) -> list[int]:
        return [token for _, item in self._items[request_id, epoch] for token in item.tokens]

    async def _until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                self._heard.clear()
                await self._heard.wait()


def _request(prompt: list[int], max_tokens: int) -> GenerateRequest:
    """A request whose blocks no other request shares."""
    return GenerateRequest(
        request_id=secrets.token_hex(6),
        gateway_id=GATEWAY,
        base_model=BASE,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        slo=Slo(),
        cache_salt=secrets.token_hex(4),
    )
