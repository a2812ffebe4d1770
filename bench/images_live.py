"""A live image worker against the twin (`python -m bench images --live-vs-twin`): the same requests for both.

The worker is the whole service with the demo model, on a NATS server of its own. In each round it is profiled as by `motet
profile`. Then pictures of two sizes, several step counts and eight adapters arrive at random, at `LOAD` of what the twin of
that profile can serve. Then the twin gets the same requests at the times at which they were sent. Machines change their speed,
so a round is one pair, and the median round counts. An error is the twin's 50th percentile over the live one's, minus one. The
twin also gets them with the step times of the live run itself: what is then left is not the machine's change of speed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator

from bench import report
from motet.cli.profile import on_private_nats
from motet.cli.profile_images import image_profile
from motet.examples.demo_images import DEMO_IMAGES
from motet.policies.times.image_fit import fit_images
from motet.policies.times.perf_model import Floats
from motet.services.worker.config import WorkerConfig
from motet.services.worker.image_profiling import ImageProfiler, image_steps, measure_images
from motet.services.worker.profiling import GATEWAY, Observed
from motet.shared import subjects
from motet.shared.clip_tokenizer import PART_TOKENS
from motet.shared.clock import now_s
from motet.shared.model import ImageParams
from motet.shared.wire.stream import TokenFrame
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_S
from motet.twin.profile import TwinProfile
from motet.twin.storage import EVERYTHING_IN_HOST
from motet.twin.worker_spec import ImageSpec, WorkerSpec
from motet.twin.workload import Workload

LOAD = 0.6
REQUESTS, ROUNDS, PROFILE_S = 60, 7, 20.0
SIDES, STEPS = (16, 32), (8, 15, 25)
QUIET_S = 120.0
"""The longest time until all pictures are there."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from a request to its first step and to its picture, both [requests]."""

    first_s: Floats
    whole_s: Floats

    def p50(self) -> tuple[float, float]:
        """The medians."""
        return float(np.median(self.first_s)), float(np.median(self.whole_s))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, return the figures."""
    requests, rounds = (10, 1) if args.quick else (REQUESTS, ROUNDS)
    running = 4 if args.quick else 32
    config = WorkerConfig.of(
        model=str(DEMO_IMAGES / "model"), engine="images", threads=1, max_running=running, adapter_foresight="off"
    )
    rows, errors, owns, capacities = [], [], [], []
    for number in args.watch.rounds(rounds):
        others = report.Elsewhere()
        live, twin, own, capacity = asyncio.run(on_private_nats(config, partial(_round, args, requests, number)))
        error = off(twin, live)
        errors.append(error)
        owns.append(off(own, live))
        capacities.append(capacity)
        shares = [f"{100 * one:+.1f}%" for one in (*error, owns[-1][1])]
        rows.append([number + 1, *live.p50(), *twin.p50(), *shares, f"{others.cores():.2f}"])
    columns = [
        *("round", "live: first step s", "picture s", "twin: first step s", "picture s", "off", "off"),
        *("picture, by the run's own steps", "other cores"),
    ]
    print(report.table(f"p50 of {requests} requests, live and in the twin", columns, rows))
    first, whole = zip(*errors, strict=True)
    return {
        "e2e_p50_error": round(statistics.median(map(abs, whole)), 3),
        "first_p50_error": round(statistics.median(map(abs, first)), 3),
        "e2e_p50_error_own_steps": round(statistics.median(abs(one) for _, one in owns), 3),
        "rounds": [[round(one, 3) for one in error] for error in errors],
        "capacity_per_s": [round(one, 2) for one in capacities],
    }


class Round(NamedTuple):
    """The live run, the twin of the profile, that of the run's own steps; and the capacity by the profile in requests/s."""

    live: Times
    twin: Times
    own: Times
    capacity: float


def off(twin: Times, live: Times) -> tuple[float, float]:
    """By how much the twin's medians exceed the live ones, as a share."""
    first, whole = (simulated / real - 1.0 for simulated, real in zip(twin.p50(), live.p50(), strict=True))
    return first, whole


async def _round(args: argparse.Namespace, requests: int, number: int, config: WorkerConfig) -> Round:
    """A profile, a live run, and its repetitions in the twin."""
    model = DEMO_IMAGES / "model"
    seconds = args.seconds or (1.0 if args.quick else PROFILE_S)
    measured = image_profile(await measure_images(config, model, seconds=seconds), config)
    spec = msgspec.convert(msgspec.to_builtins(measured), TwinProfile).spec()
    spec = replace(spec, storage=EVERYTHING_IN_HOST)
    worker = Observed(config)
    try:
        await worker.service.start()
        profiler = ImageProfiler(worker, model)
        await profiler.publish()
        planned = workload_of(np.random.default_rng(number), requests, profiler)
        ends_s = np.sort(simulated(spec, replace(planned, arrival_s=np.zeros(requests))).whole_s)
        capacity = requests / float(ends_s[-1])
        live, sent_s = await _live(profiler, worker, planned.faster(LOAD * capacity))
    finally:
        await worker.service.stop()
    facts, steps = measured.images, image_steps(worker.seen, profiler.measured.latent_px)
    assert facts is not None, "it draws pictures"
    own = fit_images(steps, latent_px=facts.latent_px, rows_max=facts.rows_max, area_max=facts.area_max).steps
    sent = replace(planned, arrival_s=sent_s)
    return Round(live, simulated(spec, sent), simulated(replace(spec, images=ImageSpec(steps=own)), sent), capacity)


def workload_of(draw: Generator, requests: int, profiler: ImageProfiler) -> Workload:
    """Requests at a rate of one each second: sizes, numbers of steps and adapters by chance, one in nine without adapter."""
    adapters = profiler.adapters
    images = tuple(ImageParams(width=side, height=side, steps=steps) for side in SIDES for steps in STEPS)
    image = draw.integers(len(images), size=requests)
    return Workload(
        arrival_s=np.cumsum(draw.exponential(1.0, size=requests)),
        adapter=draw.integers(-1, len(adapters), size=requests),
        prompt_tokens=np.full(requests, PART_TOKENS),
        output_tokens=np.array([images[at].steps + 1 for at in image.tolist()]),
        ranks=np.array([one.rank for one in adapters]),
        adapter_bytes=np.array([one.size_bytes for one in adapters]),
        image=image,
        images=images,
    )


def simulated(spec: WorkerSpec, workload: Workload) -> Times:
    """The twin's times, with every adapter on the device."""
    preload = {"worker-0000": [one.digest for one in workload.adapters]}
    cluster = Cluster(workload, [spec], None, preload=preload)
    cluster.run()
    metrics = cluster.metrics
    assert not metrics.refused.any(), "every request is taken"
    first_s, whole_s = (times / PS_PER_S - workload.arrival_s for times in (metrics.first_ps, metrics.end_ps))
    return Times(first_s, whole_s)


async def _live(profiler: ImageProfiler, worker: Observed, workload: Workload) -> tuple[Times, Floats]:
    """Send the requests at their times, once every adapter is on the device; returns their times, and when they were sent."""
    assert worker.service.bus is not None, "it has started"
    first, whole = dict[str, float](), dict[str, float]()
    over = asyncio.Event()

    def hear(frame: TokenFrame) -> None:
        at_s = now_s()
        for item in frame.items:
            first.setdefault(item.request_id, at_s)
            if item.finish is not None:
                assert item.finish == "stop", item
                whole[item.request_id] = at_s
                over.set()

    await worker.service.bus.subscribe(subjects.stream(GATEWAY), TokenFrame, hear)
    for adapter in (None, *profiler.adapters):
        await profiler.ask(SIDES[-1], STEPS[0], adapter)
    await worker.idle()
    began_s, sent, names = now_s(), [], []
    for one in workload:
        assert one.image is not None, "it is a request for a picture"
        await asyncio.sleep(max(0.0, began_s + one.arrival_ps / PS_PER_S - now_s()))
        sent.append(now_s())
        adapter = profiler.adapters[workload.adapter[one.index]] if one.adapter.digest else None
        names.append(await profiler.ask(one.image.width, one.image.steps, adapter))
    while not all(name in whole for name in names):
        over.clear()
        await asyncio.wait_for(over.wait(), QUIET_S)
    sent_s = np.array(sent)
    return (
        Times(*(np.array([seen[name] for name in names]) - sent_s for seen in (first, whole))),
        np.maximum.accumulate(sent_s - began_s),
    )
