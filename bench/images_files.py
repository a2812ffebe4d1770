"""A small Stable Diffusion checkpoint with random weights, and adapters for it, in the files that people have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from motet.examples.demo_images import model_files
from motet.examples.demo_images.layouts import UNET, write_adapter

RANKS = (8, 16, 32, 64)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LINEAR = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
SPREAD = 0.05  # of an adapter's weights: its part of a product is about as large as a trained one's


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's file. `sites`: the names of the layers that it changes."""

    name: str
    folder: Path
    rank: int
    sites: tuple[str, ...]


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """The image demo's architecture with weights drawn by `seed`, as `save_pretrained` writes it, float32."""
    torch.manual_seed(seed)
    model_files.write_tokenizer(folder / "words")
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(**model_files.vae_config()),
        text_encoder=CLIPTextModel(CLIPTextConfig(**model_files.text_encoder_config())),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "words"),
        unet=UNet2DConditionModel(**model_files.unet_config()),
        scheduler=DDIMScheduler(**model_files.scheduler_config()),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder / "model")
    return folder / "model"


def write_adapters(model: Path, folder: Path, count: int, seed: int = 1) -> list[Adapter]:
    """`count` adapters: every second one on attention alone, the others on every linear layer, ranks in turn."""
    made = []
    for i in range(count):
        rank, sites = RANKS[i // 2 % len(RANKS)], LINEAR if i % 2 else ATTENTION
        unet: Any = UNet2DConditionModel.from_pretrained(model / "unet")
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(sites))
        unet.add_adapter(config)
        generator = torch.Generator().manual_seed(seed + i)
        weights = {
            key: torch.randn(value.shape, generator=generator) * SPREAD
            for key, value in get_peft_model_state_dict(unet).items()
        }
        name = f"adapter-{i:02d}"
        write_adapter(folder / name, "diffusers", rank, {UNET: (weights, config.to_dict())})
        made.append(Adapter(name, folder / name, rank, sites))
    return made
