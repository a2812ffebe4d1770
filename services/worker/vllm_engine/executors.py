"""Additions to vLLM's processes: they end with the worker, can free a slot on command, and have a corrected CPU kernel. Only
vLLM's environment imports this file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from motet.kernels.vllm.said import KEPT
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
        self._lora_manager().deactivate_adapter(number)

    def lora_norms(self, number: int) -> list[tuple[str, int, float, float]] | None:
        """(module, layer, norm of A, norm of scale * B) of an adapter as it is in its slot; vLLM multiplies B by the scale.

        None where it cannot be told: a part of each matrix is elsewhere, or a layer has a name that adapters do not use.
        """
        manager = self._lora_manager()
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
            names += [(part, int(found[1])) for part in parts]
            if (kept := layer.__dict__.get(KEPT)) is not None:  # the plug-in has its weights (`kernels.vllm`)
                norms += [torch.tensor(both) for both in kept.norms(slot)]
                continue
            for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                norms.append(torch.stack([a[slot].float().norm(), b[slot].float().norm()]))
        told = torch.stack(norms).cpu().tolist() if norms else []
        return [(module, layer, *both) for (module, layer), both in zip(names, told, strict=True)]

    def layer_prefixes(self) -> list[str]:
        """The beginnings of the names of the language model's layers with LoRA, before `layers.<n>`."""
        manager = self._lora_manager()
        inside = tuple(f"{name}." for name in manager.mm_mapping.language_model) if manager.supports_mm else ("",)
        found = (LAYER.match(name) for name in manager.modules if name.startswith(inside))
        return sorted({one[1] for one in found if one is not None})

    def changed_by_lora(self, paths: list[str]) -> list[str]:
        """Those of the checkpoint's layers that an adapter can change here: vLLM has a LoRA layer for them."""
        manager, model = self._lora_manager(), self._lora_manager().model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper is not None else None
        known = self._lora_names({*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)})
        skipped = tuple(getattr(model, "lora_skip_prefixes", None) or ())
        found: list[str] = []
        for path in paths:
            if any(path.startswith(prefix) or f".{prefix}" in path for prefix in skipped):
                continue
            try:
                name, _ = parse_fine_tuned_lora_name(f"base_model.model.{path}.lora_A.weight", mapper)
            except ValueError:  # a weight that vLLM does not load
                continue
            if name in known:
                found.append(path)
        return found

    def unused_layers(self, number: int) -> list[str]:
        """The layers of a loaded adapter for which vLLM has no LoRA layer in this process: it would leave them out silently."""
        manager = self._lora_manager()
        adapter = manager.get_adapter(number)
        return sorted(adapter.loras.keys() - self._lora_names(manager.modules)) if adapter is not None else []

    def _lora_names(self, modules: Iterable[str]) -> set[str]:
        """What an adapter may call these modules: a pooling model's also without "model."."""
        names = set(modules)
        return names | {name.removeprefix("model.") for name in names} if self._lora_manager().is_pooling_model else names

    def _lora_manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]


BOUND = {UniProcExecutor: BoundUniProc, MultiprocExecutor: BoundMultiproc}
