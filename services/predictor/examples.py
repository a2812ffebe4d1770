"""Finished requests in a file, to train and evaluate with: JSON lines, optionally gzipped.

    {"prompt": "...", "output_tokens": 57}                                     all that is needed
    {"messages": [...], "output_tokens": 57, "adapter": "a", "max_tokens": 256, "temperature": 0.7}

Of a conversation the last message is the text, as in the gateway. Rows of instruction sets (`instruction`, `input`, `output`)
are read too; without `output_tokens`, `output_tokens_est` or the words of `output` are the length.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from motet.policies.lengths.features import pack, request_features, text_features
from motet.shared.config import ConfigError
from motet.shared.model import SamplingParams

NO_LIMIT = 1 << 20


class Example(msgspec.Struct, frozen=True):
    """A request's text, hashed features and adapter, and the length of its answer in tokens."""

    text: str
    features: bytes
    tokens: int
    adapter: str = ""


def read_examples(path: Path) -> list[Example]:
    """The requests in a file. Raises ConfigError naming the line."""
    try:
        return list(_examples(path))
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path}: {error}") from None


def example(row: dict[str, Any]) -> Example:
    """A request from its JSON object. Raises KeyError, TypeError or ValueError."""
    system, turns = "", 0
    if "messages" in row:
        messages = row["messages"]
        text, turns = str(messages[-1]["content"]), len(messages)
        system = str(messages[0]["content"]) if messages[0].get("role") in ("system", "developer") else ""
    elif "prompt" in row:
        text = str(row["prompt"])
    else:
        text = "\n".join(filter(None, (row["instruction"], row.get("input") or "")))
    tokens = row.get("output_tokens", row.get("output_tokens_est"))
    if tokens is None:
        tokens = len(str(row["output"]).split())
    sampling = SamplingParams(max_tokens=int(row.get("max_tokens") or NO_LIMIT), temperature=float(row.get("temperature", 1.0)))
    length = int(row.get("prompt_tokens", row.get("prompt_tokens_est", len(text.split()))))
    found = text_features(text) + request_features(length, sampling, stops=0, turns=turns, system=system)
    return Example(text, pack(found), max(1, int(tokens)), str(row.get("adapter") or ""))


def _examples(path: Path) -> Iterator[Example]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield example(orjson.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ConfigError(f"{path}:{number}: no request with a prompt and a length: {error!r}") from None
