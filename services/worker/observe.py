"""Observes what a worker does: its metrics, and the step times that it learns from its steps.

requests refused or ended, adapters in host memory and on disk ──┐
one report per engine step ──────────────────────────────────────┴──> metrics, StepTimes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from motet.policies.times.step_times import StepTimes
from motet.policies.worker.request_life import R
from motet.policies.worker.worker_core import WorkerCore
from motet.services.worker import metrics
from motet.services.worker.engines.request import (
    CopyStats,
    DrawingStats,
    MergeStats,
    ResidencyChange,
    StepReport,
    StepStats,
)
from motet.shared.model import FinishReason, Mechanism
from motet.shared.wire.stream import StreamItem

STATES = ("on", "waiting", "off")
SIDES_PX = (64, 128, 256, 512, 768, 1024, 2048)
"""Sizes of pictures are told as the smallest of these whose square has as many pixels, since clients choose them freely."""


class Observer:
    """Measures one worker. It only reads the worker's core and the reports of its engine."""

    def __init__(self, core: WorkerCore[R], times: StepTimes) -> None:
        self._core, self._times = core, times

    def refused(self, code: str) -> None:
        """An assignment was refused with this error code."""
        metrics.REFUSED.labels(code).inc()

    def answered(self, finish: FinishReason) -> None:
        """A request ended that the engine did not have."""
        metrics.FINISHED.labels(finish).inc()

    def ending(self, items: Iterable[StreamItem]) -> None:
        """Requests are about to end with these items of the engine. Those that have left the book were counted then."""
        for item in items:
            if self._core.entry((item.request_id, item.epoch)) is not None:
                metrics.FINISHED.labels(item.finish).inc()

    def stored(self) -> None:
        """Adapters came to host memory or to the disk, or left them."""
        metrics.ADAPTERS_RESIDENT.labels("host").set(len(self._core.host.copies))
        metrics.ADAPTERS_RESIDENT.labels("disk").set(len(self._core.host.files))

    def stepped(self, report: StepReport) -> None:
        """The engine reported a step, and the core knows of it."""
        output, stats, view = report.output, report.output.stats, self._core.view
        if stats.time_ms and (stats.prefill_tokens or stats.decode_rows):
            self._ran(stats, failed=output.failure is not None)
        if stats.drawing is not None:
            _drew(stats.drawing, stats.distinct_adapters)
            if stats.drawing.stage == "decode" and stats.drawing.pictures:
                drawn = stats.drawing
                self._times.finished(drawn.pictures * drawn.pixels / (512 * 512), 1000 * drawn.took_s)
        metrics.PREFIX_HIT_TOKENS.inc(stats.cached_tokens)
        metrics.PREEMPTIONS.inc(stats.preempted)
        metrics.REQUESTS.labels("running").set(stats.running)
        metrics.REQUESTS.labels("waiting").set(stats.waiting)
        metrics.REQUESTS.labels("loading").set(max(0, len(self._core) - stats.running - stats.waiting))
        for start in stats.cold_starts:
            metrics.COLD_STARTS.labels(*start).inc()
        for mode, error_ms in stats.cold_errors_ms:
            metrics.COLD_START_ERROR_S.labels(mode).observe(abs(error_ms) / 1000)
        if stats.merge_s:
            metrics.MERGE_S.inc(stats.merge_s)
        if stats.merging is not None:
            _merging(stats.merging)
            metrics.MERGED_SHARE.set(view.merged_share)
        if stats.mechanisms is not None:
            _mechanisms(view.mechanisms)
        metrics.COPIES.set(stats.copies.under_way if stats.copies is not None else 0)
        if stats.copies is not None:
            _copies(stats.copies)
        for change in output.residency:
            _moved(change)
        metrics.ADAPTERS_RESIDENT.labels("device").set(self._core.on_device)
        metrics.KV_USAGE.set(1 - view.kv_blocks_free / view.limits.kv_blocks_most)

    def _ran(self, stats: StepStats, *, failed: bool) -> None:
        """A step computed something. One that failed says nothing about step times."""
        metrics.STEP_S.observe(stats.time_ms / 1000)
        metrics.TOKENS.labels("prefill").inc(stats.prefill_tokens)
        if stats.drawing is None:  # whose rows are fractions
            metrics.BATCH_ROWS.observe(stats.prefill_requests + stats.decode_rows)
            metrics.TOKENS.labels("decode").inc(stats.decode_rows)
        if not failed:
            self._times.observe(stats)
            for kind, drift in self._times.drift.items():
                metrics.STEP_DRIFT.labels(kind).set(drift)


def _drew(stats: DrawingStats, adapters: int) -> None:
    metrics.IMAGE_PASS_S.labels(stats.stage).observe(stats.took_s)
    if stats.stage != "denoise":
        metrics.IMAGE_PICTURES.labels(stats.stage).inc(stats.pictures)
    elif stats.pictures:
        bucket = size_label(stats.pixels)
        metrics.IMAGE_STEPS.labels(bucket).inc()
        metrics.IMAGE_KNEE_ROWS.labels(bucket).set(stats.knee_rows)
        metrics.IMAGE_ROWS.observe(stats.rows)
        metrics.IMAGE_ADAPTERS.observe(adapters)
        metrics.IMAGE_CHECKPOINT_BYTES.inc(stats.checkpoint_bytes)
        metrics.IMAGE_PREVIEWS.inc(stats.previews)


def size_label(pixels: int) -> str:
    """The size of pictures as a label of bounded cardinality."""
    return str(next((side for side in SIDES_PX if side * side >= pixels), SIDES_PX[-1]))


def _moved(change: ResidencyChange) -> None:
    if change.tier is None:
        metrics.ADAPTER_EVICTIONS.labels("device").inc()
    elif change.took_s:
        metrics.LORA_LOAD_S.labels("activate").observe(change.took_s)


def _mechanisms(mechanisms: Mapping[str, Mechanism]) -> None:
    for name, mechanism in mechanisms.items():
        for state in STATES:
            metrics.MECHANISM.labels(name, state).set(state == mechanism.state)


def _merging(stats: MergeStats) -> None:
    metrics.MERGED_STEPS.inc(bool(stats.merged))
    metrics.MERGE_SWITCHES.inc(stats.switched)
    metrics.MERGED_BYTES.set(stats.bytes)
    metrics.RESTING.set(stats.resting)
    metrics.LORA_SHARE.set(stats.lora_share)


def _copies(copies: CopyStats) -> None:
    metrics.LINK_BYTES.inc(copies.link_bytes)
    metrics.LINK_BYTES_PER_S.set(copies.bytes_per_s)
    metrics.ASSIST_PROCESSES.set(copies.processes)
    for where, rows in copies.rows.items():
        metrics.ASSIST_ROWS.labels(where).inc(rows)
    for reason, count in copies.failures.items():
        metrics.ASSIST_FAILURES.labels(reason).inc(count)
