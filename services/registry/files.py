"""A PEFT adapter's files, the sources that they come from, and safe display of untrusted text in errors."""

from __future__ import annotations

from typing import BinaryIO, Protocol

import msgspec

from motet.shared.errors import InvalidAdapter, TooLarge
from motet.shared.text_files import WITHOUT

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_CONFIG_BYTES = 1024 * 1024
MAX_TEXTS, MAX_TEXTS_BYTES = 16, 8 << 20  # of files for chats: some tokenizers list thousands of added tokens
SHOWN_CHARS = 120
LIMIT_OPTION = "--max-adapter-bytes of the registry"


class PeftFiles(msgspec.Struct):
    """An adapter's two files, open. Close it when done."""

    config_json: bytes
    weights: BinaryIO
    size_bytes: int  # of the weights
    source: str  # where they came from, for people
    texts: dict[str, bytes] = {}  # what it brings for chats (`shared.adapter_chat`), by path in its directory

    def __enter__(self) -> PeftFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()


class Source(Protocol):
    """One kind of places that adapters come from; `sources.SOURCES` has them all."""

    remote: bool = False
    """Whether it waits for another machine. Its fetches then have slots of their own and hold up no other source."""

    refusal: str = ""
    """Why this registry takes nothing from here; "" if it does."""

    async def fetch(self, location: str, *, chat: bool) -> PeftFiles:
        """The files of the adapter at `location`; the caller closes them, and checks what is in them.

        `chat`: also what it brings for chats. Raises InvalidAdapter or TooLarge with the reason, Unavailable when it cannot be
        reached. Errors quote `location` as `shown`. Blocking work runs `in_thread`.
        """
        ...


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


class Texts:
    """Collects an adapter's small text files, within limits."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}
        self._left_bytes = MAX_TEXTS_BYTES

    def limit(self, name: str) -> int:
        """The bytes that this file may have. Raises InvalidAdapter when there are too many files."""
        if len(self.found) >= MAX_TEXTS:
            raise InvalidAdapter(f"there are more than {MAX_TEXTS} text files beside the weights; {WITHOUT}", param="location")
        return self._left_bytes

    def add(self, name: str, data: bytes) -> None:
        """Raises TooLarge when the files together are too large."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise TooLarge(
                f"{name} and the files beside it have more than {MAX_TEXTS_BYTES} bytes; {WITHOUT}", param="location"
            )
        self.found[name] = data


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
