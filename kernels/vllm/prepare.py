"""Puts Motet's wrapper in the place of vLLM's, in steps that each may fail without harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from vllm.platforms import current_platform

from motet.kernels.vllm.said import SWITCH, log

WRAPPER = "motet.kernels.vllm.wrapper.PunicaWrapperMotet"
OWN = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
"""The wrapper of vLLM that this plug-in stands in for; where another one is chosen it steps aside."""


def install() -> None:
    """Make vLLM ask for its wrapper here. Nothing else happens before a model with LoRA is configured or loaded."""
    platform = type(current_platform)
    if getattr(platform, "motet", None) is not None:
        return  # vLLM may load plug-ins more than once
    if not current_platform.is_cpu():
        log.info("Motet's LoRA kernels are for vLLM on a CPU so far; here vLLM's own are used")
        return
    own_wrapper: Callable[[], str] = platform.get_punica_wrapper
    own_check: Callable[[Any], None] = platform.check_and_update_config

    def get_punica_wrapper(cls: type) -> str:
        return prepared(own_wrapper())

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        if not _compiles(vllm_config) or prepared(own_wrapper()) != WRAPPER:
            own_check(vllm_config)
            return
        lora_config, vllm_config.lora_config = vllm_config.lora_config, None  # with it, vLLM turns compiling off
        try:
            own_check(vllm_config)
        finally:
            vllm_config.lora_config = lora_config

    platform.motet = True
    platform.get_punica_wrapper = classmethod(get_punica_wrapper)
    platform.check_and_update_config = classmethod(check_and_update_config)


def _compiles(vllm_config: Any) -> bool:
    """Whether a model with LoRA may be compiled: all of its LoRA is behind the operations of `ops`."""
    lora, model = vllm_config.lora_config, vllm_config.model_config
    return lora is not None and model is not None and not lora.fully_sharded_loras and not model.is_moe


@cache
def prepared(own: str) -> str:
    """`WRAPPER` if everything that it needs is there and gives the right results, else vLLM's `own`."""
    try:
        if own != OWN:
            log.info("Motet's LoRA kernels step aside: vLLM uses %s", own)
            return own
        from motet.kernels.vllm import check, layers

        log.info("Preparing Motet's LoRA kernels; before the first start they are compiled, which takes some minutes")
        isa = check.kernels()
        check.compare()
        layers.patch()
    except Exception as error:
        log.warning("Motet's LoRA kernels step aside, vLLM's own are used: %s: %s", type(error).__name__, error)
        _do_not_compile()
        return own
    log.info("LoRA is computed by Motet's kernels (%s); %s=0 turns them off", isa, SWITCH)
    return WRAPPER


def _do_not_compile() -> None:
    """Run models with LoRA as they are, even if the process that configured this one decided to compile them."""
    from vllm.lora.model_manager import LoRAModelManager

    own = LoRAModelManager._create_lora_modules

    def create(self: Any) -> None:
        for module in self.model.modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True
        own(self)

    LoRAModelManager._create_lora_modules = create
