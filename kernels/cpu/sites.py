"""Compiled LoRA for classes of sites: a step's rows in blocks by adapter, and one call of the library per site.

Pools may be of any type; x and y are float32. The threads are those of torch, if its OpenMP library is GNU's; with another one
a call takes one thread. src/site_lora.h has the kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import Structure, byref, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from motet.kernels.cpu.build import build, choose_isa
from motet.kernels.cpu.library import MAX_RANK, TYPES, address, load_library
from motet.kernels.pool import LoraPool

BLOCK_ROWS = 64
"""The most rows of a block, as in src/site_lora.h."""


class SitePool(Structure):
    """A LoraPool of classes."""

    _fields_ = [
        ("arena", c_void_p),
        ("table", c_void_p),
        ("pages", c_void_p),
        ("scales", c_void_p),
        ("fan_in", c_void_p),
        ("fan_out", c_void_p),
        ("classes", c_int64),
        ("max_pages", c_int64),
        ("max_sites", c_int64),
    ]


class SiteBatch(Structure):
    """A step's rows by adapter."""

    _fields_ = [
        ("pool", SitePool),
        ("order", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("weights", c_void_p),
        ("blocks", c_int64),
        ("adapters", c_int64),
        ("threads", c_int64),
        ("parallel", c_void_p),
    ]


class LoraBatch:
    """One step's rows by adapter. It is valid as long as `version` is the pool's: a load or free outdates it."""

    __slots__ = ("_kept", "call", "classes", "plan", "rows", "type", "version")

    def __init__(self, pool: LoraPool, row_slot: np.ndarray, weights: np.ndarray | None, isa: str | None, threads: int) -> None:
        if pool.max_rank > MAX_RANK:
            raise ValueError(f"ranks up to {pool.max_rank}: the compiled kernels take {MAX_RANK}")
        self.version, self.rows, self.type = pool.version, len(row_slot), TYPES[pool.arena.dtype]
        order, starts, slots, factors = _blocks(row_slot, weights)
        fans = np.array(list(pool.shapes.values()), dtype=np.int64).T.copy()
        classes, max_pages = pool.table.shape[1:]
        self._kept = (pool, order, starts, slots, factors, fans)
        self.plan = SiteBatch(
            SitePool(
                address(pool.arena),
                pool.table.ctypes.data,
                pool.pages.ctypes.data,
                pool.scales.ctypes.data,
                fans[0].ctypes.data,
                fans[1].ctypes.data,
                classes,
                max_pages,
                pool.layers,
            ),
            order.ctypes.data,
            starts.ctypes.data,
            slots.ctypes.data,
            factors.ctypes.data,
            len(slots),
            slots.shape[1],
            threads,
            torch_threads() if threads > 1 else None,
        )
        used = pool.pages[np.unique(slots[slots >= 0])].any(axis=0)
        self.classes = {
            name: (m, pool.counts[name], pool.shapes[name]) for m, name in enumerate(pool.names) if used[m]
        }  # those that an adapter of the batch changes
        self.call = sites_library(isa).motet_site_lora

    @staticmethod
    def build(
        pool: LoraPool, row_slot: np.ndarray, weights: np.ndarray | None = None, *, isa: str | None = None, threads: int = 0
    ) -> LoraBatch:
        """A batch for a pool of classes on a CPU, see `kernels.LoraBatch.build`.

        `isa` is one of `available_isas()`, by default the best one; `threads` 0 means as many as torch's. Raises BuildError
        when the library cannot be built.
        """
        return LoraBatch(pool, row_slot, weights, isa, threads or torch.get_num_threads())


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """`kernels.add_lora` for class `group` at its site `layer`, over contiguous float32 `y` [rows, out] and `x` [rows, in].

    Raises ValueError for other shapes or types.
    """
    found = batch.classes.get(group)
    if found is None:
        return
    m, count, (fan_in, fan_out) = found
    rows = batch.rows
    if (
        x.shape != (rows, fan_in)
        or y.shape != (rows, fan_out)
        or x.dtype is not torch.float32
        or y.dtype is not torch.float32
        or not x.is_contiguous()
        or not y.is_contiguous()
        or not 0 <= layer < count
    ):
        raise ValueError(
            f"{group}, site {layer} of {count}: x {x.dtype} {tuple(x.shape)} and y {y.dtype} {tuple(y.shape)}; "
            f"contiguous float32 [{rows}, {fan_in}] and [{rows}, {fan_out}] are expected"
        )
    batch.call(byref(batch.plan), batch.type, m, layer, x.data_ptr(), y.data_ptr())


def start_lora(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Does nothing: on this path add_lora does all the work."""


def _blocks(row_slot: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rows [n], where blocks of them begin [b + 1], slots [b, k], weights [b, k]). A block's slots and weights are equal."""
    slots = row_slot.reshape(len(row_slot), -1)
    factors = np.ones(slots.shape, np.float32) if weights is None else weights.reshape(slots.shape)
    begin, end = _runs(slots, factors)  # neighbouring rows, then those of one kind together
    kinds = np.lexsort((*factors[begin].T[::-1], *slots[begin].T[::-1]))
    kinds = kinds[(slots[begin[kinds]] >= 0).any(axis=1)]
    begin, end = begin[kinds], end[kinds]
    order = np.concatenate([np.arange(a, b) for a, b in zip(begin, end, strict=True)] or [begin])
    slots, factors = slots[order], factors[order]
    begin, end = _runs(slots, factors)
    starts = np.concatenate([np.arange(a, b, BLOCK_ROWS) for a, b in zip(begin, end, strict=True)] or [begin])
    return (
        order.astype(np.int32),
        np.append(starts, len(order)).astype(np.int32),
        np.ascontiguousarray(slots[starts], dtype=np.int32),
        np.ascontiguousarray(factors[starts], dtype=np.float32),
    )


def _runs(slots: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal rows begin and end, int64 [n] each."""
    if not len(slots):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    changes = np.flatnonzero((slots[1:] != slots[:-1]).any(axis=1) | (factors[1:] != factors[:-1]).any(axis=1)) + 1
    return np.concatenate([[0], changes]), np.concatenate([changes, [len(slots)]])


@lru_cache
def sites_library(isa: str | None = None) -> ctypes.CDLL:
    """The library for an instruction set, see `choose_isa`. Raises BuildError, ValueError."""
    return load_library(build(choose_isa(isa)))


@lru_cache
def torch_threads() -> int | None:
    """The address of the function by which torch's threads run one function together; None where there is no such thing.

    An OpenMP library that was preloaded, such as Intel's, replaces the one that torch brings.
    """
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
