"""Promise: a base model's shapes are those of its config.json, also where it describes more than a text model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from motet.shared.base_shapes import BaseShapes, shapes_of
from motet.shared.hf_config import UnsupportedModel, canonical

TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = BaseShapes(
    hidden_size=64, intermediate_size=128, layers=3, heads=4, kv_heads=2, head_dim=16, model_type="mistral", vocab_size=32_000
)


def test_the_text_model_of_a_model_that_takes_images_is_meant() -> None:
    config = {"model_type": "mistral3", "hidden_size": 1, "text_config": TEXT, "vision_config": {"hidden_size": 7}}
    assert shapes_of(TEXT) == SHAPES
    assert shapes_of(config) == msgspec.structs.replace(SHAPES, model_type="mistral3")


def test_what_llava_and_gemma_leave_out_is_known() -> None:
    llava = {"text_config": {"model_type": "llama", "max_position_embeddings": 4096}}
    assert canonical(llava)["max_position_embeddings"] == 4096
    assert shapes_of(llava) == BaseShapes(
        hidden_size=4096, intermediate_size=11008, layers=32, heads=32, kv_heads=32, head_dim=128, vocab_size=32_000
    )
    gemma = {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}}
    shapes = shapes_of(gemma | {"num_attention_heads": 1})
    assert (shapes.hidden_size, shapes.heads, shapes.kv_heads, shapes.head_dim) == (2560, 8, 4, 256)


def test_a_shape_that_is_missing_is_named() -> None:
    unknown = {key: value for key, value in TEXT.items() if key != "intermediate_size"} | {"model_type": "phi3"}
    with pytest.raises(UnsupportedModel, match="intermediate_size is missing"):
        shapes_of(unknown)
