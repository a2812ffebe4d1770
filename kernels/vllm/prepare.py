"""Puts Motet's wrapper in the place of vLLM's, in steps that each may fail without harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from motet.kernels.vllm import SWITCH, log

WRAPPER = "motet.kernels.vllm.wrapper.PunicaWrapperMotet"
OWN = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
"""The wrapper of vLLM that this plug-in stands in for; where another one is chosen it steps aside."""


def install() -> None:
    """Make vLLM ask `choose` for its wrapper. Nothing else happens before the first model with LoRA is loaded."""
    platform = type(current_platform)
    own: Callable[[], str] = platform.get_punica_wrapper
    if getattr(own, "motet", False):
        return  # vLLM may load plug-ins more than once
    if not current_platform.is_cpu():
        log.info("Motet's LoRA kernels are for vLLM on a CPU so far; here vLLM's own are used")
        return
    told: list[str] = []

    def choose(cls: type) -> str:
        """The name of the wrapper's class."""
        if not told:
            told.append(_prepared(own()))
        return told[0]

    choose.motet = True  # type: ignore[attr-defined]
    platform.get_punica_wrapper = classmethod(choose)


def _prepared(own: str) -> str:
    """`WRAPPER` if everything that it needs is there and gives the right results, else vLLM's `own`."""
    try:
        if own != OWN:
            log.info("Motet's LoRA kernels step aside: vLLM uses %s", own)
            return own
        from motet.kernels.vllm import check, layers

        engine = check.kernels()
        check.compare()
        layers.patch()
    except Exception as error:
        log.warning("Motet's LoRA kernels step aside, vLLM's own are used: %s: %s", type(error).__name__, error)
        return own
    log.info("LoRA is computed by Motet's kernels (%s); %s=0 turns them off", engine, SWITCH)
    return WRAPPER


def uncovered(what: Any, why: str, _said: set[tuple[str, str]] = set()) -> None:  # noqa: B006
    """Say once that the LoRA of a class of layers stays with vLLM."""
    if (type(what).__name__, why) not in _said:
        _said.add((type(what).__name__, why))
        log.info("LoRA of %s stays with vLLM's own kernels: %s", type(what).__name__, why)
