"""The file format of adapter weights, on the wire, on disk and in computation: `motet-lora/2`, a safetensors file.

One tensor per adapted module, named by the module, in the order of `shared.model.MODULES`, data from a 64-byte boundary on:

    tensor    [pages, layers, 8 * (in + out)]     pages = ceil(largest rank over the layers / 8); F32, F16 or BF16, all alike
    row       [page][layer] = A rows [8, in], then B^T rows [8, out], of ranks 8 * page to 8 * page + 7
    metadata  format = "motet-lora/2"
              shapes = JSON {module: [in, out]}
              ranks  = JSON {module: [rank of each layer]}       0: the layer is not adapted
              scales = JSON {module: [scale of each layer]}      alpha/r or alpha/sqrt(r); 0 with rank 0
              chat   = digest of what it brings for chats        absent for nothing

Ranks up to the next multiple of 8 and layers without an adapter are zero. A row contains the part of a page that one layer
needs. Pages equal those of a device pool (`kernels/pool.py`): a mapped blob of the engine's type is a pool of one slot. A
copy to the device copies rows, layer by layer; CPU processes compute from the same bytes.

`motet-lora/3`, for bases whose layers differ in number and size, has the same rows. Its tensors are *classes* of sites with one
role and shape (`shared.image_shapes`), in the order of their names, and each has a count of its own:

    tensor    [pages, sites of the class, 8 * (in + out)]          in: columns of A, for a convolution in * rows * columns
    metadata  format = "motet-lora/3"; shapes, ranks, scales = JSON as above, by class and, in it, by site

The form is canonical, so equal weights have an equal digest (SHA-256 of the whole file). The registry writes blobs and workers
only read them; both treat the bytes as data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta

from motet.shared.errors import InvalidAdapter
from motet.shared.model import MODULES

FORMAT = "motet-lora/2"
SITES_FORMAT = "motet-lora/3"
PAGE_RANKS = 8
ALIGNMENT = 64  # bytes: data begins on a cache line
MAX_HEADER_BYTES = 4 * 1024 * 1024  # some 20,000 tensors
MAX_SHOWN_CHARS = 200  # of a tensor's name, in errors
MAX_SCALE = 3.4e38  # what a float32 holds
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

Matrices = tuple[float, np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""(scale, A [rank, in], B [out, rank]), of any type as wide as the blob's: 16 bits may be uint16."""

Pairs = Mapping[tuple[int, str], Matrices]
"""{(layer, module): matrices}."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a safetensors file: offsets are half-open and count from the start of the data section."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=8)]
    data_offsets: tuple[int, int]


class BlobModule(msgspec.Struct, frozen=True):
    """One module of a blob. `start` is the byte offset of its first row in the file."""

    module: str  # or the class of sites
    fan_in: int
    fan_out: int
    pages: int
    ranks: tuple[int, ...]  # by layer, or by site of the class
    scales: tuple[float, ...]  # likewise
    start: int


class BlobIndex(msgspec.Struct, frozen=True):
    """A parsed blob header."""

    dtype: str
    layers: int  # of the base model
    start: int  # of the data, in bytes
    parts: tuple[BlobModule, ...]  # in the order of MODULES

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(max(part.ranks) for part in self.parts)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(part.module for part in self.parts)

    @property
    def adapted_layers(self) -> int:
        """The number of layers in which the adapter changes a module."""
        return sum(any(part.ranks[layer] for part in self.parts) for layer in range(self.layers))


class SiteIndex(msgspec.Struct, frozen=True):
    """A parsed header of a `motet-lora/3` blob."""

    dtype: str
    start: int  # of the data, in bytes
    parts: tuple[BlobModule, ...]  # one for each class, in the order of their names

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(max(part.ranks) for part in self.parts)

    @property
    def sites(self) -> int:
        """The number of sites that the adapter changes."""
        return sum(rank > 0 for part in self.parts for rank in part.ranks)


def safetensors_header(data: bytes | memoryview, size_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """(tensors, metadata, start of data) of a safetensors file of `size_bytes` whose beginning is `data`.

    Checks the rules of the format: header length, JSON, dtypes' sizes, offsets that lie inside the file, do not overlap
    and leave no gap. Raises InvalidAdapter with the reason. `data` must hold the whole header.
    """
    if size_bytes < 8 or len(data) < 8:
        raise InvalidAdapter("not a safetensors file: shorter than its 8-byte header length")
    length = int.from_bytes(data[:8], "little")
    if 8 + length > size_bytes:
        raise InvalidAdapter(f"not a safetensors file: header length {length} does not fit in {size_bytes} bytes")
    if length > MAX_HEADER_BYTES:
        raise InvalidAdapter(f"its header has {length} bytes, the limit is {MAX_HEADER_BYTES}: too many tensors or metadata")
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
        name = name[:MAX_SHOWN_CHARS]
        if begin != end or stop < begin or stop > data_bytes:
            raise InvalidAdapter(f"tensor {name}: offsets [{begin}, {stop}) overlap, leave a gap or pass the end")
        if item is not None and math.prod(info.shape) * item != stop - begin:
            raise InvalidAdapter(f"tensor {name}: shape {info.shape} of {info.dtype} does not fill its {stop - begin} bytes")
        end = stop
    if end != data_bytes:
        raise InvalidAdapter(f"{data_bytes - end} bytes after the last tensor")
    return tensors, metadata, 8 + length


def read_header(file: BinaryIO, size_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """`safetensors_header` of an open file of `size_bytes`, at its beginning."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) == 8 and length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        head += file.read(length)
    return safetensors_header(head, size_bytes)


def pages_for(rank: int) -> int:
    """The number of pages that this many ranks fill."""
    return -(-rank // PAGE_RANKS)


def data_bytes(modules: Mapping[str, tuple[int, int, int]], *, dtype: str, layers: int) -> int:
    """Bytes of a blob's data: whole pages over all layers. `modules`: {module: (largest rank, in, out)}."""
    rows = sum(pages_for(rank) * PAGE_RANKS * (fan_in + fan_out) for rank, fan_in, fan_out in modules.values())
    return rows * layers * DTYPE_BYTES[dtype]


def site_data_bytes(classes: Mapping[str, tuple[int, int, int, int]], *, dtype: str) -> int:
    """Bytes of the data of a `motet-lora/3` blob. `classes`: {class: (largest rank, in, out, number of sites)}."""
    return sum(data_bytes({name: shape[:3]}, dtype=dtype, layers=shape[3]) for name, shape in classes.items())


def write_blob(pairs: Pairs, *, dtype: str, layers: int, chat: str = "") -> bytes:
    """The blob of an adapter for a base of `layers` layers. The matrices of a module may differ in rank only.

    `chat`: the digest of what it brings for chats, so that another chat template is another version.
    """
    modules = {module: {layer: pair for (layer, name), pair in pairs.items() if name == module} for module in MODULES}
    return _write(FORMAT, {m: (mine, layers) for m, mine in modules.items() if mine}, dtype, {"chat": chat} if chat else {})


def write_site_blob(classes: Mapping[str, tuple[Mapping[int, Matrices], int]], *, dtype: str) -> bytes:
    """The `motet-lora/3` blob of an adapter. `classes`: {class: ({number of the site in it: matrices}, number of its sites)}.

    The matrices of a class may differ in rank only. A class without any is left out.
    """
    return _write(SITES_FORMAT, {name: classes[name] for name in sorted(classes) if classes[name][0]}, dtype, {})


def _write(kind: str, parts: Mapping[str, tuple[Mapping[int, Matrices], int]], dtype: str, more: Mapping[str, str]) -> bytes:
    """A blob with one tensor for each part: its matrices by row, and the number of rows."""
    header: dict[str, object] = {}
    shapes: dict[str, tuple[int, int]] = {}
    ranks: dict[str, list[int]] = {}
    scales: dict[str, list[float]] = {}
    tensors: list[np.ndarray[Any, Any]] = []
    at = 0
    for name, (mine, count) in parts.items():
        ranks[name] = [mine[row][1].shape[0] if row in mine else 0 for row in range(count)]
        scales[name] = [mine[row][0] if row in mine else 0.0 for row in range(count)]
        packed = _packed(mine, count)
        _, a, b = next(iter(mine.values()))
        shapes[name] = a.shape[1], b.shape[0]
        header[name] = {"dtype": dtype, "shape": packed.shape, "data_offsets": [at, at + packed.nbytes]}
        tensors.append(packed)
        at += packed.nbytes
    told = {"shapes": shapes, "ranks": ranks, "scales": scales}
    metadata = {"format": kind} | {name: msgspec.json.encode(value).decode() for name, value in told.items()} | dict(more)
    text = msgspec.json.encode({"__metadata__": metadata} | header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *(packed.data.cast("B") for packed in tensors)])


def _packed(mine: Mapping[int, Matrices], count: int) -> np.ndarray[Any, Any]:
    """The tensor [pages, count, 8 * (in + out)] of matrices by row."""
    _, a, b = next(iter(mine.values()))
    fan_in, fan_out = a.shape[1], b.shape[0]
    pages = pages_for(max(a.shape[0] for _, a, _ in mine.values()))
    packed = np.zeros((pages, count, PAGE_RANKS * (fan_in + fan_out)), dtype=a.dtype)
    for number, (_, a, b) in mine.items():
        for page in range(pages_for(a.shape[0])):
            row, some = packed[page, number], slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
            row[: a[some].size] = a[some].ravel()
            row[PAGE_RANKS * fan_in :][: b[:, some].size] = b[:, some].T.ravel()
    return packed


def read_index(data: bytes | memoryview, size_bytes: int) -> BlobIndex:
    """The index of a blob. Raises InvalidAdapter, naming the entry, when sizes, names or numbers are inconsistent."""
    tensors, told, start, dtype = _read_told(data, size_bytes, FORMAT)
    if not tensors or not tensors.keys() <= set(MODULES):
        raise InvalidAdapter(f"blob tensors {sorted(tensors)}: some of {', '.join(MODULES)} are expected")
    layers = len(next(iter(told.ranks.values())))
    parts = _parts([module for module in MODULES if module in tensors], tensors, told, start, layers)
    return BlobIndex(dtype=dtype, layers=layers, start=start, parts=parts)


def read_site_index(data: bytes | memoryview, size_bytes: int) -> SiteIndex:
    """The index of a `motet-lora/3` blob. Raises InvalidAdapter like `read_index`."""
    tensors, told, start, dtype = _read_told(data, size_bytes, SITES_FORMAT)
    if not tensors:
        raise InvalidAdapter("blob has no tensors")
    return SiteIndex(dtype=dtype, start=start, parts=_parts(sorted(tensors), tensors, told, start, None))


class _Told(msgspec.Struct, frozen=True):
    """What a blob's metadata say of each of its tensors."""

    shapes: dict[str, tuple[int, int]]
    ranks: dict[str, tuple[int, ...]]
    scales: dict[str, tuple[float, ...]]


def _read_told(data: bytes | memoryview, size_bytes: int, kind: str) -> tuple[dict[str, TensorInfo], _Told, int, str]:
    """(tensors, what is told of them, start of the data, dtype) of a blob of a format."""
    tensors, metadata, start = safetensors_header(data, size_bytes)
    if metadata.get("format") != kind:
        raise InvalidAdapter(f"blob format is {metadata.get('format')!r}, not {kind!r}")
    shapes = _told(metadata, "shapes", tuple[int, int])
    ranks = _told(metadata, "ranks", tuple[int, ...])
    scales = _told(metadata, "scales", tuple[float, ...])
    for name, told in (("shapes", shapes), ("ranks", ranks), ("scales", scales)):
        if told.keys() != tensors.keys():
            raise InvalidAdapter(f"blob {name} are of {sorted(told)}, its tensors are {sorted(tensors)}")
    dtypes = {info.dtype for info in tensors.values()}
    if tensors and (len(dtypes) != 1 or not dtypes <= DTYPE_BYTES.keys()):
        raise InvalidAdapter(f"blob dtypes {sorted(dtypes)}: one of {sorted(DTYPE_BYTES)} is expected")
    if start % ALIGNMENT:
        raise InvalidAdapter(f"blob data begins at byte {start}, not at a multiple of {ALIGNMENT}")
    return tensors, _Told(shapes, ranks, scales), start, min(dtypes, default="")


def _parts(
    names: Sequence[str], tensors: Mapping[str, TensorInfo], told: _Told, start: int, layers: int | None
) -> tuple[BlobModule, ...]:
    """The parts of a blob, which lie in this order. `layers`: rows of each, None where each has its own count."""
    parts = []
    for name in names:
        ranks = told.ranks[name]
        count = len(ranks) if layers is None else layers
        parts.append(_part(name, tensors[name], told.shapes[name], ranks, told.scales[name], count, start))
    if [part.start for part in parts] != sorted(part.start for part in parts):
        raise InvalidAdapter(f"blob tensors do not lie in the order {', '.join(names)}")
    return tuple(parts)


def _told(metadata: Mapping[str, str], name: str, kind: Any) -> dict[str, Any]:
    try:
        return msgspec.json.decode(metadata.get(name, ""), type=dict[str, kind])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidAdapter(f"blob {name}: {error}") from None


def _part(
    module: str,
    info: TensorInfo,
    shape: tuple[int, int],
    ranks: Sequence[int],
    scales: Sequence[float],
    layers: int,
    start: int,
) -> BlobModule:
    fan_in, fan_out = shape
    if fan_in < 1 or fan_out < 1 or len(ranks) != layers or len(scales) != layers:
        raise InvalidAdapter(f"{module}: {fan_in} -> {fan_out} with {len(ranks)} ranks and {len(scales)} scales of {layers}")
    rank_max = max(ranks, default=0)
    pages = pages_for(rank_max)
    if pages < 1 or info.shape != [pages, layers, PAGE_RANKS * (fan_in + fan_out)]:
        raise InvalidAdapter(
            f"{module}: tensor {info.shape} does not fit {fan_in} -> {fan_out}, {layers} layers and rank {rank_max}"
        )
    for layer, (rank, scale) in enumerate(zip(ranks, scales, strict=True)):
        if rank < 0 or not abs(scale) <= MAX_SCALE or (scale and not rank):
            raise InvalidAdapter(f"layers.{layer}.{module}: rank {rank} with scale {scale}")
    return BlobModule(module, fan_in, fan_out, pages, tuple(ranks), tuple(scales), start + info.data_offsets[0])


def digest_of(blob: bytes) -> str:
    """The content digest: SHA-256 in hex."""
    return hashlib.sha256(blob).hexdigest()
