"""Promise: the sites of an image checkpoint are the linear layers and convolutions of diffusers' and transformers' modules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from motet.shared.hf_config import UnsupportedModel
from motet.shared.image_shapes import ImageShapes, image_shapes_of, read_image_shapes
from tests.support_images import REAL, SDXL, TINY, TINY_SD, TINY_SDXL, write_checkpoint

Layers = dict[str, tuple[str, int, int, int, int]]


def layers_of(part: str, kind: str, config: dict[str, Any]) -> Layers:
    """{path: (kind, in, out, kernel, stride)} of the modules that the libraries make of a configuration, without weights."""
    import torch
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    with torch.device("meta"):
        if part == "unet":
            model = UNet2DConditionModel.from_config(config)
        else:
            classes = {"CLIPTextModel": CLIPTextModel, "CLIPTextModelWithProjection": CLIPTextModelWithProjection}
            model = classes[kind](CLIPTextConfig(**config))
    found: Layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[f"{part}.{name}"] = ("linear", module.in_features, module.out_features, 1, 1)
        elif isinstance(module, torch.nn.Conv2d):
            (rows, columns), (down, right) = module.kernel_size, module.stride
            assert module.groups == 1 and rows == columns and down == right
            found[f"{part}.{name}"] = ("conv", module.in_channels, module.out_channels, rows, down)
    return found


def told(shapes: ImageShapes) -> Layers:
    return {site.path: (site.kind, site.size_in, site.size_out, site.kernel, site.stride) for site in shapes.sites}


@pytest.mark.parametrize("size", ["tiny", "real"])
@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
def test_sites_are_those_of_the_libraries_modules(family: str, size: str) -> None:
    index, parts = (TINY if size == "tiny" else REAL)[family]
    shapes = image_shapes_of(index, parts)
    expected: Layers = {}
    for part, config in parts.items():
        expected |= layers_of(part, index[part][1], config)
    assert told(shapes) == expected
    assert len(shapes.sites) == len(expected)
    assert shapes.family == family and shapes.in_channels == (9 if family == "sd2" else 4)


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
def test_configurations_with_every_field_as_the_libraries_write_them_say_the_same(family: str) -> None:
    import torch
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig

    index, parts = TINY[family]
    with torch.device("meta"):
        full = {"unet": json.loads(UNet2DConditionModel.from_config(parts["unet"]).to_json_string())}
    encoders = {part: CLIPTextConfig(**config) for part, config in parts.items() if part != "unet"}
    full |= {part: json.loads(config.to_json_string(use_diff=False)) for part, config in encoders.items()}
    assert len(full["unet"]) >= 50
    assert image_shapes_of(index, full) == image_shapes_of(index, parts)


def test_the_unets_have_as_many_sites_as_is_known_of_them() -> None:
    counts = {family: sum(site.part == "unet" for site in image_shapes_of(*REAL[family]).sites) for family in REAL}
    assert counts == {"sd15": 282, "sd2": 282, "sdxl": 794}


def test_a_checkpoint_is_read_from_its_files(tmp_path: Path) -> None:
    shapes = read_image_shapes(write_checkpoint(tmp_path / "xl", *TINY_SDXL))
    assert shapes == image_shapes_of(*TINY_SDXL)
    assert shapes.parts == ("unet", "text_encoder", "text_encoder_2")
    site = next(site for site in shapes.sites if site.path == "unet.down_blocks.0.downsamplers.0.conv")
    assert (site.kind, site.stride, site.fan_in) == ("conv", 2, 32 * 9)


def test_a_refiner_has_the_second_text_encoder_alone() -> None:
    index, parts = copy.deepcopy(SDXL)
    index["text_encoder"] = [None, None]
    del parts["text_encoder"]
    shapes = image_shapes_of(index, parts)
    assert shapes.family == "sdxl-refiner" and shapes.parts == ("unet", "text_encoder_2")


def test_absent_fields_have_the_values_of_the_libraries(tmp_path: Path) -> None:
    index, parts = copy.deepcopy(TINY_SD)
    unet = parts["unet"]
    for field in ("attention_head_dim", "cross_attention_dim", "layers_per_block"):
        del unet[field]
    parts["text_encoder"] = {}
    expected = layers_of("unet", "", unet) | layers_of("text_encoder", "CLIPTextModel", {})
    assert told(image_shapes_of(index, parts)) == expected


REFUSED: list[tuple[str, str, Any, str]] = [
    ("", "_class_name", "FluxPipeline", "StableDiffusionXLPipeline"),
    ("", "_class_name", None, "_class_name is None"),
    ("", "unet", ["diffusers", "UNet3DConditionModel"], "unet is .*UNet2DConditionModel"),
    ("", "unet", None, "unet is None: a checkpoint of this pipeline has it"),
    ("", "text_encoder", ["transformers", "T5EncoderModel"], "text_encoder is .*CLIPTextModel"),
    ("", "text_encoder", [["x"] * 99] * 99, "text_encoder is a list of 99"),
    ("unet", "_class_name", "UNetMotionModel", "_class_name is 'UNetMotionModel'"),
    ("unet", "block_out_channels", [1 << 20, 64, 96], "whole numbers from 1 to 65536"),
    ("unet", "block_out_channels", 64, "a list of numbers"),
    ("unet", "block_out_channels", [32, 64], "a list of 3 is expected"),
    ("unet", "block_out_channels", [32, True, 96], "whole numbers"),
    ("unet", "block_out_channels", [33, 64, 96], "attention_head_dim is 8: 33 channels cannot be divided"),
    ("unet", "down_block_types", ["DownBlock2D"] * 9, "a list of 1 to 8"),
    ("unet", "down_block_types", ["AttnDownBlock2D"] * 3, "'CrossAttnDownBlock2D' or 'DownBlock2D' is served"),
    ("unet", "down_block_types", [{}] * 3, "'CrossAttnDownBlock2D' or 'DownBlock2D' is served"),
    ("unet", "up_block_types", ["UpBlock2D"], "3 blocks are expected"),
    ("unet", "layers_per_block", 17, "whole numbers from 1 to 16"),
    ("unet", "layers_per_block", "2", "whole numbers"),
    ("unet", "transformer_layers_per_block", [[1], 1, 1], "transformer_layers_per_block is a list of 3"),
    ("unet", "cross_attention_dim", 0, "cross_attention_dim is 0"),
    ("unet", "cross_attention_dim", None, "cross_attention_dim is None"),
    ("unet", "in_channels", -4, "in_channels is -4"),
    ("unet", "use_linear_projection", 1, "true or false"),
    ("unet", "only_cross_attention", True, "only_cross_attention is True"),
    ("unet", "dual_cross_attention", True, "dual_cross_attention is True"),
    ("unet", "mid_block_type", None, "mid_block_type is None"),
    ("unet", "class_embed_type", "timestep", "class_embed_type is 'timestep'"),
    ("unet", "addition_embed_type", "image", "addition_embed_type is 'image'"),
    ("unet", "addition_embed_type", "text_time", "it does not belong to StableDiffusionPipeline"),
    ("unet", "resnet_time_scale_shift", "scale_shift", "'default' is served"),
    ("unet", "class_embeddings_concat", 0, "class_embeddings_concat is 0"),
    ("unet", "conv_in_kernel", 3.0, "conv_in_kernel is 3.0"),
    ("unet", "attention_type", {"a": "gated"}, "attention_type is an object"),
    ("text_encoder", "num_hidden_layers", 1 << 30, "text_encoder/config.json: num_hidden_layers is 1073741824"),
    ("text_encoder", "hidden_size", 24.5, "hidden_size is 24.5"),
]


@pytest.mark.parametrize(("part", "field", "value", "reason"), REFUSED)
def test_a_field_that_is_not_served_is_refused_by_name(part: str, field: str, value: Any, reason: str) -> None:
    index, parts = copy.deepcopy(TINY_SD)
    (parts[part] if part else index)[field] = value
    if not part and value is None:
        parts.pop(field, None)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        image_shapes_of(index, parts)
    assert len(str(refused.value)) < 500


def test_many_transformers_are_refused_before_any_is_listed() -> None:
    index, parts = copy.deepcopy(TINY_SD)
    parts["unet"] |= {"transformer_layers_per_block": 64, "layers_per_block": 16}
    with pytest.raises(UnsupportedModel, match="6400 transformer blocks in all, 1024 at most"):
        image_shapes_of(index, parts)


def test_a_configuration_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "sd", *TINY_SD)
    for text in ("", "[]", '{"_class_name": ' + "[" * 600 + "]" * 600 + "}"):
        (directory / "unet" / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match=r"unet/config\.json (cannot be read|is not a JSON object)"):
            read_image_shapes(directory)


def test_a_missing_file_and_a_missing_field_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no model_index\.json"):
        read_image_shapes(tmp_path)
    index, parts = copy.deepcopy(TINY_SDXL)
    del parts["unet"]["projection_class_embeddings_input_dim"]
    with pytest.raises(UnsupportedModel, match="projection_class_embeddings_input_dim is missing"):
        image_shapes_of(index, parts)
    directory = write_checkpoint(tmp_path / "xl", *TINY_SDXL)
    (directory / "text_encoder_2" / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"has no text_encoder_2/config\.json"):
        read_image_shapes(directory)
