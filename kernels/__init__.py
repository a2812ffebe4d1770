"""Batched multi-rank LoRA and paged attention, with one call signature for all devices.

    once per model         once per engine step (from numpy)    per layer
    LoraPool(shapes, ..)   LoraBatch.build(pool, row_slot)      start_lora(x, pool, layer, group, batch)
                                                                add_lora(y, x, pool, layer, group, batch)
    KvCache(layers=, ..)   AttentionBatch.build(cache, ..)      attend(qkv, cache, layer, batch, heads=, window=)
                                                                attend_stored(...) where K and V are stored

Semantics of `add_lora`, for every projection s of the group (its columns of y are `out_s`), every row i with slot
a = row_slot[i] >= 0, when adapter a has projection s:

    y[i, out_s] += scale[a, layer, s] * (x[i] @ A[a, layer, s].T) @ B[a, layer, s].T

    y         [rows, sum of out over the group], in place; rows without an adapter are not changed
    x         [rows, in], the input that all projections of the group share
    A, B      [rank, in], [out, rank]; the rank is the adapter's own and may differ between projections
    group     "qkv", "o", "gate_up", "down": projections whose base weights are one fused matrix

Products accumulate in fp32; x A^T and the sum are rounded to the tensors' type, as PEFT does. Other rows of the batch can
change a row's result by rounding only. Pool memory that the row's adapter does not own never changes it.

An image model has classes of sites (pool.py) instead of seven modules: `group` is then a class and `layer` the index of a site
in it. `LoraBatch.build(pool, row_slot, weights)` also takes several adapters of a row, int32 [rows, k], each with its weight:

    y[i] += sum over k of weights[i, k] * scale[a_k, site] * (x[i] @ A[a_k, site].T) @ B[a_k, site].T

The pool's device selects the implementation: plain torch on a CPU, the Triton kernels (kernels/triton) on a GPU. kernels/cpu
contains compiled whole steps for CPUs, and compiled LoRA for sites, which a GPU computes by torch so far. kernels/device copies
adapters to a GPU beside the steps; CPU LoRA processes compute missing layers meanwhile. kernels/pointwise has the small
operations between a layer's products, and kernels/sampling draws the next tokens, for both devices. kernels/vllm is a plug-in
that computes vLLM's LoRA on a CPU.

This package needs torch and no other package of Motet. (`transformers` looks for a hub package of the same import name; a test
asserts that it does not mistake this one for it.)
"""

from motet.kernels.attention import AttentionBatch, attend, attend_stored
from motet.kernels.lora import ADAPTERS_MAX, LoraBatch, add_lora, lora_plan, lora_plans, prepare_lora, start_lora
from motet.kernels.pool import GROUPS, PAGE_RANKS, LoraPool, PackedLora, PoolFull
from motet.kernels.types import KvCache

__all__ = [
    "ADAPTERS_MAX",
    "GROUPS",
    "PAGE_RANKS",
    "AttentionBatch",
    "KvCache",
    "LoraBatch",
    "LoraPool",
    "PackedLora",
    "PoolFull",
    "add_lora",
    "attend",
    "attend_stored",
    "lora_plan",
    "lora_plans",
    "prepare_lora",
    "start_lora",
]
