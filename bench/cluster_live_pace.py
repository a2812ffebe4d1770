"""`python -m bench.cluster_live_pace` measures what `bench.cluster_live` paces steps by: the steps of model S on one core.

Batches of 1 to 16 requests decode, with and without adapters, and single prompts of 4 to 64 tokens join them. Each kind of step
counts with the shortest of its times, which other processes did not disturb. The times are fitted as the steps of a `Pace`, and
with a constant for steps that have a prompt among decodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import SHAPES, model_and_adapters
from bench.rig.engine import host_adapters
from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.assemble import assemble
from motet.shared.clock import now_s
from motet.shared.model import SamplingParams

MODEL = "S"
ROWS, PROMPTS, ADAPTERS = (1, 2, 4, 8, 16), (4, 8, 16, 32, 64), 8
DECODES, REPEATS = 40, 12
NAMES = ("pass", "per decoding row", "per rank", "per prompt token", "per step with a prompt")


def steps() -> Iterator[tuple[tuple[int, ...], float]]:
    """(decoding rows, ranks, prompts, prompt tokens) and the milliseconds of every step."""
    model, paths = model_and_adapters(MODEL)
    config = WorkerConfig.of(model=str(model), threads=1, kv_memory_gib=0.5, max_loras=32, lora_memory_mib=256)
    assembly = assemble(config, model, StepTimes(START_PERF))
    engine, draw = assembly.engine, np.random.default_rng(0)
    adapters = host_adapters(assembly, model, [str(path) for path in paths[:ADAPTERS]])
    count = 0

    def add(prompt: int, tokens: int, adapter: Any) -> None:
        nonlocal count
        count += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=1, ignore_eos=True)
        ids = draw.integers(2, SHAPES[MODEL].vocabulary, prompt).tolist()
        request = EngineRequest.local(str(count), ids, sampling, weights=adapter, gateway_id="bench", arrival_s=now_s())
        engine.add(request, now_s())

    def step() -> tuple[tuple[int, ...], float]:
        began_s = now_s()
        stats = engine.step(began_s).stats
        ranks = stats.decode_rank_sum + stats.prefill_rank_sum
        return (stats.decode_rows, ranks, stats.prefill_requests, stats.prefill_tokens), 1000.0 * (now_s() - began_s)

    for rows in ROWS * REPEATS:
        for used in ([None], adapters):
            for place in range(rows):
                add(16, DECODES, used[place % len(used)])
            yield step()
            for prompt in PROMPTS:
                add(prompt, 2, used[-1])
                yield from (step() for _ in range(4))
            while engine.has_work():
                yield step()


def fit(kinds: NDArray[np.float64], times_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients `NAMES` by least squares of relative errors. `kinds` [n, 4] as of `steps`."""
    rows, ranks, prompts, tokens = kinds.T
    features = np.column_stack([np.ones(len(kinds)), rows, ranks, tokens, (prompts > 0) & (rows > 0)])
    found, *_ = np.linalg.lstsq(features / times_ms[:, None], np.ones(len(kinds)), rcond=None)
    return np.asarray(found)


def main() -> None:
    """Measure and print."""
    seen = defaultdict(list)
    for kind, time_ms in steps():
        seen[kind].append(time_ms)
    typical = {kind: min(times) for kind, times in seen.items() if len(times) >= REPEATS and any(kind)}
    found = fit(np.array(list(typical), dtype=np.float64), np.array(list(typical.values())))
    for name, value in zip(NAMES, found.tolist(), strict=True):
        print(f"{name:24}{value:9.4f} ms {value / found[0]:9.4f} of a pass")


if __name__ == "__main__":
    main()
