"""Adapters on the device and on their way to it: what the engine's slots mean for the runner, and what is told of them.

begin      a slot was granted: its copy starts, and is whole at once where nothing copies beside the steps
look       before a decision: what is whole now, and how far the rest is, for `policies.cold_start`
left       a slot was taken back: the copy under way, if there is one, is given up
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kernels.link import LinkState
from policies.adapter_slots import AdapterSlots
from policies.batch_admission import Plan
from policies.cold_start import AssistRates, ColdStarts, Forced
from policies.perf_model import MIB
from services.worker.engine.adapter_weights import HostAdapter
from services.worker.engine.request import CopyStats, ResidencyChange
from services.worker.engine.runner import ModelRunner
from services.worker.engine.seats import Live
from shared.model import PerfModel, Residency

PAUSE_S = (0.0002, 0.02)  # shortest and longest, while everybody waits for a copy


class DeviceAdapters:
    """`cold` is None where copies do not run beside the steps. `changes` and `arrived` are taken with each step's output."""

    def __init__(
        self, runner: ModelRunner, *, slots: int, max_step_tokens: int, perf: Callable[[], PerfModel], cold_start: Forced
    ) -> None:
        self.cold: ColdStarts | None = None
        if runner.link.bytes_per_s < math.inf:
            self.cold = ColdStarts(runner.config.num_layers, max_step_tokens, cold_start)
        self.slots = AdapterSlots(slots, runner.lora_bytes_total, asynchronous=self.cold is not None)
        self.resident: dict[str, Residency] = {}
        self.changes: list[ResidencyChange] = []
        self.arrived = 0  # copies that became whole
        self._runner, self._perf = runner, perf
        self._weights: dict[str, HostAdapter] = {}  # of the copies under way
        self._told: tuple[int, dict[str, int], dict[str, int]] = (0, {}, {})  # what the last CopyStats counted up to

    def begin(self, slot: int, adapter: HostAdapter) -> None:
        """Raises what the runner raises when it cannot take the weights."""
        self._runner.begin_load(slot, adapter)
        self._weights[adapter.digest] = adapter
        if self.cold is None:
            self._whole(adapter)

    def look(self, *, waiting: bool) -> None:
        """`waiting`: somebody may be admitted by what is known after this."""
        cold, slots, runner = self.cold, self.slots, self._runner
        if cold is None:
            return
        for digest, slot in list(slots.loading.items()):
            if runner.loaded_layers(slot) == cold.layers:
                slots.arrived(digest)
                self._whole(self._weights[digest])
        if not slots.loading and not waiting:
            return
        link = runner.link
        cold.observe(
            perf=self._perf(),
            bytes_per_s=link.bytes_per_s,
            queued_bytes=link.bytes_queued,
            under_way={
                digest: (slots.size_bytes(digest), runner.bytes_ahead(slot), runner.loaded_layers(slot))
                for digest, slot in slots.loading.items()
            },
            assist=self._assist_rates(link),
        )

    def left(self, digest: str, slot: int) -> None:
        """The slot is free, whatever it held."""
        self._runner.free_adapter(slot)
        self._weights.pop(digest, None)
        if self.resident.pop(digest, None) is not None:
            self.changes.append(ResidencyChange(digest, None))

    def modes(self, plan: Plan[Live]) -> tuple[dict[int, str], int]:
        """{slot: mode} of the step's adapters that are under way, and how many of its rows belong to them."""
        loading = self.slots.loading
        if self.cold is None or not loading:
            return {}, 0
        modes, rows = dict[int, str](), 0
        for live in (*plan.decodes, *plan.prefills):
            if live.adapter in loading:
                modes[live.slot] = "assist" if self.cold.modes.get(live.adapter) == "assist" else "layerwise"
                rows += live.scheduled
        return modes, rows

    @property
    def pause_s(self) -> float:
        """How long nobody can join, when nobody runs; 0 without copies under way."""
        if self.cold is None or not self.slots.loading:
            return 0.0
        return min(max(self.cold.wait_ms / 1e3, PAUSE_S[0]), PAUSE_S[1])

    def stats(self) -> CopyStats | None:
        """Since the last time; None when nothing was copied and there are no CPU processes to tell of."""
        assist = self._runner.assist
        if self.cold is None or not (self.slots.loading or self.arrived or assist):
            return None
        link, counts = self._runner.link, self._runner.assisted
        rows = {"processes": counts.by_processes, "device": counts.on_device, "in_place": counts.in_place}
        failures = dict(assist.failures) if assist is not None else {}
        told, self._told = self._told, (link.bytes_copied, rows, failures)
        return CopyStats(
            link_bytes=link.bytes_copied - told[0],
            bytes_per_s=link.bytes_per_s,
            under_way=len(self.slots.loading),
            assist=self._assist_rates(link),
            rows={where: count - told[1].get(where, 0) for where, count in rows.items()},
            failures={reason: count - told[2].get(reason, 0) for reason, count in failures.items()},
        )

    def check(self) -> None:
        """Assert that reports, copies and slots agree."""
        slots = self.slots
        assert set(self.resident) == set(slots.digests()) - set(slots.loading), "residency reports and slots disagree"
        assert set(self._weights) == set(slots.loading), "copies and slots disagree"

    def _whole(self, adapter: HostAdapter) -> None:
        digest = adapter.digest
        del self._weights[digest]
        adapter.rest()
        self.arrived += 1
        self.resident[digest] = Residency(digest, adapter.rank, self.slots.size_bytes(digest), "device")
        self.changes.append(ResidencyChange(digest, "device"))

    def _assist_rates(self, link: LinkState) -> AssistRates | None:
        """What the CPU processes can do now; None without any, or before they have been measured."""
        assist = self._runner.assist
        if assist is None:
            return None
        capacity = assist.capacity
        if not capacity.row_s:
            return None
        ms = 1e3 * MIB / self._runner.dtype.itemsize
        return AssistRates(
            capacity.processes,
            mib_ms=capacity.read_s * ms,
            mib_row_ms=capacity.row_s * ms,
            start_ms=capacity.start_s * 1e3,
            core_share=link.core_share,
            relief=self._runner.assist_relief,
        )
