"""Additions to vLLM's processes: they end with the worker, can free a slot on command, and have a corrected CPU kernel. Only
vLLM's environment imports this file."""

from __future__ import annotations

import re

import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from motet.services.worker.vllm_engine.bound import end_with_parent
from motet.services.worker.vllm_engine.cpu_kernels import mend

mend()
LAYER = re.compile(r"(.*?)layers\.\d+\.(?:self_attn|mlp)\.")
"""The name of a linear layer of a language model."""
NUMBERED = re.compile(r".*?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The modules of a layer that vLLM computes as one."""


class BoundUniProc(UniProcExecutor):
    """Runs the model in the core's own process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class BoundMultiproc(MultiprocExecutor):
    """Runs the model in separate processes, which end with the core."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class WorkerExtension:
    """Commands that vLLM lacks. vLLM adds this class to its worker class (`--worker-extension-cls`)."""

    def free_lora_slot(self, number: int) -> None:
        """Take an adapter out of its slot and keep its weights in host memory. `number`: vLLM's number of the adapter."""
        self.model_runner.lora_manager._adapter_manager.deactivate_adapter(number)  # type: ignore[attr-defined]

    def lora_norms(self, number: int) -> list[tuple[str, int, float, float]] | None:
        """(module, layer, norm of A, norm of scale * B) of an adapter as it is in its slot; vLLM multiplies B by the scale.

        None where it cannot be told: a part of each matrix is elsewhere, or a layer has a name that adapters do not use.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        slot = manager.lora_index_to_id.index(number)
        names: list[tuple[str, int]] = []
        norms: list[torch.Tensor] = []
        for name, layer in manager.modules.items():
            found = NUMBERED.fullmatch(name)
            if found is None:
                continue
            parts = PACKED.get(found[2], (found[2],))
            if layer.tp_size > 1 or len(parts) != layer.n_slices:
                return None
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                names.append((part, int(found[1])))
                norms.append(torch.stack([a[slot].float().norm(), b[slot].float().norm()]))
        told = torch.stack(norms).cpu().tolist() if norms else []
        return [(module, layer, *both) for (module, layer), both in zip(names, told, strict=True)]

    def layer_prefixes(self) -> list[str]:
        """The beginnings of the names of layers with LoRA, before `layers.<n>`."""
        modules = self.model_runner.lora_manager._adapter_manager.modules  # type: ignore[attr-defined]
        found = (LAYER.match(name) for name in modules)
        return sorted({one[1] for one in found if one is not None})


BOUND = {UniProcExecutor: BoundUniProc, MultiprocExecutor: BoundMultiproc}
