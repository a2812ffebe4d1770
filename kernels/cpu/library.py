"""Python bindings of the compiled library: the structures of src/motet_cpu.h, and one object per instruction set.

Calls release the GIL. Tensors are passed as addresses, so every function here checks type, device and contiguity first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from motet.kernels.cpu.build import BuildError, available_isas, build, choose_isa
from motet.kernels.pool import MODULES, PAGE_RANKS, LoraPool, PackedLora
from motet.kernels.types import kv_block_bytes

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INTEGERS = {"int8": 3, "int4": 4}
"""Integer weights: with one scale per output, or per output and 32 inputs."""

KV_TYPES = TYPES | {torch.int8: INTEGERS["int8"]}
"""Types of a KV cache; int8 has scales beside its values."""

MAX_RANK = 1024
"""The largest rank of an adapter that the compiled kernels have room for."""


class Matrix(Structure):
    """A packed matrix."""

    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("type", c_int64),
    ]


class Layer(Structure):
    """One decoder layer."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("window", c_int64),
    ]


class Pool(Structure):
    """A LoraPool."""

    _fields_ = [
        ("arena", c_void_p),
        ("table", c_void_p),
        ("pages", c_void_p),
        ("scales", c_void_p),
        ("slots", c_int64),
        ("max_pages", c_int64),
        ("layers", c_int64),
        ("fan_in", c_int64 * 7),
        ("fan_out", c_int64 * 7),
        ("loaded_layers", c_void_p),
    ]


class Model(Structure):
    """A decoder with its KV cache and adapter pool."""

    _fields_ = [
        ("type", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("mlp", c_int64),
        ("vocab", c_int64),
        ("layers", c_int64),
        ("eps", c_float),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("lm_head", Matrix),
        ("layer", POINTER(Layer)),
        ("kv", c_void_p),
        ("kv_type", c_int64),
        ("blocks", c_int64),
        ("block_size", c_int64),
        ("pool", Pool),
    ]


class Loading(Structure):
    """An adapter that is being copied to the device: its slot, and where its bytes are in host memory."""

    _fields_ = [
        ("host", Pool),
        ("device", c_int64),
        ("inode", c_int64),
        ("data_start", c_int64),
        ("file_bytes", c_int64),
        ("fd", c_int32),
        ("slot", c_int32),
        ("layerwise", c_int64),
    ]


class Assist(Structure):
    """A step's adapters that are being copied, the processes that help with them, and where their rows were computed."""

    _fields_ = [
        ("loading", POINTER(Loading)),
        ("count", c_int64),
        ("channel", POINTER(c_void_p)),
        ("channels", c_int64),
        ("read_ns", c_double),
        ("row_ns", c_double),
        ("layer_ns", c_double),
        ("watchdog_ns", c_int64),
        ("layer_wait_ns", c_int64),
        ("by_processes", c_int64),
        ("on_device", c_int64),
        ("in_place", c_int64),
        ("repaired", c_int64),
        ("layer_waited_ns", c_int64),
        ("layers_late", c_int64),
    ]


class DeviceCalls(Structure):
    """Functions of a device's driver, the context and the stream to use them with, and the memory that a loader needs."""

    _fields_ = [
        ("use", c_void_p),
        ("copy", c_void_p),
        ("write", c_void_p),
        ("create", c_void_p),
        ("record", c_void_p),
        ("query", c_void_p),
        ("destroy", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
        ("words", c_uint64),
        ("ring", c_void_p),
        ("part_bytes", c_int64),
        ("parts", c_int64),
    ]


class Step(Structure):
    """One step's rows."""

    _fields_ = [
        ("rows", c_int64),
        ("seqs", c_int64),
        ("logits", c_int64),
        ("table_stride", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("row_slot", c_void_p),
        ("seq_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("kv_slots", c_void_p),
        ("logit_rows", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("out", c_void_p),
        ("assist", POINTER(Assist)),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "motet_engine_new": (c_void_p, [ctypes.c_int]),
    "motet_engine_free": (None, [c_void_p]),
    "motet_alloc": (c_void_p, [c_int64]),
    "motet_release": (None, [c_void_p, c_int64]),
    "motet_packed_bytes": (c_int64, [c_int64, c_int64, c_int64]),
    "motet_pack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "motet_pack_whole": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "motet_merge": (
        None,
        [c_void_p, POINTER(Pool), c_int64, c_int64, c_int64, POINTER(Matrix), c_void_p, c_int64, c_int64],
    ),
    "motet_forward": (None, [c_void_p, POINTER(Model), POINTER(Step)]),
    "motet_gemm": (None, [c_void_p, c_int64, POINTER(Matrix), c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "motet_lora": (
        None,
        [c_void_p, c_int64, POINTER(Pool), c_void_p, *[c_int64] * 5, c_void_p, c_void_p, c_int64],
    ),
    "motet_site_lora": (None, [c_void_p, *[c_int64] * 3, c_void_p, c_void_p]),
    "motet_layer_lora": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64]),
    "motet_attention": (None, [c_void_p, c_int64, POINTER(Step), c_void_p, c_void_p, *[c_int64] * 7, c_void_p]),
    "motet_loader_new": (c_void_p, [POINTER(Pool), c_int64, c_int64, c_double]),
    "motet_loader_on_device": (c_void_p, [POINTER(Pool), POINTER(DeviceCalls), c_int64, c_double, c_int64]),
    "motet_loader_free": (None, [c_void_p]),
    "motet_loader_begin": (None, [c_void_p, c_int64, POINTER(Pool)]),
    "motet_loader_cancel": (None, [c_void_p, c_int64]),
    "motet_loader_expect": (None, [c_void_p, c_int64]),
    "motet_loader_hold": (None, [c_void_p]),
    "motet_loader_release": (None, [c_void_p]),
    "motet_loader_state": (None, [c_void_p, POINTER(c_int64)]),
    "motet_loader_ahead": (c_int64, [c_void_p, c_int64]),
    "motet_loader_give_up": (None, [c_void_p, c_int64]),
    "motet_loader_failure": (c_int64, [c_void_p, c_int64]),
    "motet_loader_mended": (None, [c_void_p, c_int64]),
    "motet_host_calls": (None, [POINTER(DeviceCalls)]),
    "motet_channel_bytes": (c_int64, [POINTER(Pool), c_int64]),
    "motet_channel_init": (None, [c_void_p, POINTER(Pool), c_int64, c_int64, c_int64, c_uint32]),
    "motet_channel_new": (c_void_p, [c_void_p]),
    "motet_channel_free": (None, [c_void_p]),
    "motet_channel_ready": (c_int64, [c_void_p]),
    "motet_channel_state": (c_int64, [c_void_p]),
    "motet_channel_fail": (None, [c_void_p, c_int64]),
    "motet_channel_stop": (None, [c_void_p]),
    "motet_channel_counters": (None, [c_void_p, POINTER(c_int64)]),
    "motet_channel_start": (None, [c_void_p, POINTER(Loading), c_void_p, *[c_int64] * 4]),
    "motet_channel_finish": (c_int64, [c_void_p, c_void_p]),
    "motet_channel_words": (None, [c_void_p, POINTER(c_int64)]),
    "motet_channel_rows": (None, [c_void_p, c_int64, POINTER(c_int64)]),
    "motet_channel_listen": (None, [c_void_p, c_int64]),
    "motet_channel_release": (None, [c_void_p]),
    "motet_channel_account": (None, [c_void_p, c_int64, c_int64, c_int64]),
    "motet_assist_divide": (c_int64, [POINTER(Assist), c_void_p, c_int64, c_void_p, c_void_p]),
    "motet_word_write": (None, [c_void_p, c_uint32]),
    "motet_word_wait": (None, [c_void_p, c_uint32]),
    "motet_assist_serve": (None, [c_void_p, c_int64]),
    "motet_peak_flops": (c_double, [c_void_p, c_int64]),
    "motet_read_bandwidth": (c_double, [c_void_p, c_void_p, c_int64]),
}


@lru_cache
def load_library(path: Path) -> ctypes.CDLL:
    """Load a library. Raises BuildError for a file that is unreadable, damaged, or lacks a function."""
    try:
        library = ctypes.CDLL(str(path))
        functions = {name: getattr(library, name) for name in _FUNCTIONS}
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = functions[name]
        function.restype, function.argtypes = result, arguments
    return library


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix, and the memory that it points into."""

    matrix: Matrix
    kept: tuple[Any, ...]


class CpuEngine:
    """The threads and the workspace of one instruction set. One call at a time.

    `isa` is one of `available_isas()`, by default MOTET_CPU_ISA or the best; `threads` 0 takes every allowed CPU. Raises
    BuildError when no library can be built, ValueError for an instruction set that this machine lacks.
    """

    def __init__(self, *, threads: int = 0, isa: str | None = None) -> None:
        self.isa = choose_isa(isa)
        self.threads = threads or len(os.sched_getaffinity(0))
        self.path = build(self.isa)
        self.library = load_library(self.path)
        self._handle = self.library.motet_engine_new(self.threads)
        if not self._handle:
            raise BuildError(f"the operating system refuses {self.isa}; set MOTET_CPU_ISA={available_isas()[-2]}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.library.motet_engine_free(self._handle)
            self._handle = None

    @property
    def handle(self) -> int:
        """The first argument of the library's functions."""
        return self._handle

    def gemm(
        self, packed: Sequence[Packed], x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, *, add: bool = False
    ) -> None:
        """y [rows, n] (+)= x [rows, k] times each packed matrix in turn, all of one shape, both float32.

        `dtype` is the model's; rows of y may lie apart.
        """
        if y.stride(1) != 1 or y.dtype != torch.float32 or len(y) != len(x):
            raise ValueError(f"y is {y.dtype} {tuple(y.shape)}: float32 with {len(x)} rows of neighbours is expected")
        self.library.motet_gemm(
            self._handle,
            TYPES[dtype],
            (Matrix * len(packed))(*(one.matrix for one in packed)),
            len(packed),
            address(x, torch.float32),
            len(x),
            y.data_ptr(),
            y.stride(0),
            int(add),
        )

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: LoraPool,
        layer: int,
        group: int,
        row_slot: torch.Tensor,
        *,
        layers: int = 1,
        groups: int = 1,
        which: int = 3,
    ) -> None:
        """`kernels.add_lora` over float32 `x` and `y`, for `layers` layers from `layer`; `which` 1 shrinks, 2 expands.

        With `groups`, so many groups from `group` in every layer. Rows are as wide as the widest group; each takes the first
        columns.
        """
        self.library.motet_lora(
            self._handle,
            TYPES[pool.arena.dtype],
            pool_struct(pool),
            address(row_slot, torch.int32),
            len(row_slot),
            layer,
            layers,
            group,
            groups,
            address(x, torch.float32),
            address(y, torch.float32),
            which,
        )

    def attention(
        self,
        out: torch.Tensor,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        step: Any,
        *,
        heads: int,
        window: int = 0,
        layers: int = 1,
    ) -> None:
        """`kernels.attend` over float32 `qkv` [rows, heads + 2 * kv_heads, head_dim] into `out` [rows, heads * head_dim].

        `cache` is one layer of `KvCache.data`; `step` has the arrays of AttentionBatch.build. With `layers`, the same for the
        layers that follow in memory.
        """
        kv_heads, head_dim = (qkv.shape[1] - heads) // 2, qkv.shape[2]
        token_bytes = kv_block_bytes(block_size=1, kv_heads=kv_heads, head_dim=head_dim, dtype=cache.dtype)
        block_size = cache.nbytes // (len(cache) * token_bytes)
        arguments = Step(
            rows=len(qkv),
            seqs=len(step.context_lens),
            table_stride=step.block_tables.shape[1],
            seq_starts=step.seq_starts.ctypes.data,
            context_lens=step.context_lens.ctypes.data,
            block_tables=step.block_tables.ctypes.data,
            kv_slots=step.kv_slots.ctypes.data,
        )
        self.library.motet_attention(
            self._handle,
            KV_TYPES[cache.dtype],
            arguments,
            address(qkv, torch.float32),
            address(cache),
            layers,
            cache.nbytes,
            heads,
            kv_heads,
            head_dim,
            block_size,
            window,
            address(out, torch.float32),
        )

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Multiply-adds from registers, times two, per second, all threads."""
        return self.library.motet_peak_flops(self._handle, TYPES[dtype])

    def read_bandwidth(self, data: torch.Tensor) -> float:
        """Bytes per second when all threads read `data` once."""
        return self.library.motet_read_bandwidth(self._handle, address(data), data.nbytes)


def address(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """The address of the first element of a contiguous CPU tensor of `dtype`. Raises ValueError for any other tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or (dtype is not None and tensor.dtype != dtype):
        raise ValueError(f"{tensor.dtype} tensor on {tensor.device}: a contiguous one on the CPU is expected, of {dtype}")
    return tensor.data_ptr()


def pool_struct(pool: LoraPool | PackedLora) -> Pool:
    """The addresses of a pool's tables, which the pool never replaces. An adapter outside counts as a pool of one slot.

    For a pool on a device only the tables are valid, so no call that reads the arena may get it.
    """
    if pool.table.shape[2] * PAGE_RANKS > MAX_RANK:
        raise ValueError(f"ranks up to {pool.table.shape[2] * PAGE_RANKS}: the compiled kernels take {MAX_RANK}")
    shapes = [pool.shapes[module] for module in MODULES]
    return Pool(
        None if pool.arena.is_cuda else address(pool.arena),
        pool.table.ctypes.data,
        pool.pages.ctypes.data,
        pool.scales.ctypes.data,
        len(pool.pages),
        pool.table.shape[2],
        pool.layers,
        (c_int64 * 7)(*(fan_in for fan_in, _ in shapes)),
        (c_int64 * 7)(*(fan_out for _, fan_out in shapes)),
        pool.loaded_layers.ctypes.data if isinstance(pool, LoraPool) else None,
    )
