"""A worker without an engine: speaks the whole worker protocol over NATS and does what a test tells it to.

worker = FakeWorker(await connect("worker-1"), "w1")
await worker.start()                      # snapshot, heartbeat, lease, assign and control endpoints
worker.refuse = Overloaded("full")        # or .silent = True, or .speak = lambda request: [1, 2, 3]
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError
from motet.shared.leases import LeaseHolder
from motet.shared.model import (
    AdapterRef,
    FinishReason,
    PerfModel,
    Phase,
    RequestBrief,
    Residency,
    SamplingParams,
    Slo,
    WorkerLimits,
)
from motet.shared.wire.prefixes import pack_keys
from motet.shared.wire.request import Accepted, Cancel, Control, GenerateRequest, ListPrefixes, pack_tokens, unpack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame
from motet.shared.wire.worker_state import Ping, Pong, WorkerDelta, WorkerSnapshot

PERF = PerfModel(
    kernel="mbgmv",
    prefill_base_ms=4.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.02,
    decode_base_ms=10.0,
    decode_row_ms=0.2,
    decode_lora_ms=0.01,
    load_base_ms=1.0,
    load_ms_per_mib=0.5,
)


def worker_limits(**changed) -> WorkerLimits:
    """A small worker for base model "demo"; any field may be given."""
    fields = {
        "base_model": "demo",
        "max_model_len": 1024,
        "max_running": 64,
        "max_waiting": 64,
        "block_size": 16,
        "kv_blocks_total": 512,
        "adapter_bytes_total": 1 << 26,
        "max_lora_rank": 64,
    }
    return WorkerLimits(**(fields | changed))


def generate_request(request_id: str = "", *, prompt: Sequence[int] = (1, 2, 3), rank: int = 0, **changed) -> GenerateRequest:
    """A request for "demo" from gateway "g1", with an adapter when `rank` is given; any field may be given."""
    fields = {
        "request_id": request_id or secrets.token_hex(6),
        "gateway_id": "g1",
        "base_model": "demo",
        "prompt": pack_tokens(prompt),
        "sampling": SamplingParams(max_tokens=64),
        "slo": Slo(),
        "adapter": AdapterRef(name=f"rank{rank}", digest=f"digest{rank}", rank=rank, size_bytes=rank << 10) if rank else None,
    }
    return GenerateRequest(**(fields | changed))


class FakeWorker:
    """One incarnation of a fake worker. `assigned` and `controls` hold the messages to it, in order of arrival."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        *,
        limits: WorkerLimits | None = None,
        perf: PerfModel = PERF,
        heartbeat_s: float = 0.1,
    ) -> None:
        self.bus, self.worker_id = bus, worker_id
        self.limits, self.perf, self.heartbeat_s = limits or worker_limits(), perf, heartbeat_s
        self.incarnation = secrets.token_hex(4)
        self.assigned: list[GenerateRequest] = []
        self.controls: list[Control] = []
        self.refuse: MotetError | None = None  # answer assigns with this error
        self.silent = False  # never answer assigns
        self.shows = True  # states show what was assigned
        self.speak: Callable[[GenerateRequest], Sequence[int]] | None = None  # answer with these tokens at once
        self.draining = False
        self.frozen = False  # answers nothing, not even whether it lives
        self.pings = 0
        self.requests: dict[str, RequestBrief] = {}
        self.adapters: list[Residency] = []
        self.merged, self.merged_share = "", 0.0
        self.prefixes: set[int] = set()  # keys of cached KV blocks, listed by the next snapshot after it was asked
        self.lists_prefixes = True
        self.seq = 0
        self._step = 0
        self._beat: asyncio.Task[None] | None = None
        self._lease = LeaseHolder(bus, "worker", worker_id, self.incarnation)

    async def start(self, *, lease: bool = True, pings: bool = True) -> None:
        """Take assignments, then announce itself. `lease` needs the provisioned buckets."""
        if pings:
            await self.bus.serve("ping", subjects.ping(self.worker_id), Ping, self._on_ping, queue="worker")
        await self.bus.serve("assign", subjects.assign(self.worker_id), GenerateRequest, self._on_assign, queue="worker")
        await self.bus.subscribe(subjects.control(self.worker_id), Control, self._on_control)
        if lease:
            await self._lease.start()
        await self.snapshot()
        self._beat = self.bus.spawn(self._heartbeat())

    async def snapshot(self) -> None:
        """Announce the whole state now."""
        self.seq += 1
        lists, self.lists_prefixes = self.lists_prefixes, False
        await self.bus.publish(
            subjects.state(self.worker_id),
            WorkerSnapshot(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                seq=self.seq,
                limits=self.limits,
                perf=self.perf,
                kv_blocks_free=self.limits.kv_blocks_total,
                adapter_bytes_free=self.limits.adapter_bytes_total,
                draining=self.draining,
                requests=list(self.requests.values()) if self.shows else [],
                adapters=self.adapters,
                merged=self.merged,
                merged_share=self.merged_share,
                prefixes=pack_keys(self.prefixes) if lists else None,
            ),
        )

    async def delta(
        self,
        *,
        changed: Sequence[RequestBrief] = (),
        removed: Sequence[str] = (),
        cached: Sequence[int] = (),
        uncached: Sequence[int] = (),
        skip: int = 0,
    ) -> None:
        """Announce a change now; `skip` messages before it are lost."""
        self.seq += 1 + skip
        self.prefixes = (self.prefixes | set(cached)) - set(uncached)
        for brief in changed:
            self.requests[brief.request_id] = brief
        for request_id in removed:
            self.requests.pop(request_id, None)
        await self.bus.publish(
            subjects.state(self.worker_id),
            WorkerDelta(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                seq=self.seq,
                kv_blocks_free=self.limits.kv_blocks_total,
                adapter_bytes_free=self.limits.adapter_bytes_total,
                draining=self.draining,
                changed=list(changed),
                removed=list(removed),
                cached=pack_keys(cached),
                uncached=pack_keys(uncached),
            ),
        )

    async def emit(
        self, request: GenerateRequest, index: int, tokens: Sequence[int], finish: FinishReason | None = None, **item
    ) -> None:
        """Send new tokens of a request to its gateway; `tokens[0]` has output index `index`."""
        self._step += 1
        one = StreamItem(request.request_id, request.epoch, index, list(tokens), finish, **item)
        await self.bus.publish(subjects.stream(request.gateway_id), TokenFrame(self.worker_id, self._step, [one]))
        if finish is not None:
            self.requests.pop(request.request_id, None)

    def mute(self) -> None:
        """Send no more heartbeats, as if the worker hung. The lease is still renewed."""
        if self._beat is not None:
            self._beat.cancel()

    async def goodbye(self) -> None:
        """Release the lease."""
        await self._lease.release()

    async def die(self) -> None:
        """End without a notice: the connection closes and the lease expires."""
        self.mute()
        await self.bus.nc.close()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)  # time: the heartbeat's rate
            await self.snapshot()

    async def _on_assign(self, request: GenerateRequest) -> Accepted:
        self.assigned.append(request)
        if self.silent:
            await asyncio.Event().wait()
        if self.refuse is not None:
            raise self.refuse
        self.requests[request.request_id] = brief_of(request)
        if self.speak is not None:
            self.bus.spawn(self._speak(request, self.speak(request)))
        return Accepted(worker_id=self.worker_id)

    async def _speak(self, request: GenerateRequest, tokens: Sequence[int]) -> None:
        """Send the rest of `tokens`, beyond what the request already has, one frame each."""
        start = len(unpack_tokens(request.output))
        for index in range(start, len(tokens)):
            finish: FinishReason | None = "length" if index == len(tokens) - 1 else None
            await self.emit(request, index, [tokens[index]], finish)

    async def _on_ping(self, _: Ping) -> Pong:
        self.pings += 1
        if self.frozen:
            await asyncio.Event().wait()
        return Pong()

    def _on_control(self, message: Control) -> None:
        self.controls.append(message)
        if isinstance(message, Cancel):
            self.requests.pop(message.request_id, None)
        elif isinstance(message, ListPrefixes):
            self.lists_prefixes = True


def brief_of(request: GenerateRequest, phase: Phase = "waiting") -> RequestBrief:
    """The request in the form of a worker's state."""
    return RequestBrief(
        request_id=request.request_id,
        epoch=request.epoch,
        adapter_digest=request.adapter.digest if request.adapter else "",
        rank=request.adapter.rank if request.adapter else 0,
        prompt_tokens=len(unpack_tokens(request.prompt)),
        output_tokens=len(unpack_tokens(request.output)),
        predicted_tokens=request.predicted_tokens,
        phase=phase,
        tpot_slo_ms=request.slo.tpot_slo_ms,
        ttft_slo_ms=request.slo.ttft_slo_ms,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
    )
