"""The base model that a registry's adapters must fit, and how their files become a blob.

    config.json         a language model: adapters of PEFT, chats          `TextBase`
    model_index.json    an image model: LoRA files in any layout           `ImageBase`

Of both the configurations are read at start. The headers of a language model's checkpoint, with names and sizes of its layers,
are read when the first adapter comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from motet.services.registry.chats import ChatReader
from motet.services.registry.files import IMAGE, PEFT, Layout, PeftFiles
from motet.services.registry.image_lora import image_blob, read_image_lora
from motet.services.registry.peft import Converted, TextModel, convert
from motet.shared.adapter_blob import digest_of
from motet.shared.adapter_chat import AdapterChat
from motet.shared.base_layers import BaseLayers, read_base_layers
from motet.shared.base_shapes import BaseShapes, shapes_of
from motet.shared.base_tensors import base_tensors
from motet.shared.hf_config import UnsupportedModel, canonical, read_raw_config, size_in
from motet.shared.image_shapes import INDEX, TEXT_ENCODERS, UNET, ImageShapes, is_image_base, read_image_shapes
from motet.shared.model import TensorDigest
from motet.shared.text_files import ADDED_FILE, CONFIG_FILE, SPECIAL_MAP_FILE

BASE_FILES = (
    *("config.json", "tokenizer.json", CONFIG_FILE, SPECIAL_MAP_FILE, ADDED_FILE),
    *(INDEX, *(f"{part}/config.json" for part in (UNET, *TEXT_ENCODERS))),
)
"""What the registry reads of a base model; of a model by hub id no weights are downloaded."""
Tensors = Mapping[str, TensorDigest]


class Base(Protocol):
    """A base model. All methods block."""

    layout: Layout
    """The files of its adapters."""

    def chat(self, texts: Mapping[str, bytes]) -> AdapterChat | None:
        """What an adapter's text files say for chats; None for nothing. Raises InvalidAdapter."""
        ...

    def convert(self, files: PeftFiles, told: Sequence[Tensors], chat: str) -> Converted:
        """The blob of a valid adapter. Raises InvalidAdapter or TooLarge with the reason.

        `told`: the base's embeddings and output layer, as workers know them. `chat`: digest of what it brings for chats.
        """
        ...


def open_base(directory: Path, *, max_rank: int, max_bytes: int) -> Base:
    """The base model in `directory`. Raises UnsupportedModel naming the file, the field and the reason."""
    if is_image_base(directory):
        return ImageBase(read_image_shapes(directory), max_rank, max_bytes)
    config = read_raw_config(directory)
    try:
        shapes = shapes_of(config)
    except UnsupportedModel:
        if not read_base_layers(directory):
            raise
        shapes = None  # another architecture, for an engine that knows it
    return TextBase(directory, config, shapes, max_rank, max_bytes)


class TextBase(Base):
    """A language model."""

    layout = PEFT

    def __init__(
        self, directory: Path, config: Mapping[str, Any], shapes: BaseShapes | None, max_rank: int, max_bytes: int
    ) -> None:
        self._directory, self._shapes, self._model_type = directory, shapes, str(config.get("model_type", ""))
        self._max_rank, self._max_bytes = max_rank, max_bytes
        vocab_size = shapes.vocab_size if shapes is not None else size_in(canonical(config), "vocab_size", default=0)
        self._chats = ChatReader(directory, vocab_size)
        self._layers = BaseLayers()
        self._own_tensors: Tensors = {}

    def chat(self, texts: Mapping[str, bytes]) -> AdapterChat | None:
        return self._chats.read(texts)

    def convert(self, files: PeftFiles, told: Sequence[Tensors], chat: str) -> Converted:
        return convert(
            files.config_json,
            files.weights,
            files.size_bytes,
            TextModel(shapes=self._shapes, layers=self._known_layers(), model_type=self._model_type),
            max_rank=self._max_rank,
            max_bytes=self._max_bytes,
            base_tensors=lambda: self._tensors(told),
            chat=chat,
        )

    def _known_layers(self) -> BaseLayers:
        self._layers = self._layers or read_base_layers(self._directory)
        return self._layers

    def _tensors(self, told: Sequence[Tensors]) -> Tensors:
        """The base's embeddings and output layer: from the registry's own directory, else as a worker told them."""
        own = self._own_tensors = self._own_tensors or base_tensors(self._directory)
        return own or (told[0] if told else {})


class ImageBase(Base):
    """An image model of the Stable Diffusion family."""

    layout = IMAGE

    def __init__(self, shapes: ImageShapes, max_rank: int, max_bytes: int) -> None:
        self._shapes, self._max_rank, self._max_bytes = shapes, max_rank, max_bytes

    def chat(self, texts: Mapping[str, bytes]) -> AdapterChat | None:
        return None

    def convert(self, files: PeftFiles, told: Sequence[Tensors], chat: str) -> Converted:
        lora = read_image_lora(
            files.weights, files.size_bytes, self._shapes, max_rank=self._max_rank, max_bytes=self._max_bytes
        )
        blob = image_blob(lora, self._shapes, max_bytes=self._max_bytes)
        roles = {site.role for site in self._shapes.sites if site.path in lora.pairs}
        return Converted(
            blob=blob,
            digest=digest_of(blob),
            rank=lora.rank,
            modules=tuple(sorted(roles)),
            layers=0,
            dtype=lora.dtype,
            family=self._shapes.family,
            sites=len(lora.pairs),
        )
