"""Reads `generation_config.json`: defaults for requests, and the tokens that end an answer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet.shared.hf_config import (
    UnsupportedModel,
    canonical,
    contradictions,
    read_json,
    read_raw_config,
    shorten,
    size_in,
)

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
MaxTokens = Annotated[int, Meta(ge=1, le=1 << 31)]
"""The ranges of sampling parameters, in requests and in the file."""


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults from generation_config.json, used where a request has no value."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: MaxTokens | None = None


def read_generation_config(model_dir: Path) -> dict[str, Any]:
    """The `generation_config.json` in `model_dir`; {} if there is none. Raises UnsupportedModel."""
    return read_json(model_dir / "generation_config.json") or {}


def generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """The defaults in a decoded `generation_config.json`. Raises UnsupportedModel for a value that no request may have."""
    try:
        return msgspec.convert(dict(generation), GenerationDefaults)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise UnsupportedModel(f"generation_config.json: {name} is {shorten(repr(generation.get(name)))}: {reason}") from None


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, from the generation config, else from the model's. Raises UnsupportedModel.

    Chat models name their end-of-turn token only in the former. An id beyond the vocabulary is never drawn, so it is left out
    (see `notes`); transformers warns of it.
    """
    _, ids = _named(config, generation)
    return tuple(i for i in ids if i < _vocabulary(config))


def notes(model_dir: Path) -> list[str]:
    """For people: what is odd about `config.json` and `generation_config.json`. Raises UnsupportedModel."""
    config, generation = read_raw_config(model_dir), read_generation_config(model_dir)
    model = canonical(config)
    file, ids = _named(model, generation)
    beyond = [i for i in ids if i >= _vocabulary(model)]
    lines = contradictions(config)
    if beyond:
        lines.append(f"{file}: eos_token_id {beyond} is beyond the vocabulary of {model['vocab_size']}: it is ignored")
    return lines


def _named(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The file that names the tokens that end an answer, and the tokens."""
    named, file = generation.get("eos_token_id"), "generation_config.json"
    if named is None:
        named, file = config.get("eos_token_id"), "config.json"
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise UnsupportedModel(f"{file}: eos_token_id is {shorten(repr(named))}: a token id or a list of them is expected")
    return file, tuple(dict.fromkeys(ids))


def _vocabulary(config: Mapping[str, Any]) -> float:
    return math.inf if config.get("vocab_size") is None else size_in(config, "vocab_size")
