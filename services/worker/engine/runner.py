"""The model side of the engine: one step's batch in, logits out.

Owns all device memory: base weights, KV cache and adapter pool. Which blocks and slots mean what is the engine's
business; nothing here waits for anything but the device. One thread at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from motet.kernels import KvCache, LoraPool, prepare_lora
from motet.kernels.cpu import BuildError, CpuEngine, CpuForward, Packer
from motet.kernels.cpu.assist import AssistCounts, Helpers, loading_of
from motet.kernels.cpu.loading import CpuLoader
from motet.kernels.device import DeviceAssist, DeviceLoader, DeviceStreams, cuda_streams, host_streams, numbered
from motet.kernels.device.driver import DriverError, MemoryOperations
from motet.kernels.library_attention import agreeing_library
from motet.kernels.link import LinkState
from motet.services.worker.assist import CpuAssist
from motet.services.worker.engine.adapter_weights import HostAdapter
from motet.services.worker.engine.decode_graphs import DecodeGraphs
from motet.services.worker.engine.linear import Linear
from motet.services.worker.engine.loader import M, ModelWeights, load_weights, random_weights, resolve_dtype
from motet.services.worker.engine.model import Model, RotaryEmbedding
from motet.services.worker.engine.model_config import ModelConfig, read_model_config
from motet.services.worker.engine.step_batch import StepBatch
from motet.services.worker.engine.torch_steps import TorchSteps
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.telemetry import logger

KERNELS = ("auto", "reference", "cpu")
_log = logger(__name__)
SLOWER = "3 to 10"  # times, the reference beside the compiled kernels, at 32 sequences without and with adapters


class ModelRunner:
    """A loaded model with its KV cache and adapter pool.

    `dtype` is "auto" (the checkpoint's), "float32", "bfloat16" or "float16", for weights, KV and adapters alike;
    `threads` 0 leaves torch's setting. `kernels` is "cpu" (compiled), "reference" (torch) or "auto": compiled ones on a CPU
    when they can be built; MOTET_KERNELS overrides "auto". `quantization` "int8" keeps the base's matrices as whole numbers
    with one scale per output, which compiled kernels alone can read. `load_format` "dummy" makes random weights on the device
    and reads `config.json` alone. `graphs` False launches a GPU's decode steps kernel by kernel. Raises UnsupportedModel for a
    checkpoint that the engine does not run, ConfigError when the kernels asked for or needed cannot be had.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        block_size: int = 16,
        kv_blocks: int,
        lora_bytes: int,
        max_lora_rank: int,
        max_loras: int,
        threads: int = 0,
        kernels: str = "auto",
        quantization: str = "none",
        link_bytes_per_s: float = 0.0,
        assist_cores: Sequence[int] = (),
        assist_rows: int = 512,
        load_format: str = "auto",
        graphs: bool = True,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.config = read_model_config(model_dir)
        self.dtype = resolve_dtype(dtype, self.config)
        self.device = numbered(torch.device(device))
        self._random = load_format == "dummy"
        allowed = os.sched_getaffinity(0)
        self._step_cores = allowed.difference(assist_cores) or allowed  # assistants have cores of their own
        self._threads = threads or len(self._step_cores)
        with _on_cores(self._step_cores if assist_cores else None):  # threads begin on those of who starts them
            compiled = _compiled(kernels, self.device, threads)
        if quantization != "none" and compiled is None:
            raise ConfigError(
                f"--quantization {quantization}: only the compiled CPU kernels read such weights, and they are not in use here"
                f" (device {device}; see the warning above, or MOTET_KERNELS)"
            )
        self._kv_block_bytes = self.kv_bytes_per_block(self.config, dtype=dtype, block_size=block_size)
        self._cache = KvCache(
            layers=self.config.num_layers,
            blocks=kv_blocks + (self.device.type == "cuda"),  # there the last is DecodeGraphs' scratch block
            block_size=block_size,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self._pool = LoraPool(
            self.config.projection_shapes(),
            layers=self.config.num_layers,
            slots=max_loras,
            max_rank=max_lora_rank,
            bytes_total=lora_bytes,
            dtype=self.dtype,
            device=self.device,
        )
        self._loader: CpuLoader | DeviceLoader | None = None
        self.assist: CpuAssist | None = None
        if compiled is not None:
            self._steps: CpuForward | TorchSteps = self._on_cpu(compiled, model_dir, int8=quantization == "int8")
            self._loader = CpuLoader(compiled, self._pool, link_bytes_per_s=link_bytes_per_s)
            self._start_assist(compiled, assist_cores, assist_rows)
            return
        library = _library() if assist_cores or (link_bytes_per_s and self.device.type == "cpu") else None
        streams = _streams(self.device, library)
        if streams is not None:
            self._loader = DeviceLoader(self._pool, streams, link_bytes_per_s=link_bytes_per_s)
            self._start_assist(library, assist_cores, assist_rows)
        beside = DeviceAssist(self._pool, streams, library) if streams is not None else None
        self._steps = self._with_torch(model_dir, beside, scratch_block=kv_blocks if graphs else -1)

    @staticmethod
    def kv_bytes_per_block(config: ModelConfig, *, dtype: str, block_size: int) -> int:
        """Bytes of one KV block over all layers, for sizing `kv_blocks` from a memory budget."""
        values = config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim
        return values * resolve_dtype(dtype, config).itemsize

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        return self._kv_block_bytes

    @property
    def lora_bytes_total(self) -> int:
        return self._pool.bytes_total

    @property
    def lora_bytes_free(self) -> int:
        return self._pool.bytes_free

    def adapter_bytes(self, weights: HostAdapter) -> int:
        """What this adapter occupies in the pool: whole pages of 8 ranks of each projection it has, over all layers."""
        return self._pool.bytes_needed(weights.ranks)

    def load_adapter(self, slot: int, weights: HostAdapter) -> None:
        """Copy an adapter into an empty slot. Raises kernels.PoolFull when pages are short, ValueError on a taken slot."""
        with torch.inference_mode():
            self._pool.load(slot, weights.packed)

    def begin_load(self, slot: int, weights: HostAdapter) -> None:
        """`load_adapter`, beside the steps: its pages are taken now, `loaded_layers` says how many layers are there.

        Whole on return where nothing copies beside the steps (torch on a CPU, unless a link or processes were asked for), or
        when a cast is needed.
        """
        if self._loader is None or weights.packed.arena.dtype != self._pool.arena.dtype:
            self.load_adapter(slot, weights)
            return
        self._pool.reserve(slot, weights.packed)
        self._loader.begin(slot, weights.packed, weights)

    def loaded_layers(self, slot: int) -> int:
        """Layers of this slot's adapter that are on the device: all of them once it is whole."""
        return int(self._pool.loaded_layers[slot])

    def bytes_ahead(self, slot: int) -> int:
        """Bytes that pass the link until this slot's adapter is whole, those of the loads before it included."""
        return self._loader.bytes_ahead(slot) if self._loader is not None else 0

    @property
    def link(self) -> LinkState:
        """The link over which adapters reach the device."""
        return self._loader.link if self._loader is not None else LinkState(0, 0, 0.0, math.inf)

    @property
    def assist_relief(self) -> float:
        """What a CPU process spares the device, of its own time: on a CPU the same kernels would run on all threads."""
        return 1.0 / self._threads if self.device.type == "cpu" else 0.0

    @property
    def assisted(self) -> AssistCounts:
        """What became of the rows of adapters that were on their way, so far."""
        return self._steps.assisted

    def free_adapter(self, slot: int) -> None:
        """Empty a slot, whole or on its way; no row of a later step may name it until it is loaded again."""
        if self._loader is not None:
            self._loader.cancel(slot)
        self._pool.free(slot)

    def close(self) -> None:
        """End what runs beside the steps. No step follows."""
        if self.assist is not None:
            self.assist.close()
        if self._loader is not None:
            self._loader.close()
        if isinstance(self._steps, TorchSteps):
            self._steps.close()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K and V and return the wanted logits, float32 [n, vocab], in the order of `logit_rows`.

        They are valid until the next call. Raises ValueError when a row names an empty adapter slot.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: streams, graphs and Triton's launches take the current one
        helpers = self._helpers(batch)
        with _on_cores(self._step_cores if self.assist is not None else None):
            if isinstance(self._steps, TorchSteps):
                return self._steps(batch, helpers)
            began_s = now_s()
            logits = self._steps(batch, helpers)
        if self.assist is not None:
            self.assist.observe(len(batch.token_ids), now_s() - began_s, helpers)
        return logits

    def _helpers(self, batch: StepBatch) -> Helpers | None:
        """For the adapters of this step that are on their way; None when all are whole."""
        if isinstance(self._loader, DeviceLoader):
            self._loader.mend(batch.row_slot)
        if self._loader is None or not self._loader.under_way:
            return None
        self._loader.finished()  # lets go of what they were copied from
        named = set(batch.row_slot.tolist())
        loading = [
            loading_of(slot, weights, layerwise=batch.slot_modes.get(slot) != "assist")
            for slot, weights in self._loader.under_way.items()
            if slot in named
        ]
        if not loading:
            return None
        return self.assist.helpers(loading, len(batch.token_ids)) if self.assist is not None else Helpers(loading)

    def _start_assist(self, library: CpuEngine | None, cores: Sequence[int], max_rows: int) -> None:
        if cores and library is not None:
            self.assist = CpuAssist(library, self._pool, cores=cores, max_rows=max_rows)

    def _with_torch(self, model_dir: Path, beside: DeviceAssist | None, *, scratch_block: int) -> TorchSteps:
        """`scratch_block` -1: no graphs."""
        model = Model(self.config, self._weights(model_dir, Linear))
        prepare_lora(self._pool)
        graphs = None
        if self.device.type == "cuda":
            self._cache.library = agreeing_library(self._cache, heads=self.config.num_heads, windows=self.config.windows)
        if self.device.type == "cuda" and scratch_block >= 0:
            graphs = DecodeGraphs(model, self._cache, self._pool, scratch_block=scratch_block)
        loader = self._loader if isinstance(self._loader, DeviceLoader) else None
        return TorchSteps(model, self._cache, self._pool, graphs=graphs, beside=beside, loader=loader, processes=self.assist)

    def _weights(self, model_dir: Path, linear: Callable[[torch.Tensor, torch.Tensor | None], M]) -> ModelWeights[M]:
        if self._random:
            return random_weights(self.config, self.dtype, self.device, linear)
        return load_weights(model_dir, self.config, self.dtype, self.device, linear)

    def _on_cpu(self, engine: CpuEngine, model_dir: Path, *, int8: bool) -> CpuForward:
        weights = self._weights(model_dir, Packer(engine, int8=int8))
        half = self.config.head_dim // 2
        rope = RotaryEmbedding(self.config.rope, self.config.head_dim, torch.float32, self.device)

        def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = rope.at(positions)
            return cos[:, 0, :half], sin[:, 0, half:]

        return CpuForward(
            engine,
            weights,
            heads=self.config.num_heads,
            eps=self.config.rms_norm_eps,
            windows=self.config.windows,
            rotary=rotary,
            cache=self._cache,
            pool=self._pool,
        )


@contextmanager
def _on_cores(cores: set[int] | None) -> Iterator[None]:
    """This thread on `cores` for a while; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _library() -> CpuEngine | None:
    """The compiled kernels for CPU LoRA processes, beside a model that does without."""
    try:
        return CpuEngine(threads=1)
    except (BuildError, ValueError) as error:
        _log.warning("CPU LoRA processes cannot be had: %s", error)
        return None


def _streams(device: torch.device, library: CpuEngine | None) -> DeviceStreams | None:
    """For copies beside the steps of the torch model; None where they stop the steps."""
    if device.type == "cpu":
        return host_streams(library) if library is not None else None
    try:
        return cuda_streams(device, MemoryOperations())
    except DriverError as error:
        _log.warning("adapters are copied between the steps: %s", error)
        return None


def _compiled(kernels: str, device: torch.device, threads: int) -> CpuEngine | None:
    """The compiled kernels, or None for the reference."""
    if kernels == "auto":
        kernels = os.environ.get("MOTET_KERNELS", "auto")
    if kernels not in KERNELS:
        raise ConfigError(f"kernels {kernels!r}: one of {', '.join(KERNELS)} is expected")
    if kernels == "reference" or (kernels == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise ConfigError(f"kernels 'cpu': the model is on {device}")
    try:
        return CpuEngine(threads=threads)
    except (BuildError, ValueError) as error:
        if kernels == "cpu":
            raise ConfigError(f"kernels 'cpu': {error}") from None
        _log.warning("compiled CPU kernels are missing, steps take %s times as long: %s", SLOWER, error)
        return None
