"""One decoder forward pass over a ragged batch: fused weights, unmerged LoRA, paged attention.

x = embed(tokens)                                       [rows, hidden], the residual stream
per layer   qkv = norm(x) Wqkv (+ LoRA)                 one matrix, columns q | k | v
            q, k = rope(qk_norm(q, k));  x += o(attend(qkv)) (+ LoRA)
            x += down(silu(gate) * up) (+ LoRA)         gate | up is one matrix too
logits = lm_head(norm(x)[logit_rows])                   float32

What lies between the products is plain torch on a CPU and fused kernels on a GPU (kernels/pointwise.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from motet.kernels import AttentionBatch, KvCache, LoraBatch, LoraPool, add_lora, attend_stored, start_lora
from motet.kernels.device import AssistedStep
from motet.kernels.pointwise import kernels_for
from motet.kernels.types import Delta
from motet.services.worker.engines.model_config import ModelConfig, RopeConfig
from motet.services.worker.native.linear import Linear
from motet.services.worker.native.loader import ModelWeights


class Model:
    """Weights and the arithmetic over them; owns no per-request state."""

    def __init__(self, config: ModelConfig, weights: ModelWeights[Linear]) -> None:
        self.config = config
        self.weights = weights
        self._rope = RotaryEmbedding(config.rope, config.head_dim, weights.embed.dtype, weights.embed.device)
        self.pointwise = kernels_for(weights.embed.device)

    def prepare(self) -> None:
        """Do what the first step would otherwise wait for: on a GPU the fused kernels are compiled and loaded."""
        config, embed = self.config, self.weights.embed
        self.pointwise.prepare(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            mlp=config.intermediate_size,
            qk_norm=any(layer.qk_norm is not None for layer in self.weights.layers),
            dtype=embed.dtype,
            device=embed.device,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        cache: KvCache,
        attention: AttentionBatch,
        pool: LoraPool,
        lora: LoraBatch | AssistedStep,
    ) -> torch.Tensor:
        """Logits float32 [n, vocab] of `logit_rows`, int64 [n]; fills the cache.

        `token_ids`, `positions`: int64 [rows]. `lora` is an AssistedStep when adapters of the step are being copied.
        """
        return self.logits(self.hidden(token_ids, positions, cache, attention, pool, lora), logit_rows)

    def logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Logits float32 [n, vocab] of `logit_rows`, int64 [n], from what `hidden` returns."""
        return self.weights.lm_head(hidden.index_select(0, logit_rows)).float()

    def all_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits of every row of what `hidden` returns, in `out`, float32 [rows, vocab]."""
        return out.copy_(self.weights.lm_head(hidden))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KvCache,
        attention: AttentionBatch,
        pool: LoraPool,
        lora: LoraBatch | AssistedStep,
    ) -> torch.Tensor:
        """The norm of the residual stream behind the last layer, [rows, hidden], of the arguments of `forward`."""
        config, weights, pointwise, eps = self.config, self.weights, self.pointwise, self.config.rms_norm_eps
        heads, x = config.num_heads, F.embedding(token_ids, weights.embed)
        cos, sin = self._rope.at(positions)
        y, delta = None, None  # the part of the residual stream that is not added to x yet
        for i, layer in enumerate(weights.layers):
            project = _Projections(pool, i, lora)
            h = pointwise.add_norm(x, y, layer.input_norm, eps=eps, delta=delta)
            y, delta = project(layer.qkv, h, "qkv")
            qkv = y.view(len(y), heads + 2 * config.num_kv_heads, config.head_dim)
            pointwise.rotate_and_store(
                qkv, cos, sin, cache, i, attention.kv_slots, heads=heads, qk_norm=layer.qk_norm, eps=eps, delta=delta
            )
            h = attend_stored(qkv, cache, i, attention, heads=heads, window=config.windows[i])
            y, delta = project(layer.o, h, "o")
            h = pointwise.add_norm(x, y, layer.post_norm, eps=eps, delta=delta)
            y, delta = project(layer.gate_up, h, "gate_up")
            h = pointwise.silu_mul(y, delta=delta)
            y, delta = project(layer.down, h, "down")
        return pointwise.add_norm(x, y, weights.norm, eps=eps, delta=delta)


class _Projections:
    """The fused matrices of a layer and the adapters' parts of them, which begin first so that both run side by side."""

    __slots__ = ("_assisted", "_layer", "_lora", "_pool")

    def __init__(self, pool: LoraPool, layer: int, lora: LoraBatch | AssistedStep) -> None:
        self._pool, self._layer = pool, layer
        self._assisted = lora if isinstance(lora, AssistedStep) else None
        self._lora = lora.layer(layer) if isinstance(lora, AssistedStep) else lora

    def __call__(self, linear: Linear, x: torch.Tensor, group: str) -> tuple[torch.Tensor, Delta | None]:
        """The product, and what has to be added to it."""
        if self._assisted is not None:
            self._assisted.start(x, self._layer, group)
        delta = start_lora(x, self._pool, self._layer, group, self._lora)
        y = linear(x)
        add_lora(y, x, self._pool, self._layer, group, self._lora)
        if self._assisted is not None:
            self._assisted.collect(y, group)
        return y, delta


class RotaryEmbedding:
    """cos and sin by position; `sin` carries the sign of rotate_half, so that x cos + roll(x, half) sin is the rotation."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at `positions`, int64 [rows]: two [rows, 1, head_dim]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return (
            torch.cat([cos, cos], dim=-1).to(self._dtype)[:, None],
            torch.cat([-sin, sin], dim=-1).to(self._dtype)[:, None],
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """(frequencies float32 [head_dim / 2], factor on cos and sin), stretched as in Llama 3.1 or YaRN (arXiv 2309.00071)."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    plain = 1.0 / powers
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        wavelength = 2 * math.pi / plain
        longest = rope.original_max_len / rope.low_freq_factor
        shortest = rope.original_max_len / rope.high_freq_factor
        smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended = (1 - smooth) * plain / rope.factor + smooth * plain
        stretched = torch.where(wavelength > longest, plain / rope.factor, blended)
        return torch.where(wavelength < shortest, plain, stretched), 1.0
    if rope.type == "yarn":
        low, high = (_yarn_dimension(rope, turns, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (rope.factor * powers) * ramp + plain * (1 - ramp), _yarn_attention_factor(rope)
    return plain, 1.0


def _yarn_dimension(rope: RopeConfig, turns: float, head_dim: int) -> float:
    """The dimension that makes `turns` rotations over the original context."""
    return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
