"""Converts a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) to a validated `motet-lora/2` blob.

Cheap checks come first, so that a bad file costs little:

    config  ->  safetensors header  ->  every tensor's name, shape and dtype  ->  only then the weights: finite?  ->  blob

Numpy only; all functions block, so call them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import BinaryIO

import msgspec

from motet.services.registry.copies import check_copies
from motet.services.registry.files import LIMIT_OPTION, WEIGHTS, too_large
from motet.services.registry.peft_config import parse_config
from motet.services.registry.peft_plan import Pair, plan
from motet.services.registry.tensors import check_finite, numbers, read_tensor
from motet.shared.adapter_blob import data_bytes, digest_of, read_header, read_index, write_blob
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import TooLarge
from motet.shared.model import TensorDigest


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A validated adapter, ready to be stored."""

    blob: bytes
    digest: str
    rank: int  # the largest
    modules: tuple[str, ...]
    layers: int  # 0 for an image adapter
    dtype: str
    family: str = ""  # of an image adapter's base
    sites: int = 0  # of an image adapter
    left_out: tuple[str, ...] = ()  # modules of the file that have no effect, for people


def convert(
    config_json: bytes,
    weights: BinaryIO,
    size_bytes: int,
    base: BaseShapes,
    *,
    max_rank: int,
    max_bytes: int,
    base_tensors: Callable[[], Mapping[str, TensorDigest]] = dict,
    chat: str = "",
) -> Converted:
    """Validate an adapter and write its blob. `weights` is an open safetensors file of `size_bytes`, at its beginning.

    Tensors keep their dtype; a file with mixed dtypes becomes F32, which is exact. `base_tensors()`: the base's embeddings and
    output layer as far as they are known, asked for files with copies of them. `chat`: digest of what it brings for chats.
    Raises InvalidAdapter or TooLarge with the reason: `max_bytes` applies to the file and to the blob, which can be many times
    larger because of padding. For a moment memory holds the adapter's matrices and two blobs.
    """
    if size_bytes > max_bytes:
        raise too_large(WEIGHTS, size_bytes, max_bytes)
    config = parse_config(config_json)
    tensors, _, start = read_header(weights, size_bytes)
    planned = plan(config, tensors, base, max_rank)
    dtypes = {tensor.info.dtype for _, *halves in planned.pairs.values() for tensor in halves}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    _check_blob_size(planned.pairs, base, dtype, max_bytes)
    if planned.copies:
        check_copies(planned.copies, weights, start, base_tensors())
    pairs = {}
    for at, (scale, *halves) in planned.pairs.items():
        parts = [read_tensor(weights, start, tensor, WEIGHTS) for tensor in halves]
        for tensor, part in zip(halves, parts, strict=True):
            check_finite(tensor, part)
        a, b = (numbers(tensor, part, dtype) for tensor, part in zip(halves, parts, strict=True))
        pairs[at] = (scale, a, b)
    blob = write_blob(pairs, dtype=dtype, layers=base.layers, chat=chat)
    index = read_index(blob, len(blob))
    copies = tuple(f"{name}: an unchanged copy of the base model's" for name in planned.copies)
    return Converted(
        blob=blob,
        digest=digest_of(blob),
        rank=index.rank,
        modules=index.modules,
        layers=index.adapted_layers,
        dtype=index.dtype,
        left_out=planned.left_out + copies,
    )


def _check_blob_size(pairs: Mapping[tuple[int, str], Pair], base: BaseShapes, dtype: str, max_bytes: int) -> None:
    ranks: dict[str, int] = {}
    for (_, module), (_, a, _) in pairs.items():
        ranks[module] = max(a.info.shape[0], ranks.get(module, 0))
    needed = data_bytes({m: (rank, *base.linear(m)) for m, rank in ranks.items()}, dtype=dtype, layers=base.layers)
    if needed > max_bytes:
        raise TooLarge(
            f"adapter_model.safetensors needs {needed} bytes in whole pages of 8 ranks over {base.layers} layers, "
            f"the limit is {max_bytes} ({LIMIT_OPTION})"
        )
