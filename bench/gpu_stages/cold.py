"""Stage 5: cold starts while other requests decode: time to first token by the way a request starts, and the delay of the
others.

A request's adapter is on the device already (cached), or is copied there before it begins (on demand), layer by layer ahead of
its prefill, or is computed by CPU LoRA processes meanwhile; "auto" is the engine's own choice. Then the parts of the CPU
processes: round trips over shared memory, a prompt divided among several cores, and an asynchronously enqueued step beside a
synchronous one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count

import numpy as np
import torch

from bench import cpu_assist_parts
from bench.cpu_assist_rig import WARM_PROMPTS, WAYS, Answered, Asked, EngineRig, Ran
from bench.gpu_stages.bed import Bed, scratch, timed_s
from bench.gpu_stages.layers import DTYPE, Layers
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.serving import PARTS, Served
from bench.gpu_stages.shapes import another, host_adapter, projections
from bench.models import prompts
from motet.kernels import GROUPS, LoraPool
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.assist import Helpers, loading_of
from motet.kernels.device import DeviceAssist
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.assist_processes import CpuAssist

MODEL = "Llama-3.1-8B"
RANK = 64  # on all modules: 335 MB of an 8B
PROCESSES = 4
ARRIVALS, DECODING = 16, 16
GAP_S = 0.15  # between arrivals, the mean
COPIES, COPY_GAP_S = 6, 0.3
LONG_PROMPT = 1024
PROCESS_S = 30.0
SYNC_TOKENS = 64


class Cold:
    """Stage 5: requests whose adapter is not on the device, and copies of adapters."""

    def __init__(self, bed: Bed) -> None:
        self._bed, self._rank = bed, bed.pick(RANK, 16)
        self._directory = scratch()

    def points(self) -> list[Point]:
        lengths = self._bed.pick((128, 512, 16, 2000), (16,))
        lone = [Point(f"alone, {tokens} tokens", partial(self._alone, tokens), 150.0) for tokens in lengths]
        return [
            Point("copies", self._copies, 90.0),
            Point("burst beside decoding", self._burst, 240.0),
            *lone[:2],
            Point("round trips", self._round_trips),
            Point("nobody waits beside a synchronous call", self._synchronous, 150.0),
            Point("a prompt on several cores", self._cores),
            *lone[2:],
        ]

    @cached_property
    def _served(self) -> Served:
        bed, cores = self._bed, len(os.sched_getaffinity(0))
        return Served(
            bed,
            MODEL,
            self._directory,
            ranks=bed.pick([RANK] * (ARRIVALS + DECODING), [16] * 6),
            requests=ARRIVALS + DECODING + 8,
            assist_processes=min(bed.pick(PROCESSES, 1), cores),
            link_bytes_per_s=bed.pick(0.0, 0.05e9),
        )

    @cached_property
    def _rig(self) -> EngineRig:
        served, numbers = self._served, count()

        def adapter(rank: int) -> HostAdapter:
            return another(served.hosts[rank], f"{rank}-{next(numbers)}")

        warm = self._bed.pick(WARM_PROMPTS, (8,))
        return EngineRig(served.engine, served.times, [self._rank], adapter, warm_prompts=warm)

    def _alone(self, tokens: int) -> Line:
        """Median milliseconds to the first token, by way to start."""
        rig, rounds = self._rig, self._bed.pick(7, 1)
        asked = [Asked(0.0, prompts(1, tokens, seed=tokens)[0], 2)]
        found: Line = {"tokens": tokens, "rank": self._rank, "auto_chose": {}}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                times[way].append(rig.serve(asked, self._rank, way)[0].ttft_ms)
                if way == "auto":
                    found["auto_chose"] |= rig.modes
        return found | {f"{way}_ms": statistics.median(ones) for way, ones in times.items()}

    def _copies(self) -> Line:
        """GB/s of copies: while nothing else runs, beside decode steps, and beside steps with long prompts.

        Requests come one after the other and wait for their adapters. `step_ms`: the median of all steps.
        """
        bed, rig = self._bed, self._rig
        count, gap_s = bed.pick((COPIES, COPY_GAP_S), (2, 0.01))
        asked = [Asked(0.1 + gap_s * i, prompts(1, 16, seed=i)[0], 2) for i in range(count)]
        lasting_s = gap_s * (count + 1)
        decoding, tokens, others = bed.pick((DECODING, LONG_PROMPT, DECODING), (2, 16, 2))
        steps = bed.pick(int(lasting_s / 0.007), 12)
        loads = {
            "alone": [],
            "decode": [Asked(0.0, prompts(1, 16, seed=100 + i)[0], steps) for i in range(decoding)],
            "prompts": [Asked(lasting_s * i / others, prompts(1, tokens, seed=200 + i)[0], 2) for i in range(others)],
        }
        found: Line = {"rank": self._rank, "copies": count}
        for name, beside in loads.items():
            answers = rig.serve(asked, self._rank, "on demand", beside)
            found[f"{name}_gb_s"] = rig.copied / rig.copying_s / 1e9
            found[f"{name}_copy_ms"] = 1e3 * rig.copying_s / count
            found[f"{name}_ttft_ms"] = statistics.median(one.ttft_ms for one in answers[:count])
            found[f"{name}_step_ms"] = statistics.median(one.took_ms for one in rig.ran)
        return found

    def _burst(self) -> Line:
        """New requests with an adapter each while others decode: their first tokens, and the others' gaps between tokens."""
        bed, rig = self._bed, self._rig
        arrivals, decoding = bed.pick((ARRIVALS, DECODING), (2, 2))
        draw = np.random.default_rng(0)
        at = 0.3 * bed.pick(1.0, 0.0) + np.cumsum(draw.exponential(bed.pick(GAP_S, 0.002), arrivals))
        lengths = np.clip(draw.lognormal(4.5, 0.6, arrivals), 8, bed.pick(512, 16)).astype(int)
        asked = [Asked(float(s), prompts(1, int(n), seed=i)[0], 4) for i, (s, n) in enumerate(zip(at, lengths, strict=True))]
        steps = bed.pick(350, 12)
        beside = [Asked(0.0, prompts(1, 16, seed=100 + i)[0], steps) for i in range(decoding)]
        found: Line = {"arrivals": arrivals, "decoding": decoding, "rank": self._rank}
        rounds: dict[str, list[Line]] = {way: [] for way in WAYS}
        seen: dict[str, Line] = {}  # of the last round
        for _ in range(bed.pick(2, 1)):
            for way in WAYS:
                answers = rig.serve(asked, self._rank, way, beside)
                rounds[way].append(_times(answers[:arrivals], answers[arrivals:]))
                rounds[way][-1]["copy_gb_s"] = rig.copied / rig.copying_s / 1e9 if rig.copying_s else 0.0
                seen[way] = {"modes": rig.modes, "prompt_steps": _parts([one for one in rig.ran if one.prefill_tokens])}
                seen[way]["decode_steps"] = _parts([one for one in rig.ran if not one.prefill_tokens])
        for way, ones in rounds.items():
            found[way] = {name: statistics.median(one[name] for one in ones) for name in ones[0]} | seen[way]
        return found | self._served.graphs

    def _round_trips(self) -> Line:
        cores = len(os.sched_getaffinity(0))
        counts = self._bed.pick([n for n in (1, 2, 4, 8) if n < cores], [1])
        return {"trips": cpu_assist_parts.round_trips(quick=self._bed.dry, counts=counts)}

    def _cores(self) -> Line:
        counts = self._bed.pick([n for n in (1, 2, 4, 8, 12) if n <= len(os.sched_getaffinity(0))], [1])
        return {"prefills": cpu_assist_parts.prefills(quick=self._bed.dry, counts=counts)}

    def _synchronous(self) -> Line:
        """A prefill whose q, k, v adapters CPU processes compute: enqueued at once, or by a thread that waits in each layer."""
        bed, tokens = self._bed, self._bed.pick(SYNC_TOKENS, 4)
        shapes, device = projections(bed.pick(MODEL, "tiny")), bed.device
        layers = Layers(shapes, bed.pick(32, 2), device)
        adapter = host_adapter(self._served.config, self._rank, DTYPE, modules=GROUPS["qkv"])
        pool = LoraPool(
            shapes,
            layers=layers.layers,
            slots=1,
            max_rank=self._rank,
            bytes_total=adapter.nbytes,
            dtype=DTYPE,
            device=device,
        )
        pool.reserve(0, adapter.packed)
        library, streams = CpuEngine(threads=1), bed.streams()
        cores = sorted(os.sched_getaffinity(0))[: bed.pick(PROCESSES, 1)]
        assist = CpuAssist(library, pool, cores=cores, max_rows=tokens)
        beside = DeviceAssist(pool, streams, library)
        try:
            _wait_for(assist, len(cores))
            x, row_slot = layers.inputs(tokens), np.zeros(tokens, dtype=np.int32)
            base_s = bed.eager_us(partial(layers.step, x)) / 1e6
            assist.profile.base(tokens, base_s / layers.layers)
            helpers = assist.helpers([loading_of(0, adapter)], tokens)

            def enqueued() -> None:
                _enqueued(layers, x, beside, row_slot, helpers, streams.steps)

            def waiting() -> None:
                _waiting(layers, x, helpers)

            times = {}
            for name, step in (("enqueued_ms", enqueued), ("synchronous_ms", waiting)):
                step()
                times[name] = 1e3 * timed_s(step, bed.pick(9, 1))
        finally:
            beside.close()
            assist.close()
        return {"tokens": tokens, "processes": len(cores), "base_ms": 1e3 * base_s, **times}


def _times(newcomers: Sequence[Answered], others: Sequence[Answered]) -> Line:
    gaps = np.concatenate([np.diff(one.times_s) for one in others]) * 1e3
    quantiles = {f"gap_p{q}_ms": float(np.quantile(gaps, q / 100)) for q in (50, 99)}
    ttft_ms = [one.ttft_ms for one in newcomers]
    line: Line = {"ttft_ms": statistics.fmean(ttft_ms), "ttft_worst_ms": max(ttft_ms), **quantiles}
    return line | {"gap_worst_ms": float(gaps.max()), "gap_mean_ms": float(gaps.mean())}


def _parts(steps: Sequence[Ran]) -> Line:
    """Medians of steps and of their parts, and the slowest step."""
    if not steps:
        return {"steps": 0}
    parts = {f"{part}_ms": statistics.median(one.parts_ms.get(part, 0.0) for one in steps) for part in PARTS}
    slowest = max(steps, key=lambda one: one.took_ms)
    line: Line = {"steps": len(steps), "took_ms": statistics.median(one.took_ms for one in steps), **parts}
    line["tokens"] = statistics.median(one.prefill_tokens for one in steps)
    return line | {"slowest_ms": slowest.took_ms, "slowest_parts_ms": slowest.parts_ms}


def _wait_for(assist: CpuAssist, processes: int) -> None:
    until_s = time.monotonic() + PROCESS_S
    while assist.capacity.processes < processes or not assist.capacity.row_s:
        if time.monotonic() > until_s:
            raise RuntimeError(f"CPU LoRA processes did not start: {dict(assist.failures)}")
        time.sleep(0.01)


@torch.inference_mode()
def _enqueued(
    layers: Layers, x: dict[str, torch.Tensor], beside: DeviceAssist, row_slot: np.ndarray, helpers: Helpers, stream: object
) -> None:
    step = beside.begin(row_slot, helpers)

    def before(layer: int, group: str, rows: torch.Tensor) -> None:
        if group == "qkv":
            step.layer(layer)
        step.start(rows, layer, group)

    layers.step(x, before, lambda layer, group, y, rows: step.collect(y, group))
    stream.mark().synchronize()  # type: ignore[attr-defined]
    if not step.finish() or not step.channels:
        raise RuntimeError("the processes did not compute this step")


@torch.inference_mode()
def _waiting(layers: Layers, x: dict[str, torch.Tensor], helpers: Helpers) -> None:
    """The synchronous way: rows to the host, ask, wait, answers to the device."""
    channels, loading = helpers.channels, helpers.loading[0]

    def after(layer: int, group: str, y: torch.Tensor, rows: torch.Tensor) -> None:
        if group != "qkv":
            return
        host = rows.cpu().float()
        answers = torch.empty(y.shape)
        parts = list(zip(channels, host.tensor_split(len(channels)), answers.tensor_split(len(channels)), strict=True))
        for channel, mine, _ in parts:
            channel.start(loading, mine, layer=layer, group=0, bound_s=cpu_assist_parts.BOUND_S)
        if not all([channel.finish(answer) for channel, _, answer in parts]):
            raise RuntimeError("a process did not answer")
        y += answers.to(y.device, y.dtype)

    layers.step(x, None, after)
    if layers.device.type == "cuda":
        torch.cuda.synchronize()
