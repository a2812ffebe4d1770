"""The input of the length predictor: hashed features of a request's prompt and of its parameters.

    text block    words, pairs of neighbours, the opening words     ids 0 .. TEXT_IDS - 1, weighted by rarity
    side block    lengths, shape, sampling parameters, adapter      ids TEXT_IDS .. SPACE - 1, all of one weight

A feature is a 16-bit hash of a word. Different words may have the same hash, and only the hashes leave the gateway. They hide a
prompt from a casual reader, but not from an attacker, who can hash a dictionary. Only the first HEAD_WORDS and the last
TAIL_WORDS words of a text count, so a long prompt costs no more than half a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from zlib import crc32

import numpy as np

from motet.shared.model import SamplingParams

SPACE = 1 << 16
SIDE_IDS = 1 << 12
TEXT_IDS = SPACE - SIDE_IDS
HEAD_WORDS, TAIL_WORDS = 72, 24
HEAD_CHARS, TAIL_CHARS = 640, 160  # of a text: everything else is never looked at
FEATURES_MAX = 320  # a message with more is cut
_WORD = re.compile(r"\w+|[^\w\s]")
_PAIR, _OPENING, _EARLY = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def excerpt(text: str) -> str:
    """The part of a prompt's text that a predictor reads: a short text as it is, of a long one the beginning and the end."""
    return text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


def text_features(text: str) -> list[int]:
    """The features of a prompt's text, in both blocks."""
    text = excerpt(text)
    words = _WORD.findall(text.lower())
    if len(words) > HEAD_WORDS + TAIL_WORDS:
        words = words[:HEAD_WORDS] + words[-TAIL_WORDS:]
    hashes = np.array([crc32(word.encode("utf-8", "surrogatepass")) for word in words], np.uint32)
    # the opening: most instructions begin with their verb
    opening = np.cumprod(hashes[:3] * _PAIR | np.uint32(1), dtype=np.uint32)
    found = np.concatenate((hashes, hashes[:-1] * _PAIR ^ hashes[1:], opening * _OPENING, hashes[:5] * _EARLY)) % TEXT_IDS
    shape = (
        ("words", steps(len(words))),
        ("lines", min(6, text.count("\n"))),
        ("questions", min(3, text.count("?"))),
        ("digits", min(6, sum([word.isdigit() for word in words]))),
        ("end", words[-1] if words else ""),
    )
    return [*found.tolist(), *(side_feature(name, value) for name, value in shape)]


def request_features(prompt_tokens: int, sampling: SamplingParams, *, stops: int, turns: int, system: str) -> list[int]:
    """The features of everything in a request but its last message, all in the side block.

    `stops`: the number of stop strings; `turns`: the number of messages; `system`: the system prompt, of which only the
    identity counts.
    """
    penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    facts = (
        ("prompt", steps(prompt_tokens)),
        ("limit", steps(sampling.max_tokens)),
        ("least", steps(sampling.min_tokens)),
        ("temperature", round(4 * min(2.0, sampling.temperature))),
        ("penalties", bool(penalties)),
        ("allowed", bool(sampling.allowed_token_ids)),
        ("stops", min(4, stops + len(sampling.stop_token_ids))),
        ("turns", min(8, turns)),
        ("system", excerpt(system)),
    )
    return [side_feature(name, value) for name, value in facts]


def side_feature(name: str, value: object) -> int:
    """The id of one fact in the side block."""
    return TEXT_IDS + crc32(f"{name}={value}".encode("utf-8", "surrogatepass")) % SIDE_IDS


def steps(count: int) -> int:
    """A count of 0 or more in half octaves: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, ... are one step each."""
    bits = count.bit_length()
    return count if bits < 2 else 2 * bits - 2 + (count >> (bits - 2) & 1)


def pack(features: Iterable[int]) -> bytes:
    """Features as little-endian unsigned 16-bit numbers, each once, in order."""
    return np.array(sorted(set(features))[:FEATURES_MAX], "<u2").tobytes()


def unpack(packed: bytes) -> np.ndarray:
    """The inverse of `pack`, for any bytes that a message may hold: (n,) int64, each id once."""
    whole = packed[: 2 * min(len(packed) // 2, FEATURES_MAX)]
    return np.unique(np.frombuffer(whole, "<u2").astype(np.int64))
