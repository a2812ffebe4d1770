"""An adapter's files, the sources that they come from, and safe display of untrusted text in errors.

Which of the files that lie together are an adapter's is told by their names alone:

    PEFT      of a language model: adapter_config.json and adapter_model.safetensors
    IMAGE     of an image model: pytorch_lora_weights.safetensors, else the only safetensors file
"""

from __future__ import annotations

from collections.abc import Collection
from typing import BinaryIO, Protocol

import msgspec

from motet.shared.errors import InvalidAdapter, TooLarge
from motet.shared.text_files import WITHOUT

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SUFFIX = ".safetensors"
LORA_FILE = "pytorch_lora_weights.safetensors"
"""What diffusers calls the file of an image adapter."""
MAX_NAMED = 5  # files in a refusal
_BARE = b"\0{"  # bytes 7 and 8 of a safetensors file: a header of less than 2^56 bytes, and where its JSON begins
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_CONFIG_BYTES = 1024 * 1024
MAX_TEXTS, MAX_TEXTS_BYTES = 16, 8 << 20  # of files for chats: some tokenizers list thousands of added tokens
SHOWN_CHARS = 120
LIMIT_OPTION = "--max-adapter-bytes of the registry"


class Layout(msgspec.Struct, frozen=True):
    """The files of the adapters of one kind of base models."""

    name: str
    configuration: str  # the file beside the weights; "" for none
    chats: bool  # whether it may bring files for chats

    @property
    def bare(self) -> bool:
        """Whether a weights file alone is an adapter."""
        return not self.configuration

    def weights(self, place: str, names: Collection[str]) -> str:
        """Which of `names`, the files in `place`, has the weights.

        Raises InvalidAdapter, naming what is there instead, or the configuration that is missing.
        """
        if self.bare:
            return _lora_file(place, names)
        if WEIGHTS not in names:
            raise missing_weights(place, set(names))
        if self.configuration not in names:
            raise InvalidAdapter(f"{place} holds no {self.configuration}", param="location")
        return WEIGHTS


PEFT = Layout("peft", CONFIG, chats=True)
IMAGE = Layout("image", "", chats=False)
LAYOUTS = {layout.name: layout for layout in (PEFT, IMAGE)}


class PeftFiles(msgspec.Struct):
    """An adapter's files, open. Close it when done."""

    config_json: bytes  # b"" for an image adapter, whose weights file says all
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

    layout: Layout = PEFT
    """The files of the base's adapters. The registry sets it before the first fetch."""

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
    others = sorted(name for name in names if name.endswith(".safetensors"))
    hint = f" but {shown(others[0])}; an image adapter? The base model here makes text" if others else ""
    return InvalidAdapter(f"{place} holds no {WEIGHTS}{hint}", param="location")


def is_lora_file(name: str) -> bool:
    """Whether a file may have the weights of an image adapter. Hidden ones, as macOS adds to archives, do not."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def is_bare(head: bytes) -> bool:
    """Whether a file that begins with these (at least 9) bytes is a safetensors file rather than an archive."""
    return head[7:9] == _BARE


def _lora_file(place: str, names: Collection[str]) -> str:
    found = sorted(filter(is_lora_file, names))
    if LORA_FILE in found:
        return LORA_FILE
    if len(found) > 1:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise InvalidAdapter(
            f"{place} holds {len(found)} safetensors files ({', '.join(map(shown, found[:MAX_NAMED]))}{more}): one, or one"
            f" of the name {LORA_FILE}, is expected",
            param="location",
        )
    if found:
        return found[0]
    if pickles := sorted(name for name in names if name.endswith(PICKLES)):
        raise InvalidAdapter(
            f"{place} holds {shown(pickles[0])} but no safetensors file: pickle files can run code and are never opened; save"
            " the adapter as safetensors",
            param="location",
        )
    raise InvalidAdapter(f"{place} holds no LoRA file ({LORA_FILE}, or any other *{SUFFIX})", param="location")
