"""Promise: a worker tells the gateways when it starts, when it fails and for which reason, and when it stops."""

from __future__ import annotations

import pytest

from motet.services.worker.config import WorkerConfig
from motet.services.worker.service import WorkerService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import ConfigError
from motet.shared.wire.worker_state import WorkerNotice
from tests.support import eventually


@pytest.fixture
async def heard(bus: Bus) -> list[tuple[str, str]]:
    """(event, reason) of every notice."""
    notices: list[tuple[str, str]] = []
    await bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, lambda one: notices.append((one.event, one.reason)))
    return notices


async def test_a_worker_announces_its_start_and_its_stop(start, heard):
    worker = await start()
    await worker.service.stop()
    await eventually(lambda: heard == [("starting", ""), ("stopped", "")])


async def test_a_worker_that_cannot_load_its_model_says_why(heard, nats_url, checkpoint):
    service = WorkerService(WorkerConfig.of(nats_url=nats_url, model=str(checkpoint), device="cpu", max_model_len=1 << 20))
    with pytest.raises(ConfigError):
        await service.start()
    await service.stop()
    await eventually(lambda: len(heard) == 2)
    assert heard[0] == ("starting", "")
    event, reason = heard[1]
    assert event == "failed" and reason.startswith("--max-model-len: 1048576 is more than the model's")


async def test_a_worker_whose_model_is_not_there_says_so(heard, nats_url):
    service = WorkerService(WorkerConfig.of(nats_url=nats_url, model="/no/such/model", device="cpu"))
    with pytest.raises(ConfigError):
        await service.start()
    await service.stop()
    await eventually(lambda: len(heard) == 1)
    assert heard[0][0] == "failed" and "/no/such/model" in heard[0][1]


async def test_the_reason_of_an_unforeseen_failure_is_short_and_one_line(heard, nats_url, checkpoint, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise OSError("cannot open\nshared object " + 1000 * "x")

    monkeypatch.setattr("motet.services.worker.native.assemble.assemble", broken)
    service = WorkerService(WorkerConfig.of(nats_url=nats_url, model=str(checkpoint), device="cpu"))
    with pytest.raises(OSError, match="cannot open"):
        await service.start()
    await service.stop()
    await eventually(lambda: len(heard) == 2)
    assert heard[1][0] == "failed" and "cannot open" in heard[1][1] and len(heard[1][1]) == 500


async def test_a_worker_whose_engine_gives_up_leaves_with_the_reason(start, heard):
    worker = await start()
    worker.service.unhealthy = "the engine failed 3 steps in a row"
    await worker.service.stop()
    await eventually(lambda: heard[-1] == ("failed", "the engine failed 3 steps in a row"))
