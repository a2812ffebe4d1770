"""The shipped image model has the files of a Stable Diffusion checkpoint, and its adapters differ as those of people do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from motet.examples.demo_images import DEMO_IMAGES
from motet.examples.demo_images.model_files import (
    build_vocabulary,
    scheduler_config,
    text_encoder_config,
    unet_config,
    vae_config,
)
from motet.examples.demo_images.styles import PLAIN, STYLE_NAMES, STYLES

MODEL, ADAPTERS = DEMO_IMAGES / "model", DEMO_IMAGES / "adapters"


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def adapters() -> dict[str, dict[str, tuple[int, ...]]]:
    """{adapter: {tensor: shape}}."""
    found = {}
    for style in STYLES:
        (path,) = (ADAPTERS / style.adapter).iterdir()
        assert path.suffix == ".safetensors"
        found[style.adapter] = shapes(path)
    return found


def test_the_model_has_the_files_of_a_stable_diffusion_checkpoint() -> None:
    index = json.loads((MODEL / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    parts = {name: value[1] for name, value in index.items() if isinstance(value, list) and value[1]}
    assert parts == {
        "scheduler": "DDIMScheduler",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
    }
    for part, wanted in (("text_encoder", text_encoder_config()), ("vae", vae_config()), ("unet", unet_config())):
        config = json.loads((MODEL / part / "config.json").read_text())
        assert {key: config[key] for key in wanted} == wanted
        assert "_name_or_path" not in config, "a folder of the machine that trained it"
    config = json.loads((MODEL / "scheduler" / "scheduler_config.json").read_text())
    assert {key: config[key] for key in scheduler_config()} == scheduler_config()
    assert json.loads((MODEL / "tokenizer" / "vocab.json").read_text()) == build_vocabulary()
    assert {path.name for path in (MODEL / "tokenizer").iterdir()} == {
        "merges.txt", "special_tokens_map.json", "tokenizer_config.json", "vocab.json",
    }  # fmt: skip


def test_the_weights_have_16_bits() -> None:
    paths = sorted(MODEL.rglob("*.safetensors"))
    assert [path.relative_to(MODEL).as_posix() for path in paths] == [
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    assert all(shapes(path) for path in paths)


def test_there_is_an_adapter_for_every_style_and_no_other() -> None:
    assert {path.name for path in ADAPTERS.iterdir()} == {style.adapter for style in STYLES}


def test_the_adapters_come_in_three_layouts(adapters: dict[str, dict[str, tuple[int, ...]]]) -> None:
    diffusers = {name for name, tensors in adapters.items() if any(key.startswith("unet.") for key in tensors)}
    kohya = {name for name, tensors in adapters.items() if any(key.startswith("lora_unet_") for key in tensors)}
    convolved = {name for name, tensors in adapters.items() if any(shape[2:] == (3, 3) for shape in tensors.values())}
    assert diffusers | kohya == adapters.keys()
    assert not diffusers & kohya
    assert min(len(diffusers), len(kohya - convolved), len(kohya & convolved)) >= 4
    assert diffusers & convolved
    for name in kohya:
        sites = {key.split(".")[0] for key in adapters[name]}
        assert all(f"{site}.alpha" in adapters[name] for site in sites)


def test_the_adapters_differ_in_rank_and_sites(adapters: dict[str, dict[str, tuple[int, ...]]]) -> None:
    ranks = {
        shape[0] for tensors in adapters.values() for key, shape in tensors.items() if "lora_A" in key or "lora_down" in key
    }
    assert ranks == {4, 8, 16, 32}
    with_text = {name for name, tensors in adapters.items() if any(key.startswith(("lora_te_", "text_enc")) for key in tensors)}
    attention_only = {name for name, tensors in adapters.items() if all("attn" in key for key in tensors)}
    with_ff = {name for name, tensors in adapters.items() if any("ff" in key for key in tensors)}
    assert min(len(with_text), len(attention_only), len(with_ff)) >= 4


def test_adapters_are_not_empty() -> None:
    for style in STYLES:
        (path,) = (ADAPTERS / style.adapter).iterdir()
        with safe_open(path, "pt") as file:
            ups = [file.get_tensor(key) for key in file.keys() if "lora_B" in key or "lora_up" in key]  # noqa: SIM118
        assert all(torch.isfinite(up).all() for up in ups)
        assert all(up.abs().max() > 0 for up in ups)


def test_the_shipped_files_stay_small() -> None:
    size_bytes = sum(path.stat().st_size for path in [*MODEL.rglob("*"), *ADAPTERS.rglob("*")] if path.is_file())
    assert size_bytes <= 15 * 2**20


def test_the_recorded_scores_meet_the_goal() -> None:
    recorded = json.loads((DEMO_IMAGES / "SCORES.json").read_text())
    assert recorded["unseen_pictures"] >= 100
    assert recorded["scores"].keys() == {PLAIN, *STYLE_NAMES}
    shares = {name: score["style"] for name, score in recorded["scores"].items()}
    assert min(shares.values()) >= 0.95, shares
