"""Promise: what layers make of the prompts alone is computed once for requests that step together, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from motet.kernels import LoraPool
from motet.services.worker.engines.adapter_weights import class_shapes
from motet.services.worker.image_engine.checkpoint import open_checkpoint
from motet.services.worker.image_engine.sites import Sites, Text
from tests.services.worker.image_engine.conftest import Oracles

ROWS, TOKENS = 3, 77


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("room_bytes", [1 << 24, 0])
@torch.inference_mode()
def test_keys_and_values_of_the_prompts_are_made_once(family: str, room_bytes: int, oracles: Oracles) -> None:
    oracle = oracles(family)
    checkpoint = open_checkpoint(oracle.model_dir)
    pool = LoraPool(class_shapes(checkpoint.shapes), slots=2, max_rank=64, bytes_total=64 << 20, dtype=torch.float32)
    host = next(one.host for one in oracle.adapters if one.name == "mixed")
    pool.load(1, host.packed)
    sites = Sites({"unet": checkpoint.unet, **checkpoint.encoders}, checkpoint.shapes, pool)
    config = checkpoint.unet.config
    text = Text(torch.randn(ROWS, TOKENS, config.cross_attention_dim), room_bytes=room_bytes)
    added = None
    if family == "sdxl":
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(ROWS, width), "time_ids": torch.ones(ROWS, 6)}
    row_slot, weights = np.array([[1], [-1], [1]], np.int32), np.array([[1.0], [0.0], [0.5]], np.float32)

    def step(number: int, kept: Text | None) -> torch.Tensor:
        sites.use(row_slot, weights, kept)
        latents = torch.randn(ROWS, 4, 8, 8, generator=torch.Generator().manual_seed(number))
        found: torch.Tensor = checkpoint.unet(
            latents, 100.0 * number, encoder_hidden_states=text.encoded, added_cond_kwargs=added, return_dict=False
        )[0]
        return found

    for number in (1, 2):
        assert torch.equal(step(number, text), step(number, None))
    readers = [site for site in checkpoint.shapes.sites if site.name.endswith(("attn2.to_k", "attn2.to_v"))]
    assert len(text.made) == (len(readers) if room_bytes else 0)
