"""The link to the device for copies that run beside the steps: one copy after the other, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import S, Sequence
from motet.policies.step.cold_start import AssistRates, Copy, step_ms
from motet.policies.times.perf_model import MIB
from motet.shared.model import PerfModel
from motet.twin.events import PS_PER_MS, PS_PER_S, to_ps

SHORTEST_WAIT_MS = 0.01
FOREVER_PS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """The link of one worker, and its CPU LoRA processes.

    `drag`: how much longer a step takes per time of a copy beside it. 0: copies cost steps nothing; 1: steps stand still
    meanwhile.
    """

    bytes_per_s: float
    layers: int
    assist: AssistRates | None = None
    drag: float = 0.0

    def dragged_ps(self, step_ps: int, queued_ps: int) -> int:
        """The time of a step beside copies that take `queued_ps`."""
        longest_ps = round(step_ps / (1 - self.drag)) if self.drag < 1 else FOREVER_PS
        return min(step_ps + round(self.drag * queued_ps), longest_ps)


@dataclass(slots=True)
class _Copying:
    digest: str
    size_bytes: int
    total_ps: int
    left_ps: int


class DeviceLink:
    """Copies over the link, in the order in which they began.

    Times are whole picoseconds, so that equal histories are equal to the bit.
    """

    def __init__(self, model: LinkModel) -> None:
        self._model = model
        self._queue: list[_Copying] = []
        self._at_ps = 0
        self._ps_per_byte = PS_PER_S / model.bytes_per_s

    def begin(self, digest: str, size_bytes: int, now_ps: int) -> None:
        """Queue a copy behind all others."""
        if not self._queue:
            self._at_ps = now_ps
        total_ps = max(1, round(size_bytes * self._ps_per_byte))
        self._queue.append(_Copying(digest, size_bytes, total_ps, total_ps))

    def cancel(self, digest: str) -> None:
        """Remove a copy; later copies move up."""
        self._queue = [copy for copy in self._queue if copy.digest != digest]

    def advance(self, now_ps: int) -> list[str]:
        """Advance to `now_ps`; returns the copies that were completed since, in order."""
        spent_ps, self._at_ps = now_ps - self._at_ps, now_ps
        whole: list[str] = []
        while self._queue and spent_ps:
            copy = self._queue[0]
            part_ps = min(copy.left_ps, spent_ps)
            copy.left_ps -= part_ps
            spent_ps -= part_ps
            if copy.left_ps:
                break
            whole.append(copy.digest)
            del self._queue[0]
        return whole

    def loaded(self, digest: str) -> int:
        """The number of completed layers of a copy; all layers after its end."""
        copy = next((one for one in self._queue if one.digest == digest), None)
        if copy is None:
            return self._model.layers
        return (copy.total_ps - copy.left_ps) * self._model.layers // copy.total_ps

    def ahead_bytes(self, digest: str) -> float:
        """Bytes to transfer until this copy is complete."""
        at = self._queue.index(self._find(digest))
        return sum(copy.left_ps for copy in self._queue[: at + 1]) / self._ps_per_byte

    @property
    def queued_bytes(self) -> float:
        return self.queued_ps / self._ps_per_byte

    @property
    def queued_ps(self) -> int:
        """Time until all copies are complete."""
        return sum(copy.left_ps for copy in self._queue)

    @property
    def first_whole_ps(self) -> int:
        """Time until the first running copy is complete."""
        return self._queue[0].left_ps

    def _find(self, digest: str) -> _Copying:
        return next(copy for copy in self._queue if copy.digest == digest)


class Copies:
    """The link of one worker as `policies.step.batch_core` sees it; and how running copies delay requests and steps."""

    launch_ms = 0.0

    def __init__(self, model: LinkModel, perf: PerfModel) -> None:
        self.perf, self.assist, self.bytes_per_s = perf, model.assist, model.bytes_per_s
        self.link = DeviceLink(model)
        self._model = model
        self._assisted: set[str] = set()  # copies under way that processes have begun with

    @property
    def bytes_queued(self) -> float:
        """Bytes that all running copies still have to transfer."""
        return self.link.queued_bytes

    def layers_loaded(self, digest: str, slot: int) -> int:
        """Layers on the device of an adapter, copied or being copied."""
        return self.link.loaded(digest)

    def bytes_ahead(self, digest: str, slot: int) -> float:
        """Bytes to transfer until this copy is complete."""
        return self.link.ahead_bytes(digest)

    def wait_ps(self, core: BatchCore[S]) -> int:
        """For an idle engine: time until a request can join; 0 without running copies."""
        if not core.slots.loading:
            return 0
        wait_ms = max(core.wait_ms, SHORTEST_WAIT_MS)
        return min(self.link.first_whole_ps, to_ps(wait_ms)) if isfinite(wait_ms) else self.link.first_whole_ps

    def step_ps(self, core: BatchCore[S], lives: Iterable[Sequence], warm_ps: int) -> int:
        """Duration of a step of these sequences. `warm_ps`: its duration if all adapters were on the device."""
        loading, cold, model = core.slots.loading, core.cold, self._model
        if cold is None or not loading:
            return warm_ps
        if model.drag:
            warm_ps = model.dragged_ps(warm_ps, self.link.queued_ps)
        mib_rows, sizes, assisted, overlapped = 0.0, dict[str, float](), dict[str, Copy](), dict[str, Copy]()
        for live in lives:
            digest = live.adapter
            if digest not in loading:
                continue
            if cold.modes.get(digest) == "assist":
                assisted[digest] = cold.copies[digest]
                mib_rows += live.scheduled * live.adapter_bytes / MIB
                sizes[digest] = live.adapter_bytes / MIB
            else:
                overlapped[digest] = cold.copies[digest]
        if not assisted and not overlapped:
            return warm_ps
        cpu_ms = saved_ms = begin_ms = 0.0
        if model.assist is not None:
            new = assisted.keys() - self._assisted
            self._assisted = (self._assisted & loading.keys()) | new
            if new:  # processes start, and the copies take their share of a core meanwhile
                copying_ms = max(assisted[digest].whole_ms for digest in new)
                begin_ms = model.assist.begin_ms(min(copying_ms, warm_ps / PS_PER_MS))
            work = sum(sizes.values()), mib_rows, model.layers
            cpu_ms, saved_ms = model.assist.layer_ms(*work), model.assist.saved_ms(*work)
        took_ms = step_ms(
            warm_ps / PS_PER_MS,
            model.layers,
            [(copy, 0.0) for copy in assisted.values()],
            cpu_ms,
            [(copy, 0.0) for copy in overlapped.values()],
            saved_ms=saved_ms,
        )
        return to_ps(begin_ms + took_ms)
