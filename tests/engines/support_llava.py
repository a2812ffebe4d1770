"""A tiny LLaVA with random weights, and what transformers says of a prompt with images. For vLLM's environment."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from PIL import Image as Pil
from tokenizers import Tokenizer
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from motet.examples.demo import DEMO

SIDE, PATCH = 56, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
PLACEHOLDER = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_llava(folder: Path, *, seed: int = 1) -> Path:
    """A LLaVA of two layers for text and two for images, in float32, with the demo's tokenizer and an image token."""
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]})
    text = LlamaConfig(
        vocab_size=len(tokenizer) + 7,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
        initializer_range=0.3,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
        initializer_range=0.3,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
    )
    model = LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                torch.nn.init.normal_(weights, std=0.15 if "language_model" in name else 0.1)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def picture(seed: int, *, kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> bytes:
    """The file of a random image. `size`: width and height."""
    numbers = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    file = io.BytesIO()
    Pil.fromarray(numbers, mode).save(file, kind)
    return file.getvalue()


def said_by_transformers(
    folder: Path, prompt: str, images: list[bytes], length: int, adapter: Path | None = None
) -> tuple[list[int], int]:
    """The most likely tokens after a prompt, and how many tokens the prompt has."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    model = load(folder) if adapter is None else peft.PeftModel.from_pretrained(load(folder), adapter)
    given = processor(text=prompt, images=[Pil.open(io.BytesIO(one)).convert("RGB") for one in images], return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**given, max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None)
    size = given["input_ids"].shape[1]
    return [int(token) for token in out[0, size:]], size


def make_adapter(folder: Path, into: Path, *, seed: int = 7) -> Path:
    """An adapter of the language model's attention and MLP, as PEFT saves it."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, init_lora_weights=False, target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj)"
    )
    adapted = peft.get_peft_model(load(folder), lora)
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_" in name:
                weights.normal_(0.0, 0.15)
    adapted.save_pretrained(into)
    return into


def load(folder: Path) -> Any:
    """The model in float32."""
    return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
