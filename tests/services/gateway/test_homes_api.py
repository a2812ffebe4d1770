"""Promise: `/v1/homes` and `motet homes` show which adapters are at home where, and bring a plan's homes to live workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from motet.cli.homes import homes
from motet.services.gateway.edge import homes_api
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.kv import Bucket
from motet.shared.model import Slo
from motet.shared.placement import Placement
from motet.shared.plan import Plan, PlannedAdapter, PlannedKind, PlannedObjective, PlannedWorker, write_plan
from motet.shared.wire.homes import SetHomes
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import put_adapter
from tests.support import eventually


async def planner(bus: Bus, *worker_ids: str) -> None:
    """What the scheduler that plans does: the workers of a plan, one after the other, become the live workers' homes."""
    bucket = await Bucket.open(bus, subjects.KV_PLACEMENT)

    async def place(said: SetHomes) -> None:
        for worker_id, adapters in zip(worker_ids, said.workers, strict=False):
            digests = tuple(adapter.digest for adapter in adapters)
            await bucket.put(worker_id, encode(Placement(owner="brain", digests=digests, since_unix_ms=0)))

    await bus.subscribe(subjects.HOMES, SetHomes, place)


async def known(mesh: Mesh, *names: str) -> None:
    for name in names:
        await put_adapter(mesh.bus, name)
    await eventually(lambda: all(mesh.gateway.adapters.resolve(name) for name in names))
    await eventually(lambda: len(mesh.gateway.fleet.workers()) == 2)


async def test_the_homes_of_a_plan_are_placed_when_the_answer_comes(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    await known(mesh, "lower")
    await planner(mesh.bus, "w2", "w1")
    async with http.post(f"{mesh.url}/v1/homes", json={"workers": [["upper"], ["lower"]]}) as answer:
        assert answer.status == 200, await answer.text()
        assert await answer.json() == {"base_model": "demo", "homes": {"w1": ["lower"], "w2": ["upper"]}}
    async with http.get(f"{mesh.url}/v1/homes") as answer:
        assert (await answer.json())["homes"] == {"w1": ["lower"], "w2": ["upper"]}


@pytest.mark.parametrize(
    ("workers", "status", "param"),
    [
        ([["upper"], ["nobody"]], 404, "workers[1]"),
        ([["upper", "upper"]], 400, "workers[0]"),
        ([["upper"], [], []], 409, "workers"),
        ([], 400, "workers"),
        ([["upper"], 7], 400, "workers[1]"),
    ],
)
async def test_a_plan_that_cannot_be_is_refused_with_the_place_in_it(
    mesh: Mesh, http: aiohttp.ClientSession, workers: list[object], status: int, param: str
) -> None:
    await known(mesh)
    async with http.post(f"{mesh.url}/v1/homes", json={"workers": workers}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (status, param), error


async def test_without_a_scheduler_that_places_the_answer_says_what_is_missing(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes_api, "SETTLE_S", 0.2)
    await known(mesh)
    async with http.post(f"{mesh.url}/v1/homes", json={"workers": [["upper"]]}) as answer:
        assert answer.status == 503 and "--placement on" in (await answer.json())["error"]["message"]


async def test_the_command_places_the_adapters_of_a_plan_and_leaves_the_base_model_out(mesh: Mesh, tmp_path: Path) -> None:
    await known(mesh)
    await planner(mesh.bus, "w1")
    adapters = tuple(PlannedAdapter(name=name, rank=rank, rate=1.0) for name, rank in (("upper", 8), ("demo", 0)))
    worker = PlannedWorker(kind="a", adapters=adapters, flags="", kv_tokens=1, busy=0.1, in_use=1.0, limit="seats")
    goal = PlannedObjective(slo=Slo(ttft_slo_ms=500.0), share=0.99)
    kinds = (PlannedKind(name="a"),)
    plan = Plan(motet_plan=1, objective="workers", headroom=0, objectives=(goal,), kinds=kinds, workers=(worker,), cost=1)
    write_plan(tmp_path / "plan.json", plan)
    run = CliRunner(env={"COLUMNS": "120"})
    result = await asyncio.to_thread(run.invoke, homes, [str(tmp_path / "plan.json"), "--url", mesh.url])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["w1", "1", "upper"] in rows and ["w2", "0"] in rows, result.output
