"""Which GPUs each worker of `motet up` gets. Without torch: `CUDA_VISIBLE_DEVICES` and device files tell.

Each worker sees its own GPUs only, as under Ray or Kubernetes, so that `--device auto` is right in each of them.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from motet.services.worker.config import WorkerConfig
from motet.shared.config import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs of this process as `CUDA_VISIBLE_DEVICES` names them. Those behind an invalid entry are hidden, as in CUDA."""
    if VARIABLE not in environ:
        return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]
    found: list[str] = []
    for entry in map(str.strip, environ[VARIABLE].split(",")):
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return found


def assigned(workers: int, gpus: Sequence[str], *, each: int, sized: bool) -> tuple[str, ...]:
    """`CUDA_VISIBLE_DEVICES` of each worker, which needs `each` GPUs; () where nothing is to be divided.

    With `sized` memory several workers may share a GPU. Otherwise each takes all memory of its GPUs, so ConfigError is raised
    when there are too few.
    """
    if workers == 1 or not gpus:
        return ()
    groups = [",".join(gpus[at : at + each]) for at in range(0, len(gpus) - each + 1, each)]
    if not groups or (len(groups) < workers and not sized):
        raise ConfigError(
            f"--workers {workers}: each takes {each} of the {len(gpus)} GPUs here, all of their memory, so there is room for"
            f" {len(groups)}. Start fewer, or give --kv-memory-gib and --lora-memory-mib, so that workers can share a GPU"
        )
    return tuple(groups[number % len(groups)] for number in range(workers))


def gpus_of_workers(worker: WorkerConfig, workers: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """`CUDA_VISIBLE_DEVICES` of each worker with this configuration; () where they are left as they are. Raises ConfigError."""
    device, vllm = worker.engine.device, worker.engine.engine == "vllm"
    if device == "cpu" or (device == "auto" and not (vllm or torch_has_cuda())):
        return ()
    sized = bool((worker.kv.kv_memory_gib or worker.kv.kv_blocks) and worker.adapters.lora_memory_mib)
    if device.startswith("cuda:"):
        if workers > 1 and not sized:
            raise ConfigError(
                f"--device {device}: {workers} workers would each take all memory of one GPU. Leave --device out, and each gets"
                " a GPU of its own, or give --kv-memory-gib and --lora-memory-mib"
            )
        return ()
    return assigned(workers, visible_gpus(environ), each=_parallel(worker.engine.engine_args) if vllm else 1, sized=sized)


def _parallel(engine_args: str) -> int:
    """The number of GPUs that a vLLM engine with these options uses."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    try:
        found, _ = parser.parse_known_args(shlex.split(engine_args))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"--engine-args: {error}") from None
    return max(1, found.tensor_parallel_size * found.pipeline_parallel_size)


def torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, from its files: an import would take seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and "cuda: Optional[str] = None" not in version.read_text()
