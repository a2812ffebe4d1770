"""Adapters that are being copied to the device: carries out what `policies.step.batch_core` decides, and reports the results.

begin      a slot was granted: its copy starts; where copies do not run beside the steps, it is complete at once
whole      the copy is complete
left       a slot was taken back: the copy into it, if one runs, is given up
"""

from __future__ import annotations

import math
from collections.abc import Callable

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.step.batch_state import StepPlan
from motet.policies.step.cold_start import AssistRates, ColdStarts
from motet.policies.times.perf_model import MIB
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import CopyStats, ResidencyChange
from motet.services.worker.native.backend import Backend
from motet.services.worker.native.seats import LiveSequence
from motet.shared.clock import now_s
from motet.shared.model import PerfModel, Residency

PAUSE_S = (0.0002, 0.02)  # shortest and longest pause while every request waits for a copy


class DeviceAdapters:
    """The adapters of an engine that are on the device or being copied to it.

    `changes` and `arrived` are reported with each step. `beside`: copies run beside the steps.
    """

    def __init__(self, runner: Backend, slots: AdapterSlots, perf: Callable[[], PerfModel]) -> None:
        self.beside = runner.link.bytes_per_s < math.inf
        self.resident: dict[str, Residency] = {}
        self.changes: list[ResidencyChange] = []
        self.arrived = 0  # copies that became whole
        self.loading: list[str] = []  # copies that began, reported with each step
        self.unread: dict[str, int] = {}  # on the device and not probed yet, in order, with their slots
        self._slots, self._runner, self._perf = slots, runner, perf
        self._weights: dict[str, HostAdapter] = {}  # of the copies under way
        self._began_s: dict[str, float] = {}  # the same copies
        self._into: dict[str, int] = {}  # their slots
        self._told: tuple[int, dict[str, int], dict[str, int]] = (0, {}, {})  # what the last CopyStats counted up to

    def begin(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot. Raises what the backend raises when it cannot take the weights."""
        self._began_s[adapter.digest] = now_s()
        self._runner.begin_load(slot, adapter)
        self.loading.append(adapter.digest)
        self._into[adapter.digest] = slot
        self._weights[adapter.digest] = adapter
        if not self.beside:
            self.whole(adapter.digest)

    def whole(self, digest: str) -> None:
        """The copy of this adapter is complete."""
        adapter = self._weights.pop(digest)
        adapter.rest()
        self.arrived += 1
        self.unread[digest] = self._into.pop(digest)
        self.resident[digest] = Residency(digest, adapter.rank, self._slots.size_bytes(digest), "device")
        self.changes.append(ResidencyChange(digest, "device", now_s() - self._began_s.pop(digest)))

    def left(self, digest: str, slot: int) -> None:
        """The adapter has left the device: free its slot, also during a copy."""
        self._runner.free_adapter(slot)
        self._weights.pop(digest, None)
        self._began_s.pop(digest, None)
        self._into.pop(digest, None)
        self.unread.pop(digest, None)
        if self.resident.pop(digest, None) is not None:
            self.changes.append(ResidencyChange(digest, None))

    def modes(self, cold: ColdStarts | None, plan: StepPlan[LiveSequence]) -> tuple[dict[int, str], int]:
        """{slot: mode} of the step's adapters that are being copied, and the number of their rows."""
        loading = self._slots.loading
        if cold is None or not loading:
            return {}, 0
        modes, rows = dict[int, str](), 0
        for live in (*plan.decodes, *plan.prefills):
            if live.adapter in loading:
                modes[live.slot] = "assist" if cold.modes.get(live.adapter) == "assist" else "layerwise"
                rows += live.scheduled
        return modes, rows

    def pause_s(self, wait_ms: float) -> float:
        """How long to wait for copies when no request can join for `wait_ms`; 0 without copies under way."""
        return min(max(wait_ms / 1e3, PAUSE_S[0]), PAUSE_S[1]) if self._slots.loading else 0.0

    # ---- the link, for decisions

    @property
    def perf(self) -> PerfModel:
        """The present estimate of step times."""
        return self._perf()

    @property
    def bytes_per_s(self) -> float:
        """The measured or emulated rate of the link."""
        return self._runner.link.bytes_per_s

    @property
    def bytes_queued(self) -> float:
        """Bytes that all running copies still have to transfer."""
        return self._runner.link.bytes_queued

    @property
    def launch_ms(self) -> float:
        """The least time of a step with an incomplete copy; 0 where such a step is launched like any other."""
        return self._runner.launch_s * 1e3

    def layers_loaded(self, digest: str, slot: int) -> int:
        """Layers on the device of an adapter that is being copied."""
        return self._runner.loaded_layers(slot)

    def bytes_ahead(self, digest: str, slot: int) -> int:
        """Bytes to transfer until this copy is complete."""
        return self._runner.bytes_ahead(slot)

    @property
    def assist(self) -> AssistRates | None:
        """The measured rates of the CPU processes; None without any, or before they have been measured."""
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
            core_share=self._runner.link.core_share,
            relief=self._runner.assist_relief,
        )

    # ---- what is told

    def stats(self) -> CopyStats | None:
        """Statistics of copies since the last call; None when nothing was copied and there are no CPU processes."""
        assist = self._runner.assist
        if not self.beside or not (self._slots.loading or self.arrived or assist):
            return None
        link, counts = self._runner.link, self._runner.assisted
        rows = {"processes": counts.by_processes, "device": counts.on_device, "in_place": counts.in_place}
        failures = dict(assist.failures) if assist is not None else {}
        told, self._told = self._told, (link.bytes_copied, rows, failures)
        return CopyStats(
            link_bytes=link.bytes_copied - told[0],
            bytes_per_s=link.bytes_per_s,
            under_way=len(self._slots.loading),
            assist=self.assist,
            rows={where: count - told[1].get(where, 0) for where, count in rows.items()},
            failures={reason: count - told[2].get(reason, 0) for reason, count in failures.items()},
        )

    def check(self) -> None:
        """Assert that reports, copies and slots agree."""
        slots = self._slots
        assert set(self.resident) == set(slots.digests()) - set(slots.loading), "residency reports and slots disagree"
        assert set(self._weights) == set(slots.loading), "copies and slots disagree"
