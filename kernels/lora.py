"""Batched LoRA for the pool's device: plain torch on a CPU, Triton on a GPU (imported only then).

Classes of sites, and rows with several adapters or weights, are computed by the compiled kernels on a CPU (classes only) or by
plain torch on any device.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import numpy as np
import torch

from motet.kernels import reference
from motet.kernels.pool import LoraPool
from motet.kernels.types import Delta

ADAPTERS_MAX = 8
"""The most adapters of a row."""


class LoraBatch:
    """One step's rows by adapter. It is valid as long as `version` is the pool's: a load or free outdates it."""

    __slots__ = ("plan", "uses", "version")

    def __init__(
        self,
        pool: LoraPool,
        row_slot: np.ndarray,
        *,
        reserved: bool,
        plan: str | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        self.version = pool.version
        if pool.of_sites or row_slot.ndim > 1 or weights is not None:
            _check_rows(pool, row_slot, weights)
            self.uses = site_kernels() if pool.of_sites and not pool.arena.is_cuda else reference
            self.plan = self.uses.LoraBatch.build(pool, row_slot, weights)
            return
        self.uses = kernels_of(pool)
        make = self.uses.LoraBatch
        self.plan = make.reserve(pool, len(row_slot), plan) if reserved else make.build(pool, row_slot)

    @staticmethod
    def build(pool: LoraPool, row_slot: np.ndarray, weights: np.ndarray | None = None) -> LoraBatch:
        """A batch from `row_slot`, int32 [rows]: each row's slot, -1 for the base model alone.

        Or int32 [rows, k] for up to `ADAPTERS_MAX` adapters of a row. `weights`, float32 in the shape of `row_slot`, multiply
        the adapters' parts (default 1). Raises ValueError when a row names an empty slot, because serving the base model
        instead would be a wrong answer, or when shapes or types differ from these.
        """
        return LoraBatch(pool, row_slot, reserved=False, weights=weights)

    @staticmethod
    def reserve(pool: LoraPool, rows: int, plan: str | None = None) -> LoraBatch:
        """A batch of `rows` rows without adapters, for `update`. On a GPU its buffers stay where a graph expects them.

        The pool is of the seven modules. `plan` is what `lora_plan` says of such steps, else that of decode steps.
        """
        return LoraBatch(pool, np.full(rows, -1, dtype=np.int32), reserved=True, plan=plan)

    def update(self, pool: LoraPool, row_slot: np.ndarray) -> None:
        """Change a reserved batch to `row_slot` with as many rows. Raises ValueError when a row names an empty slot."""
        self.plan.update(pool, row_slot)
        self.version = pool.version


def lora_plan(pool: LoraPool, row_slot: np.ndarray) -> str:
    """Which launches the kernels of the pool's device make for a step, from `row_slot`, int32 [rows]."""
    found: str = kernels_of(pool).plan_for(row_slot)
    return found


def lora_plans(pool: LoraPool) -> tuple[str, ...]:
    """Everything that `lora_plan` may say."""
    found: tuple[str, ...] = kernels_of(pool).PLANS
    return found


def prepare_lora(pool: LoraPool) -> None:
    """Do what the first step with an adapter would otherwise wait for: on a GPU the kernels are compiled and loaded."""
    kernels_of(pool).prepare(pool)


def start_lora(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> Delta | None:
    """Begin add_lora beside other work; `x` must not change until add_lora. Optional.

    On a GPU it runs on a side stream. A returned Delta is the adapters' part of the result, valid after add_lora, which then
    has nothing to add: whoever reads `y` adds it. Elsewhere this does nothing.
    """
    found: Delta | None = batch.uses.start_lora(x, pool, layer, group, batch.plan)
    return found


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Add the adapters' part of one fused projection group to `y` in place; see the package's docstring for the formula.

    `y` [rows, sum of out], `x` [rows, in], both of the pool's type and device. After a start_lora that returned a Delta `y` is
    left as it is.
    """
    batch.uses.add_lora(y, x, pool, layer, group, batch.plan)


def _check_rows(pool: LoraPool, row_slot: np.ndarray, weights: np.ndarray | None) -> None:
    """Raises ValueError when a batch of rows with weights, or of a pool of sites, has wrong shapes or names empty slots."""
    if (
        row_slot.dtype != np.int32
        or row_slot.ndim not in (1, 2)
        or (row_slot.ndim == 2 and not 1 <= row_slot.shape[1] <= ADAPTERS_MAX)
    ):
        raise ValueError(
            f"row_slot is {row_slot.dtype} {row_slot.shape}: int32 [rows] or [rows, 1 to {ADAPTERS_MAX}] is expected"
        )
    if weights is not None and (
        weights.dtype != np.float32 or weights.shape != row_slot.shape or not np.isfinite(weights).all()
    ):
        raise ValueError(f"weights are {weights.dtype} {weights.shape}: finite float32 {row_slot.shape} are expected")
    slots = np.unique(row_slot[row_slot >= 0])
    if len(slots) and (slots[-1] >= len(pool.loaded) or (pool.loaded_layers[slots] < pool.layers).any()):
        raise ValueError(f"rows name empty adapter slots: {slots.tolist()} of which some are not loaded")


def kernels_of(pool: LoraPool) -> ModuleType:
    """The kernels for the pool's device."""
    if pool.arena.is_cuda:
        from motet.kernels import triton

        return triton
    return reference


@lru_cache
def site_kernels() -> ModuleType:
    """Kernels for classes of sites on a CPU: the compiled ones if they can be built."""
    from motet.kernels.cpu import BuildError, sites

    try:
        sites.sites_library()
    except BuildError:
        return reference
    return sites
