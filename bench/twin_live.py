"""Error of the digital twin: gives the same requests to a live worker and to the twin of its profile.

    profile   `motet profile` measures a worker and writes a file, before and after
    live      `motet worker` in a process of its own on NATS, with requests as from a scheduler and frames as to a gateway
    twin      the files' workers in a simulation get the same requests at the times they were sent

The twin models the worker: its queue, engine, adapter tiers and hops over the bus. Adapters, prompt and output lengths are
known to it; times are not.

    steady    independent arrivals at 45% of the worker's capacity, a few adapters that are on the device already
    bursty    the same load in bursts (gaps with a coefficient of variation of 4)
    cold      at 30% of the capacity, many adapters that are new to the worker or were evicted meanwhile; host memory and disk
              are full before, as in a worker that has run for a while
    overload  twice the capacity: after a few seconds the queue is full, and half of all requests are refused

A round runs every shape once, with new arrivals, between two profiles. The twin gets the requests twice, once with each
profile, because the machine's speed drifts within minutes. A round counts if the machine was quiet and steady: other
processes took less than `QUIET_CORES`, and the two profiles' steps differ by less than `STILL`. The live worker's behaviour
does not decide this. The quick form profiles once. Rounds continue until `Setup.rounds` count or time is over; if none counts
then, all do.

An error is the mean of the rounds' absolute errors, so that too fast in one round and too slow in the next do not cancel; a
figure is the worst of the shapes'. `decode_r2` is how well the schedulers' linear model of decode steps fits those of a profile
(CaraServe reaches 0.96), `step_r2` the same of the twin's own model, which also charges distinct adapters and contexts.

The model's weights are larger than a cache (`FULL`). A model that just fits into the last-level cache can take 1.5 times as
long for the same batch, depending on what ran before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from bench import report
from bench.models import model_and_adapters
from bench.rig.percentiles import quantile
from bench.rig.processes import ChildProcess, with_variables
from bench.rig.workers import LiveWorker, Served, workload
from bench.watch import Watch
from motet.shared.model import AdapterRef
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.events import PS_PER_MS, PS_PER_S
from motet.twin.metrics import NEVER
from motet.twin.profile import TwinProfile, read_profile
from motet.twin.steps import Batch
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

RANKS = (8, 16, 32, 64)
OPTIONS = {
    "threads": "1",  # the other core is for all other processes
    "max_running": "32",
    "max_waiting": "32",
    "lora_memory_mib": "128",
    "host_cache_mib": "128",
    "disk_cache_mib": "256",
}
PROFILE_RUNS = 2  # the profile takes as long as so many runs
SPARE_S, SHORTEST_S = 45.0, 5.0  # for starts and warm-ups; a run is not shorter
QUIET_CORES = 0.05
STILL = 0.06
PACE_ROWS = (1, 2, 4, 8, 16, 32)  # of the decodes by which the pace of two profiles is compared
WARM_EVERY_S = 0.15
CAPACITY_TURNS = 12  # so many requests for every place, when what a worker can serve is estimated
FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of arrivals. `load`: the rate as a share of what the worker can serve; `cv`: of the gaps between requests.

    `runs`: the duration, in `Setup.run_s`. If requests are few or come in bursts, a 99th percentile needs a longer run.
    """

    name: str
    load: float
    cv: float
    adapters: int
    exponent: float  # of their popularity
    others: int  # so many others are used once before; 0: its own are
    runs: int


SHAPES = (
    Shape("steady", 0.45, 1.0, 8, 1.0, 0, 2),
    Shape("bursty", 0.45, 4.0, 8, 1.0, 0, 2),
    Shape("cold", 0.3, 1.0, 150, 0.5, 80, 2),
    Shape("overload", 2.0, 1.0, 16, 1.0, 0, 1),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What to compare. `model`: of `bench.models`; `options`: the worker's MOTET_* variables, without the prefix."""

    model: str
    options: Mapping[str, str]
    shapes: tuple[Shape, ...]
    run_s: float
    rounds: int  # that have to count
    most_rounds: int
    profile_again: bool = True  # after every round


FULL = Setup("SM", OPTIONS, SHAPES, run_s=20.0, rounds=2, most_rounds=3)
QUICK = Setup(
    "XS",
    OPTIONS | {"max_running": "8", "max_waiting": "8"},  # a profile measures batches of up to `max_running`
    tuple(replace(shape, adapters=min(shape.adapters, 16), others=min(shape.others, 8)) for shape in SHAPES),
    run_s=4.0,
    rounds=1,
    most_rounds=1,
    profile_again=False,
)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Profile, run live, replay, print the tables, return the figures."""
    setup = QUICK if args.quick else FULL
    if args.seconds:
        setup = replace(setup, run_s=args.seconds)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        figures = asyncio.run(compare(setup, Path(directory), args.watch))
    return figures | {"options": {"model": setup.model, **setup.options}}


async def compare(setup: Setup, directory: Path, watch: Watch) -> dict[str, Any]:
    """The figures of a worker, and of the twin of its profile."""
    model, _ = model_and_adapters(setup.model)
    options, shapes, run_s = setup.options, setup.shapes, setup.run_s
    began_s = watch.left_s
    profiles = [await _profile(model, options, directory / "0", PROFILE_RUNS * run_s)]
    fits_s = (2 * watch.left_s - began_s - SPARE_S) / sum(shape.runs for shape in shapes)  # beside another profile
    if fits_s < run_s:
        setup = replace(setup, run_s=max(SHORTEST_S, fits_s))
        watch.skip(f"arrivals for {setup.run_s:.0f} s where {run_s:.0f} were planned: a profile takes long")
    rate = _capacity(profiles[0])
    outcomes: list[dict[str, tuple[Outcome, Outcome]]] = []
    counted: list[dict[str, tuple[Outcome, Outcome]]] = []
    elsewhere: list[float] = []
    drifts: list[float] = []
    for number in watch.rounds(setup.most_rounds):
        round_ = number + 1
        others = report.Elsewhere()
        live = await _live(setup, model, directory / f"live-{round_}", round_, rate)
        if setup.profile_again:
            profiles.append(await _profile(model, options, directory / str(round_), PROFILE_RUNS * setup.run_s))
        else:
            profiles.append(profiles[-1])
        elsewhere.append(others.cores())
        drifts.append(pace(profiles[-1]) / pace(profiles[-2]) - 1)
        outcomes.append({})
        for name, (served, sent, warm) in live.items():
            pair = Outcome.live(served, warm), Outcome.together([replayed(sent, one, warm) for one in profiles[-2:]])
            outcomes[-1][name] = pair
            print(f"round {round_}, {name}: off by {', '.join(_off(*pair).values())} percent", flush=True)
        counts = elsewhere[-1] <= QUIET_CORES and abs(drifts[-1]) <= STILL
        print(
            f"round {round_}: other processes took {elsewhere[-1]:.2f} cores, steps of the later profile take"
            f" {100 * drifts[-1]:+.1f} percent; it {'counts' if counts else 'does not count'}",
            flush=True,
        )
        if counts:
            counted.append(outcomes[-1])
        if len(counted) == setup.rounds:
            break
    counted_or_all = counted or outcomes
    return {
        **_figures(profiles, rate, {shape.name: [one[shape.name] for one in counted_or_all] for shape in shapes}),
        "rounds": len(outcomes),
        "rounds_counted": len(counted),
        "elsewhere_cores": [round(cores, 3) for cores in elsewhere],
        "drifts": [round(drift, 3) for drift in drifts],
        "round_errors": [{name: _rounded(_errors(*pair)) for name, pair in one.items()} for one in outcomes],
    }


async def _live(
    setup: Setup, model: Path, home: Path, round_: int, rate: float
) -> dict[str, tuple[list[Served], Workload, int]]:
    """Run all shapes live.

    Returns {shape: served requests, the same requests at the times they were sent, how many only warmed up}.
    """
    home.mkdir()
    found = {}
    async with LiveWorker(model, setup.options, home) as worker:
        for number, shape in enumerate(setup.shapes):
            count = shape.adapters + shape.others
            adapters = [await worker.publish(RANKS[i % len(RANKS)], 1000 * number + i) for i in range(count)]
            draw = np.random.default_rng((number, round_ - 1))
            workload = workload_of(draw, shape, adapters, shape.load * rate, shape.runs * setup.run_s)
            served = await worker.run(workload, adapters)
            sent = replace(workload, arrival_s=np.maximum.accumulate([one.sent_s for one in served]))
            found[shape.name] = served, sent, shape.others or shape.adapters
    return found


async def _profile(model: Path, options: Mapping[str, str], directory: Path, seconds: float) -> TwinProfile:
    """The profile that `motet profile` writes for a worker with `options`. Raises RuntimeError with the end of its output."""
    directory.mkdir()
    out, log = directory / "profile.json", directory / "profile.log"
    argv = [sys.executable, "-m", "motet", "profile", "--model", str(model), "--out", str(out), "--seconds", str(seconds)]
    with ChildProcess("profile", argv, with_variables(options), log=log) as process:
        if await asyncio.to_thread(process.wait, 600 + seconds):
            raise RuntimeError(f"motet profile failed:\n{process.said()}")
        print(process.said(30))
    return read_profile(out)


def pace(profile: TwinProfile) -> float:
    """The time of decodes by this profile: the geometric mean over `PACE_ROWS`, in milliseconds."""
    steps = profile.spec().steps
    batches = [Batch(decode_rows=rows, sampled=rows) for rows in PACE_ROWS]
    return float(np.exp(np.mean([np.log(steps.fixed_ps(batch) / PS_PER_MS) for batch in batches])))


def _lengths(draw: Generator) -> Lengths:
    pool = Lengths.lognormal(draw, prompt_mean=64, output_mean=64, prompt_cv=0.8, output_cv=0.7)
    return pool.capped(400, 700)


def _capacity(profile: TwinProfile) -> float:
    """Requests per second of the twin while all seats are taken."""
    draw, seats = np.random.default_rng(0), profile.limits.max_running
    count = CAPACITY_TURNS * seats
    prompt, output = _lengths(draw).draw(draw, count)
    ranks = np.array([RANKS[i % len(RANKS)] for i in range(16)])
    workload = Workload(
        arrival_s=np.zeros(count),
        adapter=draw.integers(len(ranks), size=count),
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=ranks,
        adapter_bytes=ranks * 60_000,
    )
    options = msgspec.structs.replace(profile.engine, max_loras=64)
    spec = replace(profile.spec(), options=options, limits=msgspec.structs.replace(profile.limits, max_waiting=count))
    cluster = Cluster(workload, [spec], None)
    cluster.run()
    out_s = np.sort(cluster.metrics.end_ps)[seats:-seats] / PS_PER_S  # neither those that began together nor the last ones
    return (len(out_s) - 1) / (out_s[-1] - out_s[0])


def workload_of(draw: Generator, shape: Shape, adapters: Sequence[AdapterRef], rate: float, run_s: float) -> Workload:
    """First a short request for each adapter that should have been used before; then `run_s` seconds of arrivals."""
    times = arrivals(draw, Intensity.constant(rate, run_s), cv=shape.cv)
    which = pick(draw, draw.permutation(zipf(shape.adapters, shape.exponent)), len(times))
    prompt, output = _lengths(draw).draw(draw, len(times))
    warm = np.arange(shape.adapters if shape.others else 0, len(adapters))
    start_s = WARM_EVERY_S * (len(warm) + 5)
    return workload(
        adapters,
        np.concatenate([WARM_EVERY_S * np.arange(len(warm)), start_s + times]),
        np.concatenate([warm, which]),
        np.concatenate([np.full(len(warm), 8), prompt]),
        np.concatenate([np.full(len(warm), 2), output]),
    )


@dataclass(frozen=True)
class Outcome:
    """A run in numbers: latencies of finished requests in milliseconds, and totals of the run."""

    ttft_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    tokens: int
    seconds: float  # from the first request to the last token
    refused: int

    @classmethod
    def of(cls, sent_s: Any, first_s: Any, end_s: Any, tokens: Any, refused: Any) -> Outcome:
        """The outcome of requests given as columns of equal length, in seconds."""
        done = ~refused
        many = done & (tokens > 1)
        return cls(
            ttft_ms=(first_s - sent_s)[done] * 1000,
            tpot_ms=(end_s - first_s)[many] / (tokens - 1)[many] * 1000,
            tokens=int(tokens[done].sum()),
            seconds=float(end_s[done].max() - sent_s[0]),
            refused=int(refused.sum()),
        )

    @classmethod
    def live(cls, served: Sequence[Served], skip: int) -> Outcome:
        """The outcome of a live run, without the first `skip` requests."""
        names = ("sent_s", "first_s", "end_s", "tokens", "refused")
        return cls.of(*(np.array([getattr(one, name) for one in served[skip:]]) for name in names))

    @classmethod
    def together(cls, rounds: Sequence[Outcome]) -> Outcome:
        """The outcome of all requests of all rounds."""
        return cls(
            np.concatenate([one.ttft_ms for one in rounds]),
            np.concatenate([one.tpot_ms for one in rounds]),
            sum(one.tokens for one in rounds),
            sum(one.seconds for one in rounds),
            sum(one.refused for one in rounds),
        )

    def figures(self) -> dict[str, float]:
        """The values of `FIGURES`."""
        latencies = [quantile(times_ms, share) for times_ms in (self.ttft_ms, self.tpot_ms) for share in (0.5, 0.99)]
        return dict(zip(FIGURES, [*latencies, self.tokens / self.seconds], strict=True))


def replayed(workload: Workload, profile: TwinProfile, skip: int) -> Outcome:
    """The twin's outcome for the same requests."""
    hops = profile.hops
    cluster = Cluster(workload, [profile.spec()], None, bus=BusDelays(submit_ms=hops.assign_ms, stream_ms=hops.frame_ms))
    cluster.run()
    metrics = cluster.metrics
    assert ((metrics.end_ps != NEVER) | metrics.refused).all(), "every request has an end"
    columns = (
        workload.arrival_s,
        metrics.first_ps / PS_PER_S,
        metrics.end_ps / PS_PER_S,
        metrics.output_tokens,
        metrics.refused,
    )
    return Outcome.of(*(column[skip:] for column in columns))


def _errors(live: Outcome, twin: Outcome) -> dict[str, float]:
    """By how many percent each figure of the twin exceeds the live one."""
    real, simulated = live.figures(), twin.figures()
    return {figure: 100 * (simulated[figure] / real[figure] - 1) for figure in FIGURES}


def _off(live: Outcome, twin: Outcome) -> dict[str, str]:
    return {figure: f"{error:+.1f}" for figure, error in _errors(live, twin).items()}


def mean_errors(rounds: Sequence[tuple[Outcome, Outcome]]) -> dict[str, float]:
    """Per figure, the mean over rounds of the absolute error in percent; a round is (live, twin)."""
    errors = [_errors(live, twin) for live, twin in rounds]
    return {figure: float(np.mean([abs(one[figure]) for one in errors])) for figure in FIGURES}


def _figures(profiles: Sequence[TwinProfile], rate: float, seen: dict[str, list[tuple[Outcome, Outcome]]]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    shapes: dict[str, Any] = {}
    for name, rounds in seen.items():
        live, twin = (Outcome.together(side) for side in zip(*rounds, strict=True))
        real, simulated, errors = live.figures(), twin.figures(), mean_errors(rounds)
        rows.append([f"{name}: live", len(live.ttft_ms), live.refused, *real.values()])
        rows.append(["twin, twice", len(twin.ttft_ms), twin.refused, *simulated.values()])
        rows.append(["error of a round, percent", "", "", *(f"{error:.1f}" for error in errors.values())])
        shapes[name] = {
            "live": _rounded(real) | {"finished": len(live.ttft_ms), "refused": live.refused},
            "twin": _rounded(simulated) | {"finished": len(twin.ttft_ms), "refused": twin.refused},
            "errors": _rounded(errors),
            "rounds": [_rounded(_errors(*one)) for one in rounds],
        }
    columns = ["", "finished", "refused", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "tokens/s"]
    print(report.table("The same requests live and in the twin", columns, rows))
    worst = {figure: max(shape["errors"][figure] for shape in shapes.values()) for figure in FIGURES}
    fits = [one.fit for one in profiles if one.fit is not None]
    return {
        "ttft_p50_error": round(worst["ttft_p50_ms"], 2),
        "ttft_p99_error": round(worst["ttft_p99_ms"], 2),
        "tpot_p50_error": round(worst["tpot_p50_ms"], 2),
        "tpot_p99_error": round(worst["tpot_p99_ms"], 2),
        "throughput_error": round(worst["tokens_per_s"], 2),
        "capacity_requests_per_s": round(float(rate), 2),
        "step_r2": [round(profile.engine_steps.r2, 4) for profile in profiles if profile.engine_steps is not None],
        "decode_r2": round(min((fit.r2_decode for fit in fits), default=0.0), 4),
        "linear_r2": [(round(fit.r2_prefill, 4), round(fit.r2_decode, 4)) for fit in fits],
        "hops_ms": [(round(one.hops.assign_ms, 2), round(one.hops.frame_ms, 2)) for one in profiles],
        "shapes": shapes,
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}
