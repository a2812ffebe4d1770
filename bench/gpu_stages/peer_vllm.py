"""vLLM's LoRA kernels, with the buffers and the calls of its PunicaWrapperGPU and its linear layers.

A slot is padded to the largest rank of all. Every projection of a fused product has tensors of its own, `slices` of it:

    A [slots, 1, max rank, in], B [slots, 1, out, max rank], and h [slices, rows, max rank] in fp32 between them
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from bench.gpu_stages.layers import Apply, Base, another_stream, matrices
from motet.kernels import GROUPS, LoraPool

Stacked = dict[str, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]


class Vllm:
    """The adapters of a pool in vLLM's buffers, and the rows' mapping, which is prepared outside of the graph.

    `ranks`: of the adapters in slots 0, 1, ...; `row_slot` int32 [rows].
    """

    def __init__(self, files: SimpleNamespace, pool: LoraPool, ranks: Sequence[int], row_slot: np.ndarray) -> None:
        self._files, self._rank, self._device = files, max(ranks), pool.arena.device
        files.utils._LORA_A_PTR_DICT.clear()  # of earlier buffers, which may have lain at the same addresses
        files.utils._LORA_B_PTR_DICT.clear()
        self._stacked = [self._stack(pool, layer, len(ranks)) for layer in range(pool.layers)]
        slots = len(ranks)
        captured = [n for n in range(1, slots + 2) if n & (n - 1) == 0 or n == slots + 1]
        self._meta = files.LoRAKernelMeta.make(slots, len(row_slot), self._device, captured)
        self._meta.prepare_tensors(torch.from_numpy(row_slot.astype(np.int64)).to(self._device))
        self._aux: torch.cuda.Stream | None = None

    def ways(self) -> dict[str, Apply]:
        """`vllm` as it is by default, `vllm_active` with `specialize_active_lora`, `vllm_dual` with
        `VLLM_LORA_ENABLE_DUAL_STREAM`, which needs a GPU.
        """
        found: dict[str, Apply] = {
            "vllm": partial(self._after, active=False),
            "vllm_active": partial(self._after, active=True),
        }
        return found | ({"vllm_dual": self._dual} if self._device.type == "cuda" else {})

    def _stack(self, pool: LoraPool, layer: int, slots: int) -> Stacked:
        found: Stacked = {}
        for group, modules in GROUPS.items():
            sizes = [pool.shapes[module] for module in modules]
            a = tuple(pool.arena.new_zeros((slots, 1, self._rank, fan_in)) for fan_in, _ in sizes)
            b = tuple(pool.arena.new_zeros((slots, 1, out, self._rank)) for _, out in sizes)
            for i, module in enumerate(modules):
                for slot in range(slots):
                    one_a, one_b = matrices(pool, slot, layer, module)
                    a[i][slot, 0, : len(one_a)] = one_a
                    b[i][slot, 0, :, : len(one_a)] = one_b
            found[group] = a, b
        return found

    def _add(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str, *, active: bool, add: bool) -> None:
        """`add_lora_linear`: writes the adapters' part to y [rows, sum of out], or adds it."""
        a, b = self._stacked[layer][group]
        h = torch.empty((len(a), len(x), self._rank), dtype=torch.float32, device=self._device)
        meta = self._meta.meta_args(len(x), active)
        self._files.lora_shrink(x, a, h, *meta, 1.0)  # zeroes h, too
        self._files.lora_expand(h, b, y, *meta, offset_start=0, add_inputs=add)

    def _after(self, layer: int, group: str, x: torch.Tensor, base: Base, *, active: bool) -> torch.Tensor:
        y = base()
        self._add(y, x, layer, group, active=active, add=True)
        return y

    def _dual(self, layer: int, group: str, x: torch.Tensor, base: Base) -> torch.Tensor:
        """`_apply_async_impl`: LoRA on another stream beside the base model's product, its kernels launched early."""
        self._aux = another_stream(self._aux)
        main = torch.cuda.current_stream()
        self._aux.wait_stream(main)
        y = base()
        self._files.envs.VLLM_LORA_ENABLE_DUAL_STREAM = True
        with torch.cuda.stream(self._aux):
            part = torch.zeros_like(y)
            self._add(part, x, layer, group, active=True, add=False)
        self._files.envs.VLLM_LORA_ENABLE_DUAL_STREAM = False
        main.wait_stream(self._aux)
        return y.add_(part)
