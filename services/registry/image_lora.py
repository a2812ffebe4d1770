"""Reads a LoRA adapter of an image checkpoint, one safetensors file in any of the layouts of `image_names`.

Cheap checks come first, so that a bad file costs little:

    size  ->  safetensors header, metadata  ->  every tensor's name, shape, dtype and scale  ->  only then the weights: finite?

A convolution has matrices, too: A [rank, in * rows * columns] and B [out, rank], so scale * B @ A, given the shape of the
convolution's weights, is what the adapter adds to them. Numpy only; all functions block, so call them in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec
import numpy as np

from motet.services.registry.files import LIMIT_OPTION, shown, too_large
from motet.services.registry.image_names import ALPHA, FOREIGN, MID, A, B, Names, check_family
from motet.services.registry.patterns import assign
from motet.services.registry.peft_config import PeftConfig, parse_config
from motet.services.registry.tensors import MAX_NAME_CHARS, Tensor, as_f32, check_finite, numbers, read_tensor
from motet.shared.adapter_blob import DTYPE_BYTES, MAX_SCALE, Matrices, read_header, site_data_bytes, write_site_blob
from motet.shared.errors import InvalidAdapter, TooLarge
from motet.shared.image_shapes import TEXT_ENCODERS, UNET, ImageShapes, Site

FILE = "the adapter's file"
CONFIGURATION = "lora_adapter_metadata"
_ALPHA_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_HALF_NAMES = {A: "lora_A (lora_down)", B: "lora_B (lora_up)"}


class ImageLora(msgspec.Struct, frozen=True, kw_only=True):
    """A validated adapter."""

    pairs: dict[str, Matrices]
    """{path of a site: (scale, A [rank, fan in], B [out, rank])}, in the order of the base's sites. BF16 is held as uint16."""
    dtype: str  # F32, F16 or BF16

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(a.shape[0] for _, a, _ in self.pairs.values())


class _Planned(msgspec.Struct, frozen=True):
    site: Site
    scale: float
    rank: int
    halves: dict[str, Tensor]


def read_image_lora(weights: BinaryIO, size_bytes: int, base: ImageShapes, *, max_rank: int, max_bytes: int) -> ImageLora:
    """Validate an adapter. `weights` is an open safetensors file of `size_bytes`, at its beginning.

    Matrices keep their dtype; a file with mixed dtypes, or with convolutions in three factors (`lora_mid`, which are multiplied
    out), becomes F32. Without an alpha or a configuration the scale is 1. Raises InvalidAdapter or TooLarge with the reason:
    `max_bytes` applies to the file and to the matrices made of it.
    """
    if size_bytes > max_bytes:
        raise too_large(FILE, size_bytes, max_bytes)
    tensors, metadata, start = read_header(weights, size_bytes)
    check_family(metadata, base.family)
    found, modules = _placed({key: Tensor(key, info) for key, info in tensors.items()}, Names(base))
    configs = _configs(metadata.get(CONFIGURATION))
    patterns = _patterns(configs, modules)
    planned = []
    for site in base.sites:
        if (halves := found.get(site.path)) is None:
            continue
        rank = _check_shapes(site, halves)
        if rank > max_rank:
            raise InvalidAdapter(
                f"tensor {halves[A].key}: rank {rank} is over the limit of {max_rank} (--max-lora-rank of registry and workers)"
            )
        alpha = _alpha(weights, start, halves[ALPHA]) if ALPHA in halves else None
        scale = _scale(halves[A], rank, alpha, configs.get(site.part), patterns.get(site.path, (None, None)))
        planned.append(_Planned(site, scale, rank, halves))
    return _read(weights, start, planned, max_bytes)


def image_blob(lora: ImageLora, base: ImageShapes, *, max_bytes: int) -> bytes:
    """The `motet-lora/3` blob of an adapter that was read for `base`.

    Raises TooLarge: it can be many times larger than the file, because a class has whole pages for all its sites.
    """
    classes: dict[str, tuple[dict[int, Matrices], int]] = {}
    needed = {}
    for name, sites in base.classes().items():
        mine = {number: lora.pairs[site.path] for number, site in enumerate(sites) if site.path in lora.pairs}
        if mine:
            classes[name] = mine, len(sites)
            rank = max(a.shape[0] for _, a, _ in mine.values())
            needed[name] = rank, sites[0].fan_in, sites[0].size_out, len(sites)
    size = site_data_bytes(needed, dtype=lora.dtype)
    if size > max_bytes:
        raise TooLarge(
            f"{FILE} needs {size} bytes in whole pages of 8 ranks over all sites of a class, the limit is {max_bytes} "
            f"({LIMIT_OPTION})",
            param="location",
        )
    return write_site_blob(classes, dtype=lora.dtype)


def _placed(tensors: Mapping[str, Tensor], names: Names) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, str]]]:
    """({path of a site: {what: tensor}}, {part: {module's name in the file: path of its site}})."""
    found: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, dict[str, str]] = {}
    for key, tensor in tensors.items():
        if len(key) > MAX_NAME_CHARS:
            raise InvalidAdapter(f"tensor {shown(key)}: its name is longer than {MAX_NAME_CHARS} characters")
        site, what, module = names.place(key)
        halves = found.setdefault(site.path, {})
        if what in halves:
            raise InvalidAdapter(f"tensor {key}: the file holds this tensor of {site.path} twice")
        halves[what] = tensor
        modules.setdefault(site.part, {})[module] = site.path
    for halves in found.values():
        for missing in {A, B} - halves.keys():
            there = next(iter(halves.values()))
            raise InvalidAdapter(f"tensor {there.key}: {_HALF_NAMES[missing]} of the same module is missing")
    if not found:
        raise InvalidAdapter(f"{FILE} holds no LoRA matrices")
    return found, modules


def _configs(text: str | None) -> dict[str, PeftConfig]:
    """{part: its PEFT configuration}, which diffusers writes into the file's metadata: `{"unet.r": 8, ...}`."""
    if text is None:
        return {}
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIGURATION} is not a JSON object: {shown(error)}", param=CONFIGURATION) from None
    parts: dict[str, dict[str, Any]] = {}
    for key, value in raw.items():
        part, _, field = key.partition(".")
        if part not in (UNET, *TEXT_ENCODERS):
            raise InvalidAdapter(
                f"{CONFIGURATION} has {shown(key)}: unet, text_encoder and text_encoder_2 are served", param=CONFIGURATION
            )
        parts.setdefault(part, {"peft_type": "LORA"})[field] = value
    return {part: parse_config(msgspec.json.encode(one), f"{part} in {CONFIGURATION}") for part, one in parts.items()}


def _patterns(
    configs: Mapping[str, PeftConfig], modules: Mapping[str, Mapping[str, str]]
) -> dict[str, tuple[str | None, str | None]]:
    """{path of a site: the keys of rank_pattern and alpha_pattern that apply to it}. Blocks for a while for expressions."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for part, config in configs.items():
        paths = modules.get(part, {})
        ranks = assign("rank_pattern", list(config.rank_pattern), list(paths))
        alphas = assign("alpha_pattern", list(config.alpha_pattern), list(paths))
        found |= {site: (ranks.get(path), alphas.get(path)) for path, site in paths.items()}
    return found


def _check_shapes(site: Site, halves: Mapping[str, Tensor]) -> int:
    """The rank of a site's tensors, whose shapes must be those of the base's layer. A 1x1 kernel may be left out."""
    a, b, mid = halves[A], halves[B], halves.get(MID)
    for tensor in (a, b, mid):
        if tensor is not None and tensor.info.dtype not in DTYPE_BYTES:
            raise InvalidAdapter(
                f"tensor {tensor.key}: dtype {shown(tensor.info.dtype)}, one of {', '.join(DTYPE_BYTES)} is expected"
            )
    rank = a.info.shape[0] if a.info.shape else 0
    if rank < 1:
        raise InvalidAdapter(f"tensor {a.key}: shape {a.info.shape} is not a matrix")
    square = [site.kernel, site.kernel]
    _expect(a, [rank, site.size_in, *([1, 1] if mid else square)], site)
    rank_b = b.info.shape[1] if len(b.info.shape) > 1 else 0
    _expect(b, [site.size_out, rank_b, 1, 1], site)
    if rank_b != rank:
        raise InvalidAdapter(f"tensor {b.key}: rank {rank_b}, but {a.key} has rank {rank}")
    if mid is not None and mid.info.shape != [rank, rank, *square]:
        raise InvalidAdapter(f"tensor {mid.key}: shape {mid.info.shape}, but {[rank, rank, *square]} is expected")
    return rank


def _expect(tensor: Tensor, shape: list[int], site: Site) -> None:
    allowed = [shape, shape[:2]] if shape[2:] == [1, 1] else [shape]
    if tensor.info.shape not in allowed or min(shape) < 1:
        raise InvalidAdapter(
            f"tensor {tensor.key}: shape {tensor.info.shape}, but the base model's {site.path} has "
            f"{site.size_in} inputs, {site.size_out} outputs and a kernel of {site.kernel}x{site.kernel}{FOREIGN}"
        )


def _alpha(weights: BinaryIO, start: int, tensor: Tensor) -> float:
    """The number in an alpha tensor."""
    kind, (begin, end) = _ALPHA_TYPES.get(tensor.info.dtype), tensor.info.data_offsets
    if kind is None or math.prod(tensor.info.shape) != 1 or end - begin != np.dtype(kind).itemsize:
        raise InvalidAdapter(
            f"tensor {tensor.key}: {shown(tensor.info.dtype)} of shape {tensor.info.shape}, but an alpha is one number"
        )
    data = read_tensor(weights, start, tensor, FILE)
    value = float((as_f32(data, "BF16") if tensor.info.dtype == "BF16" else np.frombuffer(data, kind))[0])
    if not math.isfinite(value) or value == 0:
        raise InvalidAdapter(f"tensor {tensor.key}: alpha is {value}, so the adapter would have no effect or no finite one")
    return value


def _scale(
    tensor: Tensor, rank: int, alpha: float | None, config: PeftConfig | None, keys: tuple[str | None, str | None]
) -> float:
    """alpha / rank, or alpha / sqrt(rank) with use_rslora; 1 where the file tells neither."""
    divisor = float(rank)
    if config is not None:
        if alpha is not None:
            raise InvalidAdapter(f"tensor {tensor.key}: the file has its alpha twice, as a tensor and in {CONFIGURATION}")
        told = config.r if keys[0] is None else config.rank_pattern[keys[0]]
        if told != rank:
            raise InvalidAdapter(f"tensor {tensor.key}: rank {rank}, but {CONFIGURATION} says {told}", param=CONFIGURATION)
        alpha = config.lora_alpha if keys[1] is None else config.alpha_pattern[keys[1]]
        divisor = math.sqrt(rank) if config.use_rslora else divisor
    scale = 1.0 if alpha is None else alpha / divisor
    if scale == 0 or not abs(scale) <= MAX_SCALE:
        raise InvalidAdapter(
            f"tensor {tensor.key}: alpha {alpha} with rank {rank} gives scale {scale}, which has no finite effect"
        )
    return scale


def _read(weights: BinaryIO, start: int, planned: list[_Planned], max_bytes: int) -> ImageLora:
    """The matrices of what was planned."""
    dtypes = {one.halves[half].info.dtype for one in planned for half in (A, B)}
    dtype = dtypes.pop() if len(dtypes) == 1 and not any(MID in one.halves for one in planned) else "F32"
    needed = sum(one.rank * (one.site.fan_in + one.site.size_out) for one in planned) * DTYPE_BYTES[dtype]
    if needed > max_bytes:
        raise TooLarge(f"{FILE} needs {needed} bytes as {dtype}, the limit is {max_bytes} ({LIMIT_OPTION})", param="location")
    pairs = {}
    for one in planned:
        parts = {}
        for half in (A, B, MID):
            if (tensor := one.halves.get(half)) is not None:
                data = read_tensor(weights, start, tensor, FILE)
                check_finite(tensor, data)
                parts[half] = numbers(tensor, data, dtype)
        a = parts[A].reshape(one.rank, -1)
        if MID in parts:
            a = _multiplied_out(one.halves[MID], parts[MID], a)
        pairs[one.site.path] = (one.scale, a, parts[B].reshape(one.site.size_out, one.rank))
    return ImageLora(pairs=pairs, dtype=dtype)


def _multiplied_out(tensor: Tensor, mid: np.ndarray[Any, Any], a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A [rank, in * rows * columns] of a 1x1 convolution A [rank, in] and the one after it, mid [rank, rank, rows, columns]."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.tensordot(a, mid, axes=([0], [1])).transpose(1, 0, 2, 3)
    if not np.isfinite(product).all():
        raise InvalidAdapter(f"tensor {tensor.key}: multiplied out, it is not finite")
    return np.ascontiguousarray(product).reshape(a.shape[0], -1)
