"""A worker service in the test's process, with a test gateway, scheduler and registry over a real NATS."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from motet.services.worker.service import WorkerService
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, read_index
from motet.shared.errors import from_info
from motet.shared.model import AdapterEntry, AdapterRef, AdapterVersion, SamplingParams, Slo
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Accepted, AssignReply, GenerateRequest, pack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState
from tests.policies.test_worker_view import apply
from tests.support import eventually
from tests.support_models import AdapterFixture

BASE = "tiny"


class Mesh:
    """The gateway's, the scheduler's and the registry's side of the subjects of one worker."""

    def __init__(self, bus) -> None:
        self.bus = bus
        self.frames: dict[str, list[TokenFrame]] = defaultdict(list)
        self.states: list[WorkerState] = []

    async def listen(self, worker_id: str) -> None:
        async def keep(msg) -> None:
            gateway_id = msg.subject.rsplit(".", 1)[1]
            self.frames[gateway_id].append(msgspec.msgpack.decode(msg.data, type=TokenFrame))

        await self.bus.nc.subscribe(subjects.STREAMS, cb=keep)
        await self.bus.subscribe(subjects.state(worker_id), WorkerState, self.states.append)

    async def publish_adapter(self, adapter: AdapterFixture) -> AdapterRef:
        """Publish blob, version and name, as the registry does."""
        blob, index = adapter.blob, read_index(adapter.blob, len(adapter.blob))
        store = await self.bus.object_store(subjects.BLOBS)
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        digest = digest_of(blob)
        version = AdapterVersion(
            digest=digest,
            base_model=BASE,
            rank=index.rank,
            modules=index.modules,
            layers=index.adapted_layers,
            dtype=index.dtype,
            size_bytes=len(blob),
            source="test",
            created_unix_ms=0,
        )
        entry = AdapterEntry(name=adapter.name, digest=digest, version=1, updated_unix_ms=0)
        await store.put(digest, blob)
        await kv.put(f"version.{digest}", msgspec.json.encode(version))
        await kv.put(f"name.{adapter.name}", msgspec.json.encode(entry))
        return AdapterRef(name=adapter.name, digest=digest, rank=index.rank, size_bytes=len(blob))

    async def delete_adapter(self, ref: AdapterRef) -> None:
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        await kv.delete(f"name.{ref.name}")
        await kv.delete(f"version.{ref.digest}")

    def items(self, request_id: str, epoch: int = 0) -> list[StreamItem]:
        every = [item for frames in self.frames.values() for frame in frames for item in frame.items]
        return [item for item in every if item.request_id == request_id and item.epoch == epoch]

    def tokens(self, request_id: str, epoch: int = 0) -> list[int]:
        """All tokens, after checking that their indices are consecutive."""
        tokens: list[int] = []
        items = self.items(request_id, epoch)
        start = items[0].index if items else 0
        for item in items:
            assert item.index == start + len(tokens), f"index {item.index} after {start + len(tokens)} tokens"
            tokens += item.tokens
        return tokens

    def end(self, request_id: str, epoch: int = 0) -> StreamItem | None:
        ends = [item for item in self.items(request_id, epoch) if item.finish]
        assert len(ends) <= 1, "a request ends once"
        return ends[0] if ends else None

    async def ended(self, request_id: str, epoch: int = 0, within_s: float = 20.0) -> StreamItem:
        return await eventually(lambda: self.end(request_id, epoch), within_s=within_s)


def generate(ids: list[int], *, max_tokens: int = 8, gateway_id: str = "g1", **changed: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": secrets.token_hex(6),
        "gateway_id": gateway_id,
        "base_model": BASE,
        "prompt": pack_tokens(ids),
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        "slo": Slo(),
    }
    return GenerateRequest(**fields | changed)


class Running:
    """A worker service in this process, and the means to talk to it."""

    def __init__(self, service: WorkerService, mesh: Mesh) -> None:
        self.service, self.mesh = service, mesh
        self.left = False
        self.fetches: list[str] = []

    async def assign(self, request: GenerateRequest) -> Accepted | Refused:
        return await self.mesh.bus.request(subjects.assign(self.service.worker_id), request, AssignReply, timeout_s=5.0)

    async def refusal(self, request: GenerateRequest) -> Exception:
        reply = await self.assign(request)
        assert isinstance(reply, Refused), reply
        return from_info(reply.error)

    async def accepted(self, *requests: GenerateRequest) -> None:
        for reply in await asyncio.gather(*(self.assign(request) for request in requests)):
            assert isinstance(reply, Accepted), reply

    async def control(self, message: msgspec.Struct) -> None:
        await self.mesh.bus.publish(subjects.control(self.service.worker_id), message)

    @property
    def engine(self) -> Any:
        return self.service.facts.engine

    def slow_down(self, step_s: float) -> None:
        """From now on every step takes at least `step_s`."""
        step = self.engine.step

        def slow(now_s: float) -> Any:
            time.sleep(step_s)  # time: a step takes so long
            return step(now_s)

        self.engine.step = slow

    def gate_fetches(self) -> asyncio.Event:
        """Fetches from the object store wait for the returned event, and are counted in `fetches`."""
        gate = asyncio.Event()
        fetch = self.service.shell.store.fetch

        async def gated(ref: AdapterRef) -> bytes:
            self.fetches.append(ref.digest)
            await gate.wait()
            return await fetch(ref)

        self.service.shell.store.fetch = gated
        return gate


def latest(worker: Running) -> WorkerSnapshot:
    """The worker's state after applying every message in order."""
    known: WorkerSnapshot | None = None
    for state in worker.mesh.states:
        if isinstance(state, WorkerSnapshot):
            on_disk = [] if known is None or state.lists_disk else [held for held in known.adapters if held.tier == "disk"]
            adapters = {held.digest: held for held in (*on_disk, *state.adapters)}
            known = msgspec.structs.replace(state, adapters=list(adapters.values()))
        elif known is not None:
            known = apply(known, state)
    assert known is not None
    return known


Start = Callable[..., Awaitable[Running]]
