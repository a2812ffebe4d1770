"""Builds a warm engine from a configuration: device, memory budgets, weights, KV cache, first steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch

from motet.kernels.device import numbered
from motet.policies.times.step_times import StepTimes
from motet.policies.worker.pins import PIN_SHARE
from motet.policies.worker.probe import PROMPT_TOKENS
from motet.services.worker.config import MIB, WorkerConfig, free_host_bytes, kv_blocks_for, lora_bytes_for
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import ModelConfig, quantization_of, read_model_config
from motet.services.worker.engines.opening import Facts, ProbedKind
from motet.services.worker.engines.request import EngineLimits, EngineRequest
from motet.services.worker.engines.safetensors_files import files_of
from motet.services.worker.native.backend import Backend, BackendOptions
from motet.services.worker.native.backends import open_backend
from motet.services.worker.native.checkpoint import parameters
from motet.services.worker.native.device_memory import edge_bytes, kv_bytes_per_block, pages_of
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.loader import resolve_dtype
from motet.services.worker.native.settled import settled
from motet.shared.checkpoint_digest import checkpoint_digest
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.hf_config import UnsupportedModel
from motet.shared.model import SamplingParams, WorkerLimits
from motet.shared.tokenizer import UnusableFile, end_token

OTHERS_ON_GPU = "; if another process uses this GPU, name another one with --device cuda:<n> or CUDA_VISIBLE_DEVICES"
GPU_SHARE = 0.9  # of what is free before loading; the rest is left to activations, logits and CUDA itself
WARM_UP_PROMPTS = (1, 8, 32)  # lengths in tokens; the first is the cold process's


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly(Facts):
    """An engine ready to run, and the facts about it."""

    engine: Engine


def assemble(
    config: WorkerConfig,
    model_dir: Path,
    times: StepTimes,
    *,
    link_bytes_per_s: float = 0.0,
    loaded: Callable[[float], None] = lambda _: None,
) -> Assembly:
    """Load the model and run a few steps, whose durations go to `times`. Call it in the thread that will run the engine.

    `link_bytes_per_s` is for tests and benches: adapter copies to the device take as long as over a link of that speed.
    `loaded` gets the share of the weights that are in memory. Raises ConfigError for what cannot be served.
    """
    if config.batch.max_step_tokens < config.batch.max_running:
        raise ConfigError(
            f"--max-step-tokens: {config.batch.max_step_tokens} rows have no room for --max-running {config.batch.max_running}"
        )
    device, asked = device_of(config.engine.device), config.cold.assist_processes
    try:
        model = read_model_config(model_dir)
        quantization = quantization_of(config.engine.quantization, model)
        config, decided = settled(config, device=device, quantization=quantization, shares_memory=shares_memory(config, device))
        if config.batch.max_model_len > model.max_model_len:
            raise ConfigError(f"--max-model-len: {config.batch.max_model_len} is more than the model's {model.max_model_len}")
        kv_blocks, lora_bytes = memory_of(config, model, model_dir, device)
        runner = open_backend(_backend_options(config, model_dir, device, kv_blocks, lora_bytes, link_bytes_per_s, loaded))
        end = end_token(model_dir)
    except (UnsupportedModel, UnusableFile) as error:
        raise ConfigError(f"--model: {error}") from None
    ends = () if end is None or end >= model.vocab_size else (end,)  # a token without an embedding is never drawn
    _check_copies(asked, runner, link_bytes_per_s)
    max_model_len = min(config.batch.max_model_len or model.max_model_len, kv_blocks * config.kv.block_size)
    engine = Engine(
        runner,
        EngineLimits(
            max_running=config.batch.max_running,
            block_size=config.kv.block_size,
            kv_blocks=kv_blocks,
            max_model_len=max_model_len,
        ),
        config.options,
        perf=lambda: times.model,
        ends=ends,
        tokenizer=model_dir / "tokenizer.json",
    )
    limits = _limits(
        config,
        runner,
        device=device,
        quantization=quantization,
        max_model_len=max_model_len,
        kv_blocks=kv_blocks,
        kv_format=_kv_format(config, model, model_dir, runner) if config.kv.prefix_cache else "",
    )
    runner.prepare()
    _warm_up(engine, limits, model.vocab_size, times)
    engine.read_base()

    def parse_adapter(path: Path, digest: str) -> HostAdapter:
        return HostAdapter.from_blob(path, model, dtype=runner.dtype, digest=digest)

    return Assembly(
        engine=engine,
        limits=limits,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset({*model.eos_token_ids, *ends}),
        parse_adapter=parse_adapter,
        mechanisms=decided,
        probed=ProbedKind(str(runner.dtype).removeprefix("torch."), quantization),
    )


def _backend_options(
    config: WorkerConfig,
    model_dir: Path,
    device: str,
    kv_blocks: int,
    lora_bytes: int,
    link_bytes_per_s: float,
    loaded: Callable[[float], None],
) -> BackendOptions:
    """What the backend takes from the configuration."""
    return BackendOptions(
        model_dir=model_dir,
        dtype=config.engine.dtype,
        kv_cache_dtype=config.kv.kv_cache_dtype,
        device=device,
        block_size=config.kv.block_size,
        kv_blocks=kv_blocks,
        lora_bytes=lora_bytes,
        max_lora_rank=config.adapters.max_lora_rank,
        max_loras=config.adapters.max_loras,
        elastic=shares_memory(config, device),
        merge=config.options.merge != "off",
        threads=config.engine_threads,
        quantization=config.engine.quantization,
        packed_weights_dir=config.engine.packed_weights_dir,
        link_bytes_per_s=link_bytes_per_s,
        assist_cores=config.cold.core_ids,
        assist_rows=config.batch.max_step_tokens,
        max_running=config.batch.max_running,
        load_format=config.engine.load_format,
        graphs=not config.engine.enforce_eager,
        loaded=loaded,
        probe_tokens=PROMPT_TOKENS if config.adapters.adapter_probe == "on" else 0,
    )


def _limits(
    config: WorkerConfig,
    runner: Backend,
    *,
    device: str,
    quantization: str,
    max_model_len: int,
    kv_blocks: int,
    kv_format: str,
) -> WorkerLimits:
    """What the worker tells the other services about itself."""
    return WorkerLimits(
        base_model=config.base.name,
        device=device,
        kernels=runner.kernels,
        kernels_note=runner.kernels_note,
        quantization=quantization,
        kv_cache_dtype=config.kv.kv_cache_dtype,
        max_model_len=max_model_len,
        max_running=config.batch.max_running,
        max_waiting=config.batch.max_waiting,
        block_size=config.kv.block_size,
        kv_blocks_total=kv_blocks,
        adapter_bytes_total=runner.lora_bytes_total,
        max_lora_rank=config.adapters.max_lora_rank,
        kv_block_bytes=runner.kv_block_bytes if runner.elastic else 0,
        copies=_copies(config, runner),
        prefix_cache=config.prefix_cache,
        kv_format=kv_format,
        kv_token_bytes=runner.kv_block_bytes // config.kv.block_size,
        pin_slots=config.adapters.max_loras // PIN_SHARE,
        pin_bytes=min(runner.lora_bytes_total, config.adapters.host_cache_mib * MIB) // PIN_SHARE,
    )


def _kv_format(config: WorkerConfig, model: ModelConfig, model_dir: Path, runner: Backend) -> str:
    """A digest of everything that the bytes of a KV block depend on besides its tokens, adapter and tenant."""
    types = str(runner.dtype), config.kv.kv_cache_dtype
    facts = (model, config.engine.load_format, runner.numerics, *types, config.engine.quantization, config.kv.block_size)
    return blake2b((checkpoint_digest(model_dir) + repr(facts)).encode(), digest_size=16).hexdigest()


def _copies(config: WorkerConfig, runner: Backend) -> Literal["stall", "wait", "bridged"]:
    """For schedulers: which requests wait for the copy of an adapter to the device."""
    if math.isinf(runner.link.bytes_per_s):
        return "stall"
    return "bridged" if runner.assist is not None and config.cold.cold_start in ("auto", "assist") else "wait"


def _check_copies(processes: int | Literal["auto"], runner: Backend, link_bytes_per_s: float) -> None:
    """Raise ConfigError when an emulated link or CPU LoRA processes are asked for and not possible."""
    if processes not in (0, "auto") and runner.assist is None:
        raise ConfigError(f"--assist-processes: {processes} asked for, which need the compiled CPU kernels")
    if link_bytes_per_s and math.isinf(runner.link.bytes_per_s):
        raise ConfigError("an emulated link needs the compiled CPU kernels")


def shares_memory(config: WorkerConfig, device: str) -> bool:
    """Whether KV blocks and adapters share memory. A GPU does so only on request: that path has not run on one yet."""
    return config.engine.device_memory == "shared" or (config.engine.device_memory == "auto" and device == "cpu")


def device_of(wanted: str) -> str:
    """The device of `--device`. Raises ConfigError for a GPU that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (torch.device(wanted).index or 0) >= count:
            raise ConfigError(f"--device {wanted}: PyTorch sees {count} GPUs here, numbered from 0 (see CUDA_VISIBLE_DEVICES)")
    return wanted


def memory_of(config: WorkerConfig, model: ModelConfig, model_dir: Path, device: str) -> tuple[int, int]:
    """(KV blocks, bytes for adapters) in the memory that the weights leave. Raises ConfigError when it is too little."""
    block_bytes = kv_bytes_per_block(
        model, dtype=config.engine.dtype, block_size=config.kv.block_size, kv_cache_dtype=config.kv.kv_cache_dtype
    )
    quantization = quantization_of(config.engine.quantization, model)
    dtype = resolve_dtype(config.engine.dtype, model)
    itemsize = {"int8": 1.0, "int4": 9 / 16}.get(quantization, dtype.itemsize)
    if config.engine.load_format == "dummy":
        weights = int(parameters(model) * itemsize)
    else:
        weights = sum(path.stat().st_size for path in files_of(model_dir))
        if model.quantization is None:
            weights = int(weights * itemsize / resolve_dtype("auto", model).itemsize)
        elif device != "cpu":  # as floats there
            weights = parameters(model) * dtype.itemsize
    on_cpu = device == "cpu"
    free = free_host_bytes() if on_cpu else int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    left = free - weights
    if not on_cpu and shares_memory(config, device):
        pages = pages_of(numbered(torch.device(device)))
        assert pages is not None, "it is not a CPU"
        left -= edge_bytes(
            model.num_layers, block_bytes, pages.page_bytes, spare_blocks=1 + -(-PROMPT_TOKENS // config.kv.block_size)
        )
    elif config.adapters.merge == "on" and not on_cpu:
        left -= weights  # the most that a merged copy takes; in shared memory it borrows KV blocks
    rank_bytes = sum(map(sum, model.projection_shapes().values())) * model.num_layers * dtype.itemsize
    lora_bytes = lora_bytes_for(config.adapters, rank_bytes=rank_bytes, free_bytes=max(0, left), on_cpu=on_cpu)
    if left <= lora_bytes:
        raise ConfigError(
            f"--model: weights of {weights >> 20} MiB and {lora_bytes >> 20} MiB for adapters (--lora-memory-mib) do not fit in"
            f" the {free >> 20} MiB that are free on {device}" + ("" if on_cpu else OTHERS_ON_GPU)
        )
    kv_blocks = kv_blocks_for(config.kv, block_bytes=block_bytes, free_bytes=left - lora_bytes, on_cpu=on_cpu)
    return kv_blocks, lora_bytes


def _warm_up(engine: Engine, limits: WorkerLimits, vocab_size: int, times: StepTimes) -> None:
    """Run a few short requests, so that no user waits for lazy initialisation and the fit of step times has its first steps."""
    for number, length in enumerate(WARM_UP_PROMPTS):
        length = min(length, limits.max_model_len // 2)
        engine.add(
            EngineRequest.local(
                f"warm-up-{number}",
                ((7 * number + 13 * length + i) % vocab_size for i in range(length)),
                SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
                arrival_s=now_s(),
            ),
            now_s(),
        )
        while engine.has_work():
            began = now_s()
            output = engine.step(began)
            if output.failure is not None:
                raise output.failure
            if number:
                output.stats.time_ms = (now_s() - began) * 1000
                times.observe(output.stats)
