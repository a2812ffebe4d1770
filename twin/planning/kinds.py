"""Workers that can be had: what the law needs of them, and how they are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from motet.policies.plan.capacity import Settings, StepLaw
from motet.policies.plan.native import native_settings, token_bytes
from motet.policies.plan.native_steps import LinearSteps, MeasuredSteps
from motet.policies.times.perf_model import MIB
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.metrics import NEVER, Latencies, within
from motet.twin.planning.loads import Loads
from motet.twin.profile import TwinProfile
from motet.twin.scheduler import SchedulerSpec
from motet.twin.vllm.calibrate import STEP_TOKENS, Calibration
from motet.twin.vllm.client import Requests
from motet.twin.vllm.engine import EngineConfig
from motet.twin.vllm.law import settings
from motet.twin.vllm.serving import DRAIN_S, Objectives, serve
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Floats, Ints, Workload

VLLM_SEATS = 256
"""vLLM's default of max_num_seqs."""
VLLM_MOST_TOKENS = 32_768
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one worker serves: a setting of its kind, and adapters with their rates here."""

    setting: int
    loads: Loads


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated worker did with its requests after a warm-up: columns are [adapters] of its `Part`."""

    arrived: Ints
    served: Ints
    attained: Ints
    in_ttft: int
    in_tpot: int
    ttft_p99_ms: float
    tpot_p99_ms: float


class Kind(Protocol):
    """A kind of worker, which can be pickled."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Settings:
        """Its settings for the law."""
        ...

    @property
    def together(self) -> bool:
        """Whether workers share the load of all, so that they can only be simulated together."""
        ...

    def simulate(self, parts: Sequence[Part], *, seed: int, warm_s: float, duration_s: float) -> list[Outcome]:
        """Simulate workers with new requests, drawn with a seed."""
        ...

    def flags(self, setting: int, adapters: int) -> str:
        """The options to start a worker with that serves so many adapters."""
        ...

    def adapter_share(self, setting: int) -> float | None:
        """The share of the memory for KV blocks and adapters that adapters get; None where it is not known."""
        ...


@dataclass(frozen=True, kw_only=True)
class VllmKind:
    """A GPU with vLLM that was calibrated (`twin.vllm.calibrate`). Each adapter's requests go to the workers of its plan."""

    name: str
    calibration: Calibration
    seats: int = VLLM_SEATS
    together = False

    @property
    def settings(self) -> Settings:
        """See `Kind`."""
        return settings(self.calibration, seats=self.seats)

    def simulate(self, parts: Sequence[Part], *, seed: int, warm_s: float, duration_s: float) -> list[Outcome]:
        """See `Kind`. The worker has no other requests, and its router takes no time."""
        return [self._one(part, seed + place, warm_s, duration_s) for place, part in enumerate(parts)]

    def _one(self, part: Part, seed: int, warm_s: float, duration_s: float) -> Outcome:
        loads = part.loads
        work = loads.workload(np.random.default_rng(seed), duration_s, most_tokens=VLLM_MOST_TOKENS)
        requests = sent(work, loads, duration_s)
        goals = [loads.objectives[index].slo for index in loads.objective.tolist()]
        objectives = Objectives(np.array([g.ttft_slo_ms for g in goals]), np.array([g.tpot_slo_ms for g in goals]))
        served = serve(
            self.config(part.setting),
            self.calibration.steps,
            requests,
            objectives,
            warm_s,
            request_s=self.calibration.api.request_s,
        )
        return Outcome(
            arrived=served.arrived,
            served=served.served,
            attained=served.attained,
            in_ttft=int(served.in_ttft),
            in_tpot=int(served.in_tpot),
            ttft_p99_ms=served.ttft_p99_ms,
            tpot_p99_ms=served.tpot_p99_ms,
        )

    def config(self, setting: int) -> EngineConfig:
        """vLLM as its `flags` start it."""
        law = self.settings
        return EngineConfig(
            a_max=int(law.slots[setting]),
            s_max=int(law.max_rank[setting]),
            kv_tokens=int(law.kv_tokens[setting]),
            max_num_seqs=self.seats,
            max_batched_tokens=STEP_TOKENS,
        )

    def flags(self, setting: int, adapters: int) -> str:
        """See `Kind`."""
        law = self.settings
        return (
            f"--enable-lora --max-loras {law.slots[setting]:.0f} --max-lora-rank {law.max_rank[setting]:.0f}"
            f" --max-cpu-loras {max(adapters, int(law.slots[setting]))} --max-num-seqs {self.seats}"
        )

    def adapter_share(self, setting: int) -> float | None:
        """See `Kind`: by the KV tokens that there are with and, on the same line, without slots."""
        law = self.settings
        (a, kv_a), *_, (b, kv_b) = self.calibration.kv_points[int(law.max_rank[setting])]
        without = kv_a + (kv_a - kv_b) / (b - a) * a
        return float(1.0 - law.kv_tokens[setting] / without)


@dataclass(frozen=True, kw_only=True)
class NativeKind:
    """A worker of Motet's own, from a profile of `motet profile`. Schedulers distribute the requests over all of them."""

    name: str
    profile: TwinProfile
    together = True

    @property
    def settings(self) -> Settings:
        """See `Kind`."""
        return native_settings(self.profile.limits, self.profile.engine, self._steps)

    @property
    def _steps(self) -> StepLaw:
        profile, stalls = self.profile, self.profile.link is None
        if profile.engine_steps is not None:
            return MeasuredSteps(times=profile.engine_steps, perf=profile.perf, stalls=stalls)
        extra = profile.steps
        return LinearSteps(
            perf=profile.perf, schedule_ms=extra.schedule_ms, context_token_ms=extra.context_token_ms, stalls=stalls
        )

    def simulate(self, parts: Sequence[Part], *, seed: int, warm_s: float, duration_s: float) -> list[Outcome]:
        """See `Kind`. Motet's schedulers decide; each worker starts with the adapters of its part."""
        seen = self.seen(parts, seed=seed, warm_s=warm_s, duration_s=duration_s)
        return [seen.outcome(part.loads.names) for part in parts]

    def requests(self, parts: Sequence[Part], *, seed: int, duration_s: float) -> Workload:
        """The requests of all parts, drawn anew. Their adapters are those of the `joined` parts."""
        return self._drawn(joined([part.loads for part in parts]), seed, duration_s)

    def _drawn(self, everything: Loads, seed: int, duration_s: float) -> Workload:
        return everything.workload(np.random.default_rng(seed), duration_s, most_tokens=self.profile.limits.max_model_len)

    def seen(self, parts: Sequence[Part], *, seed: int, warm_s: float, duration_s: float) -> Seen:
        """What happens to the `requests` of all parts."""
        everything = joined([part.loads for part in parts])
        work = self._drawn(everything, seed, duration_s)
        most = max(len(part.loads) for part in parts)
        hops = self.profile.hops
        cluster = Cluster(
            work,
            [self.worker(part.setting, most) for part in parts],
            SchedulerSpec(),
            bus=BusDelays(assign_ms=hops.assign_ms, stream_ms=hops.frame_ms),
            seed=seed,
        )
        digests = {name: adapter.digest for name, adapter in zip(everything.names, work.adapters, strict=True)}
        for worker, part in zip(cluster.workers, parts, strict=True):
            busiest = np.argsort(-part.loads.rate, kind="stable").tolist()
            worker.preload(digests[part.loads.names[row]] for row in busiest if part.loads.rank[row])
        cluster.run(until_s=duration_s + DRAIN_S)
        times = Latencies.of(work, cluster.metrics)
        ttft_ms, tpot_ms = np.full((2, len(work)), np.nan)
        ttft_ms[times.rows], tpot_ms[times.rows] = times.ttft_ms, times.tpot_ms
        return Seen.of(work, everything, warm_s, done=cluster.metrics.end_ps != NEVER, ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    def worker(self, setting: int, adapters: int) -> WorkerSpec:
        """The worker of the profile as its `flags` start it."""
        law, limits = self.settings, self.profile.limits
        limits = replace(
            limits,
            adapter_bytes_total=int(law.adapter_bytes[setting]),
            kv_blocks_total=int(law.kv_tokens[setting]) // limits.block_size,
        )
        options = replace(self.profile.engine, max_loras=self._slots(adapters))
        return dataclass_replace(self.profile.spec(), limits=limits, options=options)

    def _slots(self, adapters: int) -> int:
        return max(self.profile.engine.max_loras, adapters)

    def flags(self, setting: int, adapters: int) -> str:
        """See `Kind`."""
        law, limits, token = self.settings, self.profile.limits, token_bytes(self.profile.limits)
        flags = (
            f"--max-running {limits.max_running} --max-loras {self._slots(adapters)} --max-lora-rank {limits.max_lora_rank}"
            f" --lora-memory-mib {max(1.0, law.adapter_bytes[setting] / MIB):.0f}"
        )
        return f"{flags} --kv-memory-gib {law.kv_tokens[setting] * token / GIB:.4g}" if token else flags

    def adapter_share(self, setting: int) -> float | None:
        """See `Kind`."""
        law, token = self.settings, token_bytes(self.profile.limits)
        size = float(law.adapter_bytes[setting])
        return size / (size + float(law.kv_tokens[setting]) * token) if token else None


def rows_of(work: Workload, loads: Loads) -> Ints:
    """The row of `loads` of each of the requests that were drawn from them."""
    return np.where(work.adapter < 0, int(loads.rank.argmin()), work.adapter)


def sent(work: Workload, loads: Loads, duration_s: float) -> Requests:
    """Requests that were drawn from `loads`, as a server with vLLM gets them."""
    return Requests(
        arrival_s=work.arrival_s.tolist(),
        adapter=rows_of(work, loads).tolist(),
        prompt_tokens=work.prompt_tokens.tolist(),
        output_tokens=work.output_tokens.tolist(),
        ranks=loads.rank.tolist(),
        duration_s=duration_s,
    )


def joined(parts: Sequence[Loads]) -> Loads:
    """The adapters of several parts, each once with the sum of its rates."""
    place: dict[str, int] = {}
    for part in parts:
        for name in part.names:
            place.setdefault(name, len(place))
    rate = np.zeros(len(place))
    first = np.zeros((len(place), 2), np.int64)
    for number, part in enumerate(parts):
        for row, name in enumerate(part.names):
            rate[place[name]] += part.rate[row]
            first[place[name]] = number, row

    def column(values: Sequence[Ints]) -> Ints:
        return np.array([values[number][row] for number, row in first.tolist()], np.int64)

    return dataclass_replace(
        parts[0],
        names=tuple(place),
        rate=rate,
        rank=column([part.rank for part in parts]),
        size_bytes=column([part.size_bytes for part in parts]),
        pool=column([part.pool for part in parts]),
        objective=column([part.objective for part in parts]),
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What happened to each request of a cluster, [requests]."""

    names: tuple[str, ...]  # of the adapters
    adapter: Ints
    counted: NDArray[np.bool_]
    done: NDArray[np.bool_]
    ttft_ms: Floats  # nan without a first token
    tpot_ms: Floats  # nan for a single token
    in_ttft: NDArray[np.bool_]
    in_tpot: NDArray[np.bool_]

    @classmethod
    def of(
        cls, work: Workload, loads: Loads, warm_s: float, *, done: NDArray[np.bool_], ttft_ms: Floats, tpot_ms: Floats
    ) -> Seen:
        """From the times of requests that were drawn from `loads`; those after `warm_s` count."""
        in_ttft, in_tpot = within(work, np.arange(len(work)), ttft_ms, tpot_ms)
        return cls(
            names=loads.names,
            adapter=rows_of(work, loads),
            counted=work.arrival_s >= warm_s,
            done=done,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            in_ttft=done & in_ttft,
            in_tpot=done & in_tpot,
        )

    def outcome(self, adapters: Sequence[str]) -> Outcome:
        """Of the requests on these adapters, given by name."""
        at = {name: place for place, name in enumerate(adapters)}
        place = np.array([at.get(name, -1) for name in self.names])
        mine = self.counted & (place[self.adapter] >= 0)

        def each(chosen: NDArray[np.bool_]) -> Ints:
            return np.bincount(place[self.adapter[mine & chosen]], minlength=len(adapters))

        everything = np.ones(len(mine), bool)
        return Outcome(
            arrived=each(everything),
            served=each(self.done),
            attained=each(self.in_ttft & self.in_tpot),
            in_ttft=int((mine & self.in_ttft).sum()),
            in_tpot=int((mine & self.in_tpot).sum()),
            ttft_p99_ms=_p99(self.ttft_ms[mine & self.done]),
            tpot_p99_ms=_p99(self.tpot_ms[mine & self.done]),
        )


def _p99(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(np.percentile(values, 99)) if len(values) else float("nan")
