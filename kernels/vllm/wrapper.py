"""vLLM's wrapper of LoRA kernels on a CPU, with Motet's for linear layers. All else is computed by vLLM's class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from motet.kernels.cpu.layers import LayerBatch, LayerLora, add_layer_lora, slots_of

_STATE = (
    "_token_lora_indices",
    "_sampler_indices",
    "_sampler_indices_padded",
    "_embeddings_indices",
    "_seq_start_locs",
    "_seq_lengths",
    "_lora_indices_per_batch",
    "indices_len",
    "batch_size",
    "max_length",
    "token_nums",
    "is_prefill",
    "no_lora",
)
"""What `update_metadata` of vLLM's class computes for its own kernels. Here it is computed when something reads it."""


class PunicaWrapperMotet(PunicaWrapperCPU):
    """LoRA of one model's layers. One step at a time: `update_metadata` tells each row's adapter, then the layers call."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        self._later: tuple[Any, ...] | None = None
        self._active: frozenset[int] = frozenset()
        self._batch = LayerBatch.build(np.zeros(0, np.int32))
        self._parts: dict[int, LayerBatch] = {}
        ours = {*vars(self), "device"}
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._lazy = set(vars(self)) - ours <= set(_STATE)  # else vLLM's class has more that we do not know

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """`mapping.index_mapping`: the number of each row's adapter, 0 for none; `lora_index_to_id`: that of each slot."""
        self._later = (mapping, list(lora_index_to_id), max_loras, vocab_size, kwargs)
        rows = slots_of(mapping.index_mapping, lora_index_to_id)
        self._batch, self._parts = LayerBatch.build(rows), {}
        self._active = frozenset(np.unique(rows[rows >= 0]).tolist())
        if not self._lazy:
            self._own_metadata()

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y [rows, sum of slices] += x [rows, in] A^T B^T of each row's adapter, in place."""
        layer: LayerLora | None = getattr(lora_a_stacked, "lora", None)
        if layer is None:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, add_inputs=add_inputs, **kwargs)
            return
        if not add_inputs:
            y.zero_()
        batch = self._batch_of(x)
        if not batch.adapted:
            return
        if scale == 1.0 and x.dtype is layer.dtype and y.dtype is layer.dtype and y.stride(-1) == 1 and x.stride(-1) == 1:
            add_layer_lora(y, x, layer, batch)
            return
        delta = torch.zeros(y.shape, dtype=layer.dtype)
        add_layer_lora(delta, x.to(layer.dtype).contiguous(), layer, batch)
        y.add_(delta.to(y.dtype), alpha=scale)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **kwargs: Any
    ) -> None:
        """vLLM's own kernel, unless no row's adapter has weights for the logits."""
        slots = getattr(lora_b_stacked, "motet_slots", None)
        if slots is None or self.any_in(slots):
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)

    def any_in(self, slots: Iterable[int]) -> bool:
        """Whether a row of the step has its adapter in one of these slots."""
        return not self._active.isdisjoint(slots)

    def _batch_of(self, x: torch.Tensor) -> LayerBatch:
        """The step's batch; for fewer rows than the step has, its beginning."""
        rows = len(x)
        if rows >= len(self._batch.row_slot):
            return self._batch
        part = self._parts.get(rows)
        if part is None:
            part = self._parts[rows] = LayerBatch.build(self._batch.row_slot[:rows])
        return part

    def _own_metadata(self) -> None:
        """Let vLLM's class compute its part for the present step, once."""
        later, self._later = self._later, None
        if later is not None:
            mapping, index_to_id, max_loras, vocab_size, kwargs = later
            super().update_metadata(mapping, index_to_id, max_loras, vocab_size, **kwargs)


def _state(name: str) -> property:
    def get(self: PunicaWrapperMotet) -> Any:
        self._own_metadata()
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: PunicaWrapperMotet, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)


for _name in _STATE:
    setattr(PunicaWrapperMotet, _name, _state(_name))
