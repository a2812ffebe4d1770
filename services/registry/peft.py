"""Converts a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) to a validated blob.

    motet-lora/2    it changes some of the seven layers of a Llama-shaped decoder, which every engine for text computes
    motet-peft/1    it changes other layers of the base, or the base has other sizes: `peft_layers`

Cheap checks come first, so that a bad file costs little:

    config  ->  safetensors header  ->  every tensor's name, shape and dtype  ->  only then the weights: finite?  ->  blob

Numpy only; all functions block, so call them in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

import msgspec

from motet.services.registry.copies import check_copies
from motet.services.registry.files import LIMIT_OPTION, WEIGHTS, too_large
from motet.services.registry.peft_config import PeftConfig, parse_config
from motet.services.registry.peft_layers import layers_blob, needs_layers, plan_layers
from motet.services.registry.peft_plan import Pair, Sorted, plan, sort
from motet.services.registry.tensors import check_finite, numbers, read_tensor
from motet.shared.adapter_blob import data_bytes, digest_of, read_header, read_index, write_blob
from motet.shared.base_layers import BaseLayers, pattern
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import TooLarge
from motet.shared.model import TensorDigest

_BLOCK = re.compile(r"[^0-9]*?\.\d+(?=\.)")


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
    targets: tuple[str, ...] = ()  # of a `motet-peft/1` blob: patterns of its layers


class TextModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a registry knows of its base model's layers."""

    shapes: BaseShapes | None  # None for a model that is not Llama-shaped
    layers: BaseLayers  # of its checkpoint
    model_type: str


def convert(
    config_json: bytes,
    weights: BinaryIO,
    size_bytes: int,
    base: TextModel | BaseShapes,
    *,
    max_rank: int,
    max_bytes: int,
    base_tensors: Callable[[], Mapping[str, TensorDigest]] = dict,
    chat: str = "",
) -> Converted:
    """Validate an adapter and write its blob. `weights` is an open safetensors file of `size_bytes`, at its beginning.

    `base`: `BaseShapes` alone where the checkpoint's files are not known.

    Tensors keep their dtype; a file with mixed dtypes becomes F32, which is exact. `base_tensors()`: the base's embeddings and
    output layer as far as they are known, asked for files with copies of them. `chat`: digest of what it brings for chats.
    Raises InvalidAdapter or TooLarge with the reason: `max_bytes` applies to the file and to the blob, which can be many times
    larger because of padding. For a moment memory holds the adapter's matrices and two blobs.
    """
    if size_bytes > max_bytes:
        raise too_large(WEIGHTS, size_bytes, max_bytes)
    if isinstance(base, BaseShapes):
        base = TextModel(shapes=base, layers=BaseLayers(), model_type=base.model_type)
    config = parse_config(config_json)
    tensors, _, start = read_header(weights, size_bytes)
    file = sort(config, tensors, base.model_type)
    if base.shapes is not None and not needs_layers(file.chosen, base.shapes, base.layers):
        return _from_table(config, file, weights, start, base.shapes, max_rank, max_bytes, base_tensors, chat)
    planned = plan_layers(config, file, base.layers, max_rank)
    blob, dtype = layers_blob(planned, file.copies, weights, start, max_bytes=max_bytes, base_tensors=base_tensors, chat=chat)
    return Converted(
        blob=blob,
        digest=digest_of(blob),
        rank=planned.rank,
        modules=planned.modules,
        layers=_blocks(planned.pairs),
        dtype=dtype,
        left_out=planned.left_out + _copies(file.copies),
        targets=planned.targets,
    )


def _from_table(
    config: PeftConfig,
    file: Sorted,
    weights: BinaryIO,
    start: int,
    base: BaseShapes,
    max_rank: int,
    max_bytes: int,
    base_tensors: Callable[[], Mapping[str, TensorDigest]],
    chat: str,
) -> Converted:
    """The `motet-lora/2` blob of an adapter of the seven layers."""
    planned = plan(config, file, base, max_rank)
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
    return Converted(
        blob=blob,
        digest=digest_of(blob),
        rank=index.rank,
        modules=index.modules,
        layers=index.adapted_layers,
        dtype=index.dtype,
        left_out=planned.left_out + _copies(planned.copies),
    )


def _copies(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}: an unchanged copy of the base model's" for name in names)


def _blocks(paths: Iterable[str]) -> int:
    """How many blocks these layers are in; a layer outside of all blocks counts for one."""
    return len({path[: at.end()] if (at := _BLOCK.match(path)) is not None else pattern(path) for path in paths})


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
