"""Every engine that a worker can have, started with a tiny model, with its reports collected."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from motet.kernels.cpu import available_isas
from motet.services.worker.engine.adapter_weights import HostAdapter
from motet.services.worker.engine.engine import Engine
from motet.services.worker.engine.model_config import read_model_config
from motet.services.worker.engine.request import EngineRequest
from motet.services.worker.engine_protocol import EngineProtocol
from motet.services.worker.engine_thread import EngineThread, StepReport
from motet.shared.messages import StreamItem
from tests.services.worker.support_engine import ModelRunner, make_engine
from tests.support import eventually
from tests.support_models import make_adapters, make_checkpoint

Deliver = Callable[[StepReport], None]


def native(model_dir: Path, deliver: Deliver, kernels: str, isa: str = "") -> EngineProtocol:
    """Motet's own engine with these kernels, compiled for this instruction set."""

    def build() -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOTET_CPU_ISA", isa)
            options = {"runner": ModelRunner, "runner_options": {"kernels": kernels}}
            return make_engine(model_dir, max_running=4, kv_blocks=60, max_loras=2, **options)

    return EngineThread(build, deliver)


ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or available_isas()
ENGINES: dict[str, Callable[[Path, Deliver], EngineProtocol]] = {
    f"native, {isa} kernels": partial(native, kernels="cpu", isa=isa) for isa in ISAS
} | {"native, reference kernels": partial(native, kernels="reference")}


@dataclass
class Driven:
    """An engine, and what it reported."""

    engine: EngineProtocol
    reports: list[StepReport]
    adapters: list[HostAdapter]
    orders: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def items(self, request_id: str, epoch: int = 0) -> list[StreamItem]:
        """All items of a request, in order."""
        every = [item for report in self.reports for items in report.output.items.values() for item in items]
        return [item for item in every if (item.request_id, item.epoch) == (request_id, epoch)]

    async def ended(self, request: EngineRequest) -> StreamItem:
        """The last item of a request, after checking that indices run on and that there is only one end."""
        key = request.request_id, request.epoch
        await eventually(lambda: any(item.finish for item in self.items(*key)))
        items, index = self.items(*key), len(request.output)
        for item in items:
            assert item.index == index, "a token is missing or comes twice"
            index += len(item.tokens)
        assert [item.finish is not None for item in items] == [False] * (len(items) - 1) + [True]
        return items[-1]

    async def tokens(self, request: EngineRequest) -> list[int]:
        """Its tokens, once it has ended."""
        await self.ended(request)
        return [token for item in self.items(request.request_id, request.epoch) for token in item.tokens]

    def on_device(self) -> set[str]:
        """The adapters on the device, as reported."""
        there: set[str] = set()
        for change in (change for report in self.reports for change in report.output.residency):
            (there.add if change.tier == "device" else there.discard)(change.digest)
        return there


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("engines-model"))


@pytest.fixture(scope="session")
def host_adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[HostAdapter]:
    config = read_model_config(model_dir)
    made = make_adapters(model_dir, tmp_path_factory.mktemp("engines-adapters"))
    return [HostAdapter.from_blob(one.blob, config) for one in made]


@pytest.fixture(params=list(ENGINES))
async def driven(request: pytest.FixtureRequest, model_dir: Path, host_adapters: list[HostAdapter]) -> AsyncIterator[Driven]:
    reports: list[StepReport] = []
    engine = ENGINES[request.param](model_dir, reports.append)
    await engine.start()
    yield Driven(engine, reports, host_adapters)
    await engine.stop()
