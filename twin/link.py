"""The way of adapters onto the device, where copies run beside the steps: one after the other, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from policies.cold_start import AssistRates, Copy, Forced, step_ms
from twin.events import PS_PER_MS, PS_PER_S, to_ps


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """The link of one worker, the CPU processes that bridge it, and who may join before a copy is whole."""

    bytes_per_s: float
    layers: int
    assist: AssistRates | None = None
    cold_start: Forced = "auto"


@dataclass(slots=True)
class _Copying:
    digest: str
    size_bytes: int
    total_ps: int
    left_ps: int


class DeviceLink:
    """Copies in the order in which they began. Times are whole picoseconds, so equal histories stay equal to the bit."""

    def __init__(self, model: LinkModel) -> None:
        self._model = model
        self._queue: list[_Copying] = []
        self._at_ps = 0
        self._ps_per_byte = PS_PER_S / model.bytes_per_s

    def begin(self, digest: str, size_bytes: int, now_ps: int) -> None:
        """Behind all others."""
        if not self._queue:
            self._at_ps = now_ps
        total_ps = max(1, round(size_bytes * self._ps_per_byte))
        self._queue.append(_Copying(digest, size_bytes, total_ps, total_ps))

    def cancel(self, digest: str) -> None:
        """Its room goes to those behind it."""
        self._queue = [copy for copy in self._queue if copy.digest != digest]

    def advance(self, now_ps: int) -> list[str]:
        """Time has come to `now_ps`: the copies that are whole since, in order."""
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
        """Layers of a copy under way that are there."""
        copy = self._find(digest)
        return (copy.total_ps - copy.left_ps) * self._model.layers // copy.total_ps

    def ahead_bytes(self, digest: str) -> float:
        """What passes the link until this copy is whole."""
        at = self._queue.index(self._find(digest))
        return sum(copy.left_ps for copy in self._queue[: at + 1]) / self._ps_per_byte

    @property
    def queued_bytes(self) -> float:
        return sum(copy.left_ps for copy in self._queue) / self._ps_per_byte

    @property
    def first_whole_ps(self) -> int:
        """How long until the next copy is whole."""
        return self._queue[0].left_ps

    def _find(self, digest: str) -> _Copying:
        return next(copy for copy in self._queue if copy.digest == digest)

    def step_ps(self, warm_ps: int, copies: dict[str, Copy], assisted: dict[str, float], overlapped: list[str]) -> int:
        """A step that takes `warm_ps` with everything there: `assisted` {digest: rows * MiB of it}, `overlapped` ones waited
        for in the layers."""
        model, cpu_ms = self._model, 0.0
        if assisted:
            assert model.assist is not None, "assisted without processes"
            cpu_ms = model.assist.layer_ms(sum(assisted.values()), model.layers)
        took_ms = step_ms(
            warm_ps / PS_PER_MS,
            model.layers,
            [(copies[digest], 0.0) for digest in assisted],
            cpu_ms,
            [(copies[digest], 0.0) for digest in overlapped],
        )
        return max(warm_ps, to_ps(took_ms))
