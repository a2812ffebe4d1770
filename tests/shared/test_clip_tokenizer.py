"""Promise: prompts become the tokens that transformers' CLIPTokenizer makes of them, padding included."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.examples.demo_images.model_files import write_tokenizer
from motet.shared.clip_tokenizer import CONTENT_TOKENS, PART_TOKENS, ClipTokenizer, parts_of

ODD = [
    "",
    " \n\t",
    "a red circle on sky",
    "  Hello   WORLD!! it's 123 naïve café",
    "日本語 ½ ﬁ 🎨 a\u0301",
    "<|endoftext|> x <|startoftext|>y A<|ENDOFTEXT|>B",
    "a!b! !",
    "don't WE'LL 'S 'll",
    "x" * 500,
    "\u0000\u200b\u2028",
    "İstanbul ǅ ß",
]


@pytest.fixture(scope="module", params=["<|endoftext|>", "!"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ClipTokenizer, Any]:
    """Ours and transformers', of the same files; the pad token is that of SD 1.5, and that of SD 2 and of SDXL's second one."""
    from transformers import CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip") / "tokenizer"
    write_tokenizer(folder)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        told = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(told | {"pad_token": request.param}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ClipTokenizer(folder), CLIPTokenizer.from_pretrained(folder)


def check(pair: tuple[ClipTokenizer, Any], text: str) -> None:
    ours, theirs = pair
    told = theirs(text, padding="max_length", max_length=PART_TOKENS, truncation=True).input_ids
    assert ours.parts(ours.content(text)[:CONTENT_TOKENS], 1) == told


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_have_the_same_tokens(pair: tuple[ClipTokenizer, Any], text: str) -> None:
    check(pair, text)


@given(text=st.text(max_size=80))
@settings(max_examples=200)
def test_any_text_has_the_same_tokens(pair: tuple[ClipTokenizer, Any], text: str) -> None:
    check(pair, text)


def test_a_tokenizer_that_transformers_has_saved_again_is_the_same(pair: tuple[ClipTokenizer, Any], tmp_path: Path) -> None:
    pair[1].save_pretrained(tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer" / "vocab.json").exists()
    again = ClipTokenizer(tmp_path / "tokenizer"), type(pair[1]).from_pretrained(tmp_path / "tokenizer")
    for text in ODD:
        check(again, text)


def test_a_long_text_is_several_parts_each_with_its_start_and_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = ClipTokenizer(tmp_path / "tokenizer")
    content = list(range(CONTENT_TOKENS + 1))
    assert (parts_of([]), parts_of(content[:-1]), parts_of(content)) == (1, 1, 2)
    tokens = tokenizer.parts(content, 3)
    start, end = tokens[0], tokens[PART_TOKENS - 1]
    assert tokens[1 : PART_TOKENS - 1] == content[:-1]
    assert tokens[PART_TOKENS : PART_TOKENS + 3] == [start, content[-1], end]
    assert tokens[2 * PART_TOKENS :] == [start] + [end] * (PART_TOKENS - 1)
    with pytest.raises(ValueError, match="76 tokens"):
        tokenizer.parts(content, 1)
