"""Decides how a request starts while its adapter is being copied: wait, overlap, or compute on CPU cores meanwhile.

    blocking     it joins the batch when the copy is complete
    layerwise    it joins as soon as the copy is predicted to stay ahead of the layers, so that no step waits
    assist       it joins at once; missing layers are computed by CPU processes (CaraServe section 4)

A copy brings layer after layer, after the copies queued before it on the link. All times are milliseconds from now:

    layer i arrives at   queue + (i + 1 - loaded) * each          (0 for the `loaded` ones)
    layer i begins at    wait + i * base                          one layer of the first chunk takes `base`
    layerwise waits      max over i of (arrives - i * base), which is at one of the two ends
    a waiting request    joins between two steps of the others
    assist               a layer takes max(base - saved, cpu) until its copy has overtaken it, then base; decodes max(base, cpu)

A GPU computes other steps as graphs. One with an incomplete copy is launched kernel by kernel, which takes the host at least
`launch_ms`: layerwise and assist wait for that, and so does everybody else in the step.

The choice has the least cost: own time to first token + (others in the batch) * (delay of each of their steps), and for
assist the delay of decodes, its own included, until the copy is complete. Rates are current measurements, so the choice for a
waiting request is made again before every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from motet.policies.times.perf_model import MIB, Coefficients, decode_ms, prefill_ms
from motet.shared.worker_options import ColdStartName

StartMode = Literal["blocking", "layerwise", "assist"]
StartReason = Literal["forced", "no_processes", "copy_ahead", "cpu_slower", "others", "cpu_ahead", "one_layer", "launches"]

TOLERANCE = 0.02
"""Share of a step; a wait inside the layers that is shorter counts as none."""
MARGIN = 0.01
"""Minimum share that assist must be predicted to save: predictions are no more accurate, and waiting costs others nothing."""
LOOK_MS = 0.3
"""Minimum re-check interval in an idle engine."""
HOP_MS = 0.05
"""Time to hand a layer to processes and back."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A running copy of an adapter with `layers` layers."""

    layers: int
    loaded: int  # layers on the device
    queue_ms: float  # until the copy of the next layer begins; negative when it has begun
    each_ms: float  # per layer

    @property
    def whole_ms(self) -> float:
        """Time until the copy is complete."""
        return self.arrives_ms(self.layers - 1)

    def arrives_ms(self, layer: int) -> float:
        """Time until this layer (from 0) is on the device; 0 if it is there."""
        return max(0.0, self.queue_ms + (layer + 1 - self.loaded) * self.each_ms) if layer >= self.loaded else 0.0

    def stall_ms(self, base_ms: float) -> float:
        """The delay after which a step's layers, `base_ms` each, never wait for the copy."""
        if self.loaded >= self.layers:
            return 0.0
        last = self.layers - 1
        return max(0.0, self.arrives_ms(self.loaded) - self.loaded * base_ms, self.arrives_ms(last) - last * base_ms)

    @staticmethod
    def of(size_bytes: int, ahead_bytes: float, *, layers: int, loaded: int, bytes_per_s: float) -> Copy:
        """`ahead_bytes`: bytes to transfer until the copy is complete, including its own."""
        ms_per_byte = 1e3 / bytes_per_s
        each = size_bytes / layers
        return Copy(layers, loaded, (ahead_bytes - each * (layers - loaded)) * ms_per_byte, each * ms_per_byte)


@dataclass(frozen=True, slots=True)
class AssistRates:
    """Measured rates of the CPU processes."""

    processes: int  # alive
    mib_row_ms: float  # a core's time for one row of one MiB of adapter, over all layers
    hop_ms: float = HOP_MS  # per layer: there and back
    mib_ms: float = 0.0  # a core's time to read one MiB of adapter, whatever the rows
    start_ms: float = 0.0  # once: until a process has woken up and found the adapter
    core_share: float = 0.0  # share of a core that a running copy takes
    relief: float = 0.0  # time that the device saves per time that a process takes; near 0 on a GPU

    def begin_ms(self, copying_ms: float) -> float:
        """The cost of a request beyond the time of its layers: starting a process, and a copy of `copying_ms` beside it.

        Steps and processes use all cores, so the part of a core that the copy takes slows down all of them.
        """
        return self.start_ms + self.core_share * copying_ms / (1 + self.processes)

    def layer_ms(self, mib: float, mib_rows: float, layers: int) -> float:
        """Time of one layer for rows of adapters. `mib`: MiB on the device; `mib_rows`: rows * MiB; both summed over adapters.

        The rows are divided among the processes, and each process reads the adapter.
        """
        return self.hop_ms + (mib * self.mib_ms + mib_rows * self.mib_row_ms / self.processes) / layers

    def saved_ms(self, mib: float, mib_rows: float, layers: int) -> float:
        """Time that the device saves in a layer whose rows the processes compute."""
        return self.relief * (mib * self.mib_ms + mib_rows * self.mib_row_ms) / layers


@dataclass(frozen=True, slots=True)
class ColdChoice:
    """How one request starts: with the next step (`joins`), or `wait_ms` from now unless something changes."""

    mode: StartMode
    reason: StartReason
    joins: bool
    wait_ms: float
    ttft_ms: Mapping[StartMode, float]  # predicted, of each possible mode
    cost_ms: Mapping[StartMode, float]  # ttft_ms plus the delay of others


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """How CPU processes would compute the missing layers of one request's steps."""

    layer_ms: list[float]  # of each step that prefills it: one layer on the processes
    saved_ms: list[float] | None = None  # time that such a layer saves the device; None for none
    decode: tuple[float, float] = (0.0, 0.0)  # a decode step that follows on the device, and one layer of it on the processes
    start_ms: float = 0.0  # until the processes begin


def choose(
    copy: Copy,
    chunks_ms: list[float],
    cpu: CpuTimes | None,
    *,
    others: int = 0,
    between_ms: float = 0.0,
    weights_ms: float = 0.0,
    launch_ms: float = 0.0,
    forced: ColdStartName = "auto",
) -> ColdChoice:
    """Choose how one request starts.

    `chunks_ms`: the time of each step that prefills the request, if its adapter were complete, including what these steps
    compute for other sequences. `others`: the number of those sequences. `cpu` is None when no process is alive. `between_ms`:
    the time of a step without the request, 0 when no sequence runs. `weights_ms`: the part of a prefill's time that does not
    depend on its tokens. `launch_ms`: the least time of a step while the copy is not complete.
    """
    prefill = sum(chunks_ms)
    overlapping_ms = [max(chunks_ms[0], launch_ms), *chunks_ms[1:]]  # by the second the copy is most likely complete
    launching = overlapping_ms[0] - chunks_ms[0]
    # The step reads the weights once for both of its parts, so it may take no longer than the others' part, or than the rows of
    # the prefill alone. If the step reached its layers sooner than expected, all requests in it would wait.
    surely_ms = max(between_ms, chunks_ms[0] - between_ms - weights_ms) if between_ms else chunks_ms[0]
    stall = copy.stall_ms(surely_ms / copy.layers)
    ahead = stall <= TOLERANCE * surely_ms
    ttft: dict[StartMode, float] = {
        "blocking": _until(copy.whole_ms, between_ms) + prefill,
        "layerwise": (stall if ahead else _until(stall, between_ms)) + prefill + launching,
    }
    cost = ttft | {"layerwise": ttft["layerwise"] + others * launching}
    if cpu is not None:
        ttft["assist"] = cpu.start_ms + assisted_ms(copy, overlapping_ms, cpu.layer_ms, cpu.saved_ms)
        held_ms = _held_ms(copy, ttft["assist"], *cpu.decode, launch_ms)
        cost["assist"] = ttft["assist"] + others * (ttft["assist"] - prefill) + (1 + others) * held_ms
    overlaps = stall < copy.whole_ms
    waiting: StartMode = "layerwise" if overlaps and cost["layerwise"] <= cost["blocking"] else "blocking"
    mode, reason = _least(ttft, cost, waiting, ahead=ahead, overlaps=overlaps) if forced == "auto" else _forced(forced, ttft)
    if mode == "assist":
        return ColdChoice(mode, reason, True, 0.0, ttft, cost)
    wait = copy.whole_ms if mode == "blocking" else stall
    return ColdChoice(mode, reason, ahead if mode == "layerwise" else wait <= 0.0, wait, ttft, cost)


def _until(wait_ms: float, between_ms: float) -> float:
    """The wait of a request that may join after `wait_ms`, but only between two steps."""
    if wait_ms <= 0:
        return 0.0
    return ceil(wait_ms / between_ms) * between_ms if between_ms else max(wait_ms, LOOK_MS)


def _forced(forced: StartMode, ttft: Mapping[StartMode, float]) -> tuple[StartMode, StartReason]:
    return (forced, "forced") if forced in ttft else ("layerwise", "no_processes")


def _least(
    ttft: Mapping[StartMode, float], cost: Mapping[StartMode, float], waiting: StartMode, *, ahead: bool, overlaps: bool
) -> tuple[StartMode, StartReason]:
    """The cheapest mode.

    Of equal modes, one that costs other requests nothing; `waiting` is the better of the modes that wait.
    """
    if "assist" in cost and cost["assist"] < cost[waiting] * (1 - MARGIN):
        return "assist", "cpu_ahead"
    if waiting == "blocking":
        return "blocking", "launches" if overlaps else "one_layer"
    if ahead:
        return "layerwise", "copy_ahead"
    if "assist" not in cost:
        return "layerwise", "no_processes"
    return "layerwise", "others" if ttft["assist"] < ttft["layerwise"] * (1 - MARGIN) else "cpu_slower"


def assisted_ms(copy: Copy, chunks_ms: list[float], cpu_ms: list[float], saved_ms: list[float] | None = None) -> float:
    """The total time of steps of `chunks_ms` when CPU processes compute the missing layers."""
    now = 0.0
    for chunk, cpu, saved in zip(chunks_ms, cpu_ms, saved_ms or [0.0] * len(cpu_ms), strict=True):
        now += step_ms(chunk, copy.layers, [(copy, now)], cpu, [], saved_ms=saved)
    return now


def _held_ms(copy: Copy, since_ms: float, decode_ms: float, cpu_ms: float, launch_ms: float) -> float:
    """The total delay of decode steps from `since_ms` until the copy is complete; each step misses fewer layers."""
    left_ms = copy.whole_ms - since_ms
    slower_ms = copy.layers * max(0.0, cpu_ms - decode_ms / copy.layers)
    launching_ms = max(0.0, launch_ms - decode_ms)
    if left_ms <= 0 or not slower_ms + launching_ms:
        return 0.0
    missing = min(1.0, left_ms / (copy.layers * copy.each_ms)) / 2  # on average
    longer_ms = max(missing * slower_ms, launching_ms)
    return left_ms / (decode_ms + longer_ms) * longer_ms


def step_ms(
    chunk_ms: float,
    layers: int,
    assisted: list[tuple[Copy, float]],
    cpu_ms: float,
    overlapped: list[tuple[Copy, float]],
    *,
    saved_ms: float = 0.0,
) -> float:
    """The time of a step of `chunk_ms` with unfinished copies, each given as (copy, age of that state in ms).

    A layer waits for the `overlapped` copies. While a layer of an `assisted` copy is missing, it takes at least `cpu_ms` and
    the device saves `saved_ms`.
    """
    base = chunk_ms / layers
    bridged = max(base - saved_ms, cpu_ms)
    whole = max((copy.whole_ms - age for copy, age in (*assisted, *overlapped)), default=0.0)
    now = 0.0
    for layer in range(layers):
        if now >= whole:
            return now + (layers - layer) * base
        for copy, age in overlapped:
            now = max(now, copy.arrives_ms(layer) - age)
        missing = any(copy.arrives_ms(layer) - age > now for copy, age in assisted)
        now += bridged if missing else base
    return now


@dataclass(slots=True)
class ColdStarts:
    """The choices of one engine: rates and copies as observed before a step, and the chosen modes.

    `modes` has the adapters that a running sequence uses and whose copy is not complete.
    """

    layers: int
    max_step_tokens: int
    forced: ColdStartName = "auto"
    perf: Coefficients[float] | None = None
    bytes_per_s: float = 1.0
    queued_bytes: float = 0.0
    assist: AssistRates | None = None
    launch_ms: float = 0.0
    copies: dict[str, Copy] = field(default_factory=dict)
    modes: dict[str, StartMode] = field(default_factory=dict)
    wait_ms: float = 0.0  # until the first waiting request may join, as of the last decision

    def observe(
        self,
        *,
        perf: Coefficients[float],
        bytes_per_s: float,
        queued_bytes: float,
        under_way: Mapping[str, tuple[int, float, int]],
        assist: AssistRates | None,
        launch_ms: float = 0.0,
    ) -> None:
        """Take in the state before a decision. `under_way` is {digest: (bytes, bytes ahead on the link, layers loaded)}."""
        self.perf, self.bytes_per_s, self.queued_bytes, self.assist = perf, bytes_per_s, queued_bytes, assist
        self.launch_ms = launch_ms
        self.copies = {
            digest: Copy.of(size, ahead, layers=self.layers, loaded=loaded, bytes_per_s=bytes_per_s)
            for digest, (size, ahead, loaded) in under_way.items()
        }
        self.modes = {digest: mode for digest, mode in self.modes.items() if digest in self.copies}
        self.wait_ms = float("inf")

    def begun(self, digest: str, size_bytes: int) -> None:
        """A copy begins with this step, behind all others on the link."""
        self.queued_bytes += size_bytes
        copy = Copy.of(size_bytes, self.queued_bytes, layers=self.layers, loaded=0, bytes_per_s=self.bytes_per_s)
        self.copies[digest] = copy

    def consider(
        self,
        digest: str,
        size_bytes: int,
        *,
        rank: int,
        tokens: int,
        room: int,
        others: int,
        assisted: tuple[int, int] = (0, 0),
    ) -> ColdChoice:
        """Whether a request joins the next step, which has room for `room` tokens and already has `others` sequences.

        `assisted`: bytes, and rows * bytes, of the adapters that CPU processes compute in that step for other requests.
        """
        assert self.perf is not None, "rates are observed before decisions"
        copy = self.copies[digest]
        chunks, left = [min(tokens, room)], tokens - min(tokens, room)
        while left > 0:
            chunks.append(min(left, self.max_step_tokens))
            left -= chunks[-1]
        beside = decode_ms(self.perf, float(others), 0.0) if others else 0.0
        chunks_ms = [beside + prefill_ms(self.perf, float(chunk), float(rank)) for chunk in chunks]
        cpu = None
        if self.assist is not None and self.assist.processes:
            others_mib, others_mib_rows = assisted[0] / MIB, assisted[1] / MIB
            mib, layer_ms = size_bytes / MIB, self.assist.layer_ms
            on_cpu_ms = [layer_ms(mib, chunk * mib, self.layers) for chunk in chunks]
            on_cpu_ms[0] = layer_ms(mib + others_mib, chunks[0] * mib + others_mib_rows, self.layers)
            cpu = CpuTimes(
                on_cpu_ms,
                saved_ms=[self.assist.saved_ms(mib, chunk * mib, self.layers) for chunk in chunks],
                decode=(decode_ms(self.perf, others + 1.0, float(rank)), layer_ms(mib, mib, self.layers)),
                start_ms=self.assist.begin_ms(min(copy.whole_ms, sum(chunks_ms))),
            )
        choice = choose(
            copy,
            chunks_ms,
            cpu,
            others=others,
            between_ms=beside,
            weights_ms=self.perf.prefill_base_ms,
            launch_ms=self.launch_ms,
            forced=self.forced,
        )
        if choice.joins:
            if self.modes.get(digest) != "assist":
                self.modes[digest] = choice.mode
        else:
            self.wait_ms = min(self.wait_ms, choice.wait_ms)
        return choice
