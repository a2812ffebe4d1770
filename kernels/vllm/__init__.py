"""Motet's LoRA inside vLLM: a plug-in that vLLM loads by itself where both are installed (docs/vllm-plugin.md).

    register        vLLM calls it in each of its processes; it replaces two methods of vLLM's platform
    prepare         when a model with LoRA is configured or loaded: compiles the kernels, compares a random batch with vLLM's
                    own wrapper, and changes the classes of layers; on any failure vLLM stays as it was
    layers          the layers' weights in pages of the adapter's own rank, instead of slots padded to the largest rank
    wrapper         computes what the layers ask for; what is not covered goes to vLLM's own wrapper
    ops             the layers' LoRA as operations that torch.compile does not look into

Only vLLM's environment imports the modules of this package other than this one. They look for what they need in vLLM, not for
its version number.
"""

from __future__ import annotations

import os

from motet.kernels.vllm.said import SWITCH, log


def register() -> None:
    """The entry point `vllm.general_plugins`. It never raises: without the plug-in vLLM works as before."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return
    try:
        from motet.kernels.vllm.prepare import install

        install()
    except Exception as error:
        log.warning("Motet's LoRA kernels are not used: %s: %s", type(error).__name__, error)
