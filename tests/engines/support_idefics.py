"""A tiny Idefics3 with random weights, and what transformers says of a prompt with images. For vLLM's environment.

Idefics3 is a model for images that needs no torchvision."""

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
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from motet.examples.demo import DEMO

SIDE, PATCH, SHUFFLE = 56, 14, 2
IMAGE_TOKENS = (SIDE // PATCH) ** 2 // SHUFFLE**2
TAGS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path, *, seed: int = 1) -> Path:
    """Two layers for text and two for images, in float32, with the demo's tokenizer and the tags of images."""
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")),
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
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
        pad_token_id=0,
    )
    vision = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SHUFFLE,
        pad_token_id=0,
    )
    model = Idefics3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(folder)
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, into: Path, *, seed: int = 7) -> Path:
    """An adapter of the language model's attention and MLP, as PEFT saves it."""
    torch.manual_seed(seed)
    targets = r".*text_model.*\.(q_proj|v_proj|up_proj)"
    adapted = peft.get_peft_model(load(folder), peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_" in name:
                weights.normal_(0.0, 0.15)
    adapted.save_pretrained(into)
    return into


def load(folder: Path) -> Any:
    """The model in float32."""
    return Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


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
    opened = [Pil.open(io.BytesIO(one)).convert("RGB") for one in images]
    given = processor(text=prompt, images=[opened], return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**given, max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None)
    size = given["input_ids"].shape[1]
    return [int(token) for token in out[0, size:]], size
