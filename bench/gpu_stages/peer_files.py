"""Loads the kernels of vLLM and SGLang from the files that `make gpu-peers` unpacks, without those packages.

What the files import of their package, besides each other, is replaced by the few names that they use, with the values of a
CUDA machine and of the packages' default options.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton

ROOT = Path(__file__).parents[2]
Stubs = dict[str, dict[str, Any]]  # {module: its names}


def directory() -> Path:
    """Where the files are: `MOTET_PEERS`, by default `build/peers`."""
    return Path(os.environ.get("MOTET_PEERS") or ROOT / "build/peers")


def there() -> bool:
    """Whether the files are there."""
    return all((directory() / name).is_dir() for name in ("vllm", "sglang"))


class Phase(StrEnum):
    """SGLang's name for the kind of a step."""

    DECODE = "decode"
    PREFILL = "prefill"


def vllm() -> SimpleNamespace:
    """vLLM's `lora_shrink`, `lora_expand`, `LoRAKernelMeta`, and `utils`, `envs` beside them. Raises FileNotFoundError."""
    off = ("VLLM_BATCH_INVARIANT", "VLLM_LORA_DISABLE_PDL", "VLLM_LORA_ENABLE_DUAL_STREAM")
    platform = SimpleNamespace(is_cuda=torch.cuda.is_available, has_device_capability=_has_capability)
    logger = SimpleNamespace(info_once=_ignore, warning_once=_ignore)
    stubs: Stubs = {
        "vllm.envs": dict.fromkeys(off, False) | {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _to_device, "direct_register_custom_op": _no_custom_op},
    }
    with _loading("vllm", stubs):
        ops = "vllm.lora.ops.triton_ops"
        shrink, expand = (importlib.import_module(f"{ops}.lora_{name}_op") for name in ("shrink", "expand"))
        return SimpleNamespace(
            lora_shrink=shrink.lora_shrink,
            lora_expand=expand.lora_expand,
            LoRAKernelMeta=importlib.import_module(f"{ops}.lora_kernel_metadata").LoRAKernelMeta,
            utils=importlib.import_module(f"{ops}.utils"),
            envs=shrink.envs,
        )


def sglang() -> SimpleNamespace:
    """SGLang's modules `shrink`, `expand` and `tuning` (csgmv), and `plan`, `runner`, `workspace` (triton_v2).

    Raises FileNotFoundError.
    """
    off = SimpleNamespace(get=lambda: False)
    envs = SimpleNamespace(SGLANG_ENABLE_LORA_CSGMV_SPLIT_K=off, SGLANG_ENABLE_DETERMINISTIC_INFERENCE=off)
    stubs: Stubs = {
        "sglang.srt.environ": {"envs": envs},
        "sglang.srt.utils": {
            "cached_triton_kernel": lambda key: lambda kernel: kernel,  # saves the host's time, which a graph does not take
            "get_device_name": _device_name,
        },
        "sglang.srt.lora.utils": {
            "LoRABatchInfo": SimpleNamespace,
            "Phase": Phase,
            "architecture_for_capability": _ignore,  # of a runner that is not told
        },
        "sglang.kernels.ops.lora.moe.virtual_experts": {"_align_block_size_jit": _ignore},  # of routes over 512 rows
        # Only the check of the table of plans uses it; peer_sglang.py reads the table itself.
        "pydantic": {"BaseModel": object, "ConfigDict": dict, "Field": _ignore, "model_validator": _decorating},
    }
    with _loading("sglang", stubs):
        ops = "sglang.kernels.ops.lora.dense"
        return SimpleNamespace(
            shrink=importlib.import_module(f"{ops}.chunked_sgmv_shrink"),
            expand=importlib.import_module(f"{ops}.chunked_sgmv_expand"),
            tuning=importlib.import_module(f"{ops}.lora_tuning_config"),
            plan=importlib.import_module("sglang.srt.lora.dense.plan"),
            runner=importlib.import_module("sglang.srt.lora.dense.runner"),
            workspace=importlib.import_module("sglang.srt.lora.workspace"),
        )


@contextmanager
def _loading(package: str, stubs: Stubs) -> Iterator[None]:
    """Import from `package` in the directory and from the stubs. Afterwards `sys.modules` is as before."""
    home = directory() / package
    if not home.is_dir():
        raise FileNotFoundError(f"{home} is missing: `make gpu-peers` brings the kernels of vLLM and SGLang, docs/gpu.md")
    replaced = {name: module for name, module in sys.modules.items() if name in stubs or name.split(".")[0] == package}
    for name in replaced:
        del sys.modules[name]
    for name, names in {package: {"__path__": [str(home)]}, **stubs}.items():
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name in stubs or name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(replaced)


def _has_capability(wanted: int) -> bool:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor >= wanted


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _to_device(data: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, device=device)


def _no_custom_op(**_: object) -> None:
    raise AttributeError("no custom operations: the plain function is used")


def _ignore(*_: object, **__: object) -> None:
    """A function that does nothing."""


def _decorating(**_: object) -> Callable[[Any], Any]:
    return lambda function: function
