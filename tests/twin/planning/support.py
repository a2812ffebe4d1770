"""Small loads for the planner's tests, and simulations whose outcomes a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from motet.shared.model import Slo
from motet.twin.planning.check import Job, Run, run
from motet.twin.planning.kinds import NativeKind, Outcome, Part, VllmKind
from motet.twin.planning.loads import Loads, Objective
from motet.twin.planning.planner import Offer, Trial
from motet.twin.profile import a10_llama2_7b
from motet.twin.vllm.published import published
from motet.twin.workload import Lengths

TTFT_MS, TPOT_MS = 2000.0, 100.0
LLAMA = "llama-3.1-8b@h100"
KV_TOKEN_BYTES = 1 << 19
SHORT = Trial(seeds=(1,), warm_s=10.0, duration_s=70.0)
LENGTHS = Lengths.lognormal(np.random.default_rng(0), prompt_mean=120, output_mean=100)


def loads(rates: Sequence[float], ranks: Sequence[int] = (), *, share: float = 0.99, tpot_ms: float = TPOT_MS) -> Loads:
    """Adapters a0, a1, ... with these rates, of rank 8 if not given, and one objective for all."""
    n = len(rates)
    rank = np.array(ranks or [8] * n)
    return Loads(
        names=tuple(f"a{place}" for place in range(n)),
        rate=np.array(rates, float),
        rank=rank,
        size_bytes=rank << 20,
        pool=np.zeros(n, np.int64),
        objective=np.zeros(n, np.int64),
        lengths=(replace(LENGTHS, prompt_tokens=LENGTHS.prompt_tokens.clip(1, 1500)),),
        objectives=(Objective(slo=Slo(ttft_slo_ms=TTFT_MS, tpot_slo_ms=tpot_ms), share=share),),
    )


def vllm(**more: int) -> VllmKind:
    """A published calibration."""
    return VllmKind(name=f"vllm:{LLAMA}", calibration=published(LLAMA), **more)


def native() -> NativeKind:
    """CaraServe's worker, which can divide its memory."""
    profile = a10_llama2_7b()
    limits = msgspec.structs.replace(profile.limits, kv_token_bytes=KV_TOKEN_BYTES)
    return NativeKind(name="a10", profile=msgspec.structs.replace(profile, limits=limits))


VLLM, NATIVE = Offer(kind=vllm()), Offer(kind=native())


def simulated(jobs: Sequence[Job]) -> Iterator[list[Outcome]]:
    """Runs jobs in this process."""
    return map(run, jobs)


def outcome(
    arrived: Sequence[int],
    *,
    served: Sequence[int] | None = None,
    attained: Sequence[int] | None = None,
    ttft_ms: float = TTFT_MS / 2,
    tpot_ms: float = TPOT_MS / 2,
) -> Outcome:
    """The outcome of a worker whose adapters got so many requests. By default all were served and attained.

    Requests that did not attain their objectives missed TPOT if `tpot_ms` is above its objective, otherwise TTFT.
    """
    done = arrived if attained is None else attained
    late = "tpot" if tpot_ms > TPOT_MS else "ttft"
    return Outcome(
        arrived=np.array(arrived),
        served=np.array(arrived if served is None else served),
        attained=np.array(done),
        in_ttft=sum(done if late == "ttft" else arrived),
        in_tpot=sum(done if late == "tpot" else arrived),
        ttft_p99_ms=ttft_ms,
        tpot_p99_ms=tpot_ms,
    )


def good(part: Part) -> Outcome:
    """All of 1,000 requests for each adapter attained."""
    return outcome([1000] * len(part.loads))


def bad(part: Part, **more: float) -> Outcome:
    """A tenth of the requests for each adapter missed."""
    return outcome([1000] * len(part.loads), attained=[900] * len(part.loads), **more)


@dataclass
class Told:
    """Runs jobs by a function of (how often it was called before, part), and keeps the jobs of each call."""

    says: Callable[[int, Part], Outcome]
    calls: list[list[Job]] = field(default_factory=list)

    def __call__(self, jobs: Sequence[Job]) -> list[list[Outcome]]:
        number = len(self.calls)
        self.calls.append(list(jobs))
        return [[self.says(number, part) for part in job.parts] for job in jobs]


GOOD: Run = Told(lambda _, part: good(part))
