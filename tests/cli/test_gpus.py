"""Promise: workers of one host get different GPUs, or the start is refused with what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.cli import gpus
from motet.cli.gpus import assigned, gpus_of_workers, visible_gpus
from motet.cli.stack import Stack, StackOptions
from motet.cli.supervisor import State
from motet.services.worker.config import WorkerConfig
from motet.shared.config import ConfigError


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """/dev of a machine with three GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture(autouse=True)
def _torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_has_cuda", lambda: True)


def worker(**options: Any) -> WorkerConfig:
    return WorkerConfig.of(model="m", **options)


@pytest.mark.parametrize(
    ("value", "found"),
    [("", []), ("1", ["1"]), (" 2, 0", ["2", "0"]), ("-1", []), ("0,-1,1", ["0"]), ("GPU-8a2b,MIG-1", ["GPU-8a2b", "MIG-1"])],
)
def test_the_variable_says_which_gpus_there_are(value: str, found: list[str], dev: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, dev) == found


def test_without_the_variable_all_gpus_of_the_machine_count(dev: Path, tmp_path: Path) -> None:
    assert visible_gpus({}, dev) == ["0", "1", "2"]
    assert visible_gpus({}, tmp_path / "nothing") == []


def test_each_worker_gets_gpus_of_its_own() -> None:
    assert assigned(2, ["0", "1", "2"], each=1, sized=False) == ("0", "1")
    assert assigned(2, ["3", "0", "1", "2"], each=2, sized=False) == ("3,0", "1,2")


def test_one_worker_and_machines_without_gpus_are_left_alone() -> None:
    assert assigned(1, ["0", "1"], each=1, sized=False) == ()
    assert assigned(4, [], each=1, sized=False) == ()


def test_more_workers_than_gpus_are_refused_unless_their_memory_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--workers 3: .* 2 GPUs here.* room for 2\. Start fewer, or give --kv-memory-gib"):
        assigned(3, ["0", "1"], each=1, sized=False)
    assert assigned(3, ["0", "1"], each=1, sized=True) == ("0", "1", "0")
    with pytest.raises(ConfigError, match="room for 0"):
        assigned(2, ["0"], each=2, sized=True)


def test_the_configuration_decides_how_they_are_divided() -> None:
    two = {"CUDA_VISIBLE_DEVICES": "5,6"}
    assert gpus_of_workers(worker(), 2, two) == gpus_of_workers(worker(device="cuda"), 2, two) == ("5", "6")
    assert gpus_of_workers(worker(device="cpu"), 4, two) == ()
    assert gpus_of_workers(worker(kv_memory_gib=4, lora_memory_mib=512), 3, two) == ("5", "6", "5")
    vllm = {"engine": "vllm", "engine_args": "--max-num-seqs 8 --tensor-parallel-size=2 --enforce-eager"}
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert gpus_of_workers(worker(**vllm), 2, four) == ("0,1", "2,3")
    assert gpus_of_workers(worker(engine="vllm", engine_args="-pp 2 -tp 2"), 1, four) == ()
    with pytest.raises(ConfigError, match="--engine-args"):
        gpus_of_workers(worker(engine="vllm", engine_args="-tp two"), 2, four)


def test_workers_on_one_named_gpu_are_refused_unless_their_memory_is_told() -> None:
    assert gpus_of_workers(worker(device="cuda:1"), 1, {}) == ()
    with pytest.raises(ConfigError, match=r"--device cuda:1: 2 workers would each take all memory.*Leave --device out"):
        gpus_of_workers(worker(device="cuda:1"), 2, {})
    assert gpus_of_workers(worker(device="cuda:1", kv_memory_gib=4, lora_memory_mib=512), 2, {}) == ()


def test_a_torch_without_cuda_has_no_use_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_has_cuda", lambda: False)
    assert gpus_of_workers(worker(), 4, {"CUDA_VISIBLE_DEVICES": "0"}) == ()


class Nobody:
    def changed(self, name: str, state: State, note: str) -> None:
        """Nobody watches."""


def test_the_processes_of_workers_see_their_own_gpus_alone(tmp_path: Path) -> None:
    options = StackOptions(model="m", served_model_name="m", data_dir=tmp_path, workers=2, gpus=("5", "6"))
    stack = Stack(options, Nobody())
    seen = {name: stack.spec_for(name).env.get("CUDA_VISIBLE_DEVICES") for name in ("worker-1", "worker-2", "registry")}
    assert seen == {"worker-1": "5", "worker-2": "6", "registry": None}
