"""A request with a long context moves between two live workers: its next token, with KV blocks that travel and without.

    old worker   prompt, `BEFORE` tokens ──Cancel──┐ others go on
    new worker                                     └─assign──> first token      this time, KV computed again or fetched

The bench is gateway and scheduler. Both workers are processes with one thread; the old one serves other requests meanwhile, as
a worker does that requests move away from. Moves with and without blocks take turns, each with a prompt of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.models import model_and_adapters
from bench.rig.workers import Workers, greedy
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.model import KvOffer
from motet.shared.wire.request import Cancel, GenerateRequest, pack_tokens
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
    client = Client()
    both = {name: {"threads": "1"} for name in ("old", "new")}
    async with Workers(model, directory, both, client.hear, end_s=0.0) as workers:
        for _ in range(OTHERS):
            await send(workers, "old", fresh(draw.integers(2, vocabulary, size=64).tolist(), 1500))
        times: dict[bool, list[float]] = defaultdict(list)
        same = 0
        for _ in range(pairs + 1):  # the first pair warms up
            prompt = draw.integers(2, vocabulary, size=context).tolist()
            said = []
            for travels in (False, True):
                took_ms, tokens = await _move(workers, client, fresh(prompt, BEFORE + AFTER), travels=travels)
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


class Client:
    """The gateway's side of both workers: the items of each request and epoch, and when they came."""

    def __init__(self) -> None:
        self._items: dict[tuple[str, int], list[tuple[float, StreamItem]]] = defaultdict(list)
        self._heard = asyncio.Event()

    def hear(self, frame: TokenFrame) -> None:
        at_s = now_s()
        for item in frame.items:
            self._items[item.request_id, item.epoch].append((at_s, item))
        self._heard.set()

    def first_s(self, request_id: str, epoch: int) -> float:
        """When the first tokens came."""
        return self._items[request_id, epoch][0][0]

    def pause_ms(self, request_id: str, from_s: float, to_s: float) -> float:
        """The longest time without a token that ends or lies between two times."""
        came = [at_s for at_s, _ in self._items[request_id, 0] if at_s <= to_s]
        before = [at_s for at_s in came if at_s <= from_s][-1:]
        times = [*before, *[at_s for at_s in came if at_s > from_s], to_s]
        return 1000.0 * max(after - at for at, after in pairwise(times))

    async def tokens(self, request_id: str, epoch: int, count: int) -> list[int]:
        """The tokens so far, once there are at least `count`."""

        def found() -> list[int]:
            return [token for _, item in self._items[request_id, epoch] for token in item.tokens]

        async with asyncio.timeout(WAIT_S):
            while len(found()) < count:
                self._heard.clear()
                await self._heard.wait()
        return found()


async def send(workers: Workers, name: str, request: GenerateRequest) -> None:
    """Assign a request to a worker, as a scheduler does. Raises RuntimeError if it refuses."""
    if (refused := await workers.assign(name, request)) is not None:
        raise RuntimeError(f"{name} refuses: {refused.error.message}")


async def _move(workers: Workers, client: Client, request: GenerateRequest, *, travels: bool) -> tuple[float, list[int]]:
    """Returns the milliseconds from the move to the next token, and all tokens."""
    name = request.request_id
    await send(workers, "old", request)
    before, began_s = (await client.tokens(name, 0, BEFORE))[:BEFORE], now_s()
    offer = KvOffer(worker_id="old", token=secrets.token_hex(8)) if travels else None
    cancel = Cancel(request_id=name, epoch=0, kv_token=offer.token if offer is not None else "")
    await workers.bus.publish(subjects.control("old"), cancel)
    await send(workers, "new", msgspec.structs.replace(request, epoch=1, output=pack_tokens(before), kv=offer))
    await client.tokens(name, 1, 1)
    took_s = client.first_s(name, 1) - began_s
    return 1000.0 * took_s, [*before, *await client.tokens(name, 1, AFTER)]


def fresh(prompt: list[int], max_tokens: int) -> GenerateRequest:
    """A request whose blocks no other request shares."""
    return greedy(secrets.token_hex(6), prompt, max_tokens, cache_salt=secrets.token_hex(4))
