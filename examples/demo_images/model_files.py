"""The image demo's configurations and its tokenizer, in the file format of Stable Diffusion checkpoints.

Every word of a caption is one token, so captions are short. Other text is spelled in bytes, as CLIP's tokenizer does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from motet.examples.demo_images.scenes import COLOURS, GROUNDS, SHAPES, SIDE_PX
from motet.examples.demo_images.styles import STYLE_NAMES

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = ("a", "on", "in", "style", *COLOURS, *SHAPES, *GROUNDS, *STYLE_NAMES)
PROMPT_TOKENS = 77  # of every Stable Diffusion text encoder
WORD_END = "</w>"

LATENT_CHANNELS = 4
LATENT_SHRINK = 4  # pixels per latent, each way


def build_merges() -> list[tuple[str, str]]:
    """Merges that make one token of every word. A later merge never changes an earlier word, since the first one wins."""
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        while len(pieces := _encode(word, merges)) > 1:
            merges.append((pieces[0], pieces[1]))
    return merges


def _encode(word: str, merges: list[tuple[str, str]]) -> list[str]:
    pieces = [*word[:-1], word[-1] + WORD_END]
    for merge in merges:
        at = 0
        while at < len(pieces) - 1:
            if (pieces[at], pieces[at + 1]) == merge:
                pieces[at : at + 2] = ["".join(merge)]
            at += 1
    return pieces


def build_vocabulary() -> dict[str, int]:
    """Bytes, bytes that end a word, merged pieces, and the two tokens around a prompt, which come last as in CLIP's."""
    symbols = sorted(ByteLevel.alphabet())
    merged = dict.fromkeys("".join(merge) for merge in build_merges())
    tokens = [*symbols, *(symbol + WORD_END for symbol in symbols), *merged, START, END]
    return {token: index for index, token in enumerate(tokens)}


def text_encoder_config() -> dict[str, Any]:
    """A CLIP text encoder of two layers."""
    vocabulary = build_vocabulary()
    return {
        "bos_token_id": vocabulary[START],
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[END],
        "hidden_act": "quick_gelu",
        "hidden_size": 64,
        "intermediate_size": 256,
        "max_position_embeddings": PROMPT_TOKENS,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "projection_dim": 64,
        "vocab_size": len(vocabulary),
    }


def vae_config() -> dict[str, Any]:
    """An autoencoder that turns four by four pixels into one latent of four channels."""
    return {
        "act_fn": "silu",
        "block_out_channels": [32, 48, 64],
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "in_channels": 3,
        "latent_channels": LATENT_CHANNELS,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "out_channels": 3,
        "sample_size": SIDE_PX,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
    }


def unet_config() -> dict[str, Any]:
    """A UNet of two levels with cross-attention on both and in the middle: 84 linear sites."""
    return {
        "attention_head_dim": 4,  # Stable Diffusion 1.5 counts heads with it
        "block_out_channels": [64, 96],
        "cross_attention_dim": 64,
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "in_channels": LATENT_CHANNELS,
        "layers_per_block": 1,
        "norm_num_groups": 16,
        "out_channels": LATENT_CHANNELS,
        "sample_size": SIDE_PX // LATENT_SHRINK,
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "use_linear_projection": True,
    }


def scheduler_config() -> dict[str, Any]:
    """DDIM with the noise of Stable Diffusion 2: the UNet predicts velocity, which a small model learns sooner than noise."""
    return {
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": "v_prediction",
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }


def write_tokenizer(folder: Path) -> None:
    """Write the four files of a CLIP tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(build_vocabulary(), ensure_ascii=False) + "\n")
    merges = "".join(f"{left} {right}\n" for left, right in build_merges())
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")

    def special(content: str) -> dict[str, Any]:
        return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}

    named = {"bos_token": special(START), "eos_token": special(END), "pad_token": END, "unk_token": special(END)}
    settings = {
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": PROMPT_TOKENS,
        "tokenizer_class": "CLIPTokenizer",
    }
    for name, content in (("special_tokens_map.json", named), ("tokenizer_config.json", {**named, **settings})):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
