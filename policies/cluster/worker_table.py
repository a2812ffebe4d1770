"""The columns of the workers' table: one array per fact, one element per worker, and what policies compute from its limits.

A decision reads a column from end to end. `policies.cluster.cluster_state` fills the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import get_args
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from motet.policies.times.perf_model import Floats, fetch_ms, load_ms
from motet.shared.model import EXCLUSIVE_CAPABILITIES, Capability

PERF = (
    "prefill_base_ms", "prefill_token_ms", "prefill_lora_ms", "decode_base_ms", "decode_row_ms", "decode_lora_ms",
    "load_base_ms", "load_ms_per_mib", "fetch_base_ms", "fetch_ms_per_mib", "finish_ms",
)  # fmt: skip
MIN_STEP_MS = 1e-3  # no step takes less, whatever a worker says
# name: (type, value in a free row). Counts are floats, since they are multiplied with times.
COLUMNS: dict[str, tuple[str, float]] = {
    "base": ("i8", -1),  # index of the base model's name; -1: a free row
    "key": ("u8", 0),  # hash of the worker's id
    "heard_s": ("f8", 0),
    "draining": ("?", 0),
    "refusing": ("?", 0),  # it refused for lack of room since its last message
    "max_model_len": ("i8", 0),
    "max_lora_rank": ("i8", 0),
    "capabilities": ("u8", 0),  # one bit per word: `capability_bits`
    "max_running": ("f8", inf),
    "max_requests": ("f8", 0),  # max_running + max_waiting
    "block_size": ("i8", 0),
    "kv_tokens_total": ("f8", 0),  # what the KV cache holds
    "kv_tokens_free": ("f8", inf),
    "running": ("f8", 0),
    "running_left": ("f8", 0),  # output tokens the running requests are still expected to produce
    "queued": ("f8", 0),
    "queue_tokens": ("f8", 0),  # tokens the queued requests have to prefill
    "kv_tokens_promised": ("f8", 0),  # what its requests will still take: see `WorkerLoad.kv_tokens_promised`
    "queue_rank_sum": ("f8", 0),
    "queue_max_rank": ("f8", 0),
    "exists": ("f8", 0),  # running + queued
    "rank_sum": ("f8", 0),  # over exists
    "max_rank": ("f8", 0),
    "adapter_slots": ("f8", inf),  # adapters on its device at once; inf where it does not say
    "slots_used": ("f8", 0),  # share of its slots whose adapters its requests use
    "slots_lacking": ("f8", 0),  # slots that one more adapter would lack, as a share of all
    "slots_short": ("f8", 0),  # the same of the slots less their root, by which the number in use varies
    "adapter_bytes_free": ("f8", inf),
    "adapters_used": ("f8", 0),  # different adapters of its requests
    "adapters_loaded": ("f8", 0),  # adapters on the device, or about to be
    "extra_rows": ("f8", 0),  # what the requests add to a step beyond one row each
    "step_ms": ("f8", MIN_STEP_MS),  # one decode step of all its requests
    "queue_ms": ("f8", 0),  # the prefill of its queue
    "opened_ms": ("f8", -inf),  # when the first of the queued requests came; without one, long ago
    "began_ms": ("f8", -inf),  # when a request was last reported to run; without requests, long ago
    "tightest_tpot_ms": ("f8", inf),  # the strictest objective among its requests
    "copies_stall": ("f8", 0),  # 1 where steps wait for adapter copies
    "copies_wait": ("f8", 0),  # 1 where a request waits for its own adapter's copy
    "kv_format": ("i8", 0),  # index of the format of its KV blocks, from 1 on; 0: they cannot travel
    "kv_base_ms": ("f8", 0),  # a fetch of cached blocks from another worker
    "kv_token_ms": ("f8", 0),  # and each of its tokens; 0 for unknown
    "kv_tokens_most": ("f8", 0),  # the tokens of one fetch
    "bgmv": ("?", 0),
    **dict.fromkeys(PERF, ("f8", 0)),
}
CAPABILITY_BITS: dict[str, int] = {word: 1 << bit for bit, word in enumerate(get_args(Capability))}
EXCLUSIVE_BITS = sum(CAPABILITY_BITS[word] for word in EXCLUSIVE_CAPABILITIES)
_UNKNOWN_BIT = 1 << 63  # no worker has it
_SIZES_KEPT = 64  # sizes of adapters, which are those of a few ranks


def free_rows(count: int) -> dict[str, NDArray]:
    """So many rows without a worker, by column."""
    return {name: np.full(count, empty, dtype=kind) for name, (kind, empty) in COLUMNS.items()}


def capability_bits(words: Iterable[str]) -> int:
    """The words as a bit mask. An unknown word becomes a bit that no worker sets."""
    bits = 0
    for word in words:
        bits |= CAPABILITY_BITS.get(word, _UNKNOWN_BIT)
    return bits


def hash_of(text: str) -> int:
    """A 64-bit hash of the text, the same in every process and in every run."""
    data = text.encode()
    low = crc32(data)
    return (crc32(data, low ^ 0x9E3779B9) << 32) | low


class PerfColumns:
    """The perf model coefficients of all workers, one array element per worker (`times.perf_model.Coefficients`)."""

    def __init__(self, table: Mapping[str, NDArray]) -> None:
        self.bgmv: NDArray[np.bool_] = table["bgmv"]
        self.pads = bool(self.bgmv.any())  # whether some worker's kernel pads
        self.prefill_base_ms: Floats = table["prefill_base_ms"]
        self.prefill_token_ms: Floats = table["prefill_token_ms"]
        self.prefill_lora_ms: Floats = table["prefill_lora_ms"]
        self.decode_base_ms: Floats = np.maximum(table["decode_base_ms"], MIN_STEP_MS)
        self.decode_row_ms: Floats = table["decode_row_ms"]
        self.decode_lora_ms: Floats = table["decode_lora_ms"]
        self.load_base_ms: Floats = table["load_base_ms"]
        self.load_ms_per_mib: Floats = table["load_ms_per_mib"]
        self.fetch_base_ms: Floats = table["fetch_base_ms"]
        self.fetch_ms_per_mib: Floats = table["fetch_ms_per_mib"]
        self.finish_ms: Floats = table["finish_ms"]
        self.fetches = bool(self.fetch_base_ms.any() or self.fetch_ms_per_mib.any())  # whether a fetch takes time somewhere
        self._added: dict[int, tuple[Floats, Floats]] = {}
        self._transfers: dict[int, tuple[Floats, Floats]] = {}

    def added_ms(self, rank: int) -> tuple[Floats, Floats]:
        """What a request of `rank` adds to a decode step, and what its rank adds to a prefill, where nothing is padded."""
        added = self._added.get(rank)
        if added is None:
            added = self.decode_row_ms + self.decode_lora_ms * float(rank), self.prefill_lora_ms * float(rank)
            self._added[rank] = added
        return added

    def transfer_ms(self, size_bytes: int) -> tuple[Floats, Floats]:
        """Times to copy an adapter of this size to each worker's device, and to fetch it into the worker's memory.

        The caller must not change the arrays.
        """
        found = self._transfers.get(size_bytes)
        if found is None:
            if len(self._transfers) >= _SIZES_KEPT:
                self._transfers.clear()
            found = self._transfers[size_bytes] = load_ms(self, size_bytes), fetch_ms(self, size_bytes)
        return found

    def lora_load(self, rows: Floats, rank_sum: Floats, max_rank: Floats) -> Floats:
        """Each worker's LoRA load under its own kernel; the vector form of `times.perf_model.lora_load`."""
        return np.where(self.bgmv, rows * max_rank, rank_sum) if self.pads else rank_sum

    def lora_growth(self, rows: Floats, max_rank: Floats, rank: int) -> Floats | float:
        """How much one more request of `rank` adds to the LoRA load of each worker."""
        if not self.pads:
            return float(rank)
        return np.where(self.bgmv, (rows + 1.0) * np.maximum(max_rank, rank) - rows * max_rank, float(rank))
