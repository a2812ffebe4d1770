"""Promise: with an int8 KV cache a request's output does not depend on its neighbours, and is close to that with floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.kernels.cpu import available_isas
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import open_engine
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.native.engine import Engine
from motet.shared.config import ConfigError
from tests.services.worker.support_engine import make_engine, request, run, wiring
from tests.services.worker.test_quantization import distances
from tests.support_models import AdapterFixture, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts

INT8 = {"kernels": "cpu", "kv_cache_dtype": "int8"}
COUNT = 9


@pytest.fixture(scope="module", params=["llama3", "qwen3", "mistral"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFixture]:
    return make_adapters(model_dir, tmp_path_factory.mktemp("adapters"))


def sequences(count: int = 18) -> list[Sequence]:
    return [Sequence(prompt, i % 9 - 1, 1) for i, prompt in enumerate(random_prompts(count, seed=3))]


def requests() -> list[EngineRequest]:
    return [request(str(i), prompt, max_tokens=10) for i, prompt in enumerate(random_prompts(COUNT, seed=7, longest=50))]


def engine(model_dir: Path, **changes: Any) -> Engine:
    return make_engine(model_dir, runner_options=INT8, **changes)


@pytest.mark.parametrize("isa", available_isas())
def test_logits_are_near_those_with_keys_and_values_in_floats(
    model_dir: Path, adapters: list[AdapterFixture], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    got, want = sequences(), sequences()
    drive(make_runner(model_dir, adapters, kernels="reference"), want, chunk=7)
    drive(make_runner(model_dir, adapters, **INT8), got, chunk=7)
    apart = [distance for one, other in zip(got, want, strict=True) for distance in distances([one], [other])]
    assert max(apart) < 0.05
    assert sum(apart) > 0


def test_neither_chunks_nor_neighbours_nor_preemption_nor_the_prefix_cache_change_an_answer(model_dir: Path) -> None:
    right = run(engine(model_dir), requests()).tokens
    assert run(engine(model_dir, max_step_tokens=9), requests()).tokens == right
    assert run(engine(model_dir, prefix_cache=False), requests()[::-1], per_step=2).tokens == right
    short = run(engine(model_dir, kv_blocks=10), requests())
    assert short.total("preempted") > 0 and short.tokens == right
    again = engine(model_dir)
    run(again, requests())
    assert run(again, requests()).tokens == right


def test_a_block_has_half_the_bytes_of_one_in_16_bits(model_dir: Path) -> None:
    runners = [make_runner(model_dir, [], kernels="cpu", dtype="bfloat16", kv_cache_dtype=kind) for kind in ("auto", "int8")]
    wide, narrow = (runner.kv_block_bytes for runner in runners)
    head_dim = runners[0].config.head_dim
    assert narrow / wide == (head_dim + 4) / (2 * head_dim)


def test_what_cannot_have_such_a_cache_refuses_with_the_reason(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: only the compiled CPU kernels"):
        make_runner(model_dir, [], kernels="reference", kv_cache_dtype="int8")
    monkeypatch.setenv("MOTET_KERNELS", "reference")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8"):
        make_runner(model_dir, [], kv_cache_dtype="int8")
    config = WorkerConfig.of(model=str(model_dir), engine="vllm", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: .* vLLM's own, in --engine-args"):
        open_engine(config, model_dir, wiring())
