"""Every engine that a worker can have, started with a tiny model, with its reports collected."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from motet.examples.demo import DEMO
from motet.kernels.cpu import available_isas
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.protocol import EngineProtocol
from motet.services.worker.engines.request import EngineRequest, StepReport
from motet.services.worker.engines.thread import EngineThread
from motet.services.worker.native.engine import Engine
from motet.services.worker.vllm_engine.core import VllmOptions
from motet.services.worker.vllm_engine.engine import VllmEngine
from motet.services.worker.vllm_engine.peft_files import peft_adapter
from motet.shared.errors import WorkerLost
from motet.shared.wire.stream import StreamItem
from motet.shared.worker_options import Switch
from tests.services.worker.support_engine import ModelRunner, make_engine
from tests.support import eventually
from tests.support_models import make_adapters, make_checkpoint

NO_WHITESPACE = """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
"""For vLLM: the models of these tests would write nothing else between the parts of a JSON text."""
VOCABULARY = 288
"""Of the demo's tokenizer."""
PATIENCE_S = 120.0
Deliver = Callable[[StepReport], None]


def native(
    model_dir: Path, deliver: Deliver, kernels: str, isa: str = "", merge: Switch = "off", **runner_options: Any
) -> EngineProtocol:
    """Motet's own engine with these kernels, compiled for this instruction set."""

    def build() -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOTET_CPU_ISA", isa)
            options = {"runner": ModelRunner, "runner_options": {"kernels": kernels} | runner_options}
            return make_engine(model_dir, max_running=4, kv_blocks=60, max_loras=2, merge=merge, **options)

    return EngineThread(build, deliver)


def vllm(model_dir: Path, deliver: Deliver) -> EngineProtocol:
    """vLLM, in an environment that has it."""
    return VllmEngine(
        VllmOptions(
            model_dir=model_dir,
            max_running=4,
            max_step_tokens=64,
            max_loras=2,
            max_lora_rank=16,
            max_model_len=256,
            dtype="float32",
            kv_bytes=16 << 20,
            extra=NO_WHITESPACE,
        ),
        deliver,
    )


VLLM = "vllm"
ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or available_isas()
ENGINES: dict[str, Callable[[Path, Deliver], EngineProtocol]] = {
    f"native, {isa} kernels": partial(native, kernels="cpu", isa=isa) for isa in ISAS
}
ENGINES["native, reference kernels"] = partial(native, kernels="reference")
ENGINES["native, merging"] = partial(native, kernels="cpu", elastic=True, merge="on")
ENGINES["native, int8 KV cache"] = partial(native, kernels="cpu", kv_cache_dtype="int8")
if os.environ.get("MOTET_TEST_VLLM"):  # `make test-vllm`
    ENGINES = {VLLM: vllm}


@dataclass
class Driven:
    """An engine and its reports. `resumes_sampled`: resumed requests continue exactly where tokens are sampled, too."""

    engine: EngineProtocol
    reports: list[StepReport]
    adapters: list[Any]
    resumes_sampled: bool

    def items(self, request_id: str, epoch: int = 0) -> list[StreamItem]:
        """All items of a request, in order."""
        every = [item for report in self.reports for items in report.output.items.values() for item in items]
        return [item for item in every if (item.request_id, item.epoch) == (request_id, epoch)]

    async def ended(self, request: EngineRequest) -> StreamItem:
        """The last item of a request. Checks that the tokens' indices are consecutive and that the request ended once."""
        key = request.request_id, request.epoch
        await eventually(lambda: any(item.finish for item in self.items(*key)), within_s=PATIENCE_S)
        items, index = self.items(*key), request.output_tokens
        for item in items:
            assert item.index == index, "a token is missing or comes twice"
            index += len(item.tokens)
        assert [item.finish is not None for item in items] == [False] * (len(items) - 1) + [True]
        return items[-1]

    async def tokens(self, request: EngineRequest) -> list[int]:
        """All tokens of a request, once it has ended."""
        await self.ended(request)
        return [token for item in self.items(request.request_id, request.epoch) for token in item.tokens]

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, by the demo's tokenizer."""
        return Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")).decode(tokens)

    def on_device(self) -> set[str]:
        """The adapters on the device, as reported."""
        there: set[str] = set()
        for change in (change for report in self.reports for change in report.output.residency):
            (there.add if change.tier == "device" else there.discard)(change.digest)
        return there


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if VLLM in ENGINES:  # it needs a tokenizer, and on a CPU heads of at least 32 values
        return DEMO / "model"
    made = make_checkpoint("llama2", tmp_path_factory.mktemp("engines-model"), vocab_size=VOCABULARY)
    shutil.copy(DEMO / "model" / "tokenizer.json", made)
    return made


@pytest.fixture(scope="session")
def host_adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    config = read_model_config(model_dir)
    made = make_adapters(model_dir, tmp_path_factory.mktemp("engines-adapters"))
    if VLLM in ENGINES:
        blobs = tmp_path_factory.mktemp("engines-blobs")
        for number, one in enumerate(made):
            (blobs / str(number)).write_bytes(one.blob)
        return [peft_adapter(blobs / str(number), blobs) for number in range(len(made))]
    return [HostAdapter.from_blob(one.blob, config) for one in made]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_lived(model_dir: Path) -> AsyncIterator[dict[str, Driven]]:
    """Engines that take long to start, by name: one for all tests of a file. Each test leaves it empty."""
    engines: dict[str, Driven] = {}
    yield engines
    for driven in engines.values():
        await driven.engine.stop()


@pytest_asyncio.fixture(params=list(ENGINES), loop_scope="module")
async def driven(
    request: pytest.FixtureRequest, model_dir: Path, host_adapters: list[Any], long_lived: dict[str, Driven]
) -> AsyncIterator[Driven]:
    found = long_lived.get(request.param)
    if found is None:
        reports: list[StepReport] = []
        found = Driven(ENGINES[request.param](model_dir, reports.append), reports, host_adapters, request.param != VLLM)
        await found.engine.start()
    if request.param != VLLM:
        yield found
        await found.engine.stop()
        return
    long_lived[VLLM] = found
    yield found
    found.engine.abort_all(WorkerLost("the test is over"))
    for digest in found.on_device():
        found.engine.unload_adapter(digest)
    await eventually(lambda: not found.on_device() and found.engine.busy_s() == 0.0, within_s=PATIENCE_S)
    found.reports.clear()
