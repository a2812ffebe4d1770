"""Promise: a worker with nothing to do checks its ledgers, and ends with the reason if they do not add up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from motet.services.worker import service
from motet.shared import subjects
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.worker.support_service import Running, generate, latest
from tests.support import eventually
from tests.support_worker import brief_of


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers are checked as soon as a worker is idle."""
    monkeypatch.setattr(service, "CHECK_S", 0.02)


def counted(worker: Running) -> list[bool]:
    """An element for each check of the engine from now on: whether there was a request in it."""
    checks: list[bool] = []
    check = worker.engine.check

    def counting() -> None:
        checks.append(worker.engine.has_work())
        check()

    worker.engine.check = counting
    return checks


async def test_ledgers_are_checked_while_nothing_runs_and_not_while_requests_run(start) -> None:
    worker = await start()
    checks = counted(worker)
    await eventually(lambda: len(checks) > 2)
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=30)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    before = len(checks)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) > 20)
    assert len(checks) == before
    await worker.mesh.ended(request.request_id)
    await eventually(lambda: len(checks) > before + 2)
    assert not any(checks) and worker.service.not_ready() == []


def lose_a_block(worker: Running) -> None:
    worker.engine._core.state.kv.allocate(1)  # private: a ledger is broken on purpose


def lose_a_slot(worker: Running) -> None:
    worker.engine._core.slots._free_slots.pop()  # private: a ledger is broken on purpose


def forget_bytes_of_the_device(worker: Running) -> None:
    worker.engine._core.slots.bytes_free -= 1  # private: a ledger is broken on purpose


def report_an_adapter_that_is_not_there(worker: Running) -> None:
    worker.engine._adapters.resident["gone"] = None  # private: a ledger is broken on purpose


def forget_bytes_of_the_host(worker: Running) -> None:
    worker.service.core.host.host_used_bytes += 1


def show_a_request_that_is_not_there(worker: Running) -> None:
    worker.service.view.requests["gone"] = brief_of(generate([1]))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lose_a_block, "reference counts differ from the holders' block lists"),
        (lose_a_slot, "a slot is lost or taken twice"),
        (forget_bytes_of_the_device, "bytes do not add up"),
        (report_an_adapter_that_is_not_there, "residency reports and slots disagree"),
        (forget_bytes_of_the_host, "host bytes"),
        (show_a_request_that_is_not_there, "the view shows other requests than the book has"),
    ],
)
async def test_a_ledger_that_does_not_add_up_ends_the_worker_with_the_reason(start, bus, harm: Any, reason: str) -> None:
    notices: list[WorkerNotice] = []
    await bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, notices.append)
    worker = await start()
    harm(worker)
    await eventually(lambda: worker.left)
    [why] = worker.service.not_ready()
    assert why.startswith("the worker's ledgers do not add up: ") and reason in why
    assert (await worker.refusal(generate([1]))).code == "unavailable"
    await eventually(lambda: latest(worker).draining)
    await worker.service.stop()
    await eventually(lambda: [(one.event, one.reason) for one in notices if one.event == "failed"] == [("failed", why)])


async def test_requests_that_come_while_a_check_fails_are_handed_back_and_resume_elsewhere(start) -> None:
    worker = await start()
    checking, gate = threading.Event(), threading.Event()

    def fail() -> None:
        checking.set()
        gate.wait(20)
        raise AssertionError("a block is lost")

    worker.engine.check = fail
    worker.slow_down(0.02)
    await eventually(checking.is_set)
    request = generate([1, 2, 3], max_tokens=200)
    await worker.accepted(request)
    gate.set()
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "error" and end.error.code == "worker_lost" and "a block is lost" in end.error.message
    await eventually(lambda: worker.left)
