"""Promise: the native engine reads each copy once, between two steps, and leaves nothing of a probe behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.policies.worker.probe import PROMPT_TOKENS, Reading, distance, prompt
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import StepOutput
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.runner import ModelRunner
from motet.shared.errors import AdapterQuarantined
from tests.services.worker.support_engine import make_engine, request
from tests.services.worker.test_merging import UNTUNED
from tests.support_models import make_adapters, make_checkpoint

KERNELS = ("cpu", "reference")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("probe-model"))


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[HostAdapter]:
    config = read_model_config(model_dir)
    made = make_adapters(model_dir, tmp_path_factory.mktemp("probe-adapters"))
    return [HostAdapter.from_blob(one.blob, config) for one in made]


def probing(model_dir: Path, kernels: str, *, merge: Any = "off", **options: Any) -> Engine:
    runner_options = {"kernels": kernels, "probe_tokens": PROMPT_TOKENS, "elastic": merge != "off"}
    return make_engine(model_dir, runner=ModelRunner, runner_options=runner_options, merge=merge, **options)


def steps(engine: Engine, *requests: Any) -> list[StepOutput]:
    for one in requests:
        engine.add(one, 0.0)
    found: list[StepOutput] = []
    while engine.has_work():
        found.append(engine.step(float(len(found))))
        engine.check()
    return found


def readings(outputs: list[StepOutput]) -> list[Reading]:
    return [one for output in outputs for one in output.readings]


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_copy_is_announced_and_read_once_before_or_with_its_first_token(model_dir, adapters, kernels):
    engine = probing(model_dir, kernels, max_loras=2)
    outputs = steps(engine, *(request(f"r{i}", [1, 2, 3 + i], adapter) for i, adapter in enumerate(adapters[:4])))
    announced = [digest for output in outputs for digest in output.loading]
    read = [one.digest for one in readings(outputs)]
    assert sorted(announced) == sorted(read) and set(read) == {one.digest for one in adapters[:4]}
    assert all(len(output.readings) <= 1 for output in outputs), "others wait for one probe at a time"
    assert not readings(steps(engine, request("again", [5], adapters[3]))), "it is there"
    for output in outputs:
        assert output.stats.probe_s == pytest.approx(sum(one.took_s for one in output.readings))


def test_both_kernels_read_the_same_account_and_answers(model_dir, adapters):
    found = {}
    for kernels in KERNELS:
        [found[kernels]] = readings(steps(probing(model_dir, kernels), request("r", [1, 2], adapters[2])))
    one, other = found["cpu"], found["reference"]
    assert one.error == other.error == "" and one.account.keys() == other.account.keys()
    assert all(np.allclose(one.account[name], other.account[name], rtol=1e-6) for name in one.account)
    assert distance(one.adapter, other.adapter) < 1e-4 < distance(one.adapter, one.base)
    assert distance(one.base, other.base) < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_probe_neither_fills_nor_uses_the_prefix_cache(model_dir, adapters, kernels):
    engine = probing(model_dir, kernels)
    tokens = prompt(engine.runner.config.vocab_size)
    [first] = readings(steps(engine, request("r", [1, 2], adapters[2])))
    outputs = steps(engine, request("same", tokens, adapters[2]))
    assert sum(output.stats.cached_tokens for output in outputs) == 0
    engine.unload_adapter(adapters[2].digest)
    [second] = readings(steps(engine, request("r2", [1, 2], adapters[2])))
    assert distance(first.adapter, second.adapter) < 1e-5, "and the cached prompt changes no reading"


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_merged_copy_is_read_before_its_first_step(model_dir, adapters, kernels):
    engine = probing(model_dir, kernels, merge="on", merging=UNTUNED)
    outputs: list[StepOutput] = []
    for number in range(100):
        more = steps(engine, *(request(f"{number} {i}", [7, 8, 9 + i], adapters[2]) for i in range(4)))
        outputs += more
        if any(one.merged for one in readings(more)):
            break
    plain, merged = readings(outputs)
    assert (plain.merged, merged.merged, merged.account) == (False, True, None)
    assert distance(plain.adapter, merged.adapter) < 1e-3 < distance(plain.adapter, plain.base)
    first = next(n for n, one in enumerate(outputs) if one.stats.merging is not None and one.stats.merging.merged)
    assert first == next(n for n, one in enumerate(outputs) if any(found is merged for found in one.readings))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rejected_adapter_ends_its_requests_alone_and_leaves_no_block(model_dir, adapters, kernels):
    engine = probing(model_dir, kernels)
    shared = list(range(3, 40))
    engine.add(request("bad", shared, adapters[2], max_tokens=50), 0.0)
    engine.add(request("good", shared, adapters[3], max_tokens=50), 0.0)
    while not engine.step(0.0).items:
        pass
    engine.reject_adapter(adapters[2].digest, AdapterQuarantined.of("x", "a test"))
    ends = {
        item.request_id: item for output in steps(engine) for items in output.items.values() for item in items if item.finish
    }
    assert ends["bad"].error is not None and ends["bad"].error.code == "adapter_quarantined"
    assert ends["good"].finish == "length"
    assert adapters[2].digest not in {one.digest for one in engine.residency()}
    outputs = steps(engine, request("later", shared, adapters[2], max_tokens=1))
    assert sum(output.stats.cached_tokens for output in outputs) == 0


def test_without_spare_blocks_nothing_is_read(model_dir, adapters):
    outputs = steps(make_engine(model_dir), request("r", [1, 2], adapters[2]))
    assert not readings(outputs) and not any(output.loading for output in outputs)
