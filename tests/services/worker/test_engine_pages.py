"""Promise: an engine whose memory is a device's pages touches no page that it was not given, and answers as with fixed regions.

The torch model on the CPU over a driver that maps host memory (tests/support_pages.py): touching anything else ends the
process. After the start the driver has no further page, so whatever moves the boundary has to give back before it takes.
"""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.rivals  # noqa: F401 (adds the names)
import motet.kernels.lora
import motet.kernels.triton
from motet.kernels.device.driver import DriverError
from motet.kernels.pages import PhysicalPages
from motet.kernels.triton.attention import PagedAttention
from motet.kernels.triton.lora import INTERPRETED
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.native import assemble, device_memory
from motet.services.worker.native.engine import Engine
from motet.shared.config import ConfigError
from tests.services.worker.support_engine import make_engine, request, run
from tests.services.worker.support_graphs import repeated_decodes
from tests.services.worker.test_engine_memory_fight import Bed, bed, burst, fight, tight_engine
from tests.services.worker.test_engine_shared_memory import largest_bytes, requests
from tests.services.worker.test_merging import ALL_MODULES, UNTIED, Case, merged_steps, merging, whole_copy
from tests.support_models import random_prompts
from tests.support_pages import PAGE, HostPages

__all__ = ["bed"]


class Pages(PhysicalPages):
    """Of a device that has no more than were prepared."""

    def prepare(self, nbytes: int) -> None:
        super().prepare(nbytes)
        assert isinstance(self.driver, HostPages)
        self.driver.allow(self.driver.existing)


@pytest.fixture(autouse=True)
def paged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elastic memory is made of the driver's pages, with a spare block as on a GPU."""
    monkeypatch.setattr(device_memory, "physical_pages", lambda device: Pages(HostPages(tmp_path)))
    backend = import_module("motet.services.worker.native.backends.reference")
    monkeypatch.setattr(backend, "reserve", partial(device_memory.reserve, spare_blocks=1))


def driver_of(engine: Engine) -> HostPages:
    runner: Any = engine.runner
    driver: HostPages = runner.memory.pages.driver
    return driver


def with_graphs(engine: Engine) -> Engine:
    """Its decode steps are padded as on a GPU."""
    runner: Any = engine.runner
    runner.steps.graphs = repeated_decodes(runner, scratch_block=runner.memory.cache.null_block - 1)
    return engine


@pytest.mark.parametrize("graphs", [False, True])
def test_when_kv_and_adapters_fight_for_pages_no_request_fails_and_outputs_stay(bed: Bed, graphs: bool) -> None:
    draw = random.Random(f"pages {graphs}")
    asked = burst(draw, bed)
    roomy = run(make_engine(bed.model_dir), asked)
    engine = tight_engine(draw, bed, "lru", "motet", kernels="reference")
    try:
        found = fight(with_graphs(engine) if graphs else engine, asked, bed.adapters, draw)
    finally:
        engine.close()
    assert found.tokens == roomy.tokens and found.ended == dict.fromkeys(roomy.tokens, "length")
    assert found.divisions and found.loads
    assert driver_of(engine).waits, "pages went from the one side to the other"


@pytest.mark.parametrize(("kv_blocks", "adapters_fit"), [(17, 3), (60, 1)])
def test_under_pressure_outputs_are_those_of_fixed_regions(bed: Bed, kv_blocks: int, adapters_fit: int) -> None:
    roomy = run(make_engine(bed.model_dir), requests(bed.adapters))
    lora_bytes = adapters_fit * largest_bytes(bed.model_dir, bed.adapters)
    engine = with_graphs(
        make_engine(
            bed.model_dir,
            runner_options={"elastic": True, "kernels": "reference"},
            kv_blocks=kv_blocks,
            lora_bytes=lora_bytes,
            max_running=8,
        )
    )
    budget_bytes = kv_blocks * engine.runner.kv_block_bytes + lora_bytes
    driver, layers = driver_of(engine), engine.runner.config.num_layers
    assert driver.existing * PAGE <= budget_bytes + (2 * layers + 5) * PAGE + 2 * engine.runner.kv_block_bytes
    assert run(engine, requests(bed.adapters), per_step=2).tokens == roomy.tokens
    assert driver.waits


@pytest.mark.skipif(not INTERPRETED, reason="Triton's kernels run on a CPU in its interpreter only")
def test_tritons_kernels_touch_nothing_else_either(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        request(str(i), prompt[:20], adapter, max_tokens=2)
        for i, (prompt, adapter) in enumerate(zip(random_prompts(3, seed=5), [None, *bed.adapters[:2]], strict=True))
    ]
    roomy = run(make_engine(bed.model_dir), asked)
    options = {"elastic": True, "kernels": "reference"}
    engine = make_engine(bed.model_dir, runner_options=options, kv_blocks=17, lora_bytes=bed.largest_bytes)
    runner: Any = engine.runner
    runner.memory.cache.library = PagedAttention(runner.memory.cache, heads=runner.config.num_heads)
    monkeypatch.setattr(motet.kernels.lora, "kernels_of", lambda pool: motet.kernels.triton)
    assert run(with_graphs(engine), asked).tokens == roomy.tokens


def test_a_merged_copy_takes_the_pages_of_the_blocks_that_were_lent_for_it(tmp_path: Path) -> None:
    case = Case(UNTIED, "reference", tmp_path)
    engine, prompts = merging(case), random_prompts(4, seed=1)
    driver = driver_of(engine)
    for adapter in (0, ALL_MODULES, 5):
        whole_copy(engine, case, adapter)
        result = run(engine, [request(str(i), prompt, case.adapters[adapter]) for i, prompt in enumerate(prompts)])
        assert merged_steps(result) == len(result.steps)
    lent_bytes = engine.core.memory.claims["merged"].size_bytes
    assert engine.runner.merged is not None and lent_bytes > 5 * PAGE
    engine.unload_adapter(case.adapters[5].digest)
    run(engine, [request("base", [5, 6, 7], max_tokens=4)])
    assert engine.runner.merged.nbytes == 0
    assert engine.core.state.kv.total == engine.limits.kv_blocks, "the blocks are back"
    assert driver.waits


def test_memory_that_the_driver_cannot_share_is_refused_with_the_reason(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: object) -> None:
        raise DriverError("cuda:0 has no virtual memory management")

    monkeypatch.setattr(device_memory, "physical_pages", missing)
    with pytest.raises(ConfigError, match="--device-memory shared: cuda:0 has no virtual memory management"):
        make_engine(bed.model_dir, runner_options={"elastic": True, "kernels": "reference"})
    make_engine(bed.model_dir, runner_options={"elastic": False, "kernels": "reference"})


@pytest.mark.parametrize(
    ("option", "device", "shared"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda", False),
        ("fixed", "cpu", False),
        ("shared", "cuda", True),
        ("shared", "cpu", True),
    ],
)
def test_a_gpu_shares_its_memory_only_when_it_is_told_to(option: str, device: str, shared: bool) -> None:
    assert assemble.shares_memory(WorkerConfig.of(model="m", device_memory=option), device) == shared


def test_memory_that_is_shared_has_room_for_pages_used_in_part_and_none_for_a_merged_copy_beside_it(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    model = read_model_config(bed.model_dir)
    weights = sum(path.stat().st_size for path in bed.model_dir.glob("*.safetensors"))
    block_bytes = device_memory.kv_bytes_per_block(model, dtype="auto", block_size=16)

    def blocks(option: str, merge: str) -> int:
        config = WorkerConfig.of(model=str(bed.model_dir), device_memory=option, merge=merge, block_size=16)
        return assemble.memory_of(config, model, bed.model_dir, "cuda:3")[0]

    edges = device_memory.edge_bytes(model.num_layers, block_bytes, PAGE, spare_blocks=2)  # the backend's, and the probe's
    assert blocks("fixed", "off") - blocks("shared", "off") == pytest.approx(edges / block_bytes, abs=1)
    assert blocks("fixed", "off") - blocks("fixed", "on") == pytest.approx(weights / block_bytes, abs=1)
    assert blocks("shared", "on") == blocks("shared", "off")
