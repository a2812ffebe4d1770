"""Checkpoints that are refused, each with its reason, before anything is computed; adapters that do not fit the base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.kernels import PackedLora, PoolFull
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import UnsupportedModel, read_model_config
from motet.shared.adapter_blob import write_blob
from motet.shared.errors import InvalidAdapter
from tests.support_models import AdapterFixture, make_adapters, make_checkpoint, make_runner

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def model_dir(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture(scope="module")
def adapter(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterFixture:
    return make_adapters(pristine, tmp_path_factory.mktemp("adapters"))[2]


def lose(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(64, 63)


def add_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def quantize(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose, r"lacks 1 of .* model\.layers\.1\.mlp\.up_proj\.weight"),
        (reshape, r"o_proj\.weight has shape \[64, 63\], config\.json implies \[64, 64\]"),
        (add_bias, r"does not imply, as model\.layers\.0\.self_attn\.q_proj\.bias"),
        (quantize, r"model\.norm\.weight is stored as I8"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    model_dir: Path, spoil: Callable[[Tensors], None], message: str
) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    spoil(tensors)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        make_runner(model_dir, [])


def test_stored_rotary_frequencies_are_ignored(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, model_dir / "model.safetensors")
    make_runner(model_dir, [])


def test_pickled_weights_are_never_opened(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickle is never opened"):
        make_runner(model_dir, [])


def test_a_directory_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"):
        make_runner(model_dir, [])


def test_a_broken_file_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UnsupportedModel, match="not a readable safetensors file"):
        make_runner(model_dir, [])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ('{"weight_map": []}', "not a safetensors index"),
        (json.dumps({"weight_map": {"a": "../model.safetensors"}}), "own directory"),
        (json.dumps({"weight_map": {"a": "model-00001.safetensors"}}), "which is not there"),
    ],
)
def test_a_bad_shard_index_is_refused(model_dir: Path, index: str, message: str) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "weights.safetensors")
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnsupportedModel, match=message):
        make_runner(model_dir, [])


def test_an_unknown_dtype_is_refused(pristine: Path) -> None:
    with pytest.raises(UnsupportedModel, match="int8"):
        make_runner(pristine, [], dtype="int8")


def test_an_adapter_is_the_same_from_bytes_and_from_a_file(pristine: Path, adapter: AdapterFixture, tmp_path: Path) -> None:
    config = read_model_config(pristine)
    (tmp_path / "blob").write_bytes(adapter.blob)
    from_bytes, from_file = (HostAdapter.from_blob(source, config) for source in (adapter.blob, tmp_path / "blob"))
    assert (from_bytes.digest, from_bytes.rank, from_bytes.ranks) == (from_file.digest, from_file.rank, from_file.ranks)
    assert torch.equal(from_bytes.packed.arena, from_file.packed.arena)
    for name in ("table", "pages", "scales"):
        assert np.array_equal(getattr(from_bytes.packed, name), getattr(from_file.packed, name))


def test_a_mapped_blob_is_the_adapter_as_the_kernels_pack_it(pristine: Path) -> None:
    config, shapes = read_model_config(pristine), read_model_config(pristine).projection_shapes()
    draw = np.random.default_rng(0)
    pairs = {}
    for layer, module, rank in ((0, "q_proj", 4), (2, "q_proj", 17), (1, "down_proj", 8), (2, "v_proj", 1)):
        fan_in, fan_out = shapes[module]
        sizes = (rank, fan_in), (fan_out, rank)
        pairs[layer, module] = (draw.uniform(), *(draw.standard_normal(size, np.float32) for size in sizes))
    host = HostAdapter.from_blob(write_blob(pairs, dtype="F32", layers=3), config)
    matrices = {key: (scale, torch.from_numpy(a), torch.from_numpy(b)) for key, (scale, a, b) in pairs.items()}
    packed = PackedLora.pack(matrices, shapes, layers=3)
    assert torch.equal(host.packed.arena, packed.arena)
    for name in ("table", "pages", "scales"):
        assert np.array_equal(getattr(host.packed, name), getattr(packed, name))
    assert host.ranks == {"q_proj": 17, "v_proj": 1, "down_proj": 8} and host.rank == 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_finds_the_same_weights_behind_the_file_descriptor(
    pristine: Path, adapter: AdapterFixture, tmp_path: Path, dtype: torch.dtype
) -> None:
    (tmp_path / "blob").write_bytes(adapter.blob)
    host = HostAdapter.from_blob(tmp_path / "blob", read_model_config(pristine), dtype=dtype)
    (tmp_path / "blob").unlink()  # another worker evicted it
    assert host.packed.arena.dtype == dtype and host.packed.arena.data_ptr() % 64 == 0
    read = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    path = f"/proc/{os.getpid()}/fd/{host.fd}"
    seen = subprocess.run([sys.executable, "-c", read, path], check=True, capture_output=True).stdout
    assert seen[host.data_start :] == host.packed.arena.view(torch.uint8).numpy().tobytes()
    exact = HostAdapter.from_blob(adapter.blob, read_model_config(pristine)).packed.arena
    assert torch.equal(host.packed.arena, exact.to(dtype))


def _mapped_pages_kib(address: int) -> int:
    """How much of the mapping around this address is in the process's page tables."""
    found = -1
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            start, end = (int(part, 16) for part in head.split("-"))
        elif head == "Rss:" and start <= address < end:
            found = int(line.split()[1])
    return found


@pytest.mark.parametrize(("dtype", "stay"), [(None, False), (torch.bfloat16, True)], ids=["a file", "a cast copy"])
def test_only_pages_of_a_file_are_released_after_a_copy(
    pristine: Path, adapter: AdapterFixture, tmp_path: Path, dtype: torch.dtype | None, stay: bool
) -> None:
    (tmp_path / "blob").write_bytes(adapter.blob)
    host = HostAdapter.from_blob(tmp_path / "blob", read_model_config(pristine), dtype=dtype)
    weights = host.packed.arena.clone()
    before = _mapped_pages_kib(host.packed.arena.data_ptr())
    host.rest()
    assert before > 0 and _mapped_pages_kib(host.packed.arena.data_ptr()) == (before if stay else 0)
    assert torch.equal(host.packed.arena, weights)


def test_a_host_copy_closes_its_file_when_it_is_gone(pristine: Path, adapter: AdapterFixture) -> None:
    host = HostAdapter.from_blob(adapter.blob, read_model_config(pristine))
    fd = host.fd
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    del host
    with pytest.raises(FileNotFoundError):
        os.readlink(f"/proc/self/fd/{fd}")


def blob_of(module: str, a_shape: tuple[int, int], b_shape: tuple[int, int], *, layers: int = 3) -> bytes:
    return write_blob({(0, module): (1.0, np.zeros(a_shape, "<f4"), np.zeros(b_shape, "<f4"))}, dtype="F32", layers=layers)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (blob_of("q_proj", (4, 63), (64, 4)), "q_proj: 63 -> 64 does not fit the base's 64 -> 64"),
        (blob_of("up_proj", (4, 64), (64, 4)), "64 -> 96"),
        (blob_of("q_proj", (4, 64), (64, 4), layers=4), "the base model has 3 layers"),
        (b"", "not a safetensors file"),
        (b"\x80\x04pickle, surely", "not a safetensors file"),
    ],
)
def test_an_adapter_for_another_base_is_refused(pristine: Path, blob: bytes, message: str) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        HostAdapter.from_blob(blob, read_model_config(pristine))


def test_adapter_memory_is_counted_in_the_runners_type(pristine: Path, adapter: AdapterFixture) -> None:
    runner = make_runner(pristine, [])
    weights = HostAdapter.from_blob(adapter.blob, runner.config)
    full = runner.lora_bytes_free
    assert full == runner.lora_bytes_total
    runner.load_adapter(0, weights)
    assert full - runner.lora_bytes_free == runner.adapter_bytes(weights)
    half = make_runner(pristine, [], dtype="bfloat16")
    assert half.adapter_bytes(weights) * 2 == runner.adapter_bytes(weights)


def test_an_adapter_that_does_not_fit_is_refused_and_leaves_room(pristine: Path, adapter: AdapterFixture) -> None:
    weights = HostAdapter.from_blob(adapter.blob, read_model_config(pristine))
    runner = make_runner(pristine, [], lora_bytes=weights.nbytes // 2)
    free = runner.lora_bytes_free
    with pytest.raises(PoolFull):
        runner.load_adapter(0, weights)
    assert runner.lora_bytes_free == free
