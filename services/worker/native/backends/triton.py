"""The torch model with Triton kernels on a CUDA device: short steps as graphs, adapter copies on a stream of their own."""

from __future__ import annotations

import torch

from motet.kernels.device import DeviceStreams, cuda_streams, numbered
from motet.kernels.device.driver import DriverError, MemoryOperations
from motet.kernels.library_attention import agreeing_library
from motet.services.worker.native.backend import BackendMissing, BackendOptions
from motet.services.worker.native.backends.reference import lora_library, torch_runner
from motet.services.worker.native.decode_graphs import DecodeGraphs
from motet.services.worker.native.device_memory import DeviceMemory, reserve
from motet.services.worker.native.runner import ModelRunner
from motet.shared.telemetry import logger

_log = logger(__name__)


def triton(options: BackendOptions) -> ModelRunner:
    """A runner with the Triton kernels. The KV cache has a spare block, the scratch block of the CUDA graphs.

    Raises BackendMissing, ConfigError, UnsupportedModel.
    """
    if torch.device(options.device).type != "cuda":
        raise BackendMissing(f"the model is on {options.device}")
    torch.cuda.set_device(numbered(torch.device(options.device)))  # of this thread: Triton launches on the current device
    memory = reserve(options, spare_blocks=1)
    library = lora_library()
    scratch_block = memory.cache.null_block - 1  # the spare one
    graphs = None
    if options.graphs:
        results = torch.cuda.graph_pool_handle()
        most_rows = options.max_running
        graphs = DecodeGraphs(memory.cache, memory.pool, scratch_block=scratch_block, memory=results, most_rows=most_rows)
    memory.cache.library = agreeing_library(memory.cache, heads=memory.config.num_heads, windows=memory.config.windows)
    return torch_runner(options, memory, _streams(memory), library, graphs=graphs)


def _streams(memory: DeviceMemory) -> DeviceStreams | None:
    """Streams for copies beside the steps; None where the driver cannot wait for words in memory."""
    try:
        return cuda_streams(memory.device, MemoryOperations())
    except DriverError as error:
        _log.warning("adapters are copied between the steps: %s", error)
        return None
