"""The one form in which adapter weights travel and rest: `motet-lora/1`, a safetensors file with canonical names.

    header metadata   format = "motet-lora/1",  scales = JSON {"layers.0.q_proj": 2.0, ...}   (alpha/r or alpha/sqrt(r))
    tensors           layers.<i>.<module>.lora_A  [r, in]      layers.<i>.<module>.lora_B  [out, r]

Tensors stand layer by layer, modules in the order of `shared.model.MODULES`, A before B, without gaps: a worker can bring
in layer i with one contiguous read. The header is written canonically, so equal weights have an equal digest (SHA-256 of
the whole file). The registry writes blobs, workers only read them; both treat the bytes as data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.errors import InvalidAdapter
from shared.model import MODULES

FORMAT = "motet-lora/1"
Data = bytes | memoryview
MAX_HEADER_BYTES = 4 * 1024 * 1024  # some 20,000 tensors
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a safetensors file: offsets are half-open and count from the start of the data section."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=8)]
    data_offsets: tuple[int, int]


class LoraTensors(msgspec.Struct, frozen=True):
    """Where one module's pair of matrices lies in the file, as absolute byte ranges, and its scale."""

    layer: int
    module: str
    rank: int
    scale: float
    a_shape: tuple[int, int]  # [r, in]
    b_shape: tuple[int, int]  # [out, r]
    a_bytes: tuple[int, int]
    b_bytes: tuple[int, int]


class BlobIndex(msgspec.Struct, frozen=True):
    """A parsed blob header. `pairs` in file order."""

    dtype: str
    rank: int  # the largest
    modules: tuple[str, ...]
    layers: int  # how many distinct layers
    pairs: list[LoraTensors]


def safetensors_header(data: bytes | memoryview, size_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """(tensors, metadata, start of data) of a safetensors file of `size_bytes` whose beginning is `data`.

    Checks what the format promises: header length, JSON, dtypes' sizes, offsets that lie inside the file, do not overlap
    and leave no gap. Raises InvalidAdapter with the reason. `data` must hold the whole header.
    """
    if size_bytes < 8 or len(data) < 8:
        raise InvalidAdapter("not a safetensors file: shorter than its 8-byte header length")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > size_bytes:
        raise InvalidAdapter(f"not a safetensors file: header length {length} does not fit in {size_bytes} bytes")
    try:
        raw = msgspec.json.decode(bytes(data[8 : 8 + length]), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(value, type=TensorInfo) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapter(f"not a safetensors file: bad header: {error}") from None
    end, data_bytes = 0, size_bytes - 8 - length
    for name, info in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, stop = info.data_offsets
        item = DTYPE_BYTES.get(info.dtype)
        if begin != end or stop < begin or stop > data_bytes:
            raise InvalidAdapter(f"tensor {name}: offsets [{begin}, {stop}) overlap, leave a gap or pass the end")
        if item is not None and math.prod(info.shape) * item != stop - begin:
            raise InvalidAdapter(f"tensor {name}: shape {info.shape} of {info.dtype} does not fill its {stop - begin} bytes")
        end = stop
    if end != data_bytes:
        raise InvalidAdapter(f"{data_bytes - end} bytes after the last tensor")
    return tensors, metadata, 8 + length


def write_blob(pairs: Mapping[tuple[int, str], tuple[float, TensorInfo, Data, TensorInfo, Data]]) -> bytes:
    """A blob from {(layer, module): (scale, A's dtype and shape, A's bytes, B's dtype and shape, B's bytes)}."""
    header: dict[str, object] = {}
    scales: dict[str, float] = {}
    chunks: list[Data] = []
    at = 0
    for (layer, module), (scale, a_info, a_data, b_info, b_data) in sorted(
        pairs.items(), key=lambda item: (item[0][0], MODULES.index(item[0][1]))
    ):
        key = f"layers.{layer}.{module}"
        scales[key] = scale
        for suffix, info, data in (("lora_A", a_info, a_data), ("lora_B", b_info, b_data)):
            header[f"{key}.{suffix}"] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [at, at + len(data)]}
            chunks.append(data)
            at += len(data)
    metadata = {"format": FORMAT, "scales": msgspec.json.encode(scales).decode()}
    text = msgspec.json.encode({"__metadata__": metadata} | header)
    text += b" " * (-(8 + len(text)) % 64)  # data begins on a cache line
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def read_index(data: bytes | memoryview, size_bytes: int) -> BlobIndex:
    """The index of a blob. Raises InvalidAdapter when it is not one."""
    tensors, metadata, start = safetensors_header(data, size_bytes)
    if metadata.get("format") != FORMAT:
        raise InvalidAdapter(f"blob format is {metadata.get('format')!r}, not {FORMAT!r}")
    try:
        scales = msgspec.json.decode(metadata.get("scales", ""), type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise InvalidAdapter(f"blob scales: {error}") from None
    pairs = []
    for key, scale in scales.items():
        a, b = tensors.get(f"{key}.lora_A"), tensors.get(f"{key}.lora_B")
        word, number, module = key.split(".") if key.count(".") == 2 else ("", "", "")
        if a is None or b is None or word != "layers" or not number.isdigit() or module not in MODULES:
            raise InvalidAdapter(f"blob entry {key!r} is incomplete or misnamed")
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.dtype != b.dtype:
            raise InvalidAdapter(f"blob entry {key!r}: A {a.shape} and B {b.shape} do not belong together")
        pairs.append(
            LoraTensors(
                layer=int(number),
                module=module,
                rank=a.shape[0],
                scale=scale,
                a_shape=(a.shape[0], a.shape[1]),
                b_shape=(b.shape[0], b.shape[1]),
                a_bytes=(start + a.data_offsets[0], start + a.data_offsets[1]),
                b_bytes=(start + b.data_offsets[0], start + b.data_offsets[1]),
            )
        )
    if not pairs or len(tensors) != 2 * len(pairs):
        raise InvalidAdapter(f"blob has {len(tensors)} tensors for {len(pairs)} entries")
    dtypes = {info.dtype for info in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPE_BYTES.keys():
        raise InvalidAdapter(f"blob dtypes {sorted(dtypes)}: one of {sorted(DTYPE_BYTES)} is expected")
    present = {pair.module for pair in pairs}
    return BlobIndex(
        dtype=dtypes.pop(),
        rank=max(pair.rank for pair in pairs),
        modules=tuple(m for m in MODULES if m in present),
        layers=len({pair.layer for pair in pairs}),
        pairs=pairs,
    )


def digest_of(blob: bytes) -> str:
    """The content digest: SHA-256 in hex."""
    return hashlib.sha256(blob).hexdigest()
