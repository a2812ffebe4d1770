"""Image checkpoints for tests: configurations of tiny and of well-known ones, and adapters' files in every layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from motet.shared.image_shapes import ImageShapes, Site, image_shapes_of

Config = dict[str, Any]


def _index(pipeline: str, *encoders: str) -> Config:
    names = ("text_encoder", "text_encoder_2")
    parts = {name: ["transformers", kind] for name, kind in zip(names, encoders, strict=False) if kind}
    return {"_class_name": pipeline, "unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [None, None]} | parts


def _clip(hidden: int, inner: int, layers: int, heads: int, projection: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "projection_dim": projection,
    }


def _unet(channels: list[int], kinds: str, **more: Any) -> Config:
    """`kinds`: for each block on the way down `c` (with attention) or `d`."""
    down = ["CrossAttnDownBlock2D" if kind == "c" else "DownBlock2D" for kind in kinds]
    up = ["CrossAttnUpBlock2D" if kind == "c" else "UpBlock2D" for kind in reversed(kinds)]
    own = {"block_out_channels": channels, "down_block_types": down, "up_block_types": up}
    return {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0", "layers_per_block": 2} | own | more


_XL = {"addition_embed_type": "text_time", "use_linear_projection": True}
SD15 = (
    _index("StableDiffusionPipeline", "CLIPTextModel"),
    {
        "unet": _unet([320, 640, 1280, 1280], "cccd", attention_head_dim=8, cross_attention_dim=768),
        "text_encoder": _clip(768, 3072, 12, 12, 768),
    },
)
SD2_INPAINTING = (
    _index("StableDiffusionInpaintPipeline", "CLIPTextModel"),
    {
        "unet": _unet(
            [320, 640, 1280, 1280],
            "cccd",
            attention_head_dim=[5, 10, 20, 20],
            cross_attention_dim=1024,
            use_linear_projection=True,
            in_channels=9,
        ),
        "text_encoder": _clip(1024, 4096, 23, 16, 512),
    },
)
SDXL = (
    _index("StableDiffusionXLPipeline", "CLIPTextModel", "CLIPTextModelWithProjection"),
    {
        "unet": _unet(
            [320, 640, 1280],
            "dcc",
            attention_head_dim=[5, 10, 20],
            transformer_layers_per_block=[1, 2, 10],
            cross_attention_dim=2048,
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            **_XL,
        ),
        "text_encoder": _clip(768, 3072, 12, 12, 768),
        "text_encoder_2": _clip(1280, 5120, 32, 20, 1280),
    },
)
"""(model_index.json, {part: config.json}) with the fields that say something about layers."""

TINY_SD = (
    _index("StableDiffusionPipeline", "CLIPTextModel"),
    {
        "unet": _unet([32, 64, 96], "ccd", attention_head_dim=8, cross_attention_dim=24, layers_per_block=1),
        "text_encoder": _clip(24, 40, 2, 4, 24),
    },
)
TINY_SD2 = (
    _index("StableDiffusionInpaintPipeline", "CLIPTextModel"),
    {
        "unet": _unet(
            [32, 64],
            "cd",
            attention_head_dim=[4, 8],
            cross_attention_dim=[24, 24],
            use_linear_projection=True,
            in_channels=9,
            layers_per_block=[1, 2],
            only_cross_attention=[False, False],
        ),
        "text_encoder": _clip(24, 40, 1, 4, 16),
    },
)
TINY_SDXL = (
    _index("StableDiffusionXLPipeline", "CLIPTextModel", "CLIPTextModelWithProjection"),
    {
        "unet": _unet(
            [32, 64, 96],
            "dcc",
            attention_head_dim=[2, 4, 6],
            transformer_layers_per_block=[1, 1, 2],
            cross_attention_dim=56,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=72,
            **_XL,
        ),
        "text_encoder": _clip(24, 40, 1, 4, 24),
        "text_encoder_2": _clip(32, 48, 2, 4, 24),
    },
)
TINY: dict[str, tuple[Config, dict[str, Config]]] = {"sd15": TINY_SD, "sd2": TINY_SD2, "sdxl": TINY_SDXL}
REAL: dict[str, tuple[Config, dict[str, Config]]] = {"sd15": SD15, "sd2": SD2_INPAINTING, "sdxl": SDXL}


def shapes(family: str) -> ImageShapes:
    return image_shapes_of(*TINY[family])


def write_checkpoint(directory: Path, index: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> Path:
    """A checkpoint's configurations: all that the registry reads of it."""
    directory.mkdir(parents=True)
    (directory / "model_index.json").write_text(json.dumps(index))
    for part, config in parts.items():
        (directory / part).mkdir()
        (directory / part / "config.json").write_text(json.dumps(config))
    return directory


Pair = tuple[np.ndarray, np.ndarray]
"""(down [rank, in] or [rank, in, rows, columns], up [out, rank] or [out, rank, 1, 1])"""


def random_pairs(sites: Iterable[Site], ranks: Iterable[int] = (4,), seed: int = 0) -> dict[str, Pair]:
    """{path of a site: matrices as trainers hold them}; the ranks take turns."""
    random, ranks = np.random.default_rng(seed), list(ranks)
    pairs = {}
    for number, site in enumerate(sites):
        rank = ranks[number % len(ranks)]
        square = () if site.kind == "linear" else (site.kernel, site.kernel)
        ones = () if site.kind == "linear" else (1, 1)
        pairs[site.path] = (
            random.standard_normal((rank, site.size_in, *square), dtype=np.float32),
            random.standard_normal((site.size_out, rank, *ones), dtype=np.float32),
        )
    return pairs


def as_peft(pairs: Mapping[str, Pair], down: str = "lora_A", up: str = "lora_B") -> dict[str, np.ndarray]:
    """The layout of PEFT, and with other words that of diffusers."""
    tensors = {}
    for path, (a, b) in pairs.items():
        tensors[f"{path}.{down}.weight"], tensors[f"{path}.{up}.weight"] = a, b
    return tensors


_KOHYA = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}


def kohya_name(path: str, te: str = "lora_te1_") -> str:
    """What kohya-ss calls a site: it trains with a CLIPTextModel that still has the level `text_model`."""
    part, _, name = path.partition(".")
    if part != "unet" and name != "text_projection":
        name = "text_model." + name.removeprefix("text_model.")
    return (_KOHYA | {"text_encoder": te})[part] + name.replace(".", "_")


def as_kohya(
    pairs: Mapping[str, Pair], alphas: Mapping[str, float], te: str = "lora_te1_", rename: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """The layout of kohya-ss. `rename`: {its name of a site: another}."""
    tensors = {}
    for path, (a, b) in pairs.items():
        name = kohya_name(path, te)
        name = (rename or {}).get(name, name)
        tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"] = a, b
        if path in alphas:
            tensors[f"{name}.alpha"] = np.asarray(alphas[path], dtype=np.float32)
    return tensors


def delta(scale: float, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """scale * B @ A as a matrix [out, in * rows * columns]."""
    return scale * b.reshape(b.shape[0], -1) @ a.reshape(a.shape[0], -1)


def with_metadata(file: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with other metadata."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length]) | {"__metadata__": dict(metadata)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + file[8 + length :]
