"""A mesh around one real gateway: a minimal scheduler, scripted workers, a registry's bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.service import GatewayService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, Overloaded, Unavailable
from motet.shared.model import AdapterEntry, AdapterVersion, Pin
from motet.shared.wire.refusal import Refused
from motet.shared.wire.registry import AdapterInfo
from motet.shared.wire.request import Assigned, AssignReply, Cancel, GenerateRequest, SubmitReply
from tests.services.gateway.support_tokenizers import write_model_dir
from tests.support import eventually
from tests.support_worker import FakeWorker, worker_limits

Connect = Callable[[str], Awaitable[Bus]]


class FakeScheduler:
    """Gives each request to the first worker that is not excluded. `submitted` holds the requests."""

    def __init__(self, bus: Bus, workers: list[str]) -> None:
        self.bus, self.workers = bus, workers
        self.submitted: list[GenerateRequest] = []
        self.refuse: MotetError | None = None
        self.refuse_choice: int | None = None  # refuse only this choice of a request
        self.before_answer: Callable[[GenerateRequest], Awaitable[None]] | None = None

    async def start(self) -> None:
        await self.bus.serve("submit", subjects.SUBMIT, GenerateRequest, self._submit, queue="scheduler")

    async def _submit(self, request: GenerateRequest) -> SubmitReply:
        self.submitted.append(request)
        if self.refuse is not None:
            raise self.refuse
        if request.request_id.endswith(f"-{self.refuse_choice}"):
            raise Overloaded("full")
        for worker_id in sorted(self.workers, key=lambda one: one != request.move_to):
            if worker_id in request.exclude_workers:
                continue
            reply = await self.bus.request(subjects.assign(worker_id), request, AssignReply, timeout_s=5.0)
            if isinstance(reply, Refused):
                return reply
            if self.before_answer is not None:
                await self.before_answer(request)
            return Assigned(worker_id=worker_id, predicted_tokens=8)
        raise Unavailable("no worker is left")


async def start_workers(connect: Connect, *names: str, pings: bool = True, **limits: Any) -> list[FakeWorker]:
    given = worker_limits(**({"max_model_len": 256} | limits))
    workers = [FakeWorker(await connect(name), name, limits=given) for name in names]
    for worker in workers:
        await worker.start(pings=pings)
    return workers


async def assigned(worker: FakeWorker, count: int = 1) -> GenerateRequest:
    """The `count`-th request of `worker`, once it has arrived."""
    await eventually(lambda: len(worker.assigned) >= count)
    return worker.assigned[count - 1]


async def cancelled(worker: FakeWorker, request_id: str, epoch: int | None = None) -> Cancel:
    """The Cancel for this request that `worker` received, once it has arrived."""

    def found() -> Cancel | None:
        cancels = [c for c in worker.controls if isinstance(c, Cancel) and c.request_id == request_id]
        return next((c for c in cancels if epoch is None or c.epoch == epoch), None)

    cancel: Cancel = await eventually(found)
    return cancel


async def put_adapter(
    bus: Bus,
    name: str,
    *,
    digest: str = "",
    rank: int = 8,
    version: int = 1,
    alias_of: str | None = None,
    pin: Pin | None = None,
    chat: str = "",
    **facts: Any,
) -> AdapterInfo:
    """Write what the registry writes for an adapter. `facts`: of its version, others than those of a language model's."""
    digest = digest or f"digest-of-{name}"
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    told: dict[str, Any] = {"modules": ("q_proj", "v_proj"), "layers": 2} | facts
    stored = AdapterVersion(
        digest=digest,
        base_model="demo",
        rank=rank,
        dtype="F32",
        size_bytes=4096,
        source=f"path:/adapters/{name}",
        created_unix_ms=1_700_000_000_000,
        chat=chat,
        **told,
    )
    of_entry = {"name": name, "digest": digest, "version": version, "alias_of": alias_of, "pin": pin}
    entry = AdapterEntry(updated_unix_ms=1_700_000_000_000, **of_entry)
    await kv.put(f"version.{digest}", msgspec.json.encode(stored))
    await kv.put(f"name.{name}", msgspec.json.encode(entry))
    return AdapterInfo(entry=entry, version=stored)


@asynccontextmanager
async def running_gateway(nats_url: str, tmp_path: Path, **options: object) -> AsyncIterator[GatewayService]:
    """A started gateway for base model "demo" on a free port, stopped afterwards."""
    model_dir = tmp_path / "demo"
    if not model_dir.exists():
        write_model_dir(model_dir)
    config = GatewayConfig.of(**({"nats_url": nats_url, "model": str(model_dir), "port": 0, "instance_id": "g1"} | options))  # type: ignore[arg-type]
    gateway = GatewayService(config)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
