"""What the plug-in says, and the name of its switch."""

from __future__ import annotations

import logging

KEPT = "motet_lora"
"""The attribute of a linear layer of vLLM that has its `kernels.cpu.layers.LayerLora`."""
SWITCH = "MOTET_VLLM_LORA"
"""The environment variable that turns the plug-in off when it is 0."""

log = logging.getLogger("vllm.motet")
"""Below vLLM's own logger, so that its lines look like vLLM's."""


def uncovered(what: object, why: str) -> None:
    """Say once that the LoRA of a class of layers stays with vLLM."""
    said = type(what).__name__, why
    if said not in _uncovered:
        _uncovered.add(said)
        log.info("LoRA of %s stays with vLLM's own kernels: %s", *said)


_uncovered: set[tuple[str, str]] = set()
