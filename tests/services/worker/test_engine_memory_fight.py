"""Promise: when KV blocks and adapters compete for a small memory, no request fails and outputs equal those with much memory.

Random histories on the real engine, with copies over an emulated link: bursts of long prompts and of many adapters, priorities,
cancellations, prefetches and unloads, under every eviction and queue. The accounts are checked after every step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from bench.rivals import EVICTIONS, QUEUES
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.runner import ModelRunner
from motet.shared.wire.request import pack_tokens
from tests.services.worker.support_engine import BLOCK_SIZE, make_engine, request, run
from tests.support_models import make_adapters, make_checkpoint, random_prompts

REQUESTS = 32
LONGEST_PROMPT, LONGEST_OUTPUT = 90, 30
LONGEST_BLOCKS = -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // BLOCK_SIZE)
LINK_BYTES_PER_S = (2e7, 1e9)
"""An adapter takes some milliseconds, several steps of this model, or next to nothing."""


@dataclass(frozen=True)
class Bed:
    model_dir: Path
    adapters: list[HostAdapter]
    largest_bytes: int


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    directory = tmp_path_factory.mktemp("fight")
    model_dir = make_checkpoint("llama2", directory)
    config = read_model_config(model_dir)
    adapters = [HostAdapter.from_blob(one.blob, config) for one in make_adapters(model_dir, directory)]
    size = make_engine(model_dir).runner.adapter_bytes
    adapters = sorted(adapters, key=size)[:-1]  # beside the largest one there would be room for all others
    return Bed(model_dir, adapters, size(adapters[-1]))


def burst(draw: random.Random, bed: Bed) -> list[EngineRequest]:
    """Requests in bursts: long prompts on few adapters, or short ones on all. Every fourth one repeats a beginning."""
    prompts = random_prompts(REQUESTS, seed=draw.randrange(1 << 30), longest=LONGEST_PROMPT)
    found = []
    for number, prompt in enumerate(prompts):
        long = number // 8 % 2 == 0
        adapter = draw.choice([None, *bed.adapters[:2]] if long else bed.adapters)
        if number % 4 == 3:
            prompt = prompts[number - 1][: len(prompts[number - 1]) // 2] + prompt
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": number} if draw.random() < 0.3 else {}
        one = request(
            str(number),
            prompt[: LONGEST_PROMPT if long else 12],
            adapter,
            max_tokens=draw.randint(1, LONGEST_OUTPUT),
            **sampling,
        )
        found.append(msgspec.structs.replace(one, priority=draw.choice([0, 0, 0, 1])))
    return found


def tight_engine(
    draw: random.Random, bed: Bed, eviction: str, queues: str, *, kernels: Literal["cpu", "reference"] = "cpu"
) -> Engine:
    """An engine with room for little more than one long sequence and one large adapter."""
    return make_engine(
        bed.model_dir,
        runner=ModelRunner,
        runner_options={"elastic": True, "kernels": kernels, "link_bytes_per_s": draw.choice(LINK_BYTES_PER_S)},
        kv_blocks=LONGEST_BLOCKS + draw.randrange(8),
        lora_bytes=int(bed.largest_bytes * draw.uniform(1.0, 1.5)),
        max_running=draw.randint(2, 12),
        max_step_tokens=draw.choice([16, 64, 256]),
        prefix_cache=draw.random() < 0.7,
        eviction=eviction,
        queues=queues,
        prefetch=draw.choice([0, 4]),
        cold_start=draw.choice(["auto", "blocking", "layerwise"]),
    )


@dataclass
class Fight:
    """The results of the requests: their tokens and how they ended."""

    tokens: dict[str, list[int]]
    ended: dict[str, str] = field(default_factory=dict)
    loads: int = 0
    preempted: int = 0
    resumed: int = 0
    divisions: int = 0  # of the memory, into different shares


def fight(engine: Engine, requests: list[EngineRequest], adapters: list[HostAdapter], draw: random.Random) -> Fight:
    """Serve the requests. Some are cancelled and continue later, as a gateway resumes them; adapters are prefetched and
    unloaded meanwhile.

    Asserts after every step that token indices are consecutive and accounts add up.
    """
    found, todo, now = (
        Fight({one.request_id: [] for one in requests}),
        list(requests),
        {one.request_id: one for one in requests},
    )
    per_step, steps, blocks = draw.randint(1, 4), 0, set[int]()
    while todo or engine.has_work():
        for one in todo[:per_step]:
            engine.add(one, float(steps))
        todo = todo[per_step:]
        if draw.random() < 0.1:
            engine.load_adapter(draw.choice(adapters))
        if draw.random() < 0.1:
            engine.unload_adapter(draw.choice(adapters).digest)
        if draw.random() < 0.1:
            one = now[draw.choice(requests).request_id]
            engine.cancel(one.request_id, one.epoch)
        output = engine.step(float(steps))
        steps += 1
        assert output.failure is None, output.failure
        engine.check()
        blocks.add(engine.core.state.kv.total)
        found.loads += output.stats.adapters_loaded
        found.preempted += output.stats.preempted
        for item in (item for items in output.items.values() for item in items):
            tokens = found.tokens[item.request_id]
            assert item.index == len(tokens), "a token is missing or comes twice"
            tokens += item.tokens
            if item.finish == "cancelled":
                one = now[item.request_id]
                now[item.request_id] = again = msgspec.structs.replace(one, epoch=one.epoch + 1, output=pack_tokens(tokens))
                todo.append(again)
                found.resumed += 1
            elif item.finish is not None:
                assert item.request_id not in found.ended, "two ends"
                found.ended[item.request_id] = item.finish
    found.divisions = len(blocks) - 1
    return found


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_when_kv_and_adapters_fight_for_memory_no_request_fails_and_outputs_stay(bed: Bed, eviction: str) -> None:
    fights = []
    for queues in QUEUES:
        draw = random.Random(f"{eviction} {queues}")
        requests = burst(draw, bed)
        roomy = run(make_engine(bed.model_dir), requests)
        engine = tight_engine(draw, bed, eviction, queues)
        try:
            found = fight(engine, requests, bed.adapters, draw)
        finally:
            engine.close()
        assert found.ended == dict.fromkeys(roomy.tokens, "length")
        assert found.tokens == roomy.tokens
        fights.append(found)
    assert sum(one.loads for one in fights) > len(fights) * len(bed.adapters), "adapters left for others and came again"
    assert all(sum(getattr(one, what) for one in fights) for what in ("preempted", "resumed", "divisions"))
