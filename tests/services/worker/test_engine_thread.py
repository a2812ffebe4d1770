"""Promise: the event loop and the engine never wait for each other's slow parts, and no exception ends the engine's thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from motet.services.worker.engines import thread as engine_thread
from motet.services.worker.engines.request import EngineRequest, StepOutput, StepReport, StepStats
from motet.services.worker.engines.thread import EngineThread
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, WorkerLost
from motet.shared.model import Capability, SamplingParams
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import StreamItem
from tests.support import eventually


class ScriptedEngine:
    """One token per request and step. The test decides what fails. Checks that only one thread calls it."""

    kv_blocks_free, adapter_bytes_free = 10, 20
    serves: frozenset[Capability] = frozenset()
    pause_s = 0.0
    merges = False

    def take_prefixes(self) -> dict[int, bool] | None:
        """What the test says of cached KV blocks."""
        return self.told.pop(0) if self.told else None

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.told: list[dict[int, bool]] = []
        self.requests: dict[str, EngineRequest] = {}
        self.steps = 0
        self.fail_steps = 0
        self.copying = False
        self.checks = 0
        self.broken = ""
        self.closed = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: EngineRequest, now_s: float) -> None:
        assert threading.get_ident() == self.thread
        if unpack_tokens(request.prompt) == [666]:
            raise BadRequest("no such prompt", param="prompt")
        if unpack_tokens(request.prompt) == [667]:
            raise RuntimeError("bug")
        self.requests[request.request_id] = request

    def cancel(self, request_id: str, epoch: int) -> bool:
        return self.requests.pop(request_id, None) is not None

    def step(self, now_s: float) -> StepOutput:
        assert threading.get_ident() == self.thread
        self.gate.wait()
        self.steps += 1
        if self.copying:
            self.pause_s = 0.02
            return StepOutput()
        self.pause_s = 0.0
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("kernel failed")
        items = {"g": [StreamItem(request_id, 0, self.steps, [1]) for request_id in self.requests]}
        return StepOutput(items=items, stats=StepStats(sampled=len(self.requests), decode_rows=len(self.requests)))

    def close(self) -> None:
        self.closed.set()

    def check(self) -> None:
        assert threading.get_ident() == self.thread
        self.checks += 1
        assert not self.broken, self.broken

    def abort_all(self, error) -> StepOutput:
        items = [StreamItem(request_id, 0, 0, [], finish="error", error=error.info()) for request_id in self.requests]
        self.requests.clear()
        return StepOutput(items={"g": items})


def request(request_id: str, prompt: int = 1) -> EngineRequest:
    return EngineRequest.local(request_id, [prompt], SamplingParams(), gateway_id="g")


@pytest.fixture
async def driven():
    """(engine, thread, reports) of a running engine thread."""
    engines: list[ScriptedEngine] = []
    reports: list[StepReport] = []

    def build() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        return engines[0]

    others = set(threading.enumerate())
    thread = EngineThread(build, reports.append)
    await thread.start()
    yield engines[0], thread, reports
    engines[0].gate.set()
    await thread.stop()
    assert engines[0].closed.is_set() and not {one for one in threading.enumerate() if one.name == "engine"} - others


def finished(reports: list[StepReport]) -> dict[str, str]:
    items = [item for report in reports for items in report.output.items.values() for item in items]
    return {item.request_id: item.error.code for item in items if item.finish == "error" and item.error}


async def test_the_engine_sleeps_while_idle_and_wakes_for_a_request(driven):
    engine, thread, reports = driven
    await asyncio.sleep(0.05)  # time: it could have stepped
    assert engine.steps == 0 and thread.busy_s() == 0.0
    thread.add(request("r1"))
    await eventually(lambda: len(reports) >= 3)
    thread.cancel("r1", 0)
    await eventually(lambda: not engine.has_work())
    assert [report.step for report in reports[:3]] == [1, 2, 3]
    assert reports[0].kv_blocks_free == 10 and reports[0].failures == 0


async def test_a_cancel_takes_effect_before_the_next_step_even_while_one_runs(driven):
    engine, thread, reports = driven
    engine.gate.clear()
    thread.add(request("r1"))
    thread.add(request("r2"))
    await eventually(lambda: thread.busy_s() > 0)
    thread.cancel("r1", 0)
    engine.gate.set()
    await eventually(lambda: len(reports) >= 3)
    late = [item.request_id for report in reports[1:] for items in report.output.items.values() for item in items]
    assert set(late) == {"r2"}


async def test_the_engine_sleeps_while_all_requests_wait_for_a_copy_and_reports_nothing(driven):
    engine, thread, reports = driven
    engine.copying = True
    thread.add(request("r1"))
    await asyncio.sleep(0.2)  # time: of at most 25 steps
    assert 1 <= engine.steps <= 25 and reports == []
    engine.copying = False
    await eventually(lambda: len(reports) > 0)
    assert reports[0].step == 1


async def test_the_loop_stays_responsive_while_a_step_takes_long(driven):
    engine, thread, _ = driven
    engine.gate.clear()
    thread.add(request("r1"))
    await eventually(lambda: thread.busy_s() > 0.05)
    at_last = threading.Timer(5.0, engine.gate.set)
    at_last.start()
    for i in range(100):
        thread.add(request(f"more-{i}"))
    await asyncio.sleep(0)
    at_last.cancel()
    assert engine.steps == 0, "nothing here waited for the step, which still goes on"


async def test_an_engine_ahead_of_a_slow_loop_waits_and_loses_nothing(driven):
    engine, thread, reports = driven
    thread.add(request("r1"))
    await eventually(lambda: len(reports) > 0)
    time.sleep(0.3)  # time: the loop hangs  # noqa: ASYNC251
    ahead = engine.steps - len(reports)
    assert ahead <= engine_thread.MAX_AHEAD + 1
    await eventually(lambda: len(reports) > 200)
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))


async def test_a_request_the_engine_refuses_ends_with_the_reason_and_disturbs_no_other(driven):
    _, thread, reports = driven
    thread.add(request("good"))
    thread.add(request("bad", prompt=666))
    thread.add(request("bug", prompt=667))
    await eventually(lambda: len(finished(reports)) == 2)
    assert finished(reports) == {"bad": "invalid_value", "bug": "internal_error"}
    seen = len(reports)
    await eventually(lambda: len(reports) > seen + 3)


async def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served(driven):
    engine, thread, reports = driven
    engine.fail_steps = 1
    thread.add(request("r1"))
    await eventually(lambda: finished(reports) == {"r1": "internal_error"})
    assert max(report.failures for report in reports) == 1
    thread.add(request("r2"))
    await eventually(lambda: reports[-1].output.stats.sampled == 1)
    assert reports[-1].failures == 0


async def test_steps_that_keep_failing_are_counted(driven):
    engine, thread, reports = driven
    engine.fail_steps = 3
    for i in range(3):
        thread.add(request(f"r{i}"))
        await eventually(lambda i=i: f"r{i}" in finished(reports))
    assert reports[-1].failures == 3


async def test_abort_all_ends_everything_with_the_given_error(driven):
    engine, thread, reports = driven
    thread.add(request("r1"))
    thread.add(request("r2"))
    thread.abort_all(WorkerLost("leaving"))
    await eventually(lambda: finished(reports) == {"r1": "worker_lost", "r2": "worker_lost"})
    assert not engine.has_work()


async def test_ledgers_are_checked_in_the_engines_thread_while_it_has_nothing_to_do(driven):
    engine, thread, reports = driven
    await thread.check()
    assert engine.checks == 1
    thread.add(request("r1"))
    await thread.check()
    assert engine.checks == 1
    thread.abort_all(WorkerLost("enough"))
    engine.broken = "a block is lost"
    with pytest.raises(AssertionError, match="a block is lost"):
        await thread.check()
    assert engine.checks == 2
    thread.add(request("r2"))
    await eventually(lambda: reports[-1].output.stats.sampled == 1)


async def test_an_engine_that_cannot_be_built_says_why():
    def build():
        raise ConfigError("--model: no such thing")

    thread = EngineThread(build, lambda _: None)
    with pytest.raises(ConfigError, match="no such thing"):
        await thread.start()
    await thread.stop()


async def test_stopping_a_thread_that_never_started_is_fine():
    await EngineThread(ScriptedEngine, lambda _: None).stop()
