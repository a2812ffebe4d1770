"""Promise: an image adapter in any layout that people have changes the base as in diffusers; every other file is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.services.registry.image_lora import ImageLora, image_blob, read_image_lora
from motet.services.registry.image_names import Names
from motet.shared.adapter_blob import read_site_index
from motet.shared.errors import InvalidAdapter, MotetError, TooLarge
from motet.shared.image_shapes import ImageShapes, Site, image_shapes_of
from tests.support_adapters import safetensors_bytes
from tests.support_images import (
    REAL,
    TINY,
    Pair,
    as_kohya,
    as_peft,
    delta,
    kohya_name,
    random_pairs,
    shapes,
    with_metadata,
)

MAX_RANK, MAX_BYTES = 64, 8 << 20
SD15, SD2, SDXL = shapes("sd15"), shapes("sd2"), shapes("sdxl")
BASES = {"sd15": SD15, "sd2": SD2, "sdxl": SDXL}
Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
"""A linear layer that every tiny base but sd2 has."""
CONV = "unet.down_blocks.1.resnets.0.conv1"


def read(
    tensors: Mapping[str, np.ndarray] | bytes,
    base: ImageShapes = SD15,
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: str = "F32",
    dtype_of: Mapping[str, str] | None = None,
    max_rank: int = MAX_RANK,
    max_bytes: int = MAX_BYTES,
) -> ImageLora:
    file = tensors if isinstance(tensors, bytes) else safetensors_bytes(tensors, dtype, dtype_of)
    file = file if metadata is None else with_metadata(file, metadata)
    return read_image_lora(io.BytesIO(file), len(file), base, max_rank=max_rank, max_bytes=max_bytes)


def chosen(base: ImageShapes, where: Callable[[Site], bool] = lambda site: True) -> list[Site]:
    return [site for site in base.sites if where(site)]


def site(base: ImageShapes, path: str) -> Site:
    return next(one for one in base.sites if one.path == path)


def is_attention(one: Site) -> bool:
    return ".attn" in one.name or ".self_attn." in one.name


def changes(lora: ImageLora) -> dict[str, np.ndarray]:
    """{path of a site: what the adapter adds to its weights, as a matrix}"""
    return {path: delta(*pair) for path, pair in lora.pairs.items()}


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, matrix in expected.items():
        np.testing.assert_allclose(found[path], matrix, rtol=1e-5, atol=1e-5, err_msg=path)


def modules(family: str) -> dict[str, Any]:
    """{part: its module} of a tiny base, as the libraries make it."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    index, parts = TINY[family]
    classes = {"CLIPTextModel": CLIPTextModel, "CLIPTextModelWithProjection": CLIPTextModelWithProjection}
    made = {
        part: classes[index[part][1]](CLIPTextConfig(**config, vocab_size=8, max_position_embeddings=8))
        for part, config in parts.items()
        if part != "unet"
    }
    return {"unet": UNet2DConditionModel.from_config(parts["unet"])} | made


def deltas_of(parts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """{path of a site: what the adapter in PEFT's layers adds to its weights, as a matrix}"""
    from peft.tuners.lora import LoraLayer

    found = {}
    for part, module in parts.items():
        for name, layer in module.named_modules():
            if isinstance(layer, LoraLayer):
                (adapter,) = layer.lora_A
                weights = layer.get_delta_weight(adapter).detach().numpy()
                found[f"{part}.{name}"] = weights.reshape(weights.shape[0], -1)
    return found


def diffusers_reads(family: str, file: Path) -> dict[str, np.ndarray]:
    """What the pipeline of `family` makes of an adapter's file."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin

    loader = StableDiffusionXLLoraLoaderMixin if family == "sdxl" else StableDiffusionLoraLoaderMixin
    parts = modules(family)
    state, alphas, metadata = loader.lora_state_dict(
        str(file), unet_config=parts["unet"].config if family == "sdxl" else None, return_lora_metadata=True
    )
    told = {"network_alphas": alphas, "metadata": metadata}
    for part, module in parts.items():
        if any(key.startswith(f"{part}.") for key in state):
            if part == "unet":
                loader.load_lora_into_unet(state, unet=module, **told)
            else:
                loader.load_lora_into_text_encoder(state, text_encoder=module, prefix=part, **told)
    return deltas_of(parts)


def first_spelling(pairs: Mapping[str, Pair]) -> dict[str, np.ndarray]:
    """How the first versions of diffusers wrote attention."""
    tensors = {}
    for path, (a, b) in pairs.items():
        parent, _, leaf = path.removesuffix(".0").rpartition(".")
        parent += ".processor" if path.startswith("unet.") else ""
        leaf = f"to_{leaf.removesuffix('_proj').removeprefix('to_')}_lora"
        tensors[f"{parent}.{leaf}.down.weight"], tensors[f"{parent}.{leaf}.up.weight"] = a, b
    return tensors


def with_text_model(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names with the level that transformers 5 dropped."""
    return {key.replace("text_encoder.encoder.", "text_encoder.text_model.encoder."): t for key, t in tensors.items()}


def words(pairs: Mapping[str, Pair]) -> dict[str, np.ndarray]:
    """diffusers' own spelling: the text encoders' matrices have another name."""
    unet = {path: pair for path, pair in pairs.items() if path.startswith("unet.")}
    text = {path: pair for path, pair in pairs.items() if path not in unet}
    return as_peft(unet, "lora.down", "lora.up") | as_peft(text, "lora_linear_layer.down", "lora_linear_layer.up")


def original_names(base: ImageShapes, layers_per_block: int = 2) -> dict[str, str]:
    """{kohya's name of a site of the UNet: the one with blocks as the original code counts them}, by its numbering."""
    inside = {"conv1": "in_layers_2", "conv2": "out_layers_3", "time_emb_proj": "emb_layers_1"}
    inside["conv_shortcut"] = "skip_connection"
    names = {}
    for one in base.sites:
        side, *rest = one.name.split(".")
        if one.part != "unet" or side not in ("down_blocks", "mid_block", "up_blocks"):
            continue
        if side == "mid_block":
            kind, layer, *inner = rest
            place = f"middle_block_{1 if kind == 'attentions' else 2 * int(layer)}"
        else:
            block, kind, layer, *inner = rest
            if side == "down_blocks":
                number = 1 + int(block) * (layers_per_block + 1) + int(layer)
                number += layers_per_block if kind == "downsamplers" else 0
                place = f"input_blocks_{number}_{int(kind == 'attentions')}"
            else:
                number = int(block) * (layers_per_block + 1) + int(layer)
                number += layers_per_block if kind == "upsamplers" else 0
                place = f"output_blocks_{number}_{('resnets', 'attentions', 'upsamplers').index(kind)}"
        last = "_".join(inner)
        last = "op" if "downsamplers" in one.name else inside[last] if kind == "resnets" else last
        names[kohya_name(one.path)] = f"lora_unet_{place}_{last}"
    outside = {"conv_in": "input_blocks_0_0", "conv_out": "out_2"}
    outside |= {f"time_embedding_linear_{n}": f"time_embed_{2 * n - 2}" for n in (1, 2)}
    outside |= {f"add_embedding_linear_{n}": f"label_emb_0_{2 * n - 2}" for n in (1, 2)}
    return names | {f"lora_unet_{name}": f"lora_unet_{other}" for name, other in outside.items()}


def without_projection(one: Site) -> bool:
    return one.name != "text_projection"


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize(
    ("write", "where"),
    [
        pytest.param(as_peft, without_projection, id="peft"),
        pytest.param(lambda pairs: with_text_model(as_peft(pairs)), without_projection, id="peft-text_model"),
        pytest.param(words, without_projection, id="diffusers"),
        pytest.param(first_spelling, is_attention, id="first-diffusers"),
    ],
)
def test_the_layouts_of_peft_and_diffusers_are_read_as_diffusers_reads_them(
    family: str, write: Callable[[Mapping[str, Pair]], dict[str, np.ndarray]], where: Callable[[Site], bool], tmp_path: Path
) -> None:
    base = BASES[family]
    pairs = random_pairs(chosen(base, where), ranks=(4, 8, 4))
    tensors = write(pairs)
    file = tmp_path / "a.safetensors"
    file.write_bytes(safetensors_bytes(tensors))
    found = changes(read(tensors, base))
    assert_equal(found, {path: delta(1.0, *pair) for path, pair in pairs.items()})
    assert_equal(found, diffusers_reads(family, file))


@pytest.mark.parametrize(
    ("family", "te", "original"),
    [("sd15", "lora_te_", False), ("sd2", "lora_te_", False), ("sdxl", "lora_te1_", False), ("sdxl", "lora_te1_", True)],
)
def test_the_layouts_of_kohya_are_read_as_diffusers_reads_them(family: str, te: str, original: bool, tmp_path: Path) -> None:
    base = BASES[family]
    # diffusers loses this embedding under today's name; kohya-ss has the original name for it
    sites = chosen(base, lambda one: without_projection(one) and (original or "add_embedding" not in one.name))
    pairs = random_pairs(sites, ranks=(4,))
    tensors = as_kohya(pairs, dict.fromkeys(pairs, 6.0), te, original_names(base) if original else None)
    file = tmp_path / "a.safetensors"
    file.write_bytes(safetensors_bytes(tensors))
    assert ("lora_unet_input_blocks_4_1_proj_in.alpha" in tensors) == original
    found = changes(read(tensors, base))
    assert_equal(found, {path: delta(6.0 / 4, *pair) for path, pair in pairs.items()})
    assert_equal(found, diffusers_reads(family, file))


def test_what_diffusers_writes_of_a_trained_adapter_is_what_it_computes(tmp_path: Path) -> None:
    import torch
    from diffusers import StableDiffusionXLPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    parts = modules("sdxl")
    for part, module in parts.items():
        targets = ["to_q", "to_out.0", "conv1", "proj_in"] if part == "unet" else ["q_proj", "fc1"]
        patterns = {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"conv1": 5.0}} if part == "unet" else {}
        module.add_adapter(LoraConfig(r=4, lora_alpha=6, use_rslora=part != "unet", target_modules=targets, **patterns))
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                if "lora_B" in name:
                    tensor.normal_()
    layers = {f"{part}_lora_layers": get_peft_model_state_dict(module) for part, module in parts.items()}
    told = {f"{part}_lora_adapter_metadata": module.peft_config["default"].to_dict() for part, module in parts.items()}
    StableDiffusionXLPipeline.save_lora_weights(tmp_path, **layers, **told)
    (file,) = tmp_path.glob("*.safetensors")
    lora = read(file.read_bytes(), SDXL)
    assert {scale for scale, _, _ in lora.pairs.values()} == {6 / 4, 6 / 2, 5 / 4, 6 / 4**0.5}
    assert_equal(changes(lora), deltas_of(parts))
    assert_equal(changes(lora), diffusers_reads("sdxl", file))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("input_blocks_3_0_op", "down_blocks.0.downsamplers.0.conv"),
        ("input_blocks_4_0_skip_connection", "down_blocks.1.resnets.0.conv_shortcut"),
        ("input_blocks_11_0_in_layers_2", "down_blocks.3.resnets.1.conv1"),
        ("middle_block_2_out_layers_3", "mid_block.resnets.1.conv2"),
        ("output_blocks_2_1_conv", "up_blocks.0.upsamplers.0.conv"),
        ("output_blocks_5_2_conv", "up_blocks.1.upsamplers.0.conv"),
        (
            "output_blocks_11_1_transformer_blocks_0_ff_net_0_proj",
            "up_blocks.3.attentions.2.transformer_blocks.0.ff.net.0.proj",
        ),
    ],
)
def test_the_original_codes_names_of_stable_diffusion_1_are_known(name: str, path: str) -> None:
    found, what, _ = Names(image_shapes_of(*REAL["sd15"])).place(f"lora_unet_{name}.lora_down.weight")
    assert (found.path, what) == (f"unet.{path}", "A")


def test_every_site_has_its_own_rank_and_alpha() -> None:
    pairs = random_pairs(SDXL.sites, ranks=(1, 4, 16))
    alphas = {path: 0.5 + number for number, path in enumerate(pairs) if number % 5}
    lora = read(as_kohya(pairs, alphas), SDXL)
    assert list(lora.pairs) == [one.path for one in SDXL.sites]  # the text encoder's projection, too
    assert lora.rank == 16
    expected = {path: delta(alphas.get(path, a.shape[0]) / a.shape[0], a, b) for path, (a, b) in pairs.items()}
    assert_equal(changes(lora), expected)


def test_a_convolution_in_three_factors_is_what_they_do_one_after_another() -> None:
    import torch
    from torch.nn import functional

    random = np.random.default_rng(1)
    one = site(SD15, CONV)
    down, mid, up = (
        random.standard_normal(shape, dtype=np.float32)
        for shape in ((4, one.size_in, 1, 1), (4, 4, 3, 3), (one.size_out, 4, 1, 1))
    )
    name = kohya_name(CONV)
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_mid.weight": mid, f"{name}.lora_up.weight": up}
    lora = read(tensors | {f"{name}.alpha": np.float32(2)}, dtype="F16")
    assert lora.dtype == "F32"
    x = torch.randn(1, one.size_in, 5, 5)
    half = [torch.from_numpy(t.astype(np.float16).astype(np.float32)) for t in (down, mid, up)]
    expected = 2 / 4 * functional.conv2d(functional.conv2d(functional.conv2d(x, half[0]), half[1], padding=1), half[2])
    weights = torch.from_numpy(changes(lora)[CONV]).reshape(one.size_out, one.size_in, 3, 3)
    torch.testing.assert_close(functional.conv2d(x, weights, padding=1), expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_of_one_may_be_written_or_left_out() -> None:
    assert site(SD15, Q).kind == "linear"
    pairs = random_pairs([site(SD15, Q), site(SD15, "unet.down_blocks.0.attentions.0.proj_in")])
    turned = {path: (a[..., 0, 0] if a.ndim == 4 else a[..., None, None], b) for path, (a, b) in pairs.items()}
    assert [a.ndim for a, _ in turned.values()] == [4, 2]
    assert_equal(changes(read(as_peft(turned))), changes(read(as_peft(pairs))))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_keep_their_type_and_mixed_ones_become_f32(dtype: str) -> None:
    tensors = as_peft(random_pairs(chosen(SD15, is_attention)))
    lora = read(tensors, dtype=dtype)
    assert lora.dtype == dtype
    assert {a.dtype.itemsize for _, a, _ in lora.pairs.values()} == {4 if dtype == "F32" else 2}
    mixed = read(tensors, dtype=dtype, dtype_of={f"{Q}.lora_B.weight": "F32" if dtype == "F16" else "F16"})
    assert mixed.dtype == "F32"
    assert mixed.pairs[Q][1].dtype == np.float32


@pytest.mark.parametrize(
    "told",
    [
        {"ss_base_model_version": "sd_v1"},
        {"modelspec.architecture": "stable-diffusion-v1/lora", "ss_base_model_version": "sd_1.5"},
        {"ss_base_model_version": "my own merge", "ss_sd_model_name": "sdxl.safetensors"},
        {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": 4, "unet.bias": "none", "unet.use_dora": False})},
    ],
)
def test_metadata_that_fit_the_base_or_say_nothing_are_accepted(told: dict[str, str]) -> None:
    assert read(as_peft(random_pairs([site(SD15, Q)])), metadata=told).pairs.keys() == {Q}


FOREIGN_METADATA = [
    ("ss_base_model_version", "sdxl_base_v1-0", "sdxl"),
    ("ss_base_model_version", "sd_v2_v", "sd2"),
    ("ss_base_model_version", "flux1", "FLUX"),
    ("ss_base_model_version", "sd3-medium", "Stable Diffusion 3"),
    ("modelspec.architecture", "stable-diffusion-xl-v1-base/lora", "sdxl"),
    ("modelspec.architecture", "stable-diffusion-v2-768-v/lora", "sd2"),
    ("modelspec.architecture", "Flux.1-dev/lora", "FLUX"),
    ("modelspec.architecture", "stable-diffusion-xl-v1-refiner", "sdxl-refiner"),
]


@pytest.mark.parametrize(("field", "value", "family"), FOREIGN_METADATA)
def test_metadata_that_name_another_family_are_refused(field: str, value: str, family: str) -> None:
    with pytest.raises(InvalidAdapter, match=f"{field} is '{value}': an adapter for {family}, but the base model is sd15"):
        read(as_peft(random_pairs([site(SD15, Q)])), metadata={field: value})


K = kohya_name(Q)
UNSERVED = [
    (f"{K}.hada_w1_a", "LoHa"),
    (f"{K}.lokr_w1", "LoKr"),
    (f"{K}.on_input", "IA"),
    (f"{K}.oft_blocks", "OFT"),
    (f"{K}.a1.weight", "GLoRA"),
    (f"{K}.dora_scale", "DoRA"),
    (f"{Q}.lora_magnitude_vector.weight", "DoRA"),
    (f"{K}.diff", "whole weights"),
    (f"{K}.diff_b", "whole weights"),
    (f"{Q}.lora_B.bias", "biases"),
    ("bundle_emb.token.string_to_param.*", "textual inversion"),
    ("emb_params", "textual inversion"),
    ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", "an adapter for FLUX, which"),
    ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "FLUX, Stable Diffusion 3 or Qwen-Image"),
    ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "FLUX"),
    ("lora_unet_joint_blocks_0_x_block_attn_proj.alpha", "Stable Diffusion 3"),
    ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "Wan"),
    ("diffusion_model.layers.0.attention.to_q.lora_A.weight", "Z-Image"),
    ("diffusion_model.input_blocks.1.lora_A.weight", "a diffusion transformer"),
    ("unet.down_blocks.7.resnets.0.conv1.lora_A.weight", "the base model has no linear layer or convolution of this name"),
    ("lora_te2_text_projection.lora_down.weight", "the base model has no linear layer or convolution of this name"),
    ("unet.down_blocks.0.resnets.0.norm1.lora_A.weight", "the base model has no"),
    ("down_blocks.0.resnets.0.conv1.lora_A.weight", "not a LoRA matrix of the layouts"),
    ("unet.conv_in.weight", "not a LoRA matrix of the layouts"),
    ("", "not a LoRA matrix of the layouts"),
    (f"{Q}.lora_A.weight" + "x" * 600, "its name is longer than 512 characters"),
]


@pytest.mark.parametrize(("key", "reason"), UNSERVED, ids=[key[-40:] for key, _ in UNSERVED])
def test_a_tensor_that_is_not_served_is_refused_by_name(key: str, reason: str) -> None:
    tensors = as_peft(random_pairs([site(SD15, Q)])) | {key: np.ones((2, 2), np.float32)}
    with pytest.raises(InvalidAdapter, match=reason) as refused:
        read(tensors)
    assert f"tensor {key[:100]}" in refused.value.message


def _pair() -> dict[str, np.ndarray]:
    return as_peft(random_pairs([site(SD15, Q)])) | as_kohya(random_pairs([site(SD15, CONV)]), {CONV: 4.0})


QA, QB, CONV_K = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", kohya_name(CONV)
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({QB: None}, f"{QA}: lora_B .lora_up. of the same module is missing"),
    ({QA: None}, f"{QB}: lora_A .lora_down. of the same module is missing"),
    ({QA: np.ones((4, 63))}, f"{QA}: shape .4, 63., but the base model's {Q} has 64 inputs"),
    ({QB: np.ones((63, 4))}, f"{QB}: shape .63, 4., but"),
    ({QB: np.ones((64, 5))}, f"{QB}: rank 5, but {QA} has rank 4"),
    ({QA: np.ones((0, 64)), QB: np.ones((64, 0))}, f"{QA}: shape"),
    ({QA: np.ones(64)}, f"{QA}: shape"),
    ({QA: np.ones(())}, f"{QA}: shape"),
    ({QA: np.ones((4, 64, 3, 3))}, f"{QA}: shape"),
    ({f"{CONV_K}.lora_down.weight": np.ones((4, 32, 1, 1))}, "a kernel of 3x3"),
    ({f"{CONV_K}.lora_mid.weight": np.ones((4, 4, 3, 3))}, "lora_down.weight: shape .4, 32, 3, 3."),
    ({QA: np.ones((65, 64)), QB: np.ones((64, 65))}, "rank 65 is over the limit of 64 .--max-lora-rank"),
    ({f"{K}.lora_down.weight": np.ones((4, 64))}, "holds this tensor of unet.* twice"),
    ({QA: np.full((4, 64), np.nan)}, r"lora_A.weight: NaN or infinity at \[0, 0\]"),
    ({f"{CONV_K}.lora_up.weight": np.full((64, 4, 1, 1), np.inf)}, r"NaN or infinity at \[0, 0, 0, 0\]"),
    ({f"{CONV_K}.alpha": np.float32(0)}, f"{CONV_K}.alpha: alpha is 0.0"),
    ({f"{CONV_K}.alpha": np.float32("nan")}, "alpha is nan"),
    ({f"{CONV_K}.alpha": np.ones(2)}, "but an alpha is one number"),
    ({f"{CONV_K}.alpha": np.ones(0)}, "but an alpha is one number"),
    (dict.fromkeys(_pair()), "holds no LoRA matrices"),
]


@pytest.mark.parametrize(("other", "reason"), MALFORMED)
def test_a_malformed_file_is_refused_with_its_reason(other: dict[str, Any], reason: str) -> None:
    tensors = {key: np.asarray(t, np.float32) for key, t in (_pair() | other).items() if t is not None}
    with pytest.raises(InvalidAdapter, match=reason):
        read(tensors)


def test_three_factors_whose_product_is_not_finite_are_refused() -> None:
    down, mid, up = np.full((4, 32, 1, 1), 3e38), np.full((4, 4, 3, 3), 3e38), np.ones((64, 4, 1, 1))
    tensors = {f"{CONV_K}.lora_down.weight": down, f"{CONV_K}.lora_mid.weight": mid, f"{CONV_K}.lora_up.weight": up}
    with pytest.raises(InvalidAdapter, match="multiplied out, it is not finite"):
        read(tensors)


def test_a_file_or_what_it_needs_over_the_limit_is_refused() -> None:
    tensors = _pair()
    size = len(safetensors_bytes(tensors))
    assert read(tensors, max_bytes=size)
    with pytest.raises(TooLarge, match=f"has {size} bytes, the limit is {size - 1}"):
        read(tensors, max_bytes=size - 1)
    down, mid, up = np.ones((1, 32, 1, 1)), np.ones((1, 1, 3, 3)), np.ones((64, 1, 1, 1))
    factors = {f"{CONV_K}.lora_down.weight": down, f"{CONV_K}.lora_mid.weight": mid, f"{CONV_K}.lora_up.weight": up}
    with pytest.raises(TooLarge, match="needs 1408 bytes as F32"):
        read(factors, dtype="F16", max_bytes=len(safetensors_bytes(factors, "F16")))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_its_blob_holds_every_pair_in_the_row_of_its_site(dtype: str) -> None:
    pairs = random_pairs(chosen(SDXL, lambda one: is_attention(one) or one.kind == "conv")[::2], ranks=(4, 12, 1))
    lora = read(as_peft(pairs), SDXL, dtype=dtype)
    blob = image_blob(lora, SDXL, max_bytes=MAX_BYTES)
    index = read_site_index(blob, len(blob))
    assert (index.dtype, index.rank, index.sites) == (dtype, 12, len(pairs))
    kind = {"F32": "<f4", "F16": "<u2", "BF16": "<u2"}[dtype]
    left = dict(lora.pairs)
    for part in index.parts:
        sites = SDXL.classes()[part.module]
        rows = np.frombuffer(blob, kind, part.pages * len(sites) * 8 * (part.fan_in + part.fan_out), part.start)
        rows = rows.reshape(part.pages, len(sites), -1)
        for number, (one, rank) in enumerate(zip(sites, part.ranks, strict=True)):
            scale, a, b = left.pop(one.path) if rank else (0.0, np.empty((0, part.fan_in)), np.empty((part.fan_out, 0)))
            assert (part.scales[number], rank) == (scale, a.shape[0])
            halves = np.split(rows[:, number], [8 * part.fan_in], axis=1)
            np.testing.assert_array_equal(halves[0].reshape(-1, part.fan_in)[:rank], a.view(kind) if rank else a)
            np.testing.assert_array_equal(halves[1].reshape(-1, part.fan_out)[:rank].T, b.view(kind) if rank else b)
    assert not left
    assert blob == image_blob(read(as_kohya(pairs, {}), SDXL, dtype=dtype), SDXL, max_bytes=MAX_BYTES)
    with pytest.raises(TooLarge, match="in whole pages of 8 ranks over all sites of a class"):
        image_blob(lora, SDXL, max_bytes=len(blob) - index.start - 1)


CONFIGURATIONS = [
    ({"unet.r": 8, "unet.lora_alpha": 8}, "rank 4, but lora_adapter_metadata says 8"),
    ({"unet.r": 4, "unet.lora_alpha": 8, "unet.use_dora": True}, "use_dora is set in unet in lora_adapter_metadata: DoRA"),
    ({"unet.r": 4, "unet.lora_alpha": 8, "unet.mystery": 1}, "mystery is set in unet in lora_adapter_metadata"),
    ({"unet.r": 4}, "unet in lora_adapter_metadata: .*lora_alpha"),
    ({"unet.r": 4, "unet.lora_alpha": 0}, "alpha 0.0 with rank 4 gives scale 0.0"),
    ({"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"(a+)+$": 1.0, "(": 2.0}}, "alpha_pattern key"),
    ({"transformer.r": 4}, "lora_adapter_metadata has transformer.r"),
    ([], "lora_adapter_metadata is not a JSON object"),
]


@pytest.mark.parametrize(("told", "reason"), CONFIGURATIONS)
def test_a_configuration_in_the_metadata_that_does_not_fit_is_refused(told: object, reason: str) -> None:
    with pytest.raises(InvalidAdapter, match=reason):
        read(as_peft(random_pairs([site(SD15, Q)])), metadata={"lora_adapter_metadata": json.dumps(told)})


@pytest.mark.parametrize("write", [as_peft, lambda pairs: as_kohya(pairs, {})])
def test_patterns_of_a_configuration_apply_to_names_with_and_without_dots(write: Callable[..., dict[str, np.ndarray]]) -> None:
    other = Q.removesuffix("to_q") + "to_k"
    pairs = random_pairs([site(SD15, Q), site(SD15, other)], ranks=(4, 2))
    told = {"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"attn1.to_q": 2.0}, "unet.rank_pattern": {"to_k": 2}}
    lora = read(write(pairs), metadata={"lora_adapter_metadata": json.dumps(told)})
    assert {path: scale for path, (scale, _, _) in lora.pairs.items()} == {Q: 2 / 4, other: 8 / 2}


def test_an_alpha_in_two_places_is_refused() -> None:
    tensors = as_kohya(random_pairs([site(SD15, Q)]), {Q: 2.0})
    told = {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": 4})}
    with pytest.raises(InvalidAdapter, match="the file has its alpha twice"):
        read(tensors, metadata=told)


VALID = [
    safetensors_bytes(as_kohya(random_pairs([*chosen(SD15, is_attention)[:4], site(SD15, CONV)], (1, 2)), {Q: 2.0, CONV: 1.0})),
    with_metadata(
        safetensors_bytes(as_peft(random_pairs(chosen(SD15, is_attention)[:4], (2,)))),
        {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 4, "unet.rank_pattern": {"to_q": 2}})},
    ),
]
_WORDS = [
    "alpha",
    "lora_A.weight",
    "lora_mid.weight",
    "hada_w1_a",
    "unet.",
    "lora_unet_",
    "text_encoder.",
    ".",
    "\0",
    "\U0001f600",
]


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A valid file with some entries of its header changed, or bytes of it overwritten or cut off."""
    file = draw(st.sampled_from(VALID))
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(sorted(header)))
        entry = header.pop(key)
        if key == "__metadata__":
            header[key] = {draw(st.sampled_from([*entry, "ss_base_model_version"])): draw(st.text(max_size=20))}
            continue
        name = draw(st.sampled_from([key, key, key + draw(st.sampled_from(_WORDS)), draw(st.sampled_from(_WORDS)) + key]))
        name = draw(st.sampled_from([name, name.replace("down", "up"), name.replace("_q", "_k"), draw(st.text(max_size=30))]))
        entry["shape"] = draw(st.sampled_from([entry["shape"], draw(st.lists(st.integers(-1, 1 << 41), max_size=9))]))
        entry["dtype"] = draw(st.sampled_from([entry["dtype"], "F16", "I64", "BOOL", draw(st.text(max_size=5))]))
        header[name] = entry
    text = json.dumps(header).encode()
    file = bytearray(len(text).to_bytes(8, "little") + text + data)
    for _ in range(draw(st.integers(0, 2))):
        file[draw(st.integers(0, len(file) - 1))] = draw(st.integers(0, 255))
    return bytes(file[: draw(st.sampled_from([len(file), draw(st.integers(0, len(file)))]))])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hostile())
def test_a_hostile_file_is_refused_or_fits_the_base(file: bytes) -> None:
    try:
        lora = read(file)
    except MotetError as error:
        assert error.status in (400, 413)
        assert error.message and len(error.message) < 1200
        return
    sites = {one.path: one for one in SD15.sites}
    assert lora.pairs
    for path, (scale, a, b) in lora.pairs.items():
        assert a.shape == (b.shape[1], sites[path].fan_in) and b.shape[0] == sites[path].size_out
        assert 1 <= a.shape[0] <= MAX_RANK and np.isfinite(scale) and scale
        assert lora.dtype != "F32" or (np.isfinite(a).all() and np.isfinite(b).all())
