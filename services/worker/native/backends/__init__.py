"""The backends that an engine can have, by name: one file each.

cpu          compiled.py     compiled kernels: the default on a CPU
reference    reference.py    torch on a CPU
cuda         triton.py       torch and Triton on a GPU
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from motet.services.worker.native.backend import Backend, BackendMissing, BackendOptions
from motet.services.worker.native.backends.compiled import compiled
from motet.services.worker.native.backends.reference import reference
from motet.services.worker.native.backends.triton import triton
from motet.shared.config import ConfigError
from motet.shared.telemetry import logger

BACKENDS: dict[str, Callable[[BackendOptions], Backend]] = {"cpu": compiled, "reference": reference, "cuda": triton}
SLOWER = "3 to 10"  # times, the reference beside the compiled kernels, at 32 sequences without and with adapters
_log = logger(__name__)


def open_backend(options: BackendOptions) -> Backend:
    """The backend that `options.kernels` names, or for "auto" the best one for the device.

    On a CPU the reference replaces the compiled kernels where they cannot be built. Raises UnsupportedModel for a checkpoint
    that the backend does not run, ConfigError when the requested backend is not available.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    name = options.kernels if options.kernels != "auto" else os.environ.get("MOTET_KERNELS", "auto")
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"kernels {name!r}: one of auto, {', '.join(BACKENDS)} is expected")
    device = torch.device(options.device).type
    chosen = device if name == "auto" or (name == "reference" and device != "cpu") else name  # torch on a GPU runs Triton
    try:
        return BACKENDS[chosen](options)
    except BackendMissing as error:
        if name != "auto" or chosen != "cpu":
            raise ConfigError(f"kernels {chosen!r}: {error}") from None
        try:
            runner = reference(options)
        except ConfigError as without:  # what only compiled kernels can do
            raise ConfigError(f"{without}: {str(error).splitlines()[0]}") from None
        runner.kernels_note = f"steps take {SLOWER} times as long as with compiled kernels: {str(error).splitlines()[0]}"
        _log.warning("compiled CPU kernels are missing", extra={"reason": str(error), "slower": f"{SLOWER} times"})
        return runner
