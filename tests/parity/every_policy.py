"""The live engine and the twin's worker under every order of requests and every eviction, in fixed and in shared memory.

    python -m tests.parity.every_policy        (make parity)

prints how many histories were compared and how many of them differ, as a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.shared.worker_options import EvictionName, QueuesName
from motet.twin.link import LinkModel
from tests.parity.conftest import write_checkpoint
from tests.parity.test_engine_and_twin import QUICK, Recorder, counted, scripted, simulated
from tests.services.worker.support_engine import PacedRunner, make_engine, request, run

KV_BLOCKS, MAX_LORAS, SEEDS = 50, 3, (1, 2)
LONGEST, MOST = 225, 20  # output tokens
LEAST_STEPS = 200
STEP_S = 1e-3  # of the engine's clock and of the twin's
LINK_BYTES_PER_S = 50e6  # a copy takes up to 30 steps


class Setting(NamedTuple):
    """One comparison. `shared`: KV blocks and adapters share the device's memory."""

    queues: QueuesName
    eviction: EvictionName
    shared: bool
    seed: int


def settings() -> Iterator[Setting]:
    """Every setting."""
    return (Setting(*one) for one in itertools.product(get_args(QueuesName), get_args(EvictionName), (False, True), SEEDS))


def difference(setting: Setting, model_dir: Path, adapters: list[HostAdapter]) -> str:
    """Where the two histories part; "" if they are equal."""
    policies: dict[str, Any] = {"queues": setting.queues, "eviction": setting.eviction, "prefetch": 2}
    more: dict[str, Any] = {"lora_bytes": 1 << 20, "runner_options": {"elastic": True}} if setting.shared else {}
    engine = make_engine(
        model_dir, kv_blocks=KV_BLOCKS, max_loras=MAX_LORAS, max_running=12, max_step_tokens=48, perf=lambda: QUICK,
        cold_start="blocking", runner=PacedRunner, **policies, **more,
    )  # fmt: skip
    assert isinstance(engine.runner, PacedRunner)
    engine.runner.bytes_per_s = LINK_BYTES_PER_S
    workload, prompts = scripted(setting.seed, engine, adapters)
    np.minimum(workload.output_tokens, MOST, out=workload.output_tokens)
    workload.adapter[0], workload.output_tokens[0] = -1, LONGEST  # it runs all the time, so no step is skipped
    requests = []
    for i, prompt in enumerate(prompts):
        adapter = None if workload.adapter[i] < 0 else adapters[workload.adapter[i]]
        one = request(str(i), prompt, adapter, max_tokens=int(workload.output_tokens[i]))
        one.predicted_tokens, one.arrival_s = int(workload.output_tokens[i]), float(workload.arrival_s[i])
        requests.append(one)
    live = run(engine, requests, per_step=1, clock_s=STEP_S)
    recorder = Recorder()
    simulated(
        workload, engine, recorder, kv_blocks=KV_BLOCKS, max_step_tokens=48, max_loras=MAX_LORAS, prefix_cache=True,
        link=LinkModel(bytes_per_s=LINK_BYTES_PER_S, layers=3, cold_start="blocking"), **policies,
    )  # fmt: skip
    idle = (i for i, step in enumerate(live.steps) if not (step.decode_rows or step.prefill_requests))
    compared = next(idle, len(live.steps))  # then all wait for a copy: the twin goes on when it ends, the engine a step later
    assert compared >= LEAST_STEPS
    ours = [(counted(step), step.waiting) for step in live.steps[:compared]]
    theirs = [(counted(batch), batch.waiting) for batch in recorder.batches[:compared]]
    if ours == theirs:
        return ""
    at = next(i for i, (one, other) in enumerate(itertools.zip_longest(ours, theirs)) if one != other)
    return f"{setting}: different from step {at} of {compared} on"


def main() -> int:
    """Compare every setting."""
    histories, different = 0, []
    with tempfile.TemporaryDirectory() as directory:
        model_dir, adapters = write_checkpoint(Path(directory))
        for setting in settings():
            histories += 1
            if found := difference(setting, model_dir, adapters):
                different.append(found)
    print("\n".join(different), file=sys.stderr)
    print(json.dumps({"histories": histories, "differences": len(different)}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
