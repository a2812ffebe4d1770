"""The torch model on a CPU: the fallback where the compiled kernels cannot be built, and their test oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motet.kernels import prepare_lora, sampling
from motet.kernels.cpu import BuildError, CpuEngine
from motet.kernels.device import DeviceAssist, DeviceLoader, DeviceStreams, host_streams
from motet.services.worker.native.assist_processes import CpuAssist
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.cores import step_cores
from motet.services.worker.native.decode_graphs import DecodeGraphs
from motet.services.worker.native.device_memory import DeviceMemory, reserve, weights_of
from motet.services.worker.native.linear import Linear
from motet.services.worker.native.loader import Makers
from motet.services.worker.native.merged_model import MergedModel
from motet.services.worker.native.merging import NO_ROOM
from motet.services.worker.native.model import Model
from motet.services.worker.native.prompt_graphs import PromptGraphs
from motet.services.worker.native.runner import LoadsBetweenSteps, ModelRunner
from motet.services.worker.native.torch_steps import TorchSteps
from motet.shared.config import ConfigError
from motet.shared.telemetry import logger

_log = logger(__name__)


def reference(options: BackendOptions) -> ModelRunner:
    """A runner with plain torch. Adapters are copied between the steps, unless a link or processes are asked for.

    Raises ConfigError, UnsupportedModel.
    """
    memory = reserve(options)
    library = lora_library() if options.assist_cores or options.link_bytes_per_s else None
    streams = host_streams(library) if library is not None else None
    relief = 1.0 / (options.threads or len(step_cores(options.assist_cores)))
    return torch_runner(options, memory, streams, library, assist_relief=relief)


def torch_runner(
    options: BackendOptions,
    memory: DeviceMemory,
    streams: DeviceStreams | None,
    library: CpuEngine | None,
    *,
    graphs: DecodeGraphs | None = None,
    assist_relief: float = 0.0,
) -> ModelRunner:
    """The torch model on the memory's device. Without `streams` or `library`, steps wait while adapters are copied."""
    if options.merge and memory.device.type == "cpu" and not memory.elastic:
        raise ConfigError(NO_ROOM)
    if options.quantization != "none":
        raise ConfigError(
            f"--quantization {options.quantization}: only the compiled CPU kernels read such weights, and they are not in use"
            f" here (device {memory.device}, or MOTET_KERNELS chooses others)"
        )
    loader, beside, assist = None, None, None
    if streams is not None and library is not None:
        loader = DeviceLoader(library, memory.pool, streams, link_bytes_per_s=options.link_bytes_per_s)
        if options.assist_cores:
            assist = CpuAssist(library, memory.pool, cores=options.assist_cores, max_rows=options.assist_rows)
        beside = DeviceAssist(memory.pool, streams, library)
    model = Model(memory.config, weights_of(options, memory, Makers(_linear)))
    model.prepare()
    prepare_lora(memory.pool)
    sampling.prepare(memory.config.vocab_size, memory.device)
    merged = prompts = None
    if graphs is not None:
        prompts = PromptGraphs(model, memory.cache, memory.pool, scratch_block=graphs.scratch_block, memory=graphs.memory)
    if options.merge:
        dropped = graphs.forget_merged if graphs is not None else lambda: None
        merged = MergedModel(model, memory.config.projection_shapes(), room=memory.room, dropped=dropped)
    steps = TorchSteps(
        model,
        memory.cache,
        memory.pool,
        graphs=graphs,
        prompts=prompts,
        beside=beside,
        loader=loader,
        processes=assist,
    )
    steps.merged = merged
    return ModelRunner(
        memory=memory,
        steps=steps,
        loader=loader or LoadsBetweenSteps(memory.pool),
        numerics=f"torch {torch.__version__} {_hardware(memory.device)}",
        assist=assist,
        assist_relief=assist_relief,
        cores=step_cores(options.assist_cores) if assist is not None else None,
        merged=merged,
        kernels="triton" if memory.device.type == "cuda" else "reference",
    )


def _linear(parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Linear:
    return Linear(parts[0] if len(parts) == 1 else torch.cat(list(parts)), bias)


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def lora_library() -> CpuEngine | None:
    """The compiled kernels for copies beside the steps and CPU LoRA processes, beside a model that runs on torch."""
    try:
        return CpuEngine(threads=1)
    except (BuildError, ValueError) as error:
        _log.warning("adapters are copied between the steps, and there are no CPU LoRA processes: %s", error)
        return None
