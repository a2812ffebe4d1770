"""The live engine and the twin's worker under every order of requests and every eviction, in fixed and in shared memory.

    python -m tests.parity.every_policy        (make parity)

prints how many histories were compared and how many of them differ, as a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.rivals import EVICTIONS, QUEUES
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.merging import MergedWeights
from motet.twin.link import LinkModel
from motet.twin.worker_spec import MergedCopyModel
from motet.twin.workload import Workload
from tests.parity.conftest import write_checkpoint
from tests.parity.test_engine_and_twin import QUICK, Recorder, counted, scripted, simulated
from tests.services.worker.support_engine import PacedRunner, make_engine, request, run

KV_BLOCKS, MAX_LORAS, SEEDS = 50, 3, (1, 2)
LONGEST, MOST = 225, 20  # output tokens
LEAST_STEPS = 200
STEP_S = 1e-3  # of the engine's clock and of the twin's
LINK_BYTES_PER_S = 50e6  # a copy takes up to 30 steps
COPY_BYTES = 16 << 10  # of a merged copy
POPULAR = 0.8  # of the requests use one adapter, where adapters are merged
LEAST_MERGED = 5  # steps of a history
OFTEN = MergeConfig(alpha=0.6, beta=0.5, decrement=0.0, multiply=1.0, period=20, credit=60.0, starving=90.0, normal=60.0)
PAYS = MergeCosts(switch_ms=0.0, step_ms=1.0, row_ms=0.0, lora=1.0)


class Setting(NamedTuple):
    """One comparison. `shared`: KV blocks and adapters share the device's memory; `merge`: adapters are merged."""

    queues: str
    eviction: str
    shared: bool
    merge: bool
    seed: int


def settings() -> Iterator[Setting]:
    """Every setting. On a CPU a merged copy needs shared memory."""
    memory = ((False, False), (True, False), (True, True))
    for queues, eviction, (shared, merge), seed in itertools.product(QUEUES, EVICTIONS, memory, SEEDS):
        yield Setting(queues, eviction, shared, merge, seed)


class AtOnce:
    """A merged copy that is whole after its first slice, and as large for every adapter."""

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self.begin, self.drop = weights.begin, weights.drop

    def size(self, adapter: HostAdapter) -> int:
        return COPY_BYTES

    def advance(self, enough: Callable[[], bool]) -> bool:
        return self._weights.advance(lambda: False)


class MergingRunner(PacedRunner):
    """A paced runner with such a copy."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        assert self.merged is not None
        self.merged = AtOnce(self.merged)  # type: ignore[assignment]


def weighed(batches: BatchCore[Any]) -> None:
    """Merging pays as the test says: with measured times, decisions would depend on noise."""
    assert batches.copy is not None and isinstance(batches.modes, Merging)
    batches.modes.costs, batches.copy.weigh = PAYS, lambda running: None  # type: ignore[method-assign]


def prepared(
    setting: Setting, model_dir: Path, adapters: list[HostAdapter]
) -> tuple[Engine, Workload, list[EngineRequest], dict[str, Any]]:
    """The live engine, its requests for both, and the options of both."""
    policies: dict[str, Any] = {
        "queues": setting.queues, "eviction": setting.eviction, "prefetch": 2, "cold_start": "blocking",
        "merge": "on" if setting.merge else "off",
    }  # fmt: skip
    more: dict[str, Any] = {"lora_bytes": 1 << 20, "runner_options": {"elastic": True}} if setting.shared else {}
    engine = make_engine(
        model_dir, kv_blocks=KV_BLOCKS, max_loras=MAX_LORAS, max_running=12, max_step_tokens=48, perf=lambda: QUICK,
        runner=MergingRunner if setting.merge else PacedRunner, merging=OFTEN, **policies, **more,
    )  # fmt: skip
    assert isinstance(engine.runner, PacedRunner)
    engine.runner.bytes_per_s = LINK_BYTES_PER_S
    workload, prompts = scripted(setting.seed, engine, adapters)
    np.minimum(workload.output_tokens, MOST, out=workload.output_tokens)
    if setting.merge:  # most requests use one adapter
        workload.adapter[np.random.default_rng(setting.seed).random(len(workload)) < POPULAR] = 0
        weighed(engine._core)  # private: merging is weighed as the test says
    workload.adapter[0], workload.output_tokens[0] = -1, LONGEST  # it runs all the time, so no step is skipped
    requests = []
    for i, prompt in enumerate(prompts):
        adapter = None if workload.adapter[i] < 0 else adapters[workload.adapter[i]]
        one = request(str(i), prompt, adapter, max_tokens=int(workload.output_tokens[i]))
        most, arrival_s = int(workload.output_tokens[i]), float(workload.arrival_s[i])
        requests.append(msgspec.structs.replace(one, predicted_tokens=most, arrival_s=arrival_s))
    return engine, workload, requests, policies


def difference(setting: Setting, model_dir: Path, adapters: list[HostAdapter]) -> str:
    """Where the two histories part; "" if they are equal."""
    engine, workload, requests, policies = prepared(setting, model_dir, adapters)
    live = run(engine, requests, per_step=1, clock_s=STEP_S)
    recorder = Recorder()
    merged = {"merged_copy": MergedCopyModel(size_bytes=COPY_BYTES, mib_ms=1e-9), "merging": OFTEN}
    cluster = simulated(
        workload, engine, recorder, kv_blocks=KV_BLOCKS, max_step_tokens=48, max_loras=MAX_LORAS, prefix_cache=True,
        link=LinkModel(bytes_per_s=LINK_BYTES_PER_S, layers=3), **policies,
        **({"merged": merged, "prepare": weighed} if setting.merge else {}),
    )  # fmt: skip
    steps = [step for step in live.steps if step.decode_rows or step.prefill_requests]
    if setting.merge:
        assert sum(step.merging is not None and bool(step.merging.merged) for step in steps) > LEAST_MERGED
        assert cluster.metrics.merged_steps > LEAST_MERGED
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
