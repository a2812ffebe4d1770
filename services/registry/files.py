"""The two files of a PEFT adapter, whatever they were taken from, and how a refusal shows a stranger's text."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from shared.errors import InvalidAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_CONFIG_BYTES = 1024 * 1024
SHOWN_CHARS = 120


class PeftFiles(msgspec.Struct):
    """An adapter's two files, open. Close it when done."""

    config_json: bytes
    weights: BinaryIO
    size_bytes: int  # of the weights
    source: str  # where they came from, for people

    def __enter__(self) -> PeftFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()


def shown(text: object) -> str:
    """What a client sent, as it may stand in an error: one line of at most about `SHOWN_CHARS` characters."""
    line = str(text)
    if len(line) > SHOWN_CHARS:
        line = f"{line[:SHOWN_CHARS]}... ({len(line)} characters)"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def quoted(text: object) -> str:
    """`shown` of a representation, in quotes when `text` is a string."""
    return shown(repr(text[: SHOWN_CHARS + 1]) if isinstance(text, str) and len(text) > SHOWN_CHARS else repr(text))


def missing_weights(place: str, names: set[str]) -> InvalidAdapter:
    """The refusal when `place` holds the files `names` but no safetensors weights."""
    pickles = sorted(name for name in names if name.startswith("adapter_model") and name.endswith(PICKLES))
    if pickles:
        return InvalidAdapter(
            f"{place} holds {shown(pickles[0])} but no {WEIGHTS}: pickle files can run code and are never opened; "
            "save the adapter with safe_serialization=True",
            param="location",
        )
    return InvalidAdapter(f"{place} holds no {WEIGHTS}", param="location")
