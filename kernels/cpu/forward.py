"""One engine step as one call into the compiled library: all layers, from token ids to logits.

    engine = CpuEngine()
    pack = Packer(engine)                           a weight matrix -> Packed, once per model
    forward = CpuForward(engine, weights, heads=.., ..., rotary=.., cache=cache, pool=pool)
    logits = forward(batch)                         one call per step
    forward.merged = MergedWeights(engine, forward.layers)      steps with `batch.merged` compute with this copy

The KV cache and the adapter pool are the same objects that the reference kernels use, with the same contents. Sums and the
residual stream are float32. Activations are bfloat16 in products with bfloat16 weights where the instruction set multiplies
bfloat16, else float32; in products with float16 and float32 weights they are float32. A row's result does not depend on the
batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from motet.kernels.cpu.assist import AssistCounts, Helpers
from motet.kernels.cpu.library import KV_TYPES, TYPES, CpuEngine, Layer, Model, Packed, Step, address, pool_struct
from motet.kernels.cpu.merging import MergedWeights
from motet.kernels.pool import LoraPool
from motet.kernels.types import KvCache

MAX_HEADS_PER_KV_HEAD = 128
"""The largest number that the attention kernel has room for."""

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class PackedLayer(Protocol):
    """One decoder layer: float tensors and packed matrices; q, k, v and gate, up are one matrix each."""

    input_norm: torch.Tensor
    qkv: Packed
    qk_norm: torch.Tensor | None
    o: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed


class PackedWeights(Protocol):
    """All weights of a decoder."""

    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: Packed

    @property
    def layers(self) -> Sequence[PackedLayer]: ...


class Rows(Protocol):
    """One step, all numpy and contiguous; shapes and types as the engine's StepBatch says."""

    token_ids: np.ndarray
    positions: np.ndarray
    row_slot: np.ndarray
    seq_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    kv_slots: np.ndarray
    logit_rows: np.ndarray
    merged: bool  # rows are of the merged adapter, and name no slot


class CpuForward:
    """The forward pass of a decoder with packed weights, over a KV cache and an adapter pool.

    `rotary` maps positions, int64 [n], to float32 (cos, sin), each [n, head_dim / 2]. `windows` are the layers' sliding windows
    in tokens, 0 for none.
    """

    def __init__(
        self,
        engine: CpuEngine,
        weights: PackedWeights,
        *,
        heads: int,
        eps: float,
        windows: Sequence[int],
        rotary: Rotary,
        cache: KvCache,
        pool: LoraPool,
    ) -> None:
        layers, blocks = cache.data.shape[:2]
        kv_heads, head_dim, kv_dtype = cache.kv_heads, cache.head_dim, cache.data.dtype
        vocab, hidden = weights.embed.shape
        mlp = weights.layers[0].down.matrix.k
        if heads > MAX_HEADS_PER_KV_HEAD * kv_heads:
            raise ValueError(f"{heads} heads over {kv_heads} KV heads: at most {MAX_HEADS_PER_KV_HEAD} share one")
        self._engine, self._rotary, self._pool = engine, rotary, pool
        dtype = weights.embed.dtype
        if kv_dtype not in (dtype, torch.int8):
            raise ValueError(f"the KV cache is {kv_dtype}: {dtype} or int8 is expected")
        self._kept: list[Any] = [cache.data, pool.arena, weights]  # what the structures point into
        layer_type = Layer * layers
        self.layers = layer_type(*(self._layer(layer, window) for layer, window in zip(weights.layers, windows, strict=True)))
        self._model = Model(
            type=TYPES[dtype],
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=mlp,
            vocab=vocab,
            layers=layers,
            eps=eps,
            embed=address(weights.embed),
            norm=self._float(weights.norm),
            lm_head=weights.lm_head.matrix,
            layer=self.layers,
            kv=address(cache.data),
            kv_type=KV_TYPES[kv_dtype],
            blocks=blocks,
            block_size=cache.block_size,
            pool=pool_struct(pool),
        )
        self._vocab, self._half = vocab, head_dim // 2
        self._logits = torch.empty(0, vocab)
        self._cos = self._sin = torch.empty(0, self._half)
        self._step = Step()
        self.assisted = AssistCounts()
        self.merged: MergedWeights | None = None
        self._is_merged = False

    def __call__(self, batch: Rows, helpers: Helpers | None = None) -> torch.Tensor:
        """Logits of `batch.logit_rows`, float32 [n, vocab], valid until the next call; fills the cache.

        `helpers` must have the slots of all rows whose adapter is not completely loaded; `assisted` counts where these rows
        were computed. Raises ValueError when a row names an empty adapter slot or a token outside the vocabulary.
        """
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        if not rows:
            return self._logits[:0]
        self._check(batch, helpers)
        if wanted > len(self._logits):
            self._logits = torch.empty(wanted, self._vocab)
        self._reach(int(batch.positions.max()) + 1)
        if batch.merged is not self._is_merged:
            self._turn(batch.merged)
        step = self._step
        step.rows, step.seqs, step.logits = rows, len(batch.context_lens), wanted
        step.table_stride = batch.block_tables.shape[1]
        step.token_ids = _at(batch.token_ids, np.int64)
        step.positions = _at(batch.positions, np.int64)
        step.row_slot = _at(batch.row_slot, np.int32)
        step.seq_starts = _at(batch.seq_starts, np.int32)
        step.context_lens = _at(batch.context_lens, np.int32)
        step.block_tables = _at(batch.block_tables, np.int32)
        step.kv_slots = _at(batch.kv_slots, np.int64)
        step.logit_rows = _at(batch.logit_rows, np.int64)
        step.cos, step.sin, step.out = self._cos.data_ptr(), self._sin.data_ptr(), self._logits.data_ptr()
        assist = helpers.struct() if helpers is not None else None
        step.assist = None if assist is None else ctypes.pointer(assist)
        self._engine.library.motet_forward(self._engine.handle, ctypes.byref(self._model), ctypes.byref(step))
        if assist is not None:
            self.assisted.add(assist)
        return self._logits[:wanted]

    def _turn(self, merged: bool) -> None:
        """Use the merged copy of the weights from this step on, or the base weights."""
        assert not merged or (self.merged is not None and self.merged.whole), "no merged copy is whole"
        self._model.layer = self.merged.layers if merged and self.merged is not None else self.layers
        self._is_merged = merged

    def _check(self, batch: Rows, helpers: Helpers | None) -> None:
        slots = batch.row_slot
        named = slots[slots >= 0]
        if len(named) and (named.max() >= len(self._pool.loaded) or not self._pool.loaded[named].all()):
            raise ValueError(f"rows name empty adapter slots: some of {np.unique(named).tolist()} are not loaded")
        late = named[self._pool.loaded_layers[named] < self._pool.layers]
        unknown = set(late.tolist()).difference(one.slot for one in helpers.loading) if helpers is not None else late.tolist()
        if unknown:
            raise ValueError(f"rows name adapter slots that are still being loaded: {sorted(set(unknown))}")
        if len(batch.token_ids) and not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self._vocab:
            raise ValueError(f"a token id is outside the vocabulary of {self._vocab}")

    def _reach(self, positions: int) -> None:
        """Extend the rotation tables to positions 0..positions-1; sizes are powers of two."""
        if positions > len(self._cos):
            cos, sin = self._rotary(torch.arange(1 << max(positions - 1, 127).bit_length()))
            self._cos, self._sin = cos.contiguous(), sin.contiguous()

    def _layer(self, layer: PackedLayer, window: int) -> Layer:
        return Layer(
            input_norm=self._float(layer.input_norm),
            qk_norm=self._float(layer.qk_norm),
            post_norm=self._float(layer.post_norm),
            qkv=layer.qkv.matrix,
            o=layer.o.matrix,
            gate_up=layer.gate_up.matrix,
            down=layer.down.matrix,
            window=window,
        )

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a float32 copy that lives as long as this object."""
        if tensor is None:
            return None
        floats = tensor.float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()


def _at(array: np.ndarray, dtype: Any) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"a step's array is {array.dtype}, {dtype.__name__} and contiguous is expected")
    return array.__array_interface__["data"][0]
