"""Promise: a feature keeps its number, because stored models and predictors of another version refer to it."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import pytest

from motet.policies.lengths.features import SIDE_IDS, TEXT_IDS, request_features, steps, text_features
from motet.shared.model import SamplingParams


def side(*facts: str) -> list[int]:
    """The last 4096 of 65,536 numbers, by the hash of "name=value"."""
    return [65_536 - 4096 + crc32(fact.encode()) % 4096 for fact in facts]


def test_counts_are_in_half_octaves() -> None:
    assert (TEXT_IDS, SIDE_IDS) == (61_440, 4096)
    counts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 23, 24, 31, 32]
    assert [steps(count) for count in counts] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]


def test_the_facts_of_a_request_are_hashed_by_name_and_value() -> None:
    plain = SamplingParams(max_tokens=64, temperature=0.7)
    assert request_features(100, plain, stops=0, turns=1, system="be brief") == side(
        "prompt=13", "limit=12", "least=0", "temperature=3", "penalties=False", "allowed=False", "stops=0", "turns=1",
        "system=be brief",
    )  # fmt: skip
    full = SamplingParams(
        max_tokens=7, min_tokens=2, temperature=5.0, presence_penalty=0.5, allowed_token_ids=(1,), stop_token_ids=(1, 2)
    )
    assert request_features(1, full, stops=3, turns=99, system="") == side(
        "prompt=1", "limit=5", "least=2", "temperature=8", "penalties=True", "allowed=True", "stops=4", "turns=8", "system="
    )


@pytest.mark.parametrize("penalty", ["frequency_penalty", "repetition_penalty"])
def test_any_penalty_is_one(penalty: str) -> None:
    found = request_features(1, SamplingParams(max_tokens=1, **{penalty: 0.5}), stops=0, turns=0, system="")
    assert side("penalties=True")[0] in found


def test_words_pairs_and_the_opening_are_hashed_and_the_shape_is_counted() -> None:
    text = "Why 2?\nWhy"
    *hashed, words, lines, questions, digits, end = text_features(text)
    assert [words, lines, questions, digits, end] == side("words=4", "lines=1", "questions=1", "digits=1", "end=why")
    codes = [crc32(word.encode()) for word in ("why", "2", "?", "why")]
    pairs = [(a * 0x9E3779B1 ^ b) % 2**32 for a, b in pairwise(codes)]
    opening, openings = 1, []
    for code in codes[:3]:
        opening = opening * (code * 0x9E3779B1 % 2**32 | 1) % 2**32
        openings.append(opening * 0x85EBCA6B % 2**32)
    early = [code * 0xC2B2AE35 % 2**32 for code in codes[:5]]
    assert hashed == [code % 61_440 for code in (*codes, *pairs, *openings, *early)]
    assert text_features("")[-1] == side("end=")[0]
