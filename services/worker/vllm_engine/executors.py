"""Additions to vLLM's processes: they end with the worker, can free a slot on command, and have a corrected CPU kernel. Only
vLLM's environment imports this file."""

from __future__ import annotations

import re

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from motet.services.worker.vllm_engine.bound import end_with_parent
from motet.services.worker.vllm_engine.cpu_kernels import mend

mend()
LAYER = re.compile(r"(.*?)layers\.\d+\.(?:self_attn|mlp)\.")
"""The name of a linear layer of a language model."""


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

    def layer_prefixes(self) -> list[str]:
        """The beginnings of the names of layers with LoRA, before `layers.<n>`."""
        modules = self.model_runner.lora_manager._adapter_manager.modules  # type: ignore[attr-defined]
        found = (LAYER.match(name) for name in modules)
        return sorted({one[1] for one in found if one is not None})


BOUND = {UniProcExecutor: BoundUniProc, MultiprocExecutor: BoundMultiproc}
