"""The two files of a PEFT adapter from any source, and safe display of untrusted text in errors."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from motet.shared.errors import InvalidAdapter, TooLarge

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_CONFIG_BYTES = 1024 * 1024
SHOWN_CHARS = 120
LIMIT_OPTION = "--max-adapter-bytes of the registry"


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
    """Untrusted text for an error message: one line of at most about `SHOWN_CHARS` characters."""
    line = str(text)
    return _printable(line) if len(line) <= SHOWN_CHARS else f"{_printable(line[:SHOWN_CHARS])}... ({len(line)} characters)"


def quoted(value: object) -> str:
    """`shown` for the Python notation of a value: a string in quotes."""
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:SHOWN_CHARS]!r}... ({len(value)} characters)"
    return shown(repr(value))


def too_large(what: str, size_bytes: int, max_bytes: int) -> TooLarge:
    """The refusal of `what`, which is larger than the registry's limit for weights allows."""
    return TooLarge(f"{what} has {size_bytes} bytes, the limit is {max_bytes} ({LIMIT_OPTION})", param="location")


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


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
