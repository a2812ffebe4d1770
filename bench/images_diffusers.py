"""The rivals of `bench.images`: diffusers' own pipeline, in the ways in which people serve many adapters with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from bench.images_files import Adapter

Latents = dict[int, np.ndarray]  # by seed


@dataclass(frozen=True, slots=True)
class Asked:
    """A picture that is asked for. `adapters`: names and weights, none for the base."""

    prompt: str
    seed: int
    steps: int
    guidance: float
    adapters: tuple[tuple[str, float], ...] = ()
    side_px: int = 32


class Diffusers:
    """The pipeline with all adapters loaded. Its ways draw the same pictures."""

    def __init__(self, model: Path, adapters: Sequence[Adapter]) -> None:
        self._pipeline, self._fusable = (_loaded(model, adapters) for _ in range(2))

    def set_adapters(self, asked: Sequence[Asked]) -> Latents:
        """One request at a time, its adapters chosen by `set_adapters`."""
        found = {}
        for one in asked:
            _choose(self._pipeline, one)
            found[one.seed] = self._drawn(self._pipeline, [one])[0]
        return found

    def fuse(self, asked: Sequence[Asked]) -> Latents:
        """One request at a time, its adapters added to the weights before and taken out after."""
        found = {}
        for one in asked:
            _choose(self._fusable, one)
            if one.adapters:
                self._fusable.fuse_lora(adapter_names=[name for name, _ in one.adapters])
            found[one.seed] = self._drawn(self._fusable, [one])[0]
            if one.adapters:
                self._fusable.unfuse_lora()
        return found

    def equal_batches(self, asked: Sequence[Asked]) -> Latents:
        """Requests with equal adapters share a batch; one batch after the other."""
        found: Latents = {}
        for _, some in groupby(sorted(asked, key=lambda one: one.adapters), key=lambda one: one.adapters):
            batch = list(some)
            _choose(self._pipeline, batch[0])
            found |= {one.seed: latents for one, latents in zip(batch, self._drawn(self._pipeline, batch), strict=True)}
        return found

    def tokens(self, prompt: str) -> list[int]:
        """The padded ids of a prompt."""
        tokenizer = self._pipeline.tokenizer
        found: list[int] = tokenizer(prompt, padding="max_length", max_length=tokenizer.model_max_length).input_ids
        return found

    def _drawn(self, pipeline: Any, batch: Sequence[Asked]) -> list[np.ndarray]:
        """Latents of a batch, which is decoded to pictures as well."""
        first = batch[0]
        latents = pipeline(
            [one.prompt for one in batch],
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            width=first.side_px,
            height=first.side_px,
            generator=[torch.Generator().manual_seed(one.seed) for one in batch],
            output_type="latent",
        ).images
        with torch.no_grad():
            decoded = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor, return_dict=False)[0]
            pipeline.image_processor.postprocess(decoded, output_type="pil")
        return list(latents.numpy())


def _loaded(model: Path, adapters: Sequence[Adapter]) -> Any:
    """A pipeline with these adapters."""
    pipeline: Any = StableDiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    for adapter in adapters:
        pipeline.load_lora_weights(str(adapter.folder), adapter_name=adapter.name)
    return pipeline


def _choose(pipeline: Any, one: Asked) -> None:
    """Let the pipeline use the adapters of a request, and no others."""
    if one.adapters:
        pipeline.enable_lora()
        pipeline.set_adapters([name for name, _ in one.adapters], [weight for _, weight in one.adapters])
    else:
        pipeline.disable_lora()
