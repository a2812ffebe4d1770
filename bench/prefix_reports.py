"""What reports of cached KV blocks cost a worker: CPU time per step, with them and without.

An engine computes prompts that nobody has had before, as fast as it can, so that every block that it fills is news, and every
block that it evicts. With reports, the keys are shortened and collected, taken after each step, kept in the worker's view, and
packed into a message every 20 ms (`DELTA_S`). Laps with reports and without take turns in one process with one thread.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.models import model_and_adapters
from motet.policies.cluster.worker_book import DELTA_S
from motet.policies.worker.worker_view import View
from motet.shared.model import WorkerLimits

LAPS, QUICK_LAPS = 40, 4
PROMPTS, TOKENS, ANSWER = 8, 512, 8


def measure(*, quick: bool) -> dict[str, Any]:
    """The figures; prints a table."""
    from bench.rig.engine import run_engine
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    model, _ = model_and_adapters("XS")
    config = WorkerConfig.of(model=str(model), threads=1, kv_memory_gib=0.25, max_running=PROMPTS)
    assembly = assemble(config, model, StepTimes(START_PERF))
    engine, kv = assembly.engine, assembly.engine.core.state.kv
    limits = WorkerLimits(
        base_model="xs", max_model_len=2_048, max_running=PROMPTS, max_waiting=PROMPTS, block_size=kv.block_size,
        kv_blocks_total=kv.total, adapter_bytes_total=0, max_lora_rank=0,
    )  # fmt: skip
    draw = np.random.default_rng(7)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    encode = msgspec.msgpack.Encoder().encode
    each_us: dict[bool, list[float]] = {True: [], False: []}
    keys = steps = 0

    def lap(reports: bool) -> float:
        nonlocal keys, steps
        view, told_s = View("w", "i", limits), 0.0
        kv.news = {} if reports else None
        step, count = engine.step, 0

        def stepped(now_s: float) -> Any:
            nonlocal count, keys, told_s
            output = step(now_s)
            count += 1
            if reports and (news := engine.take_prefixes()):
                keys += len(news)
                view.cache(news)
            if reports and now_s - told_s >= DELTA_S:
                told_s = now_s
                encode(view.delta())
            return output

        setattr(engine, "step", stepped)  # noqa: B010 - mypy knows no assignment to a method
        prompts = draw.integers(2, vocabulary, size=(PROMPTS, TOKENS)).tolist()
        began_s = time.thread_time()
        for _ in run_engine(engine, prompts, ANSWER, [None] * PROMPTS):
            pass
        took_s = time.thread_time() - began_s
        setattr(engine, "step", step)  # noqa: B010
        steps += count
        return 1e6 * took_s / count

    for number in range((QUICK_LAPS if quick else LAPS) + 1):
        for reports in (True, False) if number % 2 else (False, True):
            took_us = lap(reports)
            if number:  # the first pair warms up
                each_us[reports].append(took_us)
    ratios = np.array(each_us[True]) / np.array(each_us[False])
    error = float(ratios.std(ddof=1) / np.sqrt(len(ratios)))
    found = {
        "step_cpu_us": round(median(each_us[False]), 1),
        "step_cpu_with_reports": round(float(np.median(ratios)), 4),
        "standard_error": round(error, 4),
        "keys_per_step": round(2 * keys / steps, 1),
    }
    print(report.table("reports of cached blocks", list(found), [list(found.values())]))
    return {f"reports.{name}": value for name, value in found.items()}
