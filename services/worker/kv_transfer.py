"""Fetches KV blocks from other workers, and gives them out: those of a request that moves, and cached ones of a prompt.

    gateway   ──Cancel(kv_token)──> old worker: holds the blocks for a moment
    scheduler ──GenerateRequest(kv)──> new worker ──OpenKv, ReadKv ...──> old worker, or a lender: holds what is cached
                                          │                                        over NATS, `WINDOW` parts at a time
                                          └── writes them between steps, then starts the request, which finds them by key

The keys by which blocks are asked for are computed here, from the tokens, the adapter and the tenant's scope of a request that
this worker has. They are hashes of 128 bits, so nobody can name blocks of which he does not know all this.

Whatever goes wrong, the request starts with the blocks that have arrived and computes the rest: at the latest after the time
that computing all of it was predicted to take. This file keeps no state of a request beyond that wait.

Blocks are copied in and out of the engine in pieces between two steps, and sent in smaller parts, so that neither a step nor a
token frame on the same connection waits for long. Everything is bounded: moves, bytes per move, pieces in memory, time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import msgspec
import numpy as np

from motet.policies.memory import kv_travel
from motet.policies.memory.kv_travel import MOVES, Stretch, content_keys
from motet.policies.times.step_times import StepTimes
from motet.services.worker import metrics
from motet.services.worker.engines.protocol import KvAccess
from motet.services.worker.engines.request import EngineRequest
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, Conflict, DeadlineExceeded, MotetError, NotFound, Overloaded, Unavailable, from_info
from motet.shared.model import TOKEN_BYTES, KvOffer, WorkerLimits
from motet.shared.telemetry import logger
from motet.shared.wire.kv import KvOpened, KvPart, KvReply, KvRequest, OpenKv, ProbeKv, ReadKv
from motet.shared.wire.refusal import Refused

log = logger("motet.worker.kv")
PIECE_BYTES = 4 << 20
PART_BYTES = 256 << 10
OVERHEAD_BYTES = 4096  # of a message beside its bytes
WINDOW = 3
MOST_KEYS = 1 << 16  # of blocks that are asked for at once
READS = 64  # requests that are answered at a time
OFFER_S = 2.0
"""Blocks are released after so long if the new worker does not ask for them."""
READ_S = 30.0
"""Blocks are held at most so long while the new worker reads them."""
EARLY_S = 0.2
"""The new worker may ask before the gateway's Cancel has come."""
PROBE_S = 30.0
"""Time between two measurements of the link."""


class Ended(Exception):
    """A fetch ended early. The message is a metric label for the reason."""


@dataclass(slots=True, eq=False)
class _Offer:
    """Blocks that are held for another worker. `blocks` and `bytes` are 0 until that worker has opened them."""

    keys: asyncio.Future[list[bytes]]
    timer: asyncio.TimerHandle
    lent: bool = False  # cached ones, and no request's that moves
    opened: bool = False
    blocks: int = 0
    pieces: dict[int, asyncio.Future[np.ndarray | None]] = field(default_factory=dict)
    reading: int = 0
    read: bool = False  # to the end


class KvTransfer:
    """The KV transfers of one worker. `times` gets the measured speed of the link."""

    def __init__(self, bus: Bus, worker_id: str, kv: KvAccess, limits: WorkerLimits, times: StepTimes) -> None:
        self._bus, self._worker_id, self._kv, self._limits, self._times = bus, worker_id, kv, limits, times
        self.spawn = bus.spawn
        self._block_bytes = limits.kv_token_bytes * limits.block_size
        self._piece_blocks = max(1, PIECE_BYTES // self._block_bytes)
        self._part_bytes = min(PART_BYTES, bus.max_payload - OVERHEAD_BYTES)
        self._offers: dict[str, _Offer] = {}
        self._expected: dict[str, asyncio.Future[_Offer]] = {}
        self._coming = 0
        self._fetching: dict[bytes, asyncio.Future[None]] = {}  # by the last key of what is fetched from a cache
        self._measured_s = 0.0

    async def start(self) -> None:
        """Answer other workers, and measure the link from time to time."""
        subject = subjects.kv(self._worker_id)
        await self._bus.serve("kv", subject, KvRequest, self._answer, queue="worker", concurrency=READS)
        self._bus.spawn(self._keep_measuring())

    # ---- the new worker

    def wait_s(self, offer: KvOffer, tokens: int, rank: int) -> float:
        """How long a request of `tokens` tokens may wait for its blocks: as long as computing them would take.

        0 when it should not wait, because there are no blocks or enough requests wait already. The scheduler decided whether
        fetching is worth it.
        """
        blocks = self._stretch(offer, tokens)
        wait_ms = kv_travel.wait_ms(self._times.model, blocks, self._limits.block_size, rank)
        if not wait_ms or offer.worker_id == self._worker_id:
            return 0.0
        if self._coming >= MOVES:
            metrics.KV_FETCHES.labels("busy").inc()
            return 0.0
        return wait_ms / 1000.0

    def _stretch(self, offer: KvOffer, tokens: int) -> Stretch:
        size, most = self._limits.block_size, offer.to_tokens if offer.cached else tokens
        return kv_travel.stretch(tokens, offer.from_tokens, most, block_size=size, block_bytes=self._block_bytes)

    async def fetch(self, offer: KvOffer, request: EngineRequest, adapter_digest: str) -> None:
        """Fetch the request's blocks into the prefix cache, as many as arrive within `request.kv_wait_s`.

        If the same blocks are being fetched for another request, this waits for these. They are held until `drop`. Failures of
        the network or the other worker raise nothing.
        """
        size, outcome = self._limits.block_size * TOKEN_BYTES, "cancelled"
        tokens = request.prompt + request.output
        blocks = self._stretch(offer, len(tokens) // TOKEN_BYTES)
        keys = content_keys([tokens[i * size : (i + 1) * size] for i in range(blocks.end)], adapter_digest, request.cache_scope)
        if offer.cached and (same := self._fetching.get(keys[-1])) is not None:
            metrics.KV_FETCHES.labels("shared").inc()
            await asyncio.wait({same}, timeout=request.kv_wait_s)
            return
        ended = asyncio.get_running_loop().create_future()
        if offer.cached:
            self._fetching[keys[-1]] = ended
        self._coming += 1
        began_s, reason = now_s(), ""
        try:
            async with asyncio.timeout(request.kv_wait_s):
                copied, last = await self._bring(offer, keys, request.kv_wait_s)
            self._observe(copied, now_s() - began_s)
            outcome = "whole"
            if last is not None:  # the engine writes it before it gets the request, which need not wait here
                last.add_done_callback(_count_fetch)
                outcome = ""
        except (TimeoutError, DeadlineExceeded):
            outcome = "late"
            self._observe((blocks.end - blocks.first) * self._block_bytes, now_s() - began_s)
        except Unavailable:
            outcome = "absent"
        except (MotetError, msgspec.MsgspecError) as error:
            outcome, reason = "refused", str(error)
        except Ended as why:
            outcome = str(why)
        finally:
            self._coming -= 1
            ended.set_result(None)
            if offer.cached:
                del self._fetching[keys[-1]]
            if outcome:
                metrics.KV_FETCHES.labels(outcome).inc()
            told = {"request_id": request.request_id, "from": offer.worker_id, "cached": offer.cached}
            told |= {"blocks": blocks.end - blocks.first, "ms": round(1000 * (now_s() - began_s))}
            log.info("KV blocks fetched", extra=told | {"outcome": outcome or "whole", "reason": reason})

    def drop(self, offer: KvOffer) -> None:
        """Release the blocks of a request that the engine has got, or that has ended."""
        self._kv.drop(offer.token)

    async def _bring(self, offer: KvOffer, keys: Sequence[bytes], within_s: float) -> tuple[int, asyncio.Future[bool] | None]:
        """The bytes that arrived, and whether there was room for the last block. Raises Ended, or the errors of a request."""
        name, size = offer.token, self._block_bytes
        kind, cached = self._limits.kv_format, offer.cached
        ask = OpenKv(token=name, kv_format=kind, keys=list(keys), within_s=within_s, cached=cached)
        here, opened = await asyncio.gather(self._kv.find(name, keys), self._ask(offer, ask, within_s))
        if not isinstance(opened, KvOpened) or opened.block_bytes != size or opened.blocks > len(keys):
            raise Ended("broken")
        if not opened.blocks:
            raise Ended("other_content")
        at = done = start = here * size
        end, piece = min(opened.blocks, here + kv_travel.MOST_BYTES // size) * size, max(1, opened.piece_blocks) * size
        parts: deque[tuple[int, asyncio.Task[KvReply]]] = deque()
        landing: asyncio.Future[bool] | None = None
        content = bytearray()
        try:
            while done < end:
                while at < end and len(parts) < WINDOW:
                    count = min(self._part_bytes, end - at, piece - at % piece)
                    ask_part = self._ask(offer, ReadKv(token=name, offset=at, size=count), within_s)
                    parts.append((count, asyncio.create_task(ask_part)))
                    at += count
                count, task = parts.popleft()
                part = await task
                if not isinstance(part, KvPart) or len(part.data) != count:
                    raise Ended("broken")
                content += part.data
                done += count
                if done % piece and done < end:
                    continue
                if landing is not None and not await landing:
                    raise Ended("full")
                first = (done - len(content)) // size
                landing = self._kv.land(name, keys[first : done // size], content)
                landing.add_done_callback(partial(_count_blocks, done // size - first, len(content)))
                content = bytearray()
        finally:
            for _, task in parts:
                task.cancel()
            await asyncio.gather(*(task for _, task in parts), return_exceptions=True)
        return max(0, end - start), landing

    async def _ask(self, offer: KvOffer, message: OpenKv | ReadKv, timeout_s: float) -> KvReply:
        reply: KvReply = await self._bus.request(subjects.kv(offer.worker_id), message, KvReply, timeout_s=timeout_s)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        return reply

    # ---- the old worker

    def offer(self, token: str, request_id: str, epoch: int) -> None:
        """Hold the blocks of a request that moves away for `OFFER_S`, for the worker that has the token."""
        if token in self._offers or self._held(lent=False) >= MOVES:
            return
        loop = asyncio.get_running_loop()
        keys = self._kv.hold(token, request_id, epoch)
        made = self._offers[token] = _Offer(keys, loop.call_later(OFFER_S, self._withdraw, token))
        expected = self._expected.get(token)
        if expected is not None and not expected.done():
            expected.set_result(made)

    def _lend(self, message: OpenKv) -> _Offer:
        """Hold the cached blocks that are asked for. Raises Conflict, or Overloaded when enough are lent."""
        self._check_format(message)
        token, count = message.token, len(message.keys)
        if token in self._offers:
            raise Conflict("this token is used")
        if count > MOST_KEYS or len(set(message.keys)) < count:
            raise BadRequest(
                f"keys: {count} KV blocks with {len(set(message.keys))} keys; {MOST_KEYS} different ones are allowed"
            )
        if self._held(lent=True) >= MOVES:
            raise Overloaded(f"{MOVES} other workers read cached KV blocks here")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(READ_S, self._withdraw, token)
        keys: asyncio.Future[list[bytes]] = loop.create_task(self._find(token, message.keys))
        lent = self._offers[token] = _Offer(keys, timer, lent=True, opened=True)
        return lent

    async def _find(self, token: str, keys: list[bytes]) -> list[bytes]:
        return keys[: await self._kv.find(token, keys)]

    def _held(self, *, lent: bool) -> int:
        return sum(offer.lent is lent for offer in self._offers.values())

    def _withdraw(self, token: str) -> None:
        offer = self._offers.pop(token, None)
        if offer is not None:
            offer.timer.cancel()
            self._kv.drop(token)

    async def _answer(self, message: KvRequest) -> KvOpened | KvPart:
        match message:
            case OpenKv():
                return await self._open(message)
            case ReadKv():
                return await self._read(message)
            case ProbeKv(size=size):
                return KvPart(data=bytes(max(0, min(size, self._part_bytes))))

    async def _open(self, message: OpenKv) -> KvOpened:
        offer = self._lend(message) if message.cached else await self._offered(message)
        keys = await asyncio.shield(offer.keys)
        offer.blocks = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(keys, message.keys, strict=False))))
        offer.timer.cancel()
        loop = asyncio.get_running_loop()
        hold_s = min(max(0.0, message.within_s), READ_S) if offer.blocks else 0.0
        offer.timer = loop.call_later(hold_s, self._withdraw, message.token)
        return KvOpened(blocks=offer.blocks, block_bytes=self._block_bytes, piece_blocks=self._piece_blocks)

    async def _offered(self, message: OpenKv) -> _Offer:
        """The blocks that are held under a token, which is used now."""
        offer = self._offers.get(message.token) or await self._expect(message.token)
        if offer.opened:
            raise Conflict("these KV blocks have been opened already")
        offer.opened = True
        self._check_format(message)
        return offer

    def _check_format(self, message: OpenKv) -> None:
        if message.kv_format != self._limits.kv_format:
            raise Conflict(f"KV blocks here are {self._limits.kv_format!r}, not {message.kv_format!r}")

    async def _expect(self, token: str) -> _Offer:
        if len(self._expected) >= MOVES or token in self._expected:
            raise Overloaded("too many requests for KV blocks that were not offered")
        expected = self._expected[token] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(expected, EARLY_S)
        except TimeoutError:
            raise NotFound("no KV blocks are held under this token") from None
        finally:
            del self._expected[token]

    async def _read(self, message: ReadKv) -> KvPart:
        offer = self._offers.get(message.token)
        if offer is None or not offer.blocks:
            raise NotFound("no KV blocks are open under this token")
        piece_bytes, total = self._piece_blocks * self._block_bytes, offer.blocks * self._block_bytes
        index, start = divmod(message.offset, piece_bytes)
        end = message.offset + message.size
        if not (0 <= message.offset < end <= total and start + message.size <= piece_bytes and message.size <= PART_BYTES):
            raise BadRequest(f"{message.size} bytes from {message.offset} on are no part of {total} bytes of KV")
        for ahead in (index, index + 1):
            first = ahead * self._piece_blocks
            if ahead not in offer.pieces and first < offer.blocks:
                count = min(self._piece_blocks, offer.blocks - first)
                offer.pieces[ahead] = self._kv.read(message.token, first, count)
        for behind in [one for one in offer.pieces if one < index - 1]:
            del offer.pieces[behind]
        offer.reading += 1
        try:
            piece = await asyncio.shield(offer.pieces[index])
        finally:
            offer.reading -= 1
        offer.read = offer.read or end == total
        if offer.read and not offer.reading:
            self._withdraw(message.token)
        if piece is None:
            raise NotFound("these KV blocks are no longer held")
        return KvPart(data=piece[start : start + message.size].tobytes())

    # ---- the link

    def _observe(self, size_bytes: int, took_s: float) -> None:
        self._measured_s = now_s()
        self._times.link.observe(size_bytes, 1000.0 * took_s)
        metrics.KV_BYTES_PER_S.set(self._times.link.bytes_per_s)

    async def _keep_measuring(self) -> None:
        """Measure the link with bytes that this worker requests from itself, which also pass NATS."""
        while True:
            if now_s() - self._measured_s >= PROBE_S or not self._times.link.ms_per_mib:
                try:
                    for parts, size in ((1, 1), (1, 1), (2 * WINDOW, self._part_bytes)):
                        await self._probe(parts, size)
                except (MotetError, msgspec.MsgspecError) as error:
                    log.warning("the link was not measured", extra={"error": repr(error)})
            await asyncio.sleep(PROBE_S / 10)

    async def _probe(self, parts: int, size: int) -> None:
        subject, began_s = subjects.kv(self._worker_id), now_s()
        asked = [self._bus.request(subject, ProbeKv(size=size), KvReply, timeout_s=5.0) for _ in range(parts)]
        await asyncio.gather(*asked)
        self._observe(parts * size, now_s() - began_s)


def named(offer: KvOffer) -> KvOffer:
    """The offer with a token of its own if it has none."""
    return offer if offer.token else msgspec.structs.replace(offer, token=secrets.token_hex(16))


def _count_blocks(blocks: int, size_bytes: int, landing: asyncio.Future[bool]) -> None:
    if not landing.cancelled() and landing.exception() is None and landing.result():
        metrics.KV_BLOCKS_MOVED.inc(blocks)
        metrics.KV_BYTES_MOVED.inc(size_bytes)


def _count_fetch(last: asyncio.Future[bool]) -> None:
    good = not last.cancelled() and last.exception() is None and last.result()
    metrics.KV_FETCHES.labels("whole" if good else "full").inc()
