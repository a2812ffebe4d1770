"""Promise: adapters are copied to the device beside the steps. Their requests wait, or join early, and get the same tokens;
other requests are not affected, also when something is cancelled, dropped, preempted or fails meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from motet.policies.step.cold_start import ColdStartName
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import StepOutput
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.runner import ModelRunner
from motet.shared.errors import WorkerLost
from motet.shared.wire.stream import StreamItem
from tests.services.worker.support_engine import PacedRunner, make_engine, request, run
from tests.support import eventually
from tests.support_models import make_adapters, make_checkpoint

PROMPT = list(range(10, 31))
SLOW = 1e3  # bytes per second: nothing arrives by itself


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[HostAdapter]]:
    directory = tmp_path_factory.mktemp("cold")
    model_dir = make_checkpoint("qwen2", directory)
    config = read_model_config(model_dir)
    return model_dir, [HostAdapter.from_blob(one.blob, config) for one in make_adapters(model_dir, directory)]


@pytest.fixture
def adapters(checkpoint: tuple[Path, list[HostAdapter]]) -> list[HostAdapter]:
    return checkpoint[1]


def paced(
    checkpoint: tuple[Path, list[HostAdapter]], cold_start: ColdStartName = "blocking", **changes: Any
) -> tuple[Engine, PacedRunner]:
    engine = make_engine(checkpoint[0], runner=PacedRunner, cold_start=cold_start, **changes)
    runner = engine.runner
    assert isinstance(runner, PacedRunner)
    runner.bytes_per_s = SLOW
    return engine, runner


def arrive(runner: PacedRunner, *, layers: float = 1e9) -> None:
    """Let this many layers of the first copy in the queue arrive; by default all copies."""
    size = runner.adapter_bytes(next(iter(runner.queue.values()))[0])
    runner.elapse(layers * size / runner.config.num_layers / runner.bytes_per_s * (1 + 1e-9))


def step(engine: Engine) -> StepOutput:
    out = engine.step(0.0)
    engine.check()
    return out


def items_of(out: StepOutput) -> list[StreamItem]:
    return [item for items in out.items.values() for item in items]


def tokens_of(outs: list[StepOutput], request_id: str) -> list[int]:
    return [token for out in outs for item in items_of(out) if item.request_id == request_id for token in item.tokens]


@pytest.mark.parametrize("cold_start", ["auto", "blocking", "layerwise", "assist"])
@pytest.mark.parametrize("bytes_per_s", [1e6, 3e7, 1e9])
def test_cold_requests_get_the_tokens_of_cached_adapters(checkpoint, cold_start: ColdStartName, bytes_per_s: float) -> None:
    model_dir, adapters = checkpoint
    requests = [request(str(i), PROMPT[: 5 + i], adapters[i % 5] if i % 6 else None) for i in range(20)]
    expected = run(make_engine(model_dir), requests).tokens
    engine, runner = paced(checkpoint, cold_start, max_loras=3, max_running=6)
    runner.bytes_per_s, runner.processes = bytes_per_s, 1
    result = run(engine, requests, per_step=2)
    assert result.tokens == expected
    arrived = result.total("adapters_loaded")  # an assisted request may end before its copy is whole
    assert arrived == len(runner.begun) or (runner.processes and 0 < arrived < len(runner.begun))
    modes = {mode for one in result.steps for mode, _ in one.cold_starts}
    assert modes == ({cold_start} if cold_start != "auto" else modes) and modes
    assert all(mode == "assist" for seen in runner.seen for mode in seen.values()) or cold_start != "assist"


def test_others_continue_in_every_step_while_an_adapter_is_copied(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint)
    engine.add(request("base", PROMPT, max_tokens=30), 0.0)
    engine.add(request("cold", PROMPT, adapters[3]), 0.0)
    for _ in range(10):
        assert [item.request_id for item in items_of(step(engine))] == ["base"]
        assert engine.pause_s == 0.0
    assert engine.residency() == []
    arrive(runner)
    out = step(engine)
    assert {item.request_id for item in items_of(out)} == {"base", "cold"}
    assert [(change.digest, change.tier) for change in out.residency] == [(adapters[3].digest, "device")]
    assert out.stats.adapters_loaded == 1


def test_an_adapter_is_copied_once_however_many_requests_wait(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint)
    for i in range(8):
        engine.add(request(str(i), PROMPT, adapters[1], max_tokens=2), 0.0)
        step(engine)
    arrive(runner)
    assert len(items_of(step(engine))) == 8 and runner.begun == [adapters[1].digest]


def test_while_all_wait_the_engine_says_how_long_it_has_nothing_to_do(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint)
    runner.bytes_per_s = 1e9
    engine.add(request("cold", PROMPT, adapters[3]), 0.0)
    out = step(engine)
    assert out.stats.prefill_requests == 0 and engine.has_work()
    left_s = runner.adapter_bytes(adapters[3]) / 1e9
    assert engine.pause_s == pytest.approx(left_s, rel=0.1)
    assert step(engine).empty
    arrive(runner)
    step(engine)
    assert engine.pause_s == 0.0


def test_a_prefetch_is_reported_when_its_copy_is_whole(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint)
    assert engine.load_adapter(adapters[0]) and engine.load_adapter(adapters[0])
    assert engine.has_work() and step(engine).empty and engine.pause_s > 0
    arrive(runner)
    assert [change.tier for change in step(engine).residency] == ["device"]
    assert not engine.has_work() and runner.begun == [adapters[0].digest]


@pytest.mark.parametrize("cold_start", ["blocking", "assist"])
def test_a_copy_continues_when_its_request_is_cancelled_and_serves_the_next(
    checkpoint, adapters, cold_start: ColdStartName
) -> None:
    engine, runner = paced(checkpoint, cold_start, max_step_tokens=8)  # in the middle of its prefill
    runner.processes = 1
    engine.add(request("first", PROMPT, adapters[1]), 0.0)
    step(engine)
    assert engine.cancel("first", 0)
    assert [item.finish for item in items_of(step(engine))] == ["cancelled"]
    arrive(runner, layers=1)
    engine.add(request("next", PROMPT, adapters[1], max_tokens=3), 0.0)
    outs = [step(engine)]
    arrive(runner)
    while engine.has_work():
        outs.append(step(engine))
    assert runner.begun == [adapters[1].digest]
    expected = run(make_engine(checkpoint[0]), [request("next", PROMPT, adapters[1], max_tokens=3)]).tokens["next"]
    assert tokens_of(outs, "next") == expected


def test_a_copy_without_waiting_requests_is_given_up_when_its_slot_is_wanted(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint, max_loras=1)
    engine.add(request("first", PROMPT, adapters[1]), 0.0)
    step(engine)
    engine.cancel("first", 0)
    engine.add(request("next", PROMPT, adapters[2], max_tokens=1), 0.0)
    step(engine)
    assert [weights.digest for weights, _ in runner.queue.values()] == [adapters[2].digest]
    arrive(runner)
    out = step(engine)
    assert [(change.digest, change.tier) for change in out.residency] == [(adapters[2].digest, "device")], "the first never was"


def test_an_adapter_that_is_dropped_while_it_is_copied_leaves_at_once_or_with_its_last_request(checkpoint, adapters) -> None:
    engine, runner = paced(checkpoint)
    engine.load_adapter(adapters[0])
    step(engine)
    assert engine.unload_adapter(adapters[0].digest) and not runner.queue
    engine.add(request("waits", PROMPT, adapters[1], max_tokens=1), 0.0)
    step(engine)
    assert not engine.unload_adapter(adapters[1].digest) and runner.queue
    arrive(runner)
    out = step(engine)
    assert [item.finish for item in items_of(out)] == ["length"]
    assert [change.tier for change in out.residency] == ["device", None] and engine.residency() == []


def test_an_adapter_that_cannot_be_taken_ends_its_own_requests_only(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint)
    begin = runner.begin_load

    def fail(slot: int, weights: HostAdapter) -> None:
        if weights.digest == "bad":
            raise MemoryError("no pages")
        begin(slot, weights)

    runner.begin_load = fail  # type: ignore[method-assign]
    bad = dataclasses.replace(adapters[1], digest="bad")
    for name, adapter in (("bad-1", bad), ("base", None), ("good", adapters[0]), ("bad-2", bad)):
        engine.add(request(name, PROMPT, adapter, max_tokens=2), 0.0)
    ends = {item.request_id: item for item in items_of(step(engine)) if item.finish == "error"}
    assert set(ends) == {"bad-1", "bad-2"} and "no pages" in ends["bad-1"].error.message
    arrive(runner)
    finished: dict[str, str | None] = {}
    while engine.has_work():
        finished |= {item.request_id: item.finish for item in items_of(step(engine))}
    assert finished == {"base": "length", "good": "length"}


def test_assisted_requests_start_at_once_and_say_so(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint, "auto")
    runner.processes = 1
    engine.add(request("cold", PROMPT, adapters[1], max_tokens=4), 0.0)
    out = step(engine)
    assert out.stats.cold_starts == [("assist", "cpu_ahead")] and len(items_of(out)) == 1
    assert out.stats.cold_rows == len(PROMPT) and [mode for mode, _ in out.stats.cold_errors_ms] == ["assist"]
    assert out.stats.copies is not None and (out.stats.copies.under_way, out.stats.copies.processes) == (1, 1)
    arrive(runner, layers=2)
    step(engine)
    arrive(runner)
    out = step(engine)
    assert out.stats.cold_rows == 0 and [set(seen.values()) for seen in runner.seen] == [{"assist"}, {"assist"}, set()]


def test_every_byte_over_the_link_is_reported_also_by_steps_with_nothing_else_to_report(
    checkpoint, adapters: list[HostAdapter]
) -> None:
    engine, runner = paced(checkpoint)
    engine.add(request("cold", PROMPT, adapters[1], max_tokens=2), 0.0)
    told = empty = 0
    while engine.has_work():
        out = step(engine)
        if runner.queue:
            arrive(runner, layers=0.5)
        if out.empty:  # the engine's thread reports none of these
            empty += 1
        elif out.stats.copies is not None:
            told += out.stats.copies.link_bytes
    assert empty > 2 and told == runner.adapter_bytes(adapters[1])


def test_without_processes_a_request_waits_until_its_copy_stays_ahead(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint, "auto")
    engine.add(request("cold", PROMPT, adapters[3], max_tokens=4), 0.0)
    assert not items_of(step(engine))
    runner.bytes_per_s = 1e12
    out = step(engine)
    assert out.stats.cold_starts == [("layerwise", "copy_ahead")] and set(runner.seen[-1].values()) == {"layerwise"}


def test_a_request_waits_for_its_copy_where_steps_beside_copies_are_launched_kernel_by_kernel(
    checkpoint, adapters: list[HostAdapter]
) -> None:
    engine, runner = paced(checkpoint, "auto")
    runner.steps.launch_s = 60.0
    engine.add(request("cold", PROMPT, adapters[3], max_tokens=4), 0.0)
    runner.bytes_per_s = 1e12
    assert not items_of(step(engine))
    arrive(runner)
    out = step(engine)
    assert out.stats.cold_starts == [("blocking", "launches")] and items_of(out) and set(runner.seen[-1].values()) == set()


def test_ending_everything_while_copies_are_under_way_leaves_a_working_engine(checkpoint, adapters: list[HostAdapter]) -> None:
    engine, runner = paced(checkpoint, "assist", max_running=2)
    runner.processes = 1
    for i in range(4):
        engine.add(request(str(i), PROMPT, adapters[i]), 0.0)
    step(engine)
    out = engine.abort_all(WorkerLost("leaving"))
    assert {item.request_id for item in items_of(out)} >= {"2", "3"}
    engine.check()
    arrive(runner)
    runner.processes = 0
    assert run(engine, [request("after", PROMPT, adapters[0], max_tokens=2)]).last["after"].finish == "length"


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("cold_start", ["auto", "blocking", "layerwise", "assist"])
def test_a_real_link_and_a_real_process_give_the_same_tokens(checkpoint, cold_start: ColdStartName, kernels: str) -> None:
    model_dir, adapters = checkpoint
    requests = [request(str(i), PROMPT[: 5 + i], adapters[i % 5] if i % 6 else None) for i in range(20)]
    expected = run(make_engine(model_dir), requests).tokens
    options = {"link_bytes_per_s": 20e6, "assist_cores": (-1,), "kernels": kernels}
    engine = make_engine(
        model_dir, runner=ModelRunner, runner_options=options, cold_start=cold_start, max_loras=3, max_running=6
    )
    assist = engine.runner.assist
    try:
        asyncio.run(eventually(lambda: assist.capacity.processes == 1, within_s=30))
        result = run(engine, requests, per_step=2)
        assert result.tokens == expected
        modes = {mode for step in result.steps for mode, _ in step.cold_starts}
        assert modes <= {cold_start} if cold_start != "auto" else modes
        assert (engine.runner.assisted.by_processes > 0) == ("assist" in modes)
        assert sum(one.copies.link_bytes for one in result.steps if one.copies is not None) > 0
    finally:
        engine.close()
