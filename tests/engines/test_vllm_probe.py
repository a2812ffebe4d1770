"""Promise: what vLLM ignores of an adapter without a word is read after its load, with the answers of Motet's own engine."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from bench.stored_adapters import stored_adapter
from motet.examples.demo import DEMO
from motet.policies.worker.probe import Judged, Reading, distance, judge, made_reference
from motet.services.worker.engines.adapter_account import file_account
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import EngineRequest, StepReport
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.backends import open_backend
from motet.services.worker.native.probing import NativeProbe
from motet.services.worker.vllm_engine.core import VllmOptions
from motet.services.worker.vllm_engine.engine import VllmEngine
from motet.services.worker.vllm_engine.peft_files import PeftAdapter, peft_adapter
from motet.shared.errors import AdapterQuarantined
from motet.shared.model import SamplingParams
from tests.support import eventually

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
]
NAMES = ("reverse", "rot13", "upper-case")
PATIENCE_S = 120.0


class Driven:
    """An engine that probes, with its reports."""

    def __init__(self, home: Path) -> None:
        self.reports: list[StepReport] = []
        self.home = home
        options = {"max_running": 4, "max_step_tokens": 64, "max_loras": 2, "max_lora_rank": 64, "max_model_len": 256}
        self.engine = VllmEngine(
            VllmOptions(model_dir=DEMO / "model", dtype="float32", kv_bytes=16 << 20, **options),
            self.reports.append,
            probing=True,
        )

    def blob(self, name: str) -> Path:
        path = self.home / name
        if not path.exists():
            path.write_bytes(stored_adapter(DEMO / "model", DEMO / "adapters" / name).blob)
        return path

    def adapter(self, name: str) -> PeftAdapter:
        return peft_adapter(self.blob(name), self.home, prefix=self.engine.core.adapter_prefix)

    async def ends(self, request_id: str, adapter: PeftAdapter, **sampling: int) -> str | None:
        """How a request for the adapter ends."""
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, **sampling)
        self.engine.add(EngineRequest.local(request_id, [1, 2, 3, 4], params, weights=adapter))
        items = await eventually(lambda: [one for one in self.items(request_id) if one.finish], within_s=PATIENCE_S)
        return items[0].finish

    def items(self, request_id: str) -> list:
        every = [item for report in self.reports for items in report.output.items.values() for item in items]
        return [item for item in every if item.request_id == request_id]

    async def reading(self, adapter: PeftAdapter) -> Reading:
        def found() -> Reading | None:
            every = [one for report in self.reports for one in report.output.readings if one.digest == adapter.digest]
            return every[-1] if every else None

        reading: Reading = await eventually(found, within_s=PATIENCE_S)
        return reading

    def on_device(self, digest: str) -> bool:
        """Whether the last report about the adapter has it in a slot."""
        tiers = [one.tier for report in self.reports for one in report.output.residency if one.digest == digest]
        return bool(tiers) and tiers[-1] == "device"

    def judged(self, reading: Reading, name: str) -> Judged:
        return judge(reading, file_account(self.blob(name)), None, dtype="float32")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driven(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driven]:
    found = Driven(tmp_path_factory.mktemp("vllm-probe"))
    await found.engine.start()
    yield found
    await found.engine.stop()


async def test_each_load_is_announced_and_read_once_and_agrees_with_the_native_engine(driven: Driven) -> None:
    config, home = read_model_config(DEMO / "model"), driven.home
    runner = open_backend(
        BackendOptions(
            model_dir=DEMO / "model",
            dtype="float32",
            kv_blocks=4,
            lora_bytes=32 << 20,
            max_lora_rank=64,
            max_loras=len(NAMES),
            probe_tokens=16,
            threads=1,
        )
    )
    probe = NativeProbe(runner, 16)
    for slot, name in enumerate(NAMES):  # more than slots: one is evicted
        adapter = driven.adapter(name)
        assert await driven.ends(f"first-{name}", adapter) == "length"
        reading = await driven.reading(adapter)
        assert driven.judged(reading, name) == Judged("good"), name
        runner.begin_load(slot, HostAdapter.from_blob(home / name, config))
        await eventually(lambda slot=slot: runner.loaded_layers(slot) == config.num_layers)
        own = probe.read(adapter.digest, slot)
        made = made_reference(own, dtype="float32", made_by="native", now_unix_ms=0)
        assert judge(reading, file_account(driven.blob(name)), made, dtype="float32") == Judged("good"), name
        assert distance(reading.adapter, reading.base) > 1000 * distance(reading.adapter, own.adapter)
        loads = [digest for report in driven.reports for digest in report.output.loading if digest == adapter.digest]
        assert len(loads) == 1
    runner.close()


async def test_modules_that_vllm_does_not_take_are_missing_in_its_account(driven: Driven) -> None:
    adapter = driven.adapter("swap-case")
    file = adapter.folder / "adapter_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "layers.0" not in name}
    save_file(kept, file)
    assert await driven.ends("partial", adapter) == "length", "vLLM says nothing"
    judged = driven.judged(await driven.reading(adapter), "swap-case")
    assert judged.verdict == "partial" and "missing on the device: layers.0." in judged.why


async def test_another_scale_is_altered_in_its_account(driven: Driven) -> None:
    adapter = driven.adapter("title-case")
    file = adapter.folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_alpha": 1.05 * config["lora_alpha"]}))
    assert await driven.ends("scaled", adapter) == "length"
    assert driven.judged(await driven.reading(adapter), "title-case").verdict == "partial"


async def test_a_rejected_adapter_ends_its_requests_with_the_reason_and_leaves(driven: Driven) -> None:
    adapter = driven.adapter("reverse")
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    driven.engine.add(EngineRequest.local("long", [1, 2, 3], params, weights=adapter))
    await eventually(lambda: driven.items("long"), within_s=PATIENCE_S)
    driven.engine.reject_adapter(adapter.digest, AdapterQuarantined.of("reverse", "a test"))
    end = await eventually(lambda: [one for one in driven.items("long") if one.finish], within_s=PATIENCE_S)
    assert end[0].error.code == "adapter_quarantined"
    await eventually(lambda: not driven.on_device(adapter.digest), within_s=PATIENCE_S)
    assert await driven.ends("again", adapter) == "length"


async def test_log_probabilities_of_a_prompt_with_an_adapter_do_not_end_the_core(driven: Driven) -> None:
    adapter = driven.adapter("upper-case")
    assert await driven.ends("prompt-logprobs", adapter, prompt_logprobs=1) == "length"
    [first, *_] = driven.items("prompt-logprobs")
    assert first.prompt_logprobs is not None and np.isfinite(first.prompt_logprobs[1].logprob)
    assert await driven.ends("after", adapter) == "length"
