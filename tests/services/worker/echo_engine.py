"""An engine in one file: it answers every request with the request's own prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Facts, Opened, Wiring
from motet.services.worker.engines.request import EngineRequest, StepOutput, StepReport
from motet.shared.clock import now_s
from motet.shared.errors import MotetError
from motet.shared.model import Capability, WorkerLimits
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import StreamItem

BLOCKS = 8


def open_echo(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    limits = WorkerLimits(
        base_model=config.base.name,
        device="cpu",
        max_model_len=64,
        max_running=1,
        max_waiting=8,
        block_size=8,
        kv_blocks_total=BLOCKS,
        adapter_bytes_total=0,
        max_lora_rank=0,
    )
    facts = Facts(limits=limits, vocab_size=100, eos_token_ids=frozenset(), parse_adapter=lambda path, digest: None)
    return Opened(Echo(wiring), lambda: facts)


class Echo:
    kv = None

    def __init__(self, wiring: Wiring) -> None:
        self._deliver, self._step = wiring.deliver, 0

    @property
    def serves(self) -> frozenset[Capability]:
        return frozenset()

    async def start(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        self._step += 1
        item = StreamItem(request.request_id, request.epoch, 0, unpack_tokens(request.prompt), "length")
        output = StepOutput(items={request.gateway_id: [item]})
        report = StepReport(self._step, now_s(), output, failures=0, kv_blocks_free=BLOCKS, adapter_bytes_free=0)
        asyncio.get_running_loop().call_soon(self._deliver, report)

    def cancel(self, request_id: str, epoch: int) -> None:
        pass

    def load_adapter(self, adapter: Any, over: Collection[str] | None = None) -> None:
        pass

    def pin_adapters(self, digests: Collection[str]) -> None:
        pass

    def unload_adapter(self, digest: str) -> None:
        pass

    def abort_all(self, error: MotetError) -> None:
        pass

    def busy_s(self) -> float:
        return 0.0

    async def check(self) -> None:
        pass

    async def stop(self) -> None:
        pass
