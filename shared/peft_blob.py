"""Adapters whose layers no table knows, as they are stored: `motet-peft/1`, PEFT's two files in one.

A blob is a safetensors file that is PEFT's `adapter_model.safetensors` as it stands, of one type, with the tensors in the order
of their names. What `adapter_config.json` has to say is in the metadata:

    format    "motet-peft/1"
    rank      the largest rank
    scale     alpha / r of all modules. Where a file has several, each B is multiplied by its own and this is 1
    modules   JSON list of the last parts of its modules' names
    targets   JSON list of the patterns of its layers (`shared.base_layers`)
    chat      digest of what it brings for chats; absent for nothing

Tensors are called `base_model.model.<path>.lora_A.weight` and `lora_B`, of an embedding `lora_embedding_A` and `_B`, with the
path of the base's checkpoint. Data begins on a 64-byte boundary. Equal weights have an equal digest (SHA-256 of the file).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from motet.shared.adapter_blob import ALIGNMENT, DTYPE_BYTES, safetensors_header
from motet.shared.errors import InvalidAdapter

FORMAT = "motet-peft/1"
PREFIX = "base_model.model."
_names = msgspec.json.Decoder(tuple[str, ...])


class PeftIndex(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed header."""

    dtype: str
    rank: int
    scale: float
    modules: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """What belongs into `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.rank * self.scale,
            "target_modules": list(self.modules),
            "bias": "none",
        }


def half_name(path: str, half: str, *, embeds: bool) -> str:
    """The name of a tensor; `half`: "A" or "B"."""
    return f"{PREFIX}{path}.lora_embedding_{half}" if embeds else f"{PREFIX}{path}.lora_{half}.weight"


def write_peft_blob(
    tensors: Mapping[str, np.ndarray[Any, Any]],
    *,
    dtype: str,
    rank: int,
    scale: float,
    modules: Iterable[str],
    targets: Iterable[str],
    chat: str = "",
) -> bytes:
    """The blob of an adapter's tensors, all of `dtype`; BF16 is held as uint16."""
    header: dict[str, object] = {}
    at = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": tensors[name].shape, "data_offsets": [at, at + size]}
        at += size
    metadata = {"format": FORMAT, "rank": str(rank), "scale": repr(scale)}
    metadata |= {"modules": _text(modules), "targets": _text(targets)} | ({"chat": chat} if chat else {})
    text = msgspec.json.encode({"__metadata__": metadata} | header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = (np.ascontiguousarray(tensors[name]).data.cast("B") for name in sorted(tensors))
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def is_peft_blob(data: bytes | memoryview, size_bytes: int) -> bool:
    """Whether the blob has this format. Raises InvalidAdapter for no safetensors file."""
    return safetensors_header(data, size_bytes)[1].get("format") == FORMAT


def read_peft_index(data: bytes | memoryview, size_bytes: int) -> PeftIndex:
    """The header of a blob, whose beginning is `data`. Raises InvalidAdapter with the reason."""
    tensors, metadata, _ = safetensors_header(data, size_bytes)
    if metadata.get("format") != FORMAT:
        raise InvalidAdapter(f"blob format {metadata.get('format')!r}: {FORMAT} is expected")
    dtypes = {info.dtype for info in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPE_BYTES.keys():
        raise InvalidAdapter(f"blob dtypes {sorted(dtypes)}: one of {', '.join(DTYPE_BYTES)} is expected")
    try:
        return PeftIndex(
            dtype=dtypes.pop(),
            rank=int(metadata["rank"]),
            scale=float(metadata["scale"]),
            modules=_names.decode(metadata["modules"]),
            targets=_names.decode(metadata["targets"]),
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidAdapter(f"blob metadata: {error!r}") from None


def _text(names: Iterable[str]) -> str:
    return msgspec.json.encode(list(names)).decode()
