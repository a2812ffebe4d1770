"""Tiny image checkpoints with random weights, their adapters, and diffusers' own pipelines as the engine's oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.examples.demo_images.model_files import build_vocabulary, write_tokenizer
from motet.services.worker.engines.adapter_weights import HostAdapter, class_shapes
from motet.shared.adapter_blob import write_site_blob
from motet.shared.image_shapes import ImageShapes, read_image_shapes
from tests.support_images import TINY, Config, Pair, as_peft, random_pairs

VAE: Config = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "scaling_factor": 0.4,
}
UNET: Config = {"sample_size": 16, "layers_per_block": 1}  # diffusers weighs no adapters where the number of layers is a list
SCHEDULER: Config = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
TOKENS = 77
SAMPLERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
}


def make_image_checkpoint(family: str, directory: Path, **scheduler: Any) -> Path:
    """A checkpoint as diffusers writes it, of a tiny model with random weights. `scheduler`: more of its options."""
    import diffusers
    import transformers

    index, parts = TINY[family]
    torch.manual_seed(sum(map(ord, family)))
    vocabulary = build_vocabulary()
    written: dict[str, Any] = {
        "unet": diffusers.UNet2DConditionModel.from_config(parts["unet"] | UNET),
        "vae": diffusers.AutoencoderKL.from_config(VAE),
        "scheduler": diffusers.DDIMScheduler.from_config(SCHEDULER | scheduler),
    }
    for part, config in parts.items():
        if part == "unet":
            continue
        ids = {"vocab_size": len(vocabulary), "bos_token_id": len(vocabulary) - 2, "eos_token_id": len(vocabulary) - 1}
        kind = getattr(transformers, index[part][1])
        written[part] = kind(transformers.CLIPTextConfig(**config, **ids, max_position_embeddings=TOKENS))
        name = part.replace("text_encoder", "tokenizer")
        write_tokenizer(directory / "made" / name)
        if name == "tokenizer_2":
            _pad_with(directory / "made" / name, "!")
        written[name] = transformers.CLIPTokenizer.from_pretrained(directory / "made" / name)
    xl = family == "sdxl"
    more = {} if xl else {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    getattr(diffusers, index["_class_name"])(**written, **more).save_pretrained(directory / family)
    return directory / family


def _pad_with(folder: Path, token: str) -> None:
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        told = json.loads((folder / name).read_text()) | {"pad_token": token}
        (folder / name).write_text(json.dumps(told))


@dataclass(frozen=True)
class MadeAdapter:
    """Random weights for some sites of a checkpoint."""

    name: str
    pairs: Mapping[str, Pair]
    host: HostAdapter


def make_adapter(shapes: ImageShapes, name: str, ranks: Sequence[int], kind: str, seed: int) -> MadeAdapter:
    """An adapter of the sites that `kind` says: attention, linear or all of the UNet; or text, which is all of everything."""
    chosen = [site for site in shapes.sites if _takes(kind, site.part, site.name, site.kind)]
    pairs = {path: (0.3 * a / a[0].size ** 0.5, 0.3 * b) for path, (a, b) in random_pairs(chosen, ranks, seed).items()}
    classes: dict[str, tuple[dict[int, Any], int]] = {}
    for group, sites in shapes.classes().items():
        mine = {
            number: (
                1.0,
                pairs[site.path][0].reshape(len(pairs[site.path][0]), -1),
                np.squeeze(pairs[site.path][1]).reshape(site.size_out, -1),
            )
            for number, site in enumerate(sites)
            if site.path in pairs
        }
        classes[group] = (mine, len(sites))
    blob = write_site_blob(classes, dtype="F32")
    return MadeAdapter(name, pairs, HostAdapter.from_blob(blob, class_shapes(shapes)))


def _takes(kind: str, part: str, name: str, form: str) -> bool:
    if kind == "text":
        return True
    if part != "unet":
        return False
    if kind == "attention":
        return ".attn" in name
    return kind == "all" or form == "linear"


@dataclass
class Oracle:
    """diffusers' pipelines over one checkpoint, one request at a time."""

    model_dir: Path
    adapters: Sequence[MadeAdapter] = ()
    _pipelines: dict[str, Any] = field(default_factory=dict)

    def pipeline(self, kind: str = "text") -> Any:
        """The pipeline for a kind of request."""
        import diffusers

        if not self._pipelines:
            base = diffusers.DiffusionPipeline.from_pretrained(self.model_dir)
            base.set_progress_bar_config(disable=True)
            for one in self.adapters:
                base.load_lora_weights(
                    {name: torch.from_numpy(t) for name, t in as_peft(one.pairs).items()}, adapter_name=one.name
                )
            self._pipelines["own"] = base
        base = self._pipelines["own"]
        name = "StableDiffusionXL" if "XL" in type(base).__name__ else "StableDiffusion"
        wanted = name + {"text": "Pipeline", "image": "Img2ImgPipeline", "inpaint": "InpaintPipeline"}[kind]
        if wanted not in self._pipelines:
            made = getattr(diffusers, wanted)(**base.components, **({} if "XL" in name else {"requires_safety_checker": False}))
            made.set_progress_bar_config(disable=True)
            self._pipelines[wanted] = made
        return self._pipelines[wanted]

    def latents(self, prompt: str, *, kind: str = "text", sampler: str = "ddim", seed: int = 0, **options: Any) -> torch.Tensor:
        """The final latents [4, rows, columns]. `adapters`: {name: weight}; other options are the pipeline's own."""
        import diffusers

        pipeline, adapters = self.pipeline(kind), options.pop("adapters", {})
        config = diffusers.DDIMScheduler.load_config(self.model_dir, subfolder="scheduler")
        pipeline.scheduler = getattr(diffusers, SAMPLERS[sampler]).from_config(config)
        if self.adapters:
            if adapters:
                pipeline.enable_lora()
                pipeline.set_adapters(list(adapters), list(adapters.values()))
            else:
                pipeline.disable_lora()
        draws = torch.Generator().manual_seed(seed)
        found = pipeline(prompt, generator=draws, output_type="latent", return_dict=False, **options)[0]
        latents: torch.Tensor = found[0]
        return latents

    def tokens(self, text: str, second: bool = False) -> list[int]:
        """The padded token ids of a prompt."""
        tokenizer = self.pipeline().tokenizer_2 if second else self.pipeline().tokenizer
        found: list[int] = tokenizer(text, padding="max_length", max_length=TOKENS, truncation=True).input_ids
        return found


def shapes_of(model_dir: Path) -> ImageShapes:
    """The sites of a checkpoint."""
    return read_image_shapes(model_dir)
