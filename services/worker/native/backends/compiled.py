"""Compiled kernels on a CPU: one call per step, weights of 32, 16, 8 or 4 bits, CPU LoRA processes."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from motet.kernels.cpu import Arena, BuildError, CpuEngine, CpuForward, MappedArena, Packer
from motet.kernels.cpu.assist import AssistCounts, Helpers
from motet.kernels.cpu.loading import CpuLoader
from motet.kernels.cpu.merging import MergedWeights
from motet.services.worker.engines.model_config import quantization_of, read_model_config
from motet.services.worker.native.assist_processes import CpuAssist
from motet.services.worker.native.backend import BackendMissing, BackendOptions
from motet.services.worker.native.cores import on_cores, step_cores
from motet.services.worker.native.device_memory import DeviceMemory, reserve, weights_of
from motet.services.worker.native.loader import Makers
from motet.services.worker.native.merging import NO_ROOM
from motet.services.worker.native.model import RotaryEmbedding
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.telemetry import logger

PACKED_VERSION = 2  # of what is packed: matrices and their order
_log = logger(__name__)


class CompiledSteps:
    """The `runner.Steps` of a `CpuForward`. `processes` measures how long they take."""

    launch_s = 0.0

    def __init__(self, forward: CpuForward, processes: CpuAssist | None) -> None:
        self._forward, self._processes = forward, processes

    @property
    def assisted(self) -> AssistCounts:
        return self._forward.assisted

    def __call__(self, batch: StepBatch, helpers: Helpers | None) -> torch.Tensor:
        if self._processes is None:
            return self._forward(batch, helpers)
        began_s = now_s()
        logits = self._forward(batch, helpers)
        self._processes.observe(len(batch.token_ids), now_s() - began_s, helpers)
        return logits

    def prepare(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing runs beside the steps."""


def compiled(options: BackendOptions) -> ModelRunner:
    """A runner with the compiled CPU kernels.

    Raises BackendMissing before anything is loaded, ConfigError, UnsupportedModel.
    """
    if torch.device(options.device).type != "cpu":
        raise BackendMissing(f"the model is on {options.device}")
    quantization = quantization_of(options.quantization, read_model_config(options.model_dir))
    if options.merge and quantization != "none":
        raise ConfigError(
            f"--merge on: with --quantization {quantization} every merged weight would be rounded to a coarse grid"
            " again; choose one of the two"
        )
    if options.merge and not options.elastic:
        raise ConfigError(NO_ROOM)
    cores = step_cores(options.assist_cores)
    try:
        with on_cores(cores if options.assist_cores else None):
            engine = CpuEngine(threads=options.threads)
    except (BuildError, ValueError) as error:
        raise BackendMissing(str(error)) from None
    memory = reserve(options, int8_kv=True)
    forward = _forward(engine, options, memory)
    if options.merge:
        forward.merged = MergedWeights(engine, forward.layers)
    loader = CpuLoader(engine, memory.pool, link_bytes_per_s=options.link_bytes_per_s)
    assist = None
    if options.assist_cores:
        assist = CpuAssist(engine, memory.pool, cores=options.assist_cores, max_rows=options.assist_rows)
    return ModelRunner(
        memory=memory,
        steps=CompiledSteps(forward, assist),
        loader=loader,
        numerics=f"cpu {engine.isa}",
        kernels=engine.isa,
        assist=assist,
        assist_relief=1.0 / (options.threads or len(cores)),  # the same kernels would run on all threads
        cores=cores if assist is not None else None,
        merged=forward.merged,
    )


def _packed_file(engine: CpuEngine, options: BackendOptions, memory: DeviceMemory) -> Path:
    """The file of the packed weights. Its name depends on the checkpoint's files, the width and the kernels."""
    directory = options.model_dir
    files = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(directory.glob("*.safetensors"))]
    facts = repr((PACKED_VERSION, files, options.quantization, memory.dtype, engine.path.name)).encode()
    name = blake2b((directory / "config.json").read_bytes() + facts, digest_size=16).hexdigest()
    return Path(options.packed_weights_dir) / f"{name}.packed"


def _forward(engine: CpuEngine, options: BackendOptions, memory: DeviceMemory) -> CpuForward:
    config = memory.config
    quantization = quantization_of(options.quantization, config)
    stored = config.quantization is not None and options.load_format != "dummy"
    file = _packed_file(engine, options, memory) if options.packed_weights_dir and options.load_format != "dummy" else None
    arena = MappedArena(engine.library, file) if file is not None and file.exists() else Arena(engine.library)
    pack = Packer(engine, None if quantization == "none" or stored else quantization, arena)
    # 8 bits also with int4: it is small, and its errors change tokens directly
    head = pack if quantization == "none" else Packer(engine, "int8", arena)
    weights = weights_of(options, memory, Makers(pack.parts, head.parts, pack.whole, reads=not arena.filled))
    if file is not None and not arena.filled:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            arena.save(file)
        except OSError as error:
            _log.warning("packed weights are not kept: %s", error)
    half = config.head_dim // 2
    rope = RotaryEmbedding(config.rope, config.head_dim, torch.float32, memory.device)

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope.at(positions)
        return cos[:, 0, :half], sin[:, 0, half:]

    return CpuForward(
        engine,
        weights,
        heads=config.num_heads,
        eps=config.rms_norm_eps,
        windows=config.windows,
        rotary=rotary,
        cache=memory.cache,
        pool=memory.pool,
    )
