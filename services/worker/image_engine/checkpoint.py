"""Opens an image checkpoint as diffusers writes it: `model_index.json` and a folder for each part.

The classes of the parts are allowed by name (`shared.image_shapes`), weights come from safetensors files alone, and no code of
the checkpoint runs. diffusers and transformers are libraries of models here: pipelines, schedulers and adapters are our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection
from transformers import logging as transformers_logging

from motet.services.worker.image_engine.noise_config import NoiseConfig, read_noise_config
from motet.shared.clip_tokenizer import PART_TOKENS, ClipTokenizer
from motet.shared.hf_config import UnsupportedModel, read_json
from motet.shared.image_shapes import (
    INDEX,
    LATENT_CHANNELS,
    TEXT_ENCODERS,
    UNET,
    ImageShapes,
    is_image_base,
    read_image_shapes,
    shrinks,
)
from motet.shared.telemetry import logger
from motet.shared.tokenizer import UnusableFile

log = logger("motet.worker.engine")
VAE = "vae"
SAFETY_CHECKER = "safety_checker"
VARIANT = "fp16"
"""The variant of files that is preferred: half as many bytes to read."""
_ENCODERS = {"CLIPTextModel": CLIPTextModel, "CLIPTextModelWithProjection": CLIPTextModelWithProjection}
_STEMS = {UNET: "diffusion_pytorch_model", VAE: "diffusion_pytorch_model"} | dict.fromkeys(TEXT_ENCODERS, "model")
TIME_IDS, SCORE_IDS = 6, 5
"""Numbers beside the time step: of SDXL (sizes and crop), and of its refiner (a score instead of the second size)."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The models of a checkpoint, float32 in host memory, and what its configurations say."""

    shapes: ImageShapes
    noise: NoiseConfig
    unet: Any
    vae: Any
    encoders: Mapping[str, Any]  # by part, in the order of `image_shapes.TEXT_ENCODERS`
    tokenizers: Mapping[str, ClipTokenizer]  # likewise
    zero_negative: bool  # without a negative prompt the encoding is zero, not that of the empty prompt

    @property
    def xl(self) -> bool:
        """Whether it is of SDXL's architecture."""
        return self.shapes.family.startswith("sdxl")

    @property
    def inpaints(self) -> bool:
        """Whether its UNet reads a mask and a masked picture besides the latents."""
        return self.shapes.inpaints

    @property
    def time_ids(self) -> int:
        """Numbers beside the time step; 0 for none."""
        if not self.xl:
            return 0
        config, pooled = self.unet.config, self.encoders[TEXT_ENCODERS[1]].config.projection_dim
        return int((config.projection_class_embeddings_input_dim - pooled) // config.addition_time_embed_dim)

    @property
    def latent_px(self) -> int:
        """Pixels per latent, each way."""
        return shrinks(self.vae.config)

    @property
    def multiple_px(self) -> int:
        """Width and height of a picture are multiples of it."""
        return self.latent_px * shrinks(self.unet.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        models = (self.unet, self.vae, *self.encoders.values())
        return sum(one.numel() * one.element_size() for model in models for one in model.parameters())


def open_checkpoint(model_dir: Path, told: Callable[[float], None] = lambda _: None) -> Checkpoint:
    """Load the checkpoint. `told` gets the share of the parts that are in memory. Raises UnsupportedModel."""
    if (single := next(model_dir.glob("*.safetensors"), None)) is not None and not is_image_base(model_dir):
        raise UnsupportedModel(
            f"{single.name} is a checkpoint in a single file; convert it with diffusers:"
            " StableDiffusionXLPipeline.from_single_file(...).save_pretrained(...)"
        )
    shapes = read_image_shapes(model_dir)
    if shapes.in_channels not in (LATENT_CHANNELS, 2 * LATENT_CHANNELS + 1):
        channels = shapes.in_channels
        raise UnsupportedModel(f"{UNET}/config.json: in_channels is {channels}: 4, or 9 for inpainting, is served")
    index = read_json(model_dir / INDEX) or {}
    vae_config = read_json(model_dir / VAE / "config.json")
    _check_vae(index, vae_config)
    if any(index.get(SAFETY_CHECKER) or ()):
        log.warning("the checkpoint has a safety checker, which is not run: no picture is checked")
    xl = shapes.family.startswith("sdxl")
    noise = read_noise_config(model_dir, xl=xl)
    parts = [part for part in TEXT_ENCODERS if part in shapes.parts]
    transformers_logging.disable_progress_bar()
    encoders = {}
    for number, part in enumerate(parts):
        encoders[part] = _loaded(_ENCODERS[index[part][1]], model_dir, part)
        told((number + 1) / (len(parts) + 2))
    vae = _loaded(AutoencoderKL, model_dir, VAE)
    unet = _loaded(UNet2DConditionModel, model_dir, UNET)
    told(1.0)
    tokenizers = {part: _tokenizer(model_dir, part, model.config) for part, model in encoders.items()}
    checkpoint = Checkpoint(
        shapes=shapes,
        noise=noise,
        unet=unet,
        vae=vae,
        encoders=encoders,
        tokenizers=tokenizers,
        zero_negative=xl and index.get("force_zeros_for_empty_prompt", True) is True,
    )
    _check_fit(checkpoint)
    return checkpoint


def _check_vae(index: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    if index.get(VAE) != ["diffusers", "AutoencoderKL"]:
        raise UnsupportedModel(f"{INDEX}: {VAE} is {index.get(VAE)!r}: diffusers and AutoencoderKL are expected")
    if config is None:
        raise UnsupportedModel(f"{VAE}/config.json is missing")
    served = {"_class_name": ("AutoencoderKL",), "latent_channels": (LATENT_CHANNELS, None), "shift_factor": (None, 0)}
    for name, values in served.items():
        if (value := config.get(name)) not in values:
            raise UnsupportedModel(f"{VAE}/config.json: {name} is {value!r}: {values[0]!r} is served")


def _check_fit(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel when the parts do not belong together."""
    config = checkpoint.unet.config
    if config.out_channels != LATENT_CHANNELS:
        raise UnsupportedModel(f"{UNET}/config.json: out_channels is {config.out_channels}: 4 is served")
    width = sum(model.config.hidden_size for model in checkpoint.encoders.values())
    cross = config.cross_attention_dim
    cross = cross[0] if isinstance(cross, list | tuple) else cross
    if width != cross:
        raise UnsupportedModel(f"{UNET}/config.json: cross_attention_dim is {cross}, the text encoders give {width}")
    if checkpoint.time_ids not in (0, SCORE_IDS, TIME_IDS):
        raise UnsupportedModel(
            f"{UNET}/config.json: projection_class_embeddings_input_dim leaves room for {checkpoint.time_ids} numbers:"
            f" {TIME_IDS}, or {SCORE_IDS} for a refiner, are served"
        )


def _loaded(kind: Any, model_dir: Path, part: str) -> Any:
    """A part's model in float32, for inference."""
    variant = _variant(model_dir / part, _STEMS[part])
    try:
        model = kind.from_pretrained(
            model_dir / part, variant=variant, use_safetensors=True, local_files_only=True, torch_dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{part} cannot be loaded: {error}") from None
    return model.eval().requires_grad_(False)


def _variant(folder: Path, stem: str) -> str | None:
    """The variant of the part's safetensors files, None for the plain ones. Raises UnsupportedModel if there are none."""
    for variant, names in (
        (VARIANT, (f"{stem}.{VARIANT}.safetensors", f"{stem}.safetensors.index.{VARIANT}.json")),
        (None, (f"{stem}.safetensors", f"{stem}.safetensors.index.json")),
    ):
        for name in names:
            if (folder / name).exists():
                _check_shards(folder / name)
                return variant
    if any(folder.glob("*.bin")) or any(folder.glob("*.ckpt")) or any(folder.glob("*.pt*")):
        raise UnsupportedModel(f"{folder} holds pickled weights only; convert them to safetensors, pickle is never opened")
    raise UnsupportedModel(f"{folder} has no {stem}.safetensors")


def _check_shards(path: Path) -> None:
    """Raise UnsupportedModel when an index names files outside the part's folder."""
    if path.suffix != ".json":
        return
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors index: {error!r}") from None
    if outside:
        raise UnsupportedModel(f"{path} names {outside[0]!r}: shards lie in the part's own folder")


def _tokenizer(model_dir: Path, part: str, config: Any) -> ClipTokenizer:
    """A text encoder's tokenizer. Raises UnsupportedModel."""
    try:
        tokenizer = ClipTokenizer(model_dir / part.replace("text_encoder", "tokenizer"))
    except UnusableFile as error:
        raise UnsupportedModel(f"{part}: {error}") from None
    if config.max_position_embeddings != PART_TOKENS:
        longest = config.max_position_embeddings
        raise UnsupportedModel(f"{part}/config.json: max_position_embeddings is {longest}: {PART_TOKENS} is served")
    if max(tokenizer.parts([], 1)) >= config.vocab_size:
        raise UnsupportedModel(f"{part}/config.json: vocab_size is {config.vocab_size}: its tokenizer has more tokens")
    return tokenizer
