"""Promise: an adapter of any layer that the base's checkpoint has is stored as PEFT computes it; one that does not fit the
checkpoint is refused, with the tensor and the reason."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from motet.services.registry.bases import open_base
from motet.services.registry.files import PeftFiles
from motet.services.registry.peft import Converted
from motet.shared import subjects
from motet.shared.base_layers import pattern, read_base_layers
from motet.shared.errors import InvalidAdapter, MotetError, TooLarge
from motet.shared.peft_blob import is_peft_blob, read_peft_index
from tests.services.registry.conftest import Client, snapshot
from tests.support import eventually
from tests.support_adapters import TINY_CONFIG, peft_config, random_tensors, safetensors_bytes, write_adapter, write_base

Layers = Mapping[str, tuple[int, int]]
"""{path in the checkpoint: (rows, columns) of its weight}."""

BLOCK = "model.layers.{}."
EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{module}": shape
    for expert in range(3)
    for module, shape in (("gate_proj", (16, 32)), ("up_proj", (16, 32)), ("down_proj", (32, 16)))
}
CHECKPOINTS: dict[str, tuple[Layers, list[str]]] = {
    "Qwen3.5's linear attention": (
        {
            "model.language_model.layers.0.linear_attn.in_proj_qkv": (80, 32),
            "model.language_model.layers.0.linear_attn.in_proj_z": (24, 32),
            "model.language_model.layers.0.linear_attn.out_proj": (32, 24),
            "model.language_model.layers.1.self_attn.q_proj": (96, 32),
        },
        [
            *("model.language_model.layers.*.linear_attn.in_proj_qkv", "model.language_model.layers.*.linear_attn.in_proj_z"),
            *("model.language_model.layers.*.linear_attn.out_proj", "model.language_model.layers.*.self_attn.q_proj"),
        ],
    ),
    "a mixture of experts": (EXPERTS, [f"model.layers.*.mlp.experts.*.{one}_proj" for one in ("down", "gate", "up")]),
    "a vision tower": ({"model.visual.blocks.7.attn.qkv": (96, 32)}, ["model.visual.blocks.*.attn.qkv"]),
    "Gemma's per-layer parts": (
        {"model.layers.1.per_layer_input_gate": (8, 32), "model.layers.1.per_layer_projection": (32, 8)},
        ["model.layers.*.per_layer_input_gate", "model.layers.*.per_layer_projection"],
    ),
    "OPT": ({"model.decoder.layers.0.fc1": (64, 32)}, ["model.decoder.layers.*.fc1"]),
    "the output layer": ({"lm_head": (64, 32)}, ["lm_head"]),
}
MORE: Layers = {f"model.layers.{layer}.mlp.router": (3, 32) for layer in range(2)} | {"model.embed_tokens": (64, 32)}
"""What every checkpoint here has besides."""


def write_checkpoint(folder: Path, layers: Layers, config: Mapping[str, Any] = TINY_CONFIG) -> Path:
    """A base whose checkpoint has these layers, all zero, and a norm."""
    write_base(folder, config)
    tensors = {f"{path}.weight": np.zeros(shape, dtype=np.float32) for path, shape in {**MORE, **layers}.items()}
    tensors |= {"model.norm.weight": np.zeros(32, dtype=np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def matrices(layers: Layers, *, rank: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """PEFT's tensors for these linear layers."""
    random = np.random.default_rng(seed)
    found = {}
    for path, (rows, columns) in layers.items():
        found[f"base_model.model.{path}.lora_A.weight"] = random.standard_normal((rank, columns), dtype=np.float32)
        found[f"base_model.model.{path}.lora_B.weight"] = random.standard_normal((rows, rank), dtype=np.float32)
    return found


def files(weights: bytes, config: bytes) -> PeftFiles:
    return PeftFiles(config_json=config, weights=io.BytesIO(weights), size_bytes=len(weights), source="test")


def converted(base: Path, tensors: Mapping[str, np.ndarray], *, max_bytes: int = 1 << 20, dtype: str = "F32", **config: Any):
    """The adapter as the registry of this base stores it."""
    modules = config.pop("modules", sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors}))
    given = files(safetensors_bytes(tensors, dtype), peft_config(modules=modules, **config))
    return open_base(base, max_rank=16, max_bytes=max_bytes).convert(given, [], "")


def update(blob: bytes, path: str) -> np.ndarray:
    """scale * B @ A of a layer, as PEFT would compute it from what is stored."""
    index, tensors = read_peft_index(blob, len(blob)), load(blob)
    scale = index.config["lora_alpha"] / index.config["r"]
    half = {key.removeprefix(f"base_model.model.{path}.lora_"): one for key, one in tensors.items() if f".{path}." in key}
    a, b = (half[f"{name}.weight"] if f"{name}.weight" in half else half[f"embedding_{name}"] for name in "AB")
    return scale * b.astype(np.float64) @ a.astype(np.float64)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_that_the_table_does_not_know_are_checked_against_the_checkpoint(name: str, tmp_path: Path):
    layers, targets = CHECKPOINTS[name]
    tensors = matrices(layers)
    found: Converted = converted(write_checkpoint(tmp_path / "base", layers), tensors, alpha=6)
    assert is_peft_blob(found.blob, len(found.blob)) and list(found.targets) == targets and found.rank == 4
    for path in layers:
        a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        np.testing.assert_allclose(update(found.blob, path), 1.5 * b @ a, rtol=1e-6)


def test_an_adapter_of_the_seven_layers_keeps_its_format(tmp_path: Path):
    layers = {f"model.layers.{layer}.self_attn.{one}": (48 if one == "q_proj" else 24, 32) for layer in (0, 1) for one in QV}
    found = converted(write_checkpoint(tmp_path, layers), random_tensors())
    assert not is_peft_blob(found.blob, len(found.blob)) and found.targets == ()


QV = ("q_proj", "v_proj")


def test_where_the_checkpoints_sizes_are_not_the_tables_the_checkpoints_count(tmp_path: Path):
    layers = {"model.layers.0.self_attn.q_proj": (80, 32)}  # with a gate, as in Qwen3.5; config.json alone says 48
    found = converted(write_checkpoint(tmp_path, layers), matrices(layers))
    assert found.targets == ("model.layers.*.self_attn.q_proj",)


def test_a_base_that_is_not_llama_shaped_is_known_by_its_checkpoint(tmp_path: Path):
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 64, "vocab_size": 64}
    layers = {"model.decoder.layers.0.fc1": (64, 32)}
    found = converted(write_checkpoint(tmp_path, layers, config), matrices(layers))
    assert found.targets == ("model.decoder.layers.*.fc1",)


def test_several_scales_are_multiplied_into_the_matrices(tmp_path: Path):
    layers = {"model.decoder.layers.0.fc1": (64, 32), "model.decoder.layers.0.fc2": (32, 64)}
    tensors = matrices(layers)
    base = write_checkpoint(tmp_path, layers)
    found = converted(base, tensors, alpha=6, alpha_pattern={"fc2": 3}, dtype="F16")
    for path, scale in zip(layers, (1.5, 0.75), strict=True):
        a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"].astype("f2").astype("f8") for half in "AB")
        np.testing.assert_allclose(update(found.blob, path), scale * b @ a, rtol=1e-6)
    assert found.dtype == "F32"
    assert converted(base, tensors, alpha=6, use_rslora=True).targets == found.targets


def test_embeddings_have_the_orientation_that_peft_gives_them(tmp_path: Path):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((4, 64), dtype=np.float32), random.standard_normal((32, 4), dtype=np.float32)
    tensors = {f"base_model.model.model.embed_tokens.lora_embedding_{name}": one for name, one in (("A", a), ("B", b))}
    found = converted(write_checkpoint(tmp_path, {}), tensors, alpha=4)
    assert found.targets == ("model.embed_tokens",)
    np.testing.assert_allclose(update(found.blob, "model.embed_tokens"), b.astype("f8") @ a.astype("f8"), rtol=1e-6)


def test_modules_that_the_configuration_leaves_out_are_not_stored(tmp_path: Path):
    layers = {"model.decoder.layers.0.fc1": (64, 32), "model.decoder.layers.0.fc2": (32, 64)}
    found = converted(write_checkpoint(tmp_path, layers), matrices(layers), exclude_modules=["fc2"])
    assert found.left_out == ("model.decoder.layers.0.fc2",) and found.modules == ("fc1",)
    assert not [key for key in load(found.blob) if "fc2" in key]


def test_one_layer_under_two_names_is_one_content(tmp_path: Path):
    """transformers calls the text model of a model that takes images otherwise than many checkpoints do."""
    base = write_checkpoint(tmp_path, {"language_model.model.layers.0.mlp.fc1": (64, 32)})
    own = converted(base, matrices({"language_model.model.layers.0.mlp.fc1": (64, 32)}))
    other = converted(base, matrices({"model.language_model.layers.0.mlp.fc1": (64, 32)}))
    assert own.digest == other.digest and own.targets == ("language_model.model.layers.*.mlp.fc1",)


def test_a_tied_output_layer_has_the_size_of_the_embeddings(tmp_path: Path):
    tied = write_checkpoint(tmp_path / "tied", {}, TINY_CONFIG | {"tie_word_embeddings": True})
    assert converted(tied, matrices({"lm_head": (64, 32)})).targets == ("lm_head",)
    own = write_checkpoint(tmp_path / "own", {}, TINY_CONFIG | {"tie_word_embeddings": False})
    with pytest.raises(InvalidAdapter, match="no linear layer lm_head"):
        converted(own, matrices({"lm_head": (64, 32)}))


FC1 = "base_model.model.model.decoder.layers.0.fc1.lora_"
Change = Callable[[dict[str, np.ndarray]], object]
BAD: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a layer that the base has not": (
        lambda t: t.update(matrices({"model.decoder.layers.9.fc1": (64, 32)})),
        {},
        "tensor base_model.model.model.decoder.layers.9.fc1.lora_A.weight: the base model has no linear layer",
    ),
    "a norm": (
        lambda t: t.update(matrices({"model.norm": (1, 32)})),
        {},
        "tensor base_model.model.model.norm.lora_A.weight: the base model has no linear layer",
    ),
    "other inputs": (
        lambda t: t.update({f"{FC1}A.weight": np.zeros((4, 33), np.float32)}),
        {},
        f"tensor {FC1}A.weight: shape [4, 33], but the base model's layer has 32 inputs",
    ),
    "other outputs": (
        lambda t: t.update({f"{FC1}B.weight": np.zeros((63, 4), np.float32)}),
        {},
        f"tensor {FC1}B.weight: shape [63, 4], but the base model's layer has 64 outputs",
    ),
    "one half": (lambda t: t.pop(f"{FC1}B.weight"), {}, f"tensor {FC1}A.weight: lora_B of the same module is missing"),
    "a rank that the configuration does not tell": (lambda t: None, {"rank": 8}, f"tensor {FC1}A.weight: rank 4, but r says 8"),
    "too large a rank": (
        lambda t: t.update(matrices({"model.decoder.layers.0.fc1": (64, 32)}, rank=17)),
        {"rank": 17},
        f"tensor {FC1}A.weight: rank 17 is over the limit of 16",
    ),
    "NaN": (lambda t: t[f"{FC1}B.weight"].__setitem__((5, 2), np.nan), {}, f"tensor {FC1}B.weight: NaN or infinity at [5, 2]"),
    "infinity": (lambda t: t[f"{FC1}A.weight"].__setitem__((0, 0), np.inf), {}, f"tensor {FC1}A.weight: NaN or infinity at"),
    "a vector": (
        lambda t: t.update({f"{FC1}A.weight": np.zeros(32, np.float32)}),
        {},
        f"tensor {FC1}A.weight: shape [32] is not a matrix",
    ),
    "a bias": (
        lambda t: t.update({f"{FC1}B.bias": np.zeros(64, np.float32)}),
        {},
        f"tensor {FC1}B.bias: not a LoRA matrix",
    ),
    "embeddings as a linear layer": (
        lambda t: t.update(matrices({"model.embed_tokens": (64, 32)})),
        {},
        "tensor base_model.model.model.embed_tokens.lora_A.weight: an embedding's matrices are called",
    ),
    "one layer twice": (
        lambda t: t.update(matrices({"decoder.layers.0.fc1": (64, 32)})),
        {},
        "tensor base_model.model.decoder.layers.0.fc1.lora_A.weight: the file changes model.decoder.layers.0.fc1 twice",
    ),
    "DoRA": (lambda t: None, {"use_dora": True}, "use_dora is set"),
    "a scale that no weight can hold": (lambda t: None, {"alpha": 1e40}, "gives no finite scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_the_tensor_and_the_reason(name: str, tmp_path: Path):
    change, config, reason = BAD[name]
    tensors = matrices({"model.decoder.layers.0.fc1": (64, 32)})
    base = write_checkpoint(tmp_path, {"model.decoder.layers.0.fc1": (64, 32)})
    assert converted(base, tensors).rank == 4
    change(tensors)
    with pytest.raises(InvalidAdapter) as refused:
        converted(base, tensors, **config)
    assert reason in str(refused.value)


def test_experts_are_changed_all_together_or_not_at_all(tmp_path: Path):
    base = write_checkpoint(tmp_path, EXPERTS)
    tensors = matrices(EXPERTS)
    some = {key: one for key, one in tensors.items() if ".experts.1.up_proj." not in key}
    with pytest.raises(InvalidAdapter, match=r"tensor base_model.*experts.1.up_proj is not changed"):
        converted(base, some)
    odd = tensors | matrices({"model.layers.0.mlp.experts.2.up_proj": (16, 32)}, rank=3)
    with pytest.raises(InvalidAdapter, match=r"experts.2.up_proj.lora_A.weight: rank 3, but other experts"):
        converted(base, odd, rank_pattern={"experts.2.up_proj": 3})


def test_a_file_over_the_limit_is_refused(tmp_path: Path):
    layers = {"model.decoder.layers.0.fc1": (64, 32)}
    base = write_checkpoint(tmp_path, layers)
    with pytest.raises(TooLarge):
        converted(base, matrices(layers), max_bytes=1024)
    two = {**layers, "model.decoder.layers.0.fc2": (32, 64)}  # in F32, for its two scales, it has twice the bytes of its file
    base = write_checkpoint(tmp_path / "two", two)
    size = len(safetensors_bytes(matrices(two), "F16"))
    with pytest.raises(TooLarge, match="as F32"):
        converted(base, matrices(two), max_bytes=size, dtype="F16", alpha_pattern={"fc2": 3})


def test_without_the_checkpoints_files_other_layers_cannot_be_checked(tmp_path: Path):
    with pytest.raises(
        InvalidAdapter, match=r"fc1.lora_A.weight: not a LoRA matrix of q_proj.* no safetensors files of the base"
    ):
        converted(write_base(tmp_path), matrices({"model.layers.0.mlp.fc1": (64, 32)}))


def test_a_checkpoint_that_cannot_be_read_has_no_layers(tmp_path: Path):
    base = write_checkpoint(tmp_path, {})
    assert read_base_layers(base).find("model.embed_tokens") is not None
    (base / "model.safetensors").write_bytes(b"\xff" * 64)
    assert not read_base_layers(base)
    assert pattern("a.12.b.3") == "a.*.b.*" and pattern("fc1.x2y") == "fc1.x2y"


# ---- the service


@pytest.fixture
async def client(start_registry, connect, tmp_path: Path, roots: Path) -> Client:
    """Of a registry whose base has fc1 in two blocks."""
    layers = {f"model.layers.{layer}.mlp.fc1": (64, 32) for layer in range(2)}
    await start_registry(model=str(write_checkpoint(tmp_path / "tiny-base", layers)))
    return Client(await connect("gateway"), roots)


def fc1(roots: Path, name: str = "fc1", **more: Any) -> Path:
    layers = {f"model.layers.{layer}.mlp.fc1": (64, 32) for layer in range(2)}
    return write_adapter(roots / name, tensors=matrices(layers, **more), modules=["fc1"])


async def test_a_registered_adapter_is_published_with_its_layers_and_stored_once(client: Client, roots: Path):
    info = await client.register("outer", fc1(roots))
    version = info.version
    assert (version.targets, version.modules, version.layers, version.rank) == (("model.layers.*.mlp.fc1",), ("fc1",), 2, 4)
    blob = (await (await client.bus.object_store(subjects.BLOBS)).get(version.digest)).data
    assert len(blob) == version.size_bytes and read_peft_index(blob, len(blob)).targets == version.targets
    again = await client.register("other", fc1(roots, "copy"))
    assert again.entry.digest == info.entry.digest and await client.blobs() == {info.entry.digest}


async def test_layers_that_no_worker_can_change_are_refused_as_soon_as_one_tells(client: Client, roots: Path):
    async def told(*targets: str, seq: int) -> None:
        state = snapshot(seq=seq, incarnation=str(seq))
        state.limits = msgspec.structs.replace(state.limits, lora_targets=targets)
        await client.bus.publish(subjects.state("w1"), state)

    async def refused(name: str) -> str:
        try:
            await client.register(name, roots / "fc1")
        except MotetError as error:
            assert error.status == 400
            return error.message
        await client.delete(name)
        return ""

    fc1(roots)
    assert await refused("nobody-tells") == ""
    await told("model.layers.*.mlp.fc2", seq=1)
    assert "can change model.layers.*.mlp.fc1 of" in await eventually(lambda: refused("not-here"))
    await told("model.layers.*.mlp.fc1", "model.layers.*.mlp.fc2", seq=2)

    async def accepted() -> bool:
        return await refused("here") == ""

    await eventually(accepted)


async def test_pickled_weights_are_never_read(client: Client, roots: Path):
    folder = roots / "pickle"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(peft_config(modules=["fc1"]))
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    error = await client.refused("pickle", folder)
    assert error.status == 400 and "safetensors" in error.message


def test_a_blob_says_what_adapter_config_has_to_say(tmp_path: Path):
    layers = {"model.decoder.layers.0.fc1": (64, 32)}
    found = converted(write_checkpoint(tmp_path, layers), matrices(layers), alpha=8)
    index = read_peft_index(found.blob, len(found.blob))
    assert json.loads(json.dumps(index.config)) == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8.0,
        "target_modules": ["fc1"],
        "bias": "none",
    }


def test_the_table_counts_where_the_checkpoints_own_sizes_are_packed(tmp_path: Path):
    base = write_checkpoint(tmp_path, {})
    blob = converted(write_packed(base), random_tensors()).blob
    assert not is_peft_blob(blob, len(blob))


def write_packed(base: Path) -> Path:
    """A checkpoint whose linear layers are quantized, as GPTQ names them."""
    paths = [f"model.layers.{layer}.self_attn.{module}" for layer in (0, 1) for module in QV]
    tensors = {f"{path}.qweight": np.zeros((4, 8), np.float32) for path in paths}
    (base / "model.safetensors").write_bytes(safetensors_bytes(tensors | {"lm_head.weight": np.zeros((64, 32), np.float32)}))
    return base
