"""Puts the parts of a worker together: the same way for the native engine, for vLLM and for a simulated worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.eviction import make_eviction
from motet.policies.memory.host_tier import HostTier
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence
from motet.policies.step.cold_start import ColdStarts
from motet.policies.step.engine_entry import E, EngineEntry, EntryLimits
from motet.policies.step.merge_decision import MergeConfig, Merging, Modes
from motet.policies.step.merged_copy import MERGE, NOTHING_KNOWN
from motet.policies.step.paying_merge import PayingMerge
from motet.policies.step.request_queues import Queues, make_queues
from motet.policies.worker.foresight import Foresight
from motet.policies.worker.request_life import R
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_view import View
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions

S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The memory of a device for KV blocks and adapters. `shared`: each may use what the other does not need.

    `block_bytes` 0: unknown, and adapters do not count in queues' quotas.
    """

    kv_blocks: int
    block_size: int
    adapter_bytes: int
    block_bytes: int = 0
    shared: bool = False

    @classmethod
    def of(cls, limits: WorkerLimits) -> DeviceMemory:
        """The memory that a worker announces."""
        return cls(
            kv_blocks=limits.kv_blocks_total,
            block_size=limits.block_size,
            adapter_bytes=limits.adapter_bytes_total,
            block_bytes=limits.kv_block_bytes or limits.kv_token_bytes * limits.block_size,
            shared=limits.kv_block_bytes > 0,
        )

    @property
    def most_blocks(self) -> int:
        """The number of KV blocks while no adapter is there."""
        return self.kv_blocks + (self.adapter_bytes // self.block_bytes if self.shared else 0)

    @property
    def token_bytes(self) -> float:
        """KV bytes of one token."""
        return self.block_bytes / self.block_size

    @property
    def total_tokens(self) -> float:
        """The whole memory in tokens, as queues divide it among themselves."""
        adapters = self.adapter_bytes / self.token_bytes if self.block_bytes else 0.0
        return self.kv_blocks * self.block_size + adapters


def batch_core(
    memory: DeviceMemory,
    options: WorkerOptions,
    *,
    max_running: int,
    perf: PerfModel,
    layers: int | None = None,
    merging: MergeConfig = MERGE,
    modes: Modes | None = None,
) -> BatchCore[S]:
    """The sequences, memory and steps of an engine whose steps the worker plans.

    `perf`: its step times to start from. `layers`: of its model, where copies to the device run beside the steps; None where
    steps wait for them. `merging`: constants of `options.merge` "on". `modes`: of an engine that changes its weights in place.
    """
    cold = ColdStarts(layers, options.max_step_tokens, options.cold_start) if layers is not None else None
    if options.merge != "off":
        modes = Merging(NOTHING_KNOWN, merging) if options.merge == "on" else PayingMerge(NOTHING_KNOWN)
    return BatchCore(
        AdmissionLimits(max_running=max_running, max_step_tokens=options.max_step_tokens, prefetch=options.prefetch),
        kv=KvBlocks(
            memory.kv_blocks,
            memory.block_size,
            prefix_cache=options.prefix_cache,
            capacity=memory.most_blocks,
            block_bytes=memory.block_bytes,
        ),
        slots=_slots(memory, options, asynchronous=cold is not None),
        cold=cold,
        shared=memory.shared,
        queues=_queues(memory, options),
        modes=modes,
        copies=perf if options.merge != "off" else None,
    )


def engine_entry(memory: DeviceMemory, options: WorkerOptions, *, seats: int) -> EngineEntry[E]:
    """Admission to an engine that has a scheduler of its own, such as vLLM: which requests it gets, and their adapter slots."""
    return EngineEntry(
        EntryLimits(seats=seats),
        kv=KvBlocks(memory.kv_blocks, memory.block_size, prefix_cache=False),
        slots=_slots(memory, options, asynchronous=True),
        queues=_queues(memory, options),
    )


def worker_core(
    view: View,
    options: WorkerOptions,
    *,
    host_bytes: int | None,
    disk_bytes: int | None,
    files: Iterable[tuple[str, int]] = (),
) -> WorkerCore[R]:
    """The requests of a worker, and its adapters in host memory and on disk. `files`: as HostTier's."""
    return WorkerCore(
        view=view,
        host=HostTier(host_bytes, disk_bytes, files=files, eviction=options.eviction),
        max_requests=view.limits.max_running + view.limits.max_waiting,
        foresight=Foresight(careful=options.foresight == "auto") if options.foresight != "off" else None,
    )


def image_slots(memory: DeviceMemory, options: WorkerOptions) -> AdapterSlots:
    """The adapter slots of an image engine, whose copies run beside its steps."""
    return _slots(memory, options, asynchronous=True)


def _slots(memory: DeviceMemory, options: WorkerOptions, *, asynchronous: bool) -> AdapterSlots:
    eviction = make_eviction(options.eviction)
    return AdapterSlots(options.max_loras, memory.adapter_bytes, asynchronous=asynchronous, eviction=eviction)


def _queues(memory: DeviceMemory, options: WorkerOptions) -> Queues[S] | None:
    return make_queues(options.queues, total_tokens=memory.total_tokens, token_bytes=memory.token_bytes)
