"""Converts a PEFT adapter of any layers of the base to a validated `motet-peft/1` blob.

Where the table of seven modules (`peft`) does not know a layer, the base's own checkpoint says whether there is such a layer
and what size it has. Which workers can run the adapter is not decided here: the blob names its layers (`targets`), and workers
announce those that they can change.

The checks come in the order of `peft`. Numpy only; all functions block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from motet.services.registry.copies import check_copies
from motet.services.registry.files import LIMIT_OPTION, WEIGHTS, shown
from motet.services.registry.patterns import assign
from motet.services.registry.peft_config import PeftConfig
from motet.services.registry.peft_plan import (
    FOREIGN,
    Loras,
    Pair,
    Sorted,
    check_matrix,
    in_table,
    left_out,
    not_lora,
    scaled_pair,
)
from motet.services.registry.tensors import Tensor, as_f32, check_finite, numbers, read_tensor
from motet.shared.adapter_blob import DTYPE_BYTES
from motet.shared.base_layers import EMBEDDING, TARGETS_MAX, BaseLayer, BaseLayers, patterns_of
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import InvalidAdapter, TooLarge
from motet.shared.model import TensorDigest
from motet.shared.peft_blob import half_name, write_peft_blob

_HALF = re.compile(r"(?:(embedding)_)?([AB])(?:\.default)?(?:\.weight)?")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.+)")


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken from a file."""

    pairs: dict[str, Pair]  # by path of the base's layer
    embeddings: frozenset[str]  # of the paths, those whose tensors are an embedding's
    left_out: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The patterns of its layers."""
        return patterns_of(self.pairs)

    @property
    def modules(self) -> tuple[str, ...]:
        """The last parts of their names."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.pairs}))

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(a.info.shape[0] for _, a, _ in self.pairs.values())


def needs_layers(paths: Iterable[str], shapes: BaseShapes, layers: BaseLayers) -> bool:
    """Whether the table of seven modules does not say all of this adapter: it changes another layer, or the base's differ.

    A layer that the base lacks altogether, such as one after the last, is the table's to refuse.
    """
    for path in paths:
        at = in_table(path, shapes)
        if at is None:
            return True
        there = layers.find(path)
        if there is not None and (there.columns, there.rows) != shapes.linear(at[1]):
            return True
        if there is None and layers and not layers.packed and layers.find(re.sub(r"layers\.\d+", "layers.0", path)) is None:
            return True
    return False


def plan_layers(config: PeftConfig, file: Sorted, layers: BaseLayers, max_rank: int) -> LayerPlan:
    """What a file's header holds, and what of it the configuration selects. Raises InvalidAdapter naming the tensor."""
    loras, paths = file.loras, [path for path in file.loras if path in file.chosen]
    if not layers:
        raise not_lora(
            _first_other(loras, paths),
            ", and the registry has no safetensors files of the base model to check other layers against: give it a --model"
            " directory that has them",
        )
    rank_keys = assign("rank_pattern", list(config.rank_pattern), paths)
    alpha_keys = assign("alpha_pattern", list(config.alpha_pattern), paths)
    pairs: dict[str, Pair] = {}
    embeddings: set[str] = set()
    for path in paths:
        layer = layers.find(path)
        if layer is None:
            raise InvalidAdapter(
                f"tensor {shown(loras[path][0][1].key)}: the base model has no linear layer {shown(path)}{FOREIGN}"
            )
        halves, embeds = _halves(loras[path])
        if layer.path in pairs:
            raise InvalidAdapter(f"tensor {halves['A'].key}: the file changes {layer.path} twice, under two names")
        if embeds:
            embeddings.add(layer.path)
        elif path.rpartition(".")[2] == EMBEDDING:
            raise InvalidAdapter(f"tensor {halves['A'].key}: an embedding's matrices are called lora_embedding_A and _B")
        keys = rank_keys.get(path), alpha_keys.get(path)
        pairs[layer.path] = scaled_pair(config, halves["A"], halves["B"], _linear(layer, embeds=embeds), keys, max_rank)
    _check_experts(pairs, layers)
    found = LayerPlan(pairs=pairs, embeddings=frozenset(embeddings), left_out=left_out(loras, file.chosen))
    if len(found.targets) > TARGETS_MAX:
        raise InvalidAdapter(f"the adapter changes {len(found.targets)} different kinds of layers, the limit is {TARGETS_MAX}")
    return found


def layers_blob(
    planned: LayerPlan,
    copies: Mapping[str, Tensor],
    weights: BinaryIO,
    start: int,
    *,
    max_bytes: int,
    base_tensors: Callable[[], Mapping[str, TensorDigest]],
    chat: str,
) -> tuple[bytes, str]:
    """(blob, dtype) of what was planned. `weights`: the open file, whose data begins at `start`.

    Tensors keep their type. A file with mixed types, or with several scales, becomes F32. Raises InvalidAdapter or TooLarge.
    """
    scales = {scale for scale, _, _ in planned.pairs.values()}
    dtypes = {tensor.info.dtype for _, *halves in planned.pairs.values() for tensor in halves}
    dtype = dtypes.pop() if len(dtypes) == 1 and len(scales) == 1 else "F32"
    elements = sum(int(np.prod(tensor.info.shape)) for _, *halves in planned.pairs.values() for tensor in halves)
    if elements * DTYPE_BYTES[dtype] > max_bytes:
        needed = elements * DTYPE_BYTES[dtype]
        raise TooLarge(f"{WEIGHTS} needs {needed} bytes as {dtype}, the limit is {max_bytes} ({LIMIT_OPTION})")
    if copies:
        check_copies(copies, weights, start, base_tensors())
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for path, (scale, a, b) in planned.pairs.items():
        for half, tensor in (("A", a), ("B", b)):
            data = read_tensor(weights, start, tensor, WEIGHTS)
            check_finite(tensor, data)
            found = numbers(tensor, data, dtype)
            if half == "B" and len(scales) > 1:
                found = _scaled(tensor, as_f32(data, tensor.info.dtype).reshape(tensor.info.shape), scale)
            tensors[half_name(path, half, embeds=path in planned.embeddings)] = found
    blob = write_peft_blob(
        tensors,
        dtype=dtype,
        rank=planned.rank,
        scale=scales.pop() if len(scales) == 1 else 1.0,
        modules=planned.modules,
        targets=planned.targets,
        chat=chat,
    )
    return blob, dtype


def _scaled(tensor: Tensor, matrix: np.ndarray[Any, Any], scale: float) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        product = matrix * np.float32(scale)
    if not np.isfinite(product).all():
        raise InvalidAdapter(f"tensor {tensor.key}: times its scale {scale} it is not finite")
    return product


def _first_other(loras: Loras, paths: Sequence[str]) -> str:
    """The first tensor, for people, that is not in the table; the first of all if each looks like it."""
    return loras[next((path for path in paths if not path.endswith("_proj")), paths[0])][0][1].key


def _halves(parts: list[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """({A, B: tensor}, whether they are an embedding's) of one module."""
    found: dict[str, Tensor] = {}
    embeds = False
    for rest, tensor in parts:
        match = _HALF.fullmatch(rest)
        if match is None or (match[1] is None) != rest.endswith(".weight"):
            raise InvalidAdapter(f"tensor {shown(tensor.key)}: not a LoRA matrix")
        if match[2] in found:
            raise InvalidAdapter(f"tensor {shown(tensor.key)}: the file holds this matrix twice")
        check_matrix(tensor)
        embeds = match[1] is not None
        found[match[2]] = tensor
    if len(found) != 2:
        there, missing = ("A", "B") if "A" in found else ("B", "A")
        raise InvalidAdapter(f"tensor {shown(found[there].key)}: lora_{missing} of the same module is missing")
    return found, embeds


def _linear(layer: BaseLayer, *, embeds: bool) -> tuple[int, int]:
    """(inputs, outputs) as the columns of A and the rows of B have them; an embedding's inputs are tokens."""
    return (layer.rows, layer.columns) if embeds else (layer.columns, layer.rows)


def _check_experts(pairs: Mapping[str, Pair], layers: BaseLayers) -> None:
    """Raises InvalidAdapter unless all experts of a block are changed, in all their layers and with one rank in each.

    Engines compute all experts of a block in one kernel, from stacked matrices.
    """
    ranks: dict[tuple[str, str], int] = {}
    found: dict[str, set[str]] = {}
    for path, (_, a, _) in pairs.items():
        if (match := _EXPERT.fullmatch(path)) is None:
            continue
        found.setdefault(match[1], set()).add(path)
        rank = ranks.setdefault((match[1], match[2]), a.info.shape[0])
        if a.info.shape[0] != rank:
            raise InvalidAdapter(f"tensor {a.key}: rank {a.info.shape[0]}, but other experts of {match[1]} have {rank}")
    for block, mine in found.items():
        missing = sorted(layers.beside(block) - mine)
        if missing:
            one = pairs[min(mine)][1]
            raise InvalidAdapter(
                f"tensor {one.key}: {missing[0]} is not changed; an adapter of experts changes all of {block}, in all layers"
            )
