"""`python -m bench probe`: whether the probe of loaded adapters finds faults, raises no false alarm, and what it costs.

The engine is a worker's, with the compiled CPU kernels, in float32 and bfloat16; readings are judged as a worker judges them.
References are made by the first loads in float32 and hold for both types.

    faults         four of each kind, planted between file and device, two in each type: a module is not applied, another file,
                   four ranks of all, updates of twice the size (one: 1.02 times), and another base model with the same adapters
    false alarms   loads of adapters of ranks 8 to 64 in random order into four slots, so that most loads evict another one
    cost           the probe beside a prefill of 32 tokens with the same adapter, in turns in an idle engine
    cold start     time to first token of a request whose adapter is in host memory, without and with the probe
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.models import SHAPES, model_and_adapters, write_model
from bench.probe_faults import Fault, ignored_module, swapped, truncated_rank, wrong_scale
from motet.policies.worker.probe import Account, Judged, Reading, Reference, judge, made_reference
from motet.shared.clock import now_s

TYPES = ("float32", "bfloat16")
SLOTS = 4
LOADS, QUICK_LOADS = 500, 40
ROUNDS, QUICK_ROUNDS = 40, 6
PREFILL_TOKENS, COLD_PROMPT_TOKENS = 32, 64
CLEAN = ("good", "small")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--model", choices=SHAPES, default="S", help="its shape (default S)")


@dataclass(slots=True)
class Rig:
    """An engine of one type with the adapters in host memory. `references` are those of all engines, by digest."""

    dtype: str
    assembly: Any
    adapters: list[Any]
    accounts: dict[str, Account]
    references: dict[str, Reference]
    readings: list[Reading] = field(default_factory=list)
    asked: int = 0

    @property
    def engine(self) -> Any:
        return self.assembly.engine

    def load(self, adapter: Any, *, prompt_tokens: int = 4) -> tuple[Judged | None, float, float]:
        """A request of one token for the adapter: the verdict of a load, the seconds to its token, and those of its reading."""
        from motet.services.worker.engines.request import EngineRequest
        from motet.shared.model import SamplingParams

        self.asked += 1
        draw = random.Random(self.asked)
        prompt = [draw.randrange(2, 4000) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        began = now_s()
        request = EngineRequest.local(f"r{self.asked}", prompt, sampling, weights=adapter, gateway_id="g", arrival_s=began)
        self.engine.add(request, began)
        judged, took_s, first_s, answered_s = None, 0.0, 0.0, 0.0
        while self.engine.has_work():
            output = self.engine.step(now_s())
            if output.failure is not None:
                raise output.failure
            for reading in output.readings:
                judged, took_s, answered_s = self.judge(reading), reading.took_s, now_s() - began
            if output.items and not first_s:
                first_s = now_s() - began
        return judged, max(first_s, answered_s), took_s  # its token is held until the reading is there

    def judge(self, reading: Reading) -> Judged:
        """The verdict of a worker; the first good reading becomes the reference."""
        reference = self.references.get(reading.digest)
        judged = judge(reading, self.accounts[reading.digest], reference, dtype=self.dtype)
        if reference is None and judged.verdict in CLEAN:
            made = made_reference(reading, dtype=self.dtype, made_by="bench", now_unix_ms=0)
            self.references[reading.digest] = made
        self.readings.append(reading)
        return judged

    def clear(self) -> None:
        """Take all adapters off the device."""
        for adapter in self.adapters:
            self.engine.unload_adapter(adapter.digest)
        while self.engine.has_work():
            self.engine.step(now_s())

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """What goes to the device has this fault."""
        runner = self.engine.runner
        begin = runner.begin_load
        runner.begin_load = lambda slot, weights: begin(slot, fault(weights))
        try:
            yield
        finally:
            del runner.begin_load


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    name = "XS" if args.quick else args.model
    directory, paths = model_and_adapters(name)
    chosen = [paths[i] for i in (0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19)]  # ranks 8 to 64, four with the MLP too
    references: dict[str, Reference] = {}
    figures: dict[str, Any] = {"model": name}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as home:
        rigs = [_rig(directory, chosen, dtype, references, Path(home)) for dtype in TYPES]
        for rig in rigs:  # float32 first: its readings are the references
            for adapter in rig.adapters:
                rig.load(adapter)
        found = _planted(rigs) + _other_bases(name, chosen, references, Path(home))
        figures |= _faults(found)
        figures |= _false_alarms(rigs, QUICK_LOADS if args.quick else LOADS)
        rounds = args.watch.rounds(QUICK_ROUNDS if args.quick else ROUNDS, "rounds")
        figures |= _cost(rigs, _rig(directory, chosen, TYPES[1], references, Path(home), probe="off"), rounds)
    return figures


def _rig(
    directory: Path, paths: Sequence[Path], dtype: str, references: dict[str, Reference], home: Path, *, probe: str = "on"
) -> Rig:
    from bench.stored_adapters import stored_adapter
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.adapter_account import file_account
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    config = WorkerConfig.of(
        model=str(directory),
        dtype=dtype,
        kv_memory_gib=0.02,
        max_lora_rank=64,
        max_loras=SLOTS,
        lora_memory_mib=80,
        adapter_probe=probe,
    )
    assembly = assemble(config, directory, StepTimes(START_PERF))
    adapters, accounts = [], {}
    for path in paths:
        stored = stored_adapter(directory, path)
        file = home / stored.digest
        file.write_bytes(stored.blob)
        adapters.append(assembly.parse_adapter(file, stored.digest))
        accounts[stored.digest] = file_account(file)
    return Rig(dtype, assembly, adapters, accounts, references)


def _false_alarms(rigs: Sequence[Rig], loads: int) -> dict[str, Any]:
    """Loads without a fault. Requests that find their adapter on the device load nothing, and count nothing."""
    verdicts: dict[str, int] = {}
    reloads = 0
    for number, rig in enumerate(rigs):
        draw, wanted = random.Random(number), loads // len(rigs)
        done = 0
        while done < wanted:
            judged, _, _ = rig.load(draw.choice(rig.adapters))
            if judged is not None:
                done += 1
                verdicts[judged.verdict] = verdicts.get(judged.verdict, 0) + 1
                if judged.verdict not in CLEAN:
                    print(f"false alarm in {rig.dtype}: {judged.why}")
        reloads += done
    alarms = sum(count for verdict, count in verdicts.items() if verdict not in CLEAN)
    return {"false_alarms": alarms, "loads": reloads, "too_small": verdicts.get("small", 0)}


def _planted(rigs: Sequence[Rig]) -> list[tuple[str, str, Judged | None, Judged]]:
    """(kind, type, verdict, verdict of the answers alone) of each fault in an adapter."""
    found: list[tuple[str, str, Judged | None, Judged]] = []
    for rig in rigs:
        one, two, mlp, other = rig.adapters[1], rig.adapters[2], rig.adapters[7], rig.adapters[3]
        cases: list[tuple[str, Any, Fault]] = [
            ("ignored module", mlp, lambda adapter: ignored_module(adapter, 6)),
            ("ignored module", one, ignored_module),
            ("swapped files", two, swapped(rig.adapters[6])),  # of the same rank
            ("swapped files", one, swapped(other)),
            ("truncated rank", two, truncated_rank),
            ("truncated rank", mlp, truncated_rank),
            ("wrong scale", one, wrong_scale),
            ("wrong scale", mlp, lambda adapter: wrong_scale(adapter, 1.02)),
        ]
        for kind, adapter, fault in cases:
            rig.clear()
            with rig.fault(fault):
                judged, _, _ = rig.load(adapter)
            reference = rig.references[adapter.digest]
            found.append((kind, rig.dtype, judged, judge(rig.readings[-1], None, reference, dtype=rig.dtype)))
        rig.clear()
    return found


def _other_bases(
    name: str, paths: Sequence[Path], references: dict[str, Reference], home: Path
) -> list[tuple[str, str, Judged | None, Judged]]:
    """The same of workers with another base model: other random weights of the same shape."""
    found: list[tuple[str, str, Judged | None, Judged]] = []
    for seed in (1, 2):
        directory = home / f"base-{seed}"
        write_model(directory, SHAPES[name], dtype="bfloat16", seed=seed)
        for dtype in TYPES:
            rig = _rig(directory, paths[:1], dtype, references, home)
            judged, _, _ = rig.load(rig.adapters[0])
            assert judged is not None, "it was loaded"
            found.append(("other base", dtype, judged, judged))
            rig.engine.close()
    return found


def _faults(found: Sequence[tuple[str, str, Judged | None, Judged]]) -> dict[str, Any]:
    kinds = dict.fromkeys(kind for kind, *_ in found)
    rows, total, by_answers = [], 0, 0
    for kind in kinds:
        mine = [(judged, answers) for one, _, judged, answers in found if one == kind]
        caught = [judged for judged, _ in mine if judged is not None and judged.verdict not in CLEAN]
        alone = sum(answers.verdict not in CLEAN for _, answers in mine)
        total, by_answers = total + len(caught), by_answers + alone
        rows.append([kind, len(mine), len(caught), alone, caught[0].why if caught else ""])
    print(report.table("Planted faults", ["", "planted", "found", "by answers alone", "one of the reasons"], rows))
    return {"probe_found": total, "planted": len(found), "found_by_answers_alone": by_answers}


def _cost(rigs: Sequence[Rig], without: Rig, rounds: Any) -> dict[str, Any]:
    """The probe's time over a prefill's, and what it adds to a cold start."""
    ratios: dict[str, list[float]] = {rig.dtype: [] for rig in rigs}
    probes: dict[str, list[float]] = {rig.dtype: [] for rig in rigs}
    cold: dict[bool, list[float]] = {True: [], False: []}
    for number in rounds:
        for rig in rigs:
            adapter = rig.adapters[number % 4]
            rig.clear()
            _, _, probe_s = rig.load(adapter)
            _, prefill_s, _ = rig.load(adapter, prompt_tokens=PREFILL_TOKENS)
            ratios[rig.dtype].append(probe_s / prefill_s)
            probes[rig.dtype].append(probe_s * 1000)
        pair = (rigs[1], without) if number % 2 else (without, rigs[1])
        for rig in pair:
            rig.clear()
            _, first_s, _ = rig.load(rig.adapters[number % 4], prompt_tokens=COLD_PROMPT_TOKENS)
            cold[rig is without].append(first_s * 1000)
    ratio = {dtype: statistics.median(values) for dtype, values in ratios.items()}
    off_ms, on_ms = statistics.median(cold[True]), statistics.median(cold[False])
    rows = [[dtype, statistics.median(probes[dtype]), ratio[dtype]] for dtype in ratio]
    print(report.table("Cost", ["", "probe ms", "of a prefill of 32 tokens"], rows))
    print(report.table("Cold start, bfloat16, prompt of 64 tokens", ["", "TTFT ms"], [["without", off_ms], ["with", on_ms]]))
    return {
        "probe_vs_prefill": round(max(ratio.values()), 3),
        "probe_vs_prefill_by_type": {dtype: round(value, 3) for dtype, value in ratio.items()},
        "cold_start_ms_off": round(off_ms, 2),
        "cold_start_ms_on": round(on_ms, 2),
        "cold_start_added_ms": round(on_ms - off_ms, 2),
    }
