"""Opens vLLM from a worker's configuration."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from motet.policies.worker.pins import PIN_SHARE
from motet.services.worker.config import GIB, LORA_LEAST_MIB, MIB, WorkerConfig, free_host_bytes
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.opening import Facts, Opened, ProbedKind, Wiring
from motet.services.worker.vllm_engine.core import Core, VllmOptions, padded_rank
from motet.services.worker.vllm_engine.engine import VllmEngine
from motet.services.worker.vllm_engine.peft_files import peft_adapter
from motet.shared.base_layers import read_base_layers
from motet.shared.config import ConfigError
from motet.shared.hf_config import UnsupportedModel, read_config
from motet.shared.model import WorkerLimits
from motet.shared.telemetry import logger

log = logger("motet.worker.vllm")
CPU_KV_SHARE = 0.25


def open_vllm(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """vLLM as an engine. Raises ConfigError for options that vLLM does not support."""
    if config.engine.quantization != "none":
        raise ConfigError("--quantization: with --engine vllm it is vLLM's own, in --engine-args")
    if config.kv.kv_cache_dtype != "auto":
        raise ConfigError("--kv-cache-dtype: with --engine vllm it is vLLM's own, in --engine-args")
    if config.adapters.merge == "on":
        raise ConfigError("--merge on: vLLM computes every adapter beside the weights; only the native engine merges one")
    if config.cold.processes:
        raise ConfigError("--assist-processes: only the native engine has CPU LoRA processes")
    dtype = config.engine.dtype if config.engine.dtype != "auto" else stored_type(model_dir)
    slot_bytes = _slot_bytes(model_dir, padded_rank(config.adapters.max_lora_rank), 4 if dtype == "float32" else 2)
    slots = min(config.adapters.max_loras, max(1, (config.adapters.lora_memory_mib or LORA_LEAST_MIB) * MIB // slot_bytes))
    log.info(
        "adapter slots",
        extra={"slots": slots, "mib_each": round(slot_bytes / MIB, 1), "of_rank": config.adapters.max_lora_rank},
    )
    kv_bytes = int(config.kv.kv_memory_gib * GIB)
    if not kv_bytes and config.engine.device != "cuda" and not Path("/dev/nvidiactl").exists():
        kv_bytes = int(min(GIB, CPU_KV_SHARE * free_host_bytes()))
    engine = VllmEngine(
        VllmOptions(
            model_dir=model_dir,
            max_running=config.batch.max_running,
            max_step_tokens=config.batch.max_step_tokens,
            max_loras=slots,
            max_lora_rank=config.adapters.max_lora_rank,
            max_model_len=config.batch.max_model_len,
            kv_bytes=kv_bytes,
            dtype=dtype,
            prefix_cache=config.kv.prefix_cache,
            extra=config.engine.engine_args,
        ),
        wiring.deliver,
        slot_bytes=slot_bytes,
        entry_options=config.options,
        probing=config.adapters.adapter_probe == "on",
    )
    return Opened(engine, partial(_facts, config, engine))


def _facts(config: WorkerConfig, engine: VllmEngine) -> Facts:
    """The facts of a started engine."""
    core, folders = engine.core, tempfile.TemporaryDirectory(prefix="motet-vllm-adapters-")
    slots = engine.options.max_loras if core.takes_adapters else 0
    limits = WorkerLimits(
        base_model=config.base.name,
        device="cuda" if Path("/dev/nvidiactl").exists() else "cpu",
        max_model_len=min(core.max_model_len, core.kv_blocks * core.block_size),
        max_running=config.batch.max_running,
        max_waiting=config.batch.max_waiting,
        block_size=core.block_size,
        kv_blocks_total=core.kv_blocks,
        adapter_bytes_total=slots * engine.slot_bytes,
        max_lora_rank=config.adapters.max_lora_rank if core.takes_adapters else 0,
        lora_targets=core.adapter_layers,
        copies="stall",
        prefix_cache=config.prefix_cache if core.tells_cached else "",
        adapter_slots=slots,
        pin_slots=slots // PIN_SHARE,
        pin_bytes=min(slots * engine.slot_bytes, config.adapters.host_cache_mib * MIB) // PIN_SHARE,
    )

    def parse_adapter(path: Path, digest: str) -> Any:
        return peft_adapter(path, Path(folders.name), digest, core.adapter_prefix)

    return Facts(
        limits=limits,
        vocab_size=core.vocab_size,
        eos_token_ids=core.eos_token_ids,
        parse_adapter=parse_adapter,
        slot_bytes=engine.slot_bytes,
        probed=_probed(core),
    )


def _probed(core: Core) -> ProbedKind:
    model = core.config.model_config
    return ProbedKind(str(model.dtype).removeprefix("torch."), model.quantization or "none")


def stored_type(model_dir: Path) -> str:
    """`--dtype auto` in Motet's sense, the checkpoint's own type. vLLM's `auto` would store float32 in 16 bits.

    Where the checkpoint does not name a type, vLLM decides.
    """
    try:
        told = read_config(model_dir).get("dtype")
    except UnsupportedModel:
        return "auto"
    return told if told in ("float32", "float16", "bfloat16") else "auto"


def _slot_bytes(model_dir: Path, rank: int, width: int) -> int:
    """Bytes of one slot, padded to `rank`, in numbers of `width` bytes.

    Of an architecture that is not known here all matrices of the checkpoint count, which is a little too much; without its
    files a slot counts as 1, so that only slots are counted.
    """
    try:
        model = read_model_config(model_dir)
    except UnsupportedModel:
        return max(1, read_base_layers(model_dir).elements * rank * width)
    return sum(fan_in + fan_out for fan_in, fan_out in model.projection_shapes().values()) * rank * model.num_layers * width
