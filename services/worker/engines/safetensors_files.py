"""The safetensors files of a checkpoint, and what their headers list. Reads no weights, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from motet.shared.hf_config import UnsupportedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of weights as safetensors and as torch call them."""


class Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    path: Path
    dtype: str  # as safetensors calls it
    shape: list[int]


def files_of(model_dir: Path) -> list[Path]:
    """The files of the checkpoint, confined to its directory. Raises UnsupportedModel.

    Where there is a single file and an index, the single file counts, as in transformers; vLLM takes the index.
    """
    index, single = model_dir / INDEX, model_dir / SINGLE
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UnsupportedModel(f"{index} is not a safetensors index: {error!r}") from None
        for name in outside:
            raise UnsupportedModel(f"{index} names {name!r}: shards lie in the checkpoint's own directory")
        for name in names:
            if not (model_dir / name).exists():
                raise UnsupportedModel(f"{index} names {name}, which is not there")
        return [model_dir / name for name in names]
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt*")):
        raise UnsupportedModel(f"{model_dir} holds pickled weights only; convert them to safetensors, pickle is never opened")
    raise UnsupportedModel(f"{model_dir} has neither {SINGLE} nor {INDEX}")


def opened(path: Path, framework: str = "pt") -> Any:
    """A context with a mapped safetensors file. Raises UnsupportedModel."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file: {error}") from None


def headers(paths: Iterable[Path]) -> dict[str, Stored]:
    """{name: tensor} of all files. Raises UnsupportedModel for an unreadable file and for a tensor that two files have."""
    found: dict[str, Stored] = {}
    for path in paths:
        with opened(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                piece = file.get_slice(name)
                if name in found:
                    raise UnsupportedModel(f"tensor {name} is in both {found[name].path.name} and {path.name}")
                found[name] = Stored(path, piece.get_dtype(), list(piece.get_shape()))
    return found


def stored_type(model_dir: Path) -> str:
    """The type of the first tensor of floats, as torch calls it, for a config.json that names none, as transformers does it.

    "float32" if there are no weights. Raises UnsupportedModel.
    """
    try:
        paths = files_of(model_dir)[:1]
    except UnsupportedModel:
        return "float32"
    return next((FLOATS[one.dtype] for one in headers(paths).values() if one.dtype in FLOATS), "float32")
