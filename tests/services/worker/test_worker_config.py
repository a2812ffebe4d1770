"""Promise: a configuration that cannot work is refused with the flag and both numbers, before any model is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import GIB, WorkerConfig, free_host_bytes, kv_blocks_for
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.assemble import assemble
from motet.shared.config import ConfigError, load
from tests.support_models import make_checkpoint

MIB = 1 << 20


def config(**flags: object) -> WorkerConfig:
    return load(WorkerConfig, {"model": "m", **flags}, {})


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"kv_blocks": -1}, "--kv-blocks"),
        ({"max_running": 0}, "--max-running"),
        ({"dtype": "int8"}, "--dtype"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"device": "tpu"}, "--device"),
        ({"block_size": 1000}, "--block-size"),
        ({"model": ""}, "--model"),
    ],
)
def test_values_out_of_range_name_their_flag(flags, flag):
    with pytest.raises(ConfigError, match=flag):
        config(**flags)


def test_the_base_models_name_is_the_last_part_of_its_path_unless_given():
    assert config(model="org/llama-7b").base.name == "llama-7b"
    assert config(model="/models/llama/").base.name == "llama"
    assert config(served_model_name="demo").base.name == "demo"


def test_kv_blocks_follow_the_flags_and_the_free_memory():
    def sized(free_bytes: int, *, on_cpu: bool = True, **flags: object) -> int:
        return kv_blocks_for(config(**flags).kv, block_bytes=MIB, free_bytes=free_bytes, on_cpu=on_cpu)

    assert sized(64 * GIB, kv_blocks=77) == 77
    assert sized(64 * GIB, kv_memory_gib=0.5) == 512
    assert sized(64 * GIB) == 1024  # a modest gibibyte on a machine that others use too
    assert sized(2 * GIB) == 512  # a quarter of a small one
    assert sized(64 * GIB, on_cpu=False) == 64 * 1024


def test_a_kv_cache_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"--kv-memory-gib: 8\.00 GiB .* 2\.00 GiB"):
        kv_blocks_for(config(kv_memory_gib=8.0).kv, block_bytes=MIB, free_bytes=2 * GIB, on_cpu=True)
    with pytest.raises(ConfigError, match="hold 0 KV blocks"):
        kv_blocks_for(config().kv, block_bytes=8 * GIB, free_bytes=2 * GIB, on_cpu=True)


def test_free_memory_is_something_between_nothing_and_a_very_large_machine():
    assert 1 << 20 < free_host_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_model_len": 4096}, "--max-model-len: 4096 is more than the model's 256"),
        ({"max_step_tokens": 16, "max_running": 32}, "--max-step-tokens: 16 rows have no room for --max-running 32"),
        ({"kv_memory_gib": 900_000.0}, "--kv-memory-gib"),
    ],
)
def test_flags_that_contradict_the_model_or_the_machine_are_refused(flags, says, tmp_path):
    model = make_checkpoint("llama2", tmp_path)
    with pytest.raises(ConfigError, match=says):
        assemble(config(model=str(model), threads=1, **flags), model, StepTimes(START_PERF))


def test_a_small_kv_cache_shortens_the_longest_request(tmp_path):
    model = make_checkpoint("llama2", tmp_path)
    assembly = assemble(config(model=str(model), threads=1, kv_blocks=4, block_size=8), model, StepTimes(START_PERF))
    assert assembly.limits.max_model_len == 32


def test_a_wrong_model_is_reported_without_importing_torch():
    code = (
        "import sys; from motet.services.worker.config import WorkerConfig; from motet.services.worker.service import main;"
        "status = main(WorkerConfig.of(model='/no/such/model')); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "/no/such/model" in done.stderr
