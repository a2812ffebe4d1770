"""Promise: when workers fail, the gateway's status names them, with the time and the reason."""

from __future__ import annotations

import aiohttp
import pytest

from motet.policies.cluster.lost_workers import FORGET_S, KEPT, LostWorkers
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway
from tests.support import eventually


def notice(
    event: str, reason: str = "", *, worker_id: str = "w1", incarnation: str = "first", model: str = "demo"
) -> WorkerNotice:
    return WorkerNotice(worker_id=worker_id, incarnation=incarnation, base_model=model, event=event, reason=reason)  # type: ignore[arg-type]


def test_a_failed_worker_is_named_with_its_reason_and_how_often_it_began() -> None:
    absent = LostWorkers("demo")
    for start in range(3):
        absent.on_notice(notice("starting", incarnation=str(start)), 10.0 * start)
        absent.on_notice(notice("failed", "no space left on device", incarnation=str(start)), 10.0 * start + 1)
    assert absent.sentences(24.0) == ["w1 failed 3 s ago: no space left on device [start 3]"]
    assert absent.summary(24.0) == "1 failed"


def test_a_worker_that_loads_its_model_is_reported_as_loading() -> None:
    absent = LostWorkers("demo")
    absent.on_notice(notice("starting"), 1.0)
    assert absent.sentences(5.0) == ["w1 has been loading its model for 4 s"]
    absent.on_state("w1", "first")
    assert absent.sentences(6.0) == []


def test_a_worker_that_restarts_again_and_again_does_not_count_as_loading() -> None:
    absent = LostWorkers("demo")
    for start in range(4):
        absent.on_notice(notice("starting", incarnation=str(start)), 10.0 * start)
        assert absent.loading(10.0 * start) == (start < 3)
    absent.on_state("w1", "3")
    absent.on_notice(notice("starting", incarnation="later"), 50.0)
    assert absent.loading(60.0) and not absent.loading(50.0 + FORGET_S + 1.0)


def test_a_killed_worker_is_lost_without_a_reason() -> None:
    absent = LostWorkers("demo")
    absent.on_lost("w1", 1.0)
    assert "w1 was lost 2 s ago without a word" in absent.sentences(3.0)[0]


@pytest.mark.parametrize(("event", "shown"), [("stopped", 0), ("failed", 1)])
def test_what_a_worker_said_at_its_end_outlives_its_lease_and_a_late_state(event: str, shown: int) -> None:
    absent = LostWorkers("demo")
    absent.on_notice(notice(event), 1.0)
    absent.on_state("w1", "first")
    absent.on_lost("w1", 2.0)
    assert len(absent.all(3.0)) == shown
    absent.on_state("w1", "second")
    assert not absent.all(3.0)


def test_workers_of_other_base_models_are_ignored() -> None:
    absent = LostWorkers("demo")
    absent.on_notice(notice("failed", model="another"), 1.0)
    assert not absent.all(1.0)


def test_what_is_remembered_of_absent_workers_is_bounded_in_number_and_age() -> None:
    absent = LostWorkers("demo")
    for number in range(KEPT + 10):
        absent.on_notice(notice("failed", worker_id=f"w{number}"), float(number))
    assert len(absent.all(KEPT + 10.0)) == KEPT
    assert absent.sentences(KEPT + 10.0)[-1] == f"and {KEPT - 3} more"
    assert not absent.all(KEPT + 11.0 + FORGET_S)


async def test_a_gateway_without_workers_says_why_in_its_readiness_its_status_and_to_clients(
    bus: Bus, nats_url: str, tmp_path, http: aiohttp.ClientSession
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2") as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        await bus.publish(subjects.notice("w9"), notice("failed", "libcuda.so.1 is missing", worker_id="w9"))
        await eventually(lambda: gateway.fleet.lost.all(0.0))
        async with http.get(f"{url}/ready") as answer:
            assert answer.status == 503
            assert "no worker serves demo; w9 failed 0 s ago: libcuda.so.1 is missing" in (await answer.json())["reasons"]
        async with http.get(f"{url}/v1/status") as answer:
            [absent] = (await answer.json())["absent_workers"]
        assert (absent["worker_id"], absent["state"], absent["last_words"]) == ("w9", "failed", "libcuda.so.1 is missing")
        async with http.post(f"{url}/v1/completions", json={"model": "demo", "prompt": "x"}) as answer:
            assert answer.status == 503
            message = (await answer.json())["error"]["message"]
        assert "workers: 1 failed" in message and "libcuda" not in message


async def test_a_worker_that_reports_again_is_not_absent(mesh: Mesh, bus: Bus) -> None:
    fleet = mesh.gateway.fleet
    fleet.lose("w1")
    assert [one.worker_id for one in fleet.lost.all(0.0)] == ["w1"]
    await eventually(lambda: not fleet.lost.all(0.0) and "w1" in fleet.workers())
