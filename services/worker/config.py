"""The worker's configuration and its memory budgets in bytes. Imports no torch, so a wrong flag is reported at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from motet.policies.memory.eviction import EVICTIONS
from motet.policies.step.cold_start import ColdStartName
from motet.policies.step.request_queues import QUEUES
from motet.shared.adapter_blob import PAGE_RANKS, pages_for
from motet.shared.config import (
    COMMON,
    EXPERT,
    MAX_LORA_RANK,
    PER_PROCESS,
    BaseModelConfig,
    Config,
    ConfigError,
    MaxLoraRank,
    ServiceConfig,
)
from motet.shared.tables import Table
from motet.shared.worker_options import Switch, WorkerOptions

ENGINES: Table[str] = Table(
    {
        "native": "motet.services.worker.native.opening:open_native",
        "vllm": "motet.services.worker.vllm_engine.opening:open_vllm",
        "images": "motet.services.worker.image_engine.opening:open_images",
    }
)
"""The engines by the names that `--engine` takes, each with the function that opens it (`engines.opening.OpenEngine`).

The functions are named, not imported, so that a worker imports the engine that it runs and no other.
"""
GIB = 1 << 30
MIB = 1 << 20
CPU_KV_GIB = 1.0
CPU_KV_SHARE = 0.25
LORA_LEAST_MIB = 256
LORA_ADAPTERS, LORA_RANK, LORA_SHARE = 32, 64, 0.25


class WorkerEngineConfig(Config, frozen=True, kw_only=True):
    """How the model is held and computed."""

    engine: Annotated[
        str,
        ENGINES,
        Meta(
            description="what runs the model: native (Motet's own engine), vllm (where vLLM is installed), or images (image"
            " models, where motet[images] is installed)",
            extra=COMMON,
        ),
    ] = "native"
    engine_args: Annotated[
        str, Meta(description="options of vLLM itself, for --engine vllm, as on its command line", extra=COMMON)
    ] = ""
    device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="where the model runs: auto (cuda if present), cpu, cuda or cuda:<n>",
            extra=COMMON,
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads of the engine; 0: all cores except those of --assist-processes", extra=COMMON)
    ] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and KV cache: auto (the checkpoint's), float32, bfloat16, float16", extra=COMMON),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4"],
        Meta(
            description="base weights in memory: none (as --dtype), int8 or int4 (both need the compiled CPU kernels)",
            extra=COMMON,
        ),
    ] = "none"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(
            description="weights: auto (the checkpoint's), or dummy (random ones, for benchmarks)",
            extra=EXPERT,
        ),
    ] = "auto"
    packed_weights_dir: Annotated[
        str,
        Meta(
            description="directory for the base's weights in the layout of the compiled CPU kernels: the first start writes"
            " them (as many bytes as in memory), later starts map them instead of packing them again; empty: none"
        ),
    ] = ""
    device_memory: Annotated[
        Literal["auto", "shared", "fixed"],
        Meta(
            description="division of device memory by --kv-memory-gib and --lora-memory-mib: shared (each may use what the"
            " other does not need), fixed, or auto (shared on a CPU, fixed on a GPU)"
        ),
    ] = "auto"
    enforce_eager: Annotated[bool, Meta(description="no CUDA graphs: launch every step kernel by kernel")] = False
    profile: Annotated[
        str,
        Meta(description="file from `motet profile` with this worker's step times; empty: they are learned while serving"),
    ] = ""


class BatchConfig(Config, frozen=True, kw_only=True):
    """How many requests, and how long."""

    max_running: Annotated[int, Meta(ge=1, le=4096, description="maximum sequences in the running batch", extra=COMMON)] = 64
    max_waiting: Annotated[
        int, Meta(ge=1, description="maximum requests on the worker beyond --max-running; further ones are refused")
    ] = 256
    max_step_tokens: Annotated[
        int, Meta(ge=16, description="maximum tokens per engine step; longer prompts are split into chunks")
    ] = 512
    max_model_len: Annotated[
        int, Meta(ge=0, description="maximum prompt plus output tokens; 0: the model's own limit", extra=COMMON)
    ] = 0
    queues: Annotated[
        str,
        QUEUES,
        Meta(
            description="order of waiting requests: fcfs (by priority, TTFT objective and arrival), auto (the same, but late"
            " requests let those go first that can still be in time: 13% more in time at 1.3 times the capacity), motet (also"
            " by size, recent service of the tenant and the adapter, and whether the adapter is in use: 12% fewer in time), or"
            " one that --plugins adds",
            extra=EXPERT,
        ),
    ] = "auto"


class KvConfig(Config, frozen=True, kw_only=True):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens per KV block")] = 16
    kv_blocks: Annotated[
        int,
        Meta(
            ge=0,
            description="number of KV blocks; 0: as many as fit into --kv-memory-gib",
            extra=EXPERT,
        ),
    ] = 0
    kv_memory_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="KV cache size; 0: on a CPU 1 GiB, at most a quarter of free memory; on a GPU all free memory",
            extra=COMMON,
        ),
    ] = 0.0
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="type of keys and values in memory: auto (as --dtype) or int8 (half the bytes, rounded; needs the"
            " compiled CPU kernels)"
        ),
    ] = "auto"
    prefix_cache: Annotated[bool, Meta(description="reuse KV blocks of common prompt prefixes")] = True
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="share KV blocks of base-model prompts between tenants; faster, but a tenant can find out whether"
            " another one sent a prompt that it guesses"
        ),
    ] = False


class AdaptersConfig(Config, frozen=True, kw_only=True):
    """Memory for adapters: on the device, in host memory, on disk."""

    max_lora_rank: MaxLoraRank = MAX_LORA_RANK
    max_loras: Annotated[int, Meta(ge=1, le=4096, description="maximum adapters on the device", extra=COMMON)] = 64
    lora_memory_mib: Annotated[
        int,
        Meta(
            ge=0,
            description="device memory in MiB for adapter weights; 0: at least 256 and an adapter of --max-lora-rank, on a GPU"
            " 32 of rank 64 if they fit in a quarter of what the weights leave (--engine vllm: 256)",
            extra=COMMON,
        ),
    ] = 0
    host_cache_mib: Annotated[int, Meta(ge=1, description="host memory in MiB for adapters that are not in use")] = 1024
    disk_cache_mib: Annotated[
        int,
        Meta(ge=1, description="maximum size of --adapter-cache-dir in MiB; the least recently used adapter is evicted first"),
    ] = 8192
    adapter_eviction: Annotated[
        str,
        EVICTIONS,
        Meta(
            description="which idle adapter is evicted first from full memory: next-use (least likely to be requested next,"
            " weighted by copying time per byte), gdsf (least frequent, weighted in the same way, with aging), or one that"
            " --plugins adds",
            extra=EXPERT,
        ),
    ] = "next-use"
    adapter_prefetch: Annotated[
        int,
        Meta(
            ge=0,
            description="number of waiting requests whose adapters are copied to the device before their turn; only where"
            " copies run beside the steps",
            extra=EXPERT,
        ),
    ] = 0
    adapter_foresight: Annotated[
        Switch,
        Meta(
            description="load adapters that are likely to be requested soon to host memory and to the device, while nothing"
            " else is being copied; auto: where enough of these forecasts come true",
            extra=EXPERT,
        ),
    ] = "auto"
    adapter_probe: Annotated[
        Literal["on", "off"],
        Meta(
            description="after each copy of an adapter to the device compare what is there with its file, and its answers to a"
            " short prompt with those at its first load; one that is partly ignored, has no effect or is another one is"
            " quarantined before it answers. off: no such check"
        ),
    ] = "on"
    merge: Annotated[
        Switch,
        Meta(
            description="on: merge the adapter of most requests into a copy of the weights, made between the steps in free KV"
            " memory. Other requests pause while it is merged. auto: only while that is measured to be faster, in memory that"
            " nothing else uses. Not with quantized weights; on a CPU not with --device-memory fixed. Off, since auto's gains"
            " are the twin's so far, and answers may differ by rounding"
        ),
    ] = "off"
    adapter_cache_dir: Annotated[
        str,
        Meta(
            description="directory for downloaded adapters, kept over restarts; empty: a temporary one, removed at exit",
            extra=PER_PROCESS,
        ),
    ] = ""


class ColdConfig(Config, frozen=True, kw_only=True):
    """Requests whose adapter is not on the device yet."""

    cold_start: Annotated[
        ColdStartName,
        Meta(
            description="how a request starts while its adapter is being copied: auto (least predicted cost), blocking (after"
            " the copy), layerwise (when the copy stays ahead of the layers), assist (at once, with --assist-processes)",
            extra=EXPERT,
        ),
    ] = "auto"
    assist_processes: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Meta(
            description="number of CPU LoRA processes, which compute adapters that are still being copied; each uses a core."
            " auto: none on a CPU, which has no cores to spare; on a GPU up to 4 of the cores that the service leaves",
        ),
    ] = 0
    assist_cores: Annotated[
        str,
        Meta(
            pattern=r"^(\d+(,\d+)*)?$",
            description="core ids for --assist-processes, comma-separated; empty: the highest ones",
            extra=EXPERT,
        ),
    ] = ""

    @property
    def processes(self) -> int:
        """How many CPU LoRA processes there are; none for `auto`, until the engine knows its device and replaces it."""
        return 0 if self.assist_processes == "auto" else self.assist_processes

    @property
    def core_ids(self) -> tuple[int, ...]:
        """A core for each of --assist-processes. Raises ConfigError when there are not that many, or not the ones named."""
        allowed = sorted(os.sched_getaffinity(0))
        named = [int(core) for core in self.assist_cores.split(",") if core]
        if not set(named) <= set(allowed):
            raise ConfigError(f"--assist-cores: {self.assist_cores}, this process may run on {', '.join(map(str, allowed))}")
        cores = named or allowed[-self.processes :] if self.processes else []
        if len(set(cores)) != self.processes:
            raise ConfigError(f"--assist-processes: {self.processes} processes need a core each of {len(set(cores))}")
        return tuple(cores)


class WorkerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The model is loaded once. Adapters come from the registry while the worker serves."""

    base: BaseModelConfig
    engine: WorkerEngineConfig = WorkerEngineConfig()
    batch: BatchConfig = BatchConfig()
    kv: KvConfig = KvConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cold: ColdConfig = ColdConfig()

    @property
    def options(self) -> WorkerOptions:
        """The options on which the worker's decisions depend."""
        return WorkerOptions(
            max_step_tokens=self.batch.max_step_tokens,
            max_loras=self.adapters.max_loras,
            prefix_cache=self.kv.prefix_cache,
            queues=self.batch.queues,
            eviction=self.adapters.adapter_eviction,
            prefetch=self.adapters.adapter_prefetch,
            foresight=self.adapters.adapter_foresight,
            cold_start=self.cold.cold_start,
            merge=self.adapters.merge,
        )

    @property
    def prefix_cache(self) -> Literal["", "tenant", "base"]:
        """The prompts that share KV blocks, as `WorkerLimits` says it."""
        if not self.kv.prefix_cache:
            return ""
        return "base" if self.kv.share_prefix_cache else "tenant"

    @property
    def engine_threads(self) -> int:
        """How many CPU threads the engine uses: as asked, or every core this process may run on but those of assistants."""
        return self.engine.threads or max(1, len(os.sched_getaffinity(0)) - self.cold.processes)


def lora_bytes_for(config: AdaptersConfig, *, rank_bytes: int, free_bytes: int, on_cpu: bool) -> int:
    """How many bytes to reserve for adapters when the weights leave `free_bytes` of the device's memory.

    `rank_bytes`: what an adapter takes per rank, on all projections. The default holds any adapter that the worker accepts, and
    on a GPU `LORA_ADAPTERS` of them, up to `LORA_SHARE` of the memory; one adapter may take half.
    """
    if config.lora_memory_mib:
        return config.lora_memory_mib * MIB

    def size(rank: int) -> int:
        return pages_for(rank) * PAGE_RANKS * rank_bytes

    largest, several = size(config.max_lora_rank), LORA_ADAPTERS * size(min(config.max_lora_rank, LORA_RANK))
    room = max(int(LORA_SHARE * free_bytes), min(largest, free_bytes // 2))
    return max(LORA_LEAST_MIB * MIB, min(largest if on_cpu else max(largest, several), room))


def kv_blocks_for(config: KvConfig, *, block_bytes: int, free_bytes: int, on_cpu: bool) -> int:
    """How many KV blocks of `block_bytes` to allocate when `free_bytes` are free on the device.

    An explicit size larger than what is free is a ConfigError, not a crash in the middle of the first long prompt.
    """
    if config.kv_blocks:
        wanted = config.kv_blocks * block_bytes
    elif config.kv_memory_gib:
        wanted = int(config.kv_memory_gib * GIB)
    elif on_cpu:
        wanted = int(min(CPU_KV_GIB * GIB, CPU_KV_SHARE * free_bytes))
    else:
        wanted = free_bytes
    if wanted > free_bytes:
        raise ConfigError(f"--kv-memory-gib: {wanted / GIB:.2f} GiB of KV cache asked for, {free_bytes / GIB:.2f} GiB are free")
    blocks = wanted // block_bytes
    if blocks < 2:
        raise ConfigError(f"--kv-memory-gib: {wanted / GIB:.3f} GiB hold {blocks} KV blocks of {block_bytes} bytes")
    return int(blocks)


def free_host_bytes() -> int:
    """Memory that can be had without swapping (MemAvailable), within the control group's limit."""
    available = 4 * GIB
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            available = min(available, max(0, int(limit) - int(stat["anon"])))
    except (OSError, ValueError, KeyError):
        return available  # no Linux, or no control group: what is known so far
    return available
