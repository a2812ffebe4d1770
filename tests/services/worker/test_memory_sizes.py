"""Promise: adapters have room by default, and a device that cannot be used is refused by name before anything is loaded."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.services.worker.config import GIB, MIB, AdaptersConfig, WorkerConfig, lora_bytes_for
from motet.services.worker.engines.model_config import parse_model_config
from motet.services.worker.native import assemble as assembling
from motet.services.worker.native.backend import BackendOptions
from motet.shared.config import ConfigError
from tests.services.worker.test_model_config import LLAMA

LLAMA_8B = parse_model_config(LLAMA)
RANK_BYTES = sum(map(sum, LLAMA_8B.projection_shapes().values())) * LLAMA_8B.num_layers * 2
H100, CARD = 54 * GIB, 4 * GIB  # what an 8B model leaves of 80 GB and of 24 GB


def lora_bytes(free_bytes: int, *, on_cpu: bool = False, rank_bytes: int = RANK_BYTES, **options: Any) -> int:
    return lora_bytes_for(AdaptersConfig.of(**options), rank_bytes=rank_bytes, free_bytes=free_bytes, on_cpu=on_cpu)


@pytest.mark.parametrize("max_lora_rank", [64, 256])
def test_a_gpu_has_room_for_32_adapters_of_rank_64_where_memory_allows(max_lora_rank: int) -> None:
    room = lora_bytes(H100, max_lora_rank=max_lora_rank)
    assert room == 32 * 64 * RANK_BYTES
    assert room < H100 // 4


def test_smaller_ranks_take_less() -> None:
    assert lora_bytes(H100, max_lora_rank=8) == 32 * 8 * RANK_BYTES
    assert lora_bytes(H100, max_lora_rank=9) == 32 * 16 * RANK_BYTES, "pages of 8 ranks"


def test_a_small_gpu_gives_a_quarter_of_what_the_weights_leave() -> None:
    assert lora_bytes(CARD, max_lora_rank=64) == CARD // 4


def test_every_adapter_that_is_accepted_fits_where_half_of_the_memory_can_hold_it() -> None:
    assert lora_bytes(CARD, max_lora_rank=256) == 256 * RANK_BYTES > CARD // 4
    assert lora_bytes(2 * GIB, max_lora_rank=256) == GIB
    assert lora_bytes(24 * GIB, on_cpu=True, max_lora_rank=256) == 256 * RANK_BYTES


def test_small_models_keep_the_least_room() -> None:
    assert lora_bytes(H100, rank_bytes=1000) == 256 * MIB
    assert lora_bytes(24 * GIB, rank_bytes=1000, on_cpu=True) == 256 * MIB


def test_a_size_that_is_given_is_taken() -> None:
    assert lora_bytes(H100, lora_memory_mib=7) == 7 * MIB


def sized(monkeypatch: pytest.MonkeyPatch, free_bytes: int, **options: Any) -> tuple[int, int]:
    """(KV blocks, bytes for adapters) of the 8B model on a GPU with so much free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, free_bytes))
    config = WorkerConfig.of(model="m", load_format="dummy", **options)
    return assembling.memory_of(config, LLAMA_8B, Path("nowhere"), "cuda:0")


def test_kv_blocks_get_what_weights_and_adapters_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, adapters = sized(monkeypatch, 80 * GIB)
    weights = assembling.parameters(LLAMA_8B) * 2
    block_bytes = LLAMA_8B.num_layers * 16 * 2 * 8 * 128 * 2
    assert adapters == 32 * 64 * RANK_BYTES
    assert 0 <= int(80 * GIB * 0.9) - weights - adapters - blocks * block_bytes < block_bytes


def test_a_gpu_that_is_in_use_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"do not fit in the .* free on cuda:0; if another process uses"):
        sized(monkeypatch, 12 * GIB)


@pytest.mark.parametrize(("wanted", "count"), [("cuda:2", 2), ("cuda", 0), ("cuda:0", 0)])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=rf"--device {wanted}: PyTorch sees {count} GPUs here"):
        assembling.device_of(wanted)


def test_a_gpu_is_made_current_before_anything_is_launched_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, whatever device its tensors are on."""
    done: list[Any] = []

    class Launched(Exception):
        pass

    def reserve(options: BackendOptions, **_: Any) -> None:
        done.append("reserve")
        raise Launched

    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    backend = import_module("motet.services.worker.native.backends.triton")
    monkeypatch.setattr(backend, "reserve", reserve)
    options = BackendOptions(model_dir=Path(), device="cuda:1", kv_blocks=1, lora_bytes=1, max_lora_rank=8, max_loras=1)
    with pytest.raises(Launched):
        backend.triton(options)
    assert done == [torch.device("cuda:1"), "reserve"]
