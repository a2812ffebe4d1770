"""Builds a simulated worker from a profile (`shared.profile`); also contains profiles of the papers' workers."""

from __future__ import annotations

from pathlib import Path

from motet.policies.step.cold_start import AssistRates
from motet.shared import profile
from motet.shared.json_files import FileError, line_of
from motet.shared.model import WorkerLimits
from motet.shared.profile import VERSION
from motet.twin.events import to_ps
from motet.twin.link import LinkModel
from motet.twin.memory import LLAMA2_7B
from motet.twin.steps import A10_MBGMV, Link, MeasuredSteps, PerfSteps
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import ImageSpec, MergedCopyModel, WorkerSpec

MIB = 1 << 20


class TwinProfile(profile.Profile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile from which simulated workers are built."""

    def spec(self) -> WorkerSpec:
        """The simulated worker of this profile."""
        extra, storage, measured = self.steps, self.storage, self.engine_steps
        linear = PerfSteps(
            self.perf,
            schedule_ms=extra.schedule_ms,
            waiting_ms=extra.waiting_ms,
            context_token_ps=to_ps(extra.context_token_ms),
        )
        return WorkerSpec(
            limits=self.limits,
            perf=self.perf,
            steps=linear if measured is None else MeasuredSteps(measured, self.perf),
            storage=StorageModel(
                host_bytes=storage.host_mib * MIB or None,
                disk_bytes=storage.disk_mib * MIB or None,
                disk=Link(storage.disk_base_ms, storage.disk_ms_per_mib),
                store=Link(storage.store_base_ms, storage.store_ms_per_mib),
            ),
            options=self.engine,
            merged_copy=None
            if self.merge is None
            else MergedCopyModel(size_bytes=round(self.merge.copy_mib * MIB), mib_ms=self.merge.mib_ms),
            link=None if self.link is None else _link(self.link),
            images=None if self.images is None else ImageSpec(steps=self.images),
        )


def _link(facts: profile.LinkFacts) -> LinkModel:
    assist = None
    if facts.assist_processes:
        assist = AssistRates(
            facts.assist_processes,
            mib_row_ms=facts.assist_mib_row_ms,
            hop_ms=facts.assist_hop_ms,
            mib_ms=facts.assist_mib_ms,
            start_ms=facts.assist_start_ms,
            core_share=facts.assist_core_share,
            relief=facts.assist_relief,
        )
    return LinkModel(bytes_per_s=facts.gb_per_s * 1e9, layers=facts.layers, assist=assist, drag=facts.drag)


A10_BYTES = 24_000_000_000


def a10_llama2_7b() -> TwinProfile:
    """CaraServe's worker: Llama-2-7B on an A10, with 2 GiB for adapters."""
    adapter_bytes = 2 << 30
    return TwinProfile(
        motet_profile=VERSION,
        name="Llama-2-7B on an A10 (CaraServe)",
        limits=WorkerLimits(
            base_model="llama-2-7b",
            device="cuda",
            max_model_len=4096,
            max_running=64,
            max_waiting=256,
            block_size=16,
            kv_blocks_total=LLAMA2_7B.kv_blocks(A10_BYTES, adapter_bytes=adapter_bytes, block_size=16),
            adapter_bytes_total=adapter_bytes,
            max_lora_rank=128,
            pin_slots=32,
            pin_bytes=adapter_bytes // 2,
        ),
        perf=A10_MBGMV,
    )


def read_profile(path: Path) -> TwinProfile:
    """The profile in a file. Raises FileError naming the line and the field."""
    read = profile.read_profile(path, TwinProfile)
    draws = read.limits.engine == "images" or "draws" in read.limits.capabilities
    for field, missing in (("images", read.images is None), ("link", read.link is None)):
        if draws and missing:
            raise FileError(
                path, line_of(path.read_text(encoding="utf-8"), field), field, "expected of a worker that draws pictures"
            )
    return read
