"""What `bench.cluster_live` is made of: the requests, the live cluster that answers them, and the twin's prediction of it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from bench.cluster import LENGTHS, POPULARITY, RANKS
from bench.models import ATTENTION, Shape, write_adapter
from bench.paced import SEED_ENDS, Pace
from bench.rig.answers import get, metric, wait_for
from bench.rig.http import completion, post
from bench.rig.mesh import Mesh, demo_mesh
from bench.rig.requests import Kind, Request, play
from bench.rig.waiting import until
from bench.rivals.parts import ABLATIONS
from motet.cli.credentials import password_file
from motet.policies.times.perf_model import batch_load, decode_ms, prefill_ms
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import BusConfig
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.events import to_ps
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import Batch, PerfSteps
from motet.twin.traces import read_lengths, read_popularity
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

DEMO_SHAPE = Shape(hidden=192, layers=4, heads=6, kv_heads=2, mlp=512, vocabulary=288)
KEY = "key-bench"
HEADERS = {"authorization": f"Bearer {KEY}"}
MOST_TOKENS = 128  # of an answer; what every client asks for, as none knows how long its answer will be
TTFT_SLO_MS = 60_000.0  # the objective is the time per token
WARM_EVERY_S, WARM_WITHIN_S = 0.04, 120.0
ALONE_TOKENS, ALONE_TIMES = 48, 2
LETTERS = (97, 123)  # tokens of a prompt: the demo's tokens are bytes
HEAR_S = 30.0
POWER = 1.1  # of the popularity where no data is given


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all policies share. `shares` and `ranks`: popularity and rank of each adapter."""

    workers: int
    seats: int
    pace: Pace
    rate: float  # requests per second, all workers
    requests: int  # of a round
    seed: int
    shares: NDArray[np.float64]
    lengths: Lengths

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """Among five neighbours in popularity each rank occurs once, so that no rank is favoured."""
        draw = self._draw(0, 4)
        fives = -(-len(self.shares) // len(RANKS))
        return np.concatenate([draw.permutation(RANKS) for _ in range(fives)])[: len(self.shares)]

    @cached_property
    def names(self) -> list[str]:
        """The adapters' names."""
        return [f"lora-{number:02}-rank-{rank}" for number, rank in enumerate(self.ranks)]

    def draw(self, round_: int, tpot_slo_ms: float, *, requests: int = 0) -> Workload:
        """The requests of a round; those of another round or seed are others."""
        count = requests or self.requests
        at_s = arrivals(self._draw(round_, 1), Intensity.constant(self.rate, 2 * count / self.rate + 60.0))[:count]
        prompt, output = self.lengths.draw(self._draw(round_, 3), count)
        return Workload(
            arrival_s=at_s - at_s[0],
            adapter=pick(self._draw(round_, 2), self.shares, count),
            prompt_tokens=prompt,
            output_tokens=output,
            ranks=self.ranks,
            adapter_bytes=self.ranks * 4096,
            slos=(Slo(ttft_slo_ms=TTFT_SLO_MS, tpot_slo_ms=tpot_slo_ms),),
        )

    def _draw(self, round_: int, what: int) -> Generator:
        return np.random.default_rng((self.seed, round_, what))


def popularity_and_lengths(data: Path | None, adapters: int) -> tuple[NDArray[np.float64], Lengths]:
    """Shares of the most called functions of Azure and Alpaca's lengths from `data`, or a power law and log-normal lengths."""
    if data is not None:
        shares = np.sort(read_popularity(data / POPULARITY).shares)[::-1][:adapters]
        lengths = read_lengths(data / LENGTHS)
    else:
        shares = zipf(adapters, POWER)
        draw = np.random.default_rng(7)
        lengths = Lengths.lognormal(draw, prompt_mean=20.7, output_mean=65.8, prompt_cv=0.7, output_cv=0.95)
    fits = (lengths.prompt_tokens <= MOST_TOKENS) & (lengths.output_tokens <= MOST_TOKENS)
    return shares / shares.sum(), Lengths(lengths.prompt_tokens[fits], lengths.output_tokens[fits])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One policy's run. `kept`: which requests kept their objective. A single token has no time per token to miss.

    `tpot_ms` and `ttft_ms` have an element per answered request, `tpot_ms` without single tokens.
    """

    kept: NDArray[np.bool_]
    tpot_ms: NDArray[np.float64]
    ttft_ms: NDArray[np.float64]
    failed: int = 0
    busy: float = 0.0  # CPU seconds per second and core of the machine, mesh and client
    behind: float = 0.0  # how late steps ended, as a share of their pace
    lost: float = 0.0  # delays of steps that were not made up, as a share of their pace

    @property
    def attainment(self) -> float:
        """The share of requests that kept their objective."""
        return float(self.kept.mean())

    @classmethod
    def together(cls, rounds: Sequence[Outcome]) -> Outcome:
        """The outcome of all rounds."""
        return cls(
            kept=np.concatenate([one.kept for one in rounds]),
            tpot_ms=np.concatenate([one.tpot_ms for one in rounds]),
            ttft_ms=np.concatenate([one.ttft_ms for one in rounds]),
            failed=sum(one.failed for one in rounds),
            busy=float(np.mean([one.busy for one in rounds])),
            behind=float(np.mean([one.behind for one in rounds])),
            lost=float(np.mean([one.lost for one in rounds])),
        )

    def figures(self) -> dict[str, float]:
        """The figures of the table."""
        return {
            "attainment": round(self.attainment, 4),
            "tpot_ms": round(float(self.tpot_ms.mean()), 2),
            "tpot_p50_ms": round(float(np.quantile(self.tpot_ms, 0.5)), 2),
            "tpot_p99_ms": round(float(np.quantile(self.tpot_ms, 0.99)), 2),
            "ttft_ms": round(float(self.ttft_ms.mean()), 1),
            "busy": round(self.busy, 3),
            "behind": round(self.behind, 4),
            "lost": round(self.lost, 4),
            "failed": self.failed,
        }


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the client saw of each request, [requests], and how the machine was. Times in ms, inf where an answer is not whole.

    The time per token of a single token is nan. `behind`, `lost`: as in `Outcome`.
    """

    status: NDArray[np.int64]
    whole: NDArray[np.bool_]
    ttft_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    busy: float
    behind: float
    lost: float


class Live:
    """The running cluster. Its workers stay; each policy gets a scheduler and a predictor that know nothing yet."""

    def __init__(self, mesh: Mesh, setting: Setting) -> None:
        self._mesh, self._setting = mesh, setting

    @classmethod
    @contextmanager
    def started(cls, setting: Setting, more: Mapping[str, str] = {}) -> Iterator[Live]:
        """A context with the cluster, with every adapter on the device of every worker. `more`: further MOTET_* variables."""
        variables = {
            "MOTET_PLUGINS": "bench.rivals,bench.rivals.named_parts",
            "MOTET_POLICY": "round-robin",
            "MOTET_ADMISSION": "room",
            "MOTET_REBALANCE": "off",
            "MOTET_MAX_RUNNING": str(setting.seats),
            "MOTET_MAX_WAITING": "4096",
            "MOTET_MAX_LORAS": str(len(setting.ranks)),
            "MOTET_LORA_MEMORY_MIB": "256",
            "MOTET_PREFIX_CACHE": "false",  # policies get the same prompts in turns
            "MOTET_PREDICTOR_STATE": "false",
            "MOTET_PREDICTOR_FIT_S": "100000",  # lengths do not depend on prompts here, and a fit takes a core
            SEED_ENDS: "1",
            **setting.pace.variables(),
            **more,
        }
        with TemporaryDirectory(prefix="motet-bench-") as directory:
            for number, (name, rank) in enumerate(zip(setting.names, setting.ranks.tolist(), strict=True)):
                write_adapter(Path(directory) / name, DEMO_SHAPE, rank=rank, modules=ATTENTION, seed=number)
            with demo_mesh(
                variables,
                f"{KEY} bench admin\n",
                workers=setting.workers,
                module="bench.paced",
                adapters=Path(directory),
            ) as mesh:
                live = cls(mesh, setting)
                live._warm()
                yield live

    def alone_ms(self) -> float:
        """The mean time per token of requests that are alone on the cluster, some of each rank."""
        times = []
        for rank in RANKS * ALONE_TIMES:
            name = self._setting.names[int(np.flatnonzero(self._setting.ranks == rank)[0])]
            request = request_for(0.0, name, 16, ALONE_TOKENS, Slo())
            play(self._mesh.port, [request])
            times.append(_tpot_ms(request, ALONE_TOKENS))
        return float(np.mean(times))

    def run(self, policy: str, workload: Workload) -> Outcome:
        """The policy's answers to these requests."""
        self.begin(policy)
        answers = self.answers(workload, self._setting.names)
        return Outcome(
            kept=~(answers.tpot_ms > workload.slos[0].tpot_slo_ms),
            tpot_ms=answers.tpot_ms[np.isfinite(answers.tpot_ms)],
            ttft_ms=answers.ttft_ms[answers.whole],
            failed=int((~answers.whole).sum()),
            busy=answers.busy,
            behind=answers.behind,
            lost=answers.lost,
        )

    def restart(self, variables: Mapping[str, str]) -> None:
        """Replace the workers by ones with these MOTET_* variables, and bring every adapter to their devices."""
        workers = [name for name in self._mesh.facts.services if name.startswith("worker")]
        self._mesh.replace({**variables, "MOTET_POLICY": "round-robin"}, "scheduler-1", *workers)
        self._warm()

    def begin(self, policy: str) -> None:
        """Replace scheduler and predictor by ones that know nothing yet."""
        self._mesh.replace({"MOTET_POLICY": policy}, "scheduler-1", "predictor")
        wait_for(self._mesh.port, self._setting.names, HEADERS)

    def answers(self, workload: Workload, names: Sequence[str], *, most_tokens: int = MOST_TOKENS) -> Answers:
        """The answers to requests for adapters of these names. Every client asks for up to `most_tokens` tokens."""
        slo, wanted = workload.slos[0], workload.output_tokens.tolist()
        columns = zip(
            workload.arrival_s.tolist(), workload.adapter.tolist(), workload.prompt_tokens.tolist(), wanted, strict=True
        )
        requests = [
            request_for(at_s, names[which], prompt, output, slo, most_tokens=most_tokens)
            for at_s, which, prompt, output in columns
        ]
        before_s, paced_before = sum(self._mesh.cpu_s().values()), self._paced()
        began_s = time.monotonic()
        play(self._mesh.port, requests)
        took_s = time.monotonic() - began_s
        cpu_s = sum(self._mesh.cpu_s().values()) - before_s
        paced_s, behind_s, lost_s = self._paced() - paced_before
        whole = np.array([one.status == 200 and one.tokens == tokens for one, tokens in zip(requests, wanted, strict=True)])
        tpot_ms = np.array([_tpot_ms(one, tokens) for one, tokens in zip(requests, wanted, strict=True)])
        return Answers(
            status=np.array([one.status for one in requests]),
            whole=whole,
            ttft_ms=np.where(whole, [1000.0 * one.ttft_s for one in requests], np.inf),
            tpot_ms=np.where(whole, tpot_ms, np.inf),
            busy=cpu_s / took_s / cores(),
            behind=float(behind_s / paced_s),
            lost=float(lost_s / paced_s),
        )

    def sizes(self) -> dict[str, int]:
        """Bytes of each adapter on a device, as the registry says."""
        listed = json.loads(get(f"{self._mesh.url}/v1/adapters", HEADERS))["data"]
        return {adapter["name"]: int(adapter["size_bytes"]) for adapter in listed}

    def learned(self) -> list[PerfModel]:
        """What the workers have learned of their step times, as schedulers hear it."""
        return [word.perf for word in self.snapshots()]

    def snapshots(self) -> list[WorkerSnapshot]:
        """What each worker says of itself, as schedulers hear it."""
        return asyncio.run(self._hear())

    async def _hear(self) -> list[WorkerSnapshot]:
        facts, found = self._mesh.facts, dict[str, WorkerSnapshot]()
        complete = asyncio.Event()

        def hear(word: WorkerState) -> None:
            if isinstance(word, WorkerSnapshot):
                found[word.worker_id] = word
            if len(found) == self._setting.workers:
                complete.set()

        secret = str(password_file(Path(facts.credentials_dir), "scheduler"))
        config = BusConfig(nats_url=facts.nats_url, nats_user="scheduler", nats_password_file=secret)
        bus = await Bus.connect(config, "bench", inbox="scheduler")
        try:
            await bus.subscribe(subjects.WORKER_STATES, WorkerState, hear)
            await asyncio.wait_for(complete.wait(), HEAR_S)
        finally:
            await bus.close()
        return [found[name] for name in sorted(found)]

    def _warm(self) -> None:
        """Bring every adapter to the device of every worker: with round-robin, requests in a row go to different workers."""
        names = self._setting.names
        wait_for(self._mesh.port, names, HEADERS)

        def missing() -> list[str]:
            return [name for name in names if not self._everywhere(name)]

        def warmed() -> bool:
            asked = [name for name in missing() for _ in range(self._setting.workers)]
            times = WARM_EVERY_S * np.arange(len(asked))
            play(self._mesh.port, [request_for(at_s, name, 4, 2, Slo()) for at_s, name in zip(times, asked, strict=True)])
            return not missing()

        until(warmed, lambda: f"not on every device: {missing()}", within_s=WARM_WITHIN_S)

    def _everywhere(self, name: str) -> bool:
        resident: Mapping[str, str] = json.loads(get(f"{self._mesh.url}/v1/adapters/{name}", HEADERS))["resident"]
        return sum(place == "device" for place in resident.values()) == self._setting.workers

    def _paced(self) -> NDArray[np.float64]:
        """Seconds that all steps so far should have taken, that they ended late, and of these, that were not made up."""
        urls = [facts["ops_url"] for name, facts in self._mesh.facts.services.items() if name.startswith("worker")]
        names = (f"motet_bench_{name}_seconds_total" for name in ("paced", "behind", "lost"))
        return np.array([sum(metric(url, name, HEADERS) for url in urls) for name in names])


def cores() -> int:
    """The cores that processes of the bench may run on."""
    return len(os.sched_getaffinity(0))


def request_for(
    at_s: float, name: str, prompt_tokens: int, output_tokens: int, slo: Slo, *, most_tokens: int = MOST_TOKENS
) -> Request:
    """A request whose answer has `output_tokens` tokens, which its seed tells the paced engine alone."""
    draw = np.random.default_rng((prompt_tokens, output_tokens))
    prompt = draw.integers(*LETTERS, size=prompt_tokens).tolist()
    kind = Kind(name="bench", ttft_slo_ms=slo.ttft_slo_ms, tpot_slo_ms=slo.tpot_slo_ms)
    letters = {"allowed_token_ids": [*range(*LETTERS)]}  # every token is a text, so each comes in an event of its own
    body = completion(name, prompt, most_tokens, ignore_eos=False, seed=output_tokens, stream=True, **letters)
    return Request(wire=post(body, {"connection": "close", **HEADERS, **kind.objectives}), at_s=at_s, kind=kind)


def _tpot_ms(request: Request, tokens: int) -> float:
    return 1000.0 * (request.last_s - request.first_s) / (tokens - 1) if tokens > 1 else np.nan


# ---- the twin


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Steps of an engine that computes prompts and decodes in one pass: a prefill alone takes a pass as well."""

    perf: PerfModel
    context_token_ps = longest_token_ps = 0
    reads_adapters = False

    def fixed_ps(self, batch: Batch) -> int:
        perf, kernel = self.perf, self.perf.kernel
        load = batch_load(kernel, batch.decode_rows, batch.decode_rank_sum, batch.decode_max_rank)
        total_ms = decode_ms(perf, float(batch.decode_rows), load)
        if batch.prefill_tokens:
            load = batch_load(kernel, batch.prefill_requests, batch.prefill_rank_sum, batch.prefill_max_rank)
            total_ms += prefill_ms(perf, float(batch.prefill_tokens), load)
        return to_ps(total_ms)


def paced_perf(pace: Pace) -> PerfModel:
    """The step times of a worker that keeps the pace and knows it."""
    return PerfModel(
        prefill_base_ms=0.0,
        prefill_token_ms=pace.token_ms,
        prefill_lora_ms=pace.rank_ms,
        decode_base_ms=pace.step_ms,
        decode_row_ms=pace.row_ms,
        decode_lora_ms=pace.rank_ms,
        load_base_ms=0.0,
        load_ms_per_mib=0.0,
    )


def predicted(
    setting: Setting, learned: Sequence[PerfModel], policy: str, workload: Workload, *, mixes: bool = True
) -> Outcome:
    """The twin's outcome of the same requests: workers whose steps are as those of the live ones were learned.

    Not `mixes`: a prefill is a step of its own.
    """
    limits = WorkerLimits(
        base_model="demo", max_model_len=2048, max_running=setting.seats, max_waiting=4096, block_size=16,
        kv_blocks_total=8192, adapter_bytes_total=1 << 30, max_lora_rank=max(RANKS),
    )  # fmt: skip
    options, steps = WorkerOptions(max_loras=len(setting.ranks)), MixedSteps if mixes else PerfSteps
    specs = [WorkerSpec(limits=limits, perf=perf, steps=steps(perf), options=options) for perf in learned]
    choose = ABLATIONS.get(policy)
    scheduler = SchedulerSpec(
        policy="motet" if choose is not None else policy,
        choose=choose,
        admission="room",
        max_tokens=MOST_TOKENS,
        rebalance="off",
    )
    digests = [adapter.digest for adapter in workload.adapters]
    cluster = Cluster(workload, specs, scheduler, preload={f"worker-{i:04d}": digests for i in range(len(specs))})
    cluster.run()
    times = Latencies.of(workload, cluster.metrics)
    kept = np.zeros(len(workload), dtype=bool)
    kept[times.rows] = ~(times.tpot_ms > workload.slos[0].tpot_slo_ms)
    return Outcome(
        kept=kept,
        tpot_ms=times.tpot_ms[~np.isnan(times.tpot_ms)],
        ttft_ms=times.ttft_ms,
        failed=len(workload) - len(times.rows),
    )
