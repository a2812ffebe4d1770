"""The layers of a base model that an adapter could change, by name and size, from the headers of its checkpoint. No torch.

    path       model.decoder.layers.3.fc1           a module, as the checkpoint names its weight, without ".weight"
    pattern    model.decoder.layers.*.fc1           the same layer of all blocks: numbers become "*"

Every matrix in the safetensors files counts, whatever the architecture. Which of them can be adapted is the engine's to say.
An adapter names modules as transformers does, and a checkpoint may put another wrapper before the same module
(`language_model.model.layers.0` for `model.language_model.layers.0`), so wrappers are not compared. Blocks while it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from motet.shared.adapter_blob import read_header
from motet.shared.errors import MotetError
from motet.shared.hf_config import UnsupportedModel, canonical, read_raw_config

WEIGHT, OUTPUT, EMBEDDING = ".weight", "lm_head", "embed_tokens"
PACKED = (".qweight", ".weight_packed")
"""How tensors of GPTQ, AWQ and compressed-tensors end."""
TARGETS_MAX = 512
"""Patterns that a worker announces or an adapter has, at most. A large model of images and text has about fifty."""
_WRAPPERS = re.compile(r"(?:(?:model|language_model|text_model|transformer)\.)*")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")


class BaseLayer(msgspec.Struct, frozen=True):
    """A layer's weight, [rows, columns]: [out, in] of a linear layer, [tokens, width] of an embedding."""

    path: str
    rows: int
    columns: int


class BaseLayers:
    """The layers of one checkpoint. Empty when its files are not there, as with a hub id of which only `config.json` is."""

    def __init__(self, layers: Iterable[BaseLayer] = (), *, packed: bool = False) -> None:
        """`packed`: it also has quantized layers, whose sizes its headers do not tell."""
        self.packed = packed
        self._layers = {layer.path: layer for layer in layers}
        self._short: dict[str, BaseLayer | None] = {}  # None: several layers have this short name
        for path, layer in self._layers.items():
            short = _short(path)
            self._short[short] = None if short in self._short else layer
        self.patterns = frozenset(map(pattern, self._layers))

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def paths(self) -> list[str]:
        """Of every layer."""
        return [*self._layers]

    @property
    def elements(self) -> int:
        """Inputs and outputs of all layers together: elements of an adapter of rank 1 that changes each of them."""
        return sum(layer.rows + layer.columns for layer in self._layers.values())

    def find(self, path: str) -> BaseLayer | None:
        """The layer that an adapter calls `path`: the one of that name, else the only one that differs in wrappers."""
        return self._layers.get(path) or self._short.get(_short(path))

    def beside(self, path: str) -> set[str]:
        """The paths of the layers below the block `path`."""
        return {one for one in self._layers if one.startswith(path + ".")}


def read_base_layers(directory: Path) -> BaseLayers:
    """The layers of the checkpoint in `directory`; none if it has no safetensors files or one cannot be read."""
    shapes: dict[str, list[int]] = {}
    try:
        for file in _files(directory):
            with file.open("rb") as opened:
                tensors, _, _ = read_header(opened, file.stat().st_size)
            shapes |= {name: info.shape for name, info in tensors.items()}
        tied = is_tied(directory)
    except (OSError, MotetError, UnsupportedModel):
        return BaseLayers()
    layers = [
        BaseLayer(name.removesuffix(WEIGHT), *shape)
        for name, shape in shapes.items()
        if name.endswith(WEIGHT) and len(shape) == 2
    ]
    embeddings = [layer for layer in layers if layer.path.rpartition(".")[2] == EMBEDDING]
    if tied and len(embeddings) == 1 and not any(layer.path.rpartition(".")[2] == OUTPUT for layer in layers):
        layers.append(BaseLayer(OUTPUT, embeddings[0].rows, embeddings[0].columns))
    return BaseLayers(layers, packed=any(name.endswith(PACKED) for name in shapes))


def pattern(path: str) -> str:
    """`path` with "*" for each number between dots."""
    return _NUMBER.sub("*", path)


def patterns_of(paths: Iterable[str]) -> tuple[str, ...]:
    """The patterns of some paths, sorted."""
    return tuple(sorted(set(map(pattern, paths))))


def missing(targets: Iterable[str], takes: Iterable[str]) -> tuple[str, ...]:
    """Those of an adapter's `targets` that a worker which `takes` these patterns cannot change."""
    known = frozenset(takes)
    return tuple(one for one in targets if one not in known)


def is_tied(directory: Path) -> bool:
    """Whether `config.json` ties the output layer to the embeddings; in transformers most architectures do by default."""
    config: Mapping[str, object] = read_raw_config(directory)
    return bool(config.get("tie_word_embeddings", canonical(config).get("tie_word_embeddings", True)))


def _files(directory: Path) -> list[Path]:
    """The checkpoint's own files: `model*.safetensors`, else all."""
    return sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))


def _short(path: str) -> str:
    found = _WRAPPERS.match(path)
    return path[found.end() :] if found is not None else path
