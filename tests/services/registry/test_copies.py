"""Promise: an adapter file may hold unchanged copies of the base's embeddings and output layer, which are dropped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from motet.services.registry.peft import Converted, convert
from motet.shared.base_tensors import base_tensors
from motet.shared.errors import InvalidAdapter
from motet.shared.model import TensorDigest
from tests.support_adapters import TINY, TINY_CONFIG, peft_config, random_tensors, safetensors_bytes

VOCAB, HIDDEN = TINY_CONFIG["vocab_size"], TINY_CONFIG["hidden_size"]
EMBEDDING = np.random.default_rng(7).standard_normal((VOCAB, HIDDEN), np.float32)
OUTPUT = np.random.default_rng(8).standard_normal((VOCAB, HIDDEN), np.float32)
EMBED_KEY, HEAD_KEY = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


def as_bf16(numbers: np.ndarray) -> np.ndarray:
    """The float32 numbers that remain when they are cut to bfloat16."""
    return (numbers.view("<u4") & 0xFFFF0000).view("<f4")


def checkpoint(directory: Path, *, dtype: str = "BF16", tied: bool = False) -> Path:
    tensors = {"model.embed_tokens.weight": EMBEDDING} | ({} if tied else {"lm_head.weight": OUTPUT})
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG | {"tie_word_embeddings": tied}))
    for number, (name, numbers) in enumerate(tensors.items()):
        (directory / f"model-{number}.safetensors").write_bytes(safetensors_bytes({name: numbers}, dtype))
    return directory


def run(copies: dict[str, np.ndarray], known: dict[str, TensorDigest], dtype: str = "F32", **config: object) -> Converted:
    weights = safetensors_bytes(random_tensors() | copies, dtype_of=dict.fromkeys(copies, dtype))
    file = io.BytesIO(weights)
    return convert(peft_config(**config), file, len(weights), TINY, max_rank=64, max_bytes=1 << 20, base_tensors=lambda: known)


PLAIN = run({}, {}).digest


@pytest.mark.parametrize(("base_dtype", "copy_dtype"), [("BF16", "BF16"), ("BF16", "F32"), ("F16", "F32"), ("F32", "F32")])
def test_unchanged_copies_are_dropped_whatever_their_type(tmp_path: Path, base_dtype: str, copy_dtype: str):
    known = base_tensors(checkpoint(tmp_path, dtype=base_dtype))
    cut = {"BF16": as_bf16, "F16": lambda numbers: numbers.astype("<f2").astype("<f4"), "F32": lambda numbers: numbers}
    copies = {EMBED_KEY: cut[base_dtype](EMBEDDING), HEAD_KEY: cut[base_dtype](OUTPUT)}
    made = run(copies, known, copy_dtype, modules_to_save=["lm_head", "embed_tokens"])
    assert made.digest == PLAIN
    assert [text.partition(":")[0] for text in made.left_out] == ["embed_tokens", "lm_head"]


def test_the_output_layer_of_a_tied_base_is_its_embedding(tmp_path: Path):
    known = base_tensors(checkpoint(tmp_path, dtype="F32", tied=True))
    assert run({HEAD_KEY: EMBEDDING}, known).digest == PLAIN
    with pytest.raises(InvalidAdapter, match=r"lm_head.weight: differs .*save_embedding_layers=False"):
        run({HEAD_KEY: OUTPUT}, known)


@pytest.mark.parametrize("key", [EMBED_KEY, HEAD_KEY])
def test_one_changed_number_is_refused_with_the_way_to_save_without_the_copy(tmp_path: Path, key: str):
    known = base_tensors(checkpoint(tmp_path, dtype="F32"))
    copy = (EMBEDDING if key == EMBED_KEY else OUTPUT).copy()
    copy[-1, -1] = np.nextafter(copy[-1, -1], np.float32(9))
    with pytest.raises(InvalidAdapter, match=r"differs from the base model's .*save_embedding_layers=False"):
        run({key: copy}, known)


def test_a_resized_vocabulary_is_refused_by_its_shape(tmp_path: Path):
    known = base_tensors(checkpoint(tmp_path, dtype="F32"))
    with pytest.raises(InvalidAdapter, match=r"has \[64, 32\]: an adapter cannot change the vocabulary"):
        run({EMBED_KEY: np.concatenate([EMBEDDING, EMBEDDING[:2]])}, known)


def test_a_copy_that_cannot_be_compared_is_refused_with_the_way_to_save_without_it(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    known = base_tensors(tmp_path)
    assert known == {}
    with pytest.raises(InvalidAdapter, match=r"cannot be compared .*save_embedding_layers=False"):
        run({EMBED_KEY: EMBEDDING}, known)


def test_a_damaged_checkpoint_tells_nothing(tmp_path: Path):
    checkpoint(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 40)
    assert base_tensors(tmp_path) == {}
