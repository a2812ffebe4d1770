"""Tiny models of other architectures, adapters of their own layers, and PEFT's answers. For vLLM's environment."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, PhiConfig

from motet.examples.demo import DEMO


def make_phi(folder: Path, *, seed: int = 1) -> Path:
    """A Phi of two layers in float32, with the demo's tokenizer. Its layers are dense, fc1 and fc2, besides q, k and v."""
    torch.manual_seed(seed)
    config = PhiConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        partial_rotary_factor=1.0,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weights in model.parameters():
        if weights.ndim == 2:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(folder)
    for file in (*(DEMO / "model").glob("token*.json"), DEMO / "model" / "special_tokens_map.json"):
        shutil.copy(file, folder)
    return folder


def make_adapter(
    model_dir: Path, folder: Path, targets: Sequence[str], *, seed: int = 1, rank: int = 4, strength: float = 1.0
) -> Path:
    """An adapter of these modules with random weights, as PEFT saves it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    for name, weights in model.named_parameters():
        if "lora_" in name:
            weights.data *= strength
    model.save_pretrained(folder)
    return folder


def greedy(model_dir: Path, adapter: Path | None, prompt: Sequence[int], length: int) -> list[int]:
    """The tokens that transformers draws, with PEFT's adapter."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in ids[0, len(prompt) :]]
