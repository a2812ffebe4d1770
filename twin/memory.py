"""Device memory: bytes of weights, KV cache and adapters from the shapes of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from motet.shared.model import MODULES

GPU_SHARE = 0.9  # as live workers do: the rest is left to activations, logits and the driver
ATTENTION_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShapes:
    """A Llama-shaped decoder. Sizes in elements; `value_bytes` per element of weights and KV cache."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool = False
    value_bytes: int = 2

    def features(self, module: str) -> tuple[int, int]:
        """(in, out) of one of `shared.model.MODULES`."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[module]

    @property
    def weight_bytes(self) -> int:
        """All weights: linear layers, norms, embeddings."""
        layer = sum(a * b for a, b in map(self.features, MODULES)) + 2 * self.hidden
        embeddings = (1 if self.tied_embeddings else 2) * self.vocabulary * self.hidden
        return (self.layers * layer + embeddings + self.hidden) * self.value_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    def adapter_rank_bytes(self, modules: Collection[str] = MODULES) -> int:
        """Bytes per unit of rank of an adapter on these modules: a row of A and a column of B in every layer."""
        return self.layers * sum(sum(self.features(module)) for module in modules) * self.value_bytes

    def kv_blocks(self, device_bytes: int, *, adapter_bytes: int, block_size: int) -> int:
        """The number of KV blocks that fit on a device beside weights and adapters. Raises ValueError when none fits."""
        left = int(device_bytes * GPU_SHARE) - self.weight_bytes - adapter_bytes
        blocks = left // (self.kv_token_bytes * block_size)
        if blocks < 1:
            raise ValueError(
                f"weights of {self.weight_bytes >> 20} MiB and {adapter_bytes >> 20} MiB for adapters leave no room for a KV"
                f" cache on {device_bytes >> 20} MiB"
            )
        return blocks


LLAMA2_7B = ModelShapes(layers=32, hidden=4096, intermediate=11_008, heads=32, kv_heads=32, head_dim=128, vocabulary=32_000)
LLAMA31_8B = ModelShapes(layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256)
