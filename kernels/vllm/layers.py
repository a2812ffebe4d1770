"""vLLM's layers with LoRA, changed so that a slot is an index: an adapter takes the memory of its own ranks.

    linear layers          pages of `kernels.cpu.layers`. vLLM reads only shapes and types of `lora_a_stacked` and
                           `lora_b_stacked`, so these become tensors without memory
    embedding and logits   vLLM's own slots, allocated when the first adapter with such weights comes; most have none

vLLM fuses projections, slices weights for tensor parallelism and multiplies B by the scale, as always; then pages are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora import layers as classes
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA, MergedQKVParallelLinearWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from motet.kernels.cpu.layers import LayerLora
from motet.kernels.vllm import ops
from motet.kernels.vllm.said import KEPT, uncovered

LINEAR = (
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
)
"""The classes whose weights are in pages; their subclasses are not."""


class Shapes(tuple[torch.Tensor, ...]):
    """The shapes and types of a layer's A for vLLM, and the layer's adapters. The tensors have no memory."""

    lora: LayerLora


def patch() -> None:
    """Change the classes. Raises KeyError or AttributeError, before anything is changed, when vLLM lacks one of the methods."""
    linear = frozenset(getattr(classes, name) for name in LINEAR if hasattr(classes, name))
    base, merged, merged_qkv = BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA, MergedQKVParallelLinearWithLoRA
    embedding, logits = VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA
    creating = functools.partial(_creating, linear=linear)
    wanted: list[tuple[type, str, Callable[..., Any]]] = [
        (base, "create_lora_weights", creating),
        (merged, "create_lora_weights", creating),
        (merged_qkv, "create_lora_weights", creating),
        (base, "set_lora", _setting),
        (merged, "set_lora", _setting),
        (base, "reset_lora", _resetting),
        (embedding, "create_lora_weights", _creating_late),
        (embedding, "set_lora", functools.partial(_setting_late, create=vars(embedding)["create_lora_weights"])),
        (embedding, "reset_lora", _resetting_late),
        (embedding, "forward", _embedding),
        (logits, "create_lora_weights", _creating_late),
        (logits, "set_lora", functools.partial(_setting_late, create=vars(logits)["create_lora_weights"])),
        (logits, "reset_lora", _resetting_late),
        (LoRAModelManager, "_deactivate_adapter", _deactivating),
        (LoRAModelManager, "remove_all_adapters", _removing_all),
        (BaseLayerWithLoRA, "set_mapping", _mapping),
    ]
    for cls, name, function in [(cls, name, change(vars(cls)[name])) for cls, name, change in wanted]:
        setattr(cls, name, function)


def _mapping(own: Callable[..., Any]) -> Callable[..., Any]:
    """`set_mapping`, which tells a layer its wrapper: linear layers and embeddings get a name for `ops`."""

    @functools.wraps(own)
    def set_mapping(self: Any, punica_wrapper: Any) -> None:
        # a classification head is found by its wrapper, and is not compiled
        linear = isinstance(self, BaseLinearLayerWithLoRA) and not hasattr(self, "set_output_mapping")
        own(self, ops.LayerWrapper(punica_wrapper, self) if linear else punica_wrapper)
        if isinstance(self, VocabParallelEmbeddingWithLoRA):
            self.motet_name = ops.named(self)

    return set_mapping


def _creating(own: Callable[..., Any], linear: frozenset[type]) -> Callable[..., Any]:
    """`create_lora_weights` of linear layers: vLLM's own with one slot tells the shapes, then the pages are prepared."""

    @functools.wraps(own)
    def create(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        if self.__dict__.get("motet_creating"):  # the class calls its parent's
            own(self, max_loras, lora_config, model_config)
            return
        why = _why_not(self, lora_config, linear)
        if why:
            uncovered(self, why)
            own(self, max_loras, lora_config, model_config)
            return
        self.motet_creating = True
        own(self, 1, lora_config, model_config)
        self.motet_creating = False
        a, b = self.lora_a_stacked, self.lora_b_stacked
        fan_in, rank = a[0].shape[-1], a[0].shape[-2]
        if any(one.shape != (1, 1, rank, fan_in) for one in a) or any(one.shape[:2] != (1, 1) for one in b):
            raise RuntimeError(f"{type(self).__name__} has weights of another layout: {[tuple(one.shape) for one in (*a, *b)]}")
        lora = LayerLora(fan_in, [one.shape[-2] for one in b], slots=max_loras, max_rank=rank, dtype=a[0].dtype)
        shapes = Shapes(_without_memory(one, max_loras) for one in a)
        shapes.lora = lora
        self.lora_a_stacked, self.lora_b_stacked = shapes, tuple(_without_memory(one, max_loras) for one in b)
        setattr(self, KEPT, lora)

    return create


def _why_not(layer: Any, lora_config: Any, linear: frozenset[type]) -> str:
    """Why a linear layer is left to vLLM; "" if it is not."""
    if type(layer) not in linear:
        return "not a class of layers that Motet's kernels know"
    if lora_config.fully_sharded_loras:
        return "--fully-sharded-loras"
    if layer.device.type != "cpu":
        return f"it is on {layer.device}"
    if lora_config.lora_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its adapters are {lora_config.lora_dtype}"
    return ""


def _without_memory(one: torch.Tensor, slots: int) -> torch.Tensor:
    return torch.empty((slots, *one.shape[1:]), dtype=one.dtype, device="meta")


def _setting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def set_lora(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        lora: LayerLora | None = self.__dict__.get(KEPT)
        if lora is None:
            own(self, index, lora_a, lora_b)
            return
        if isinstance(lora_b, list) and len(lora_b) != self.n_slices:
            lora_a, lora_b = self.expand_packed_lora(lora_a, lora_b)
        if self.tp_size > 1:
            lora_a, lora_b = self.slice_lora_a(lora_a), self.slice_lora_b(lora_b)
        single = isinstance(lora_a, torch.Tensor)
        lora.set(index, [lora_a] if single else lora_a, [lora_b] if single else lora_b)

    return set_lora


def _resetting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def reset_lora(self: Any, index: int) -> None:
        lora: LayerLora | None = self.__dict__.get(KEPT)
        if lora is None:
            own(self, index)
        else:
            lora.reset(index)

    return reset_lora


def _deactivating(own: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter that leaves its slot gives its memory back at once; vLLM keeps it until another one takes the slot."""

    @functools.wraps(own)
    def deactivate(self: Any, lora_id: int) -> Any:
        if lora_id in self.lora_index_to_id:
            index = self.lora_index_to_id.index(lora_id)
            for layer in self.modules.values():
                lora: LayerLora | None = layer.__dict__.get(KEPT)
                if lora is not None:
                    lora.reset(index)
        return own(self, lora_id)

    return deactivate


def _removing_all(own: Callable[..., Any]) -> Callable[..., Any]:
    """Every slot is emptied, also of the adapters that a model was warmed up with."""

    @functools.wraps(own)
    def remove_all(self: Any) -> None:
        own(self)
        for layer in self.modules.values():
            lora: LayerLora | None = layer.__dict__.get(KEPT)
            for index in range(lora.slots if lora is not None else 0):
                layer.reset_lora(index)

    return remove_all


def _creating_late(own: Callable[..., Any]) -> Callable[..., Any]:
    """`create_lora_weights` of an embedding or of logits: one slot tells the shapes, the others wait for `set_lora`."""

    @functools.wraps(own)
    def create(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        own(self, 1, lora_config, model_config)
        self.lora_a_stacked = _without_memory(self.lora_a_stacked, max_loras)
        self.lora_b_stacked = _without_memory(self.lora_b_stacked, max_loras)
        if hasattr(self, "lora_a_stacked_2d"):
            self.lora_a_stacked_2d = self.lora_a_stacked.flatten(0, 1)
        self.motet_later = (max_loras, lora_config, model_config)
        self.motet_slots = set()
        self.lora_b_stacked.motet_slots = self.motet_slots

    return create


def _setting_late(own: Callable[..., Any], create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` is vLLM's own `create_lora_weights`."""

    @functools.wraps(own)
    def set_lora(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        if self.lora_b_stacked.is_meta:
            uncovered(self, "some adapters have weights for it")
            create(self, *self.motet_later)
            self.lora_b_stacked.motet_slots = self.motet_slots
        own(self, index, lora_a, lora_b)
        self.motet_slots.add(index)

    return set_lora


def _resetting_late(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def reset_lora(self: Any, index: int) -> None:
        self.motet_slots.discard(index)
        if not self.lora_b_stacked.is_meta:
            own(self, index)

    return reset_lora


def _embedding(own: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of an embedding, which is the base's unless a row's adapter has weights for it."""

    @functools.wraps(own)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return ops.embedding(self, x)
        if self.punica_wrapper.any_in(self.motet_slots):
            return own(self, x)
        return self.base_layer.forward(x)

    return forward
