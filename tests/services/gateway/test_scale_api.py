"""Promise: `/v1/scale` and `motet scale` say how many workers there should be, and why, and say so when nobody decides."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from click.testing import CliRunner

from motet.cli.scale import scale
from motet.services.gateway.edge.scale_api import scale_of, why
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.wire.admin import ClusterStatus, StatusRequest
from motet.shared.wire.scale import Decision, Sized
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect

UP = Decision(at_s=5.0, desired=4, reason="up", current=2, starting=1, needed=4, limit="seats", overdue=("worker-9",))


def sized(decision: Decision, base: str = "demo") -> Sized:
    rates = {"requests_s": 12.5, "forecast_requests_s": 20.0, "lead_s": 42.0}
    return Sized(base_model=base, scheduler_id="brain", at_unix_ms=1000, decision=decision, **rates)


async def tell(bus: Bus, *decided: list[Sized]) -> None:
    """A scheduler with these decisions."""

    async def answer(asked: StatusRequest) -> ClusterStatus:
        return ClusterStatus(scheduler_id="brain", workers=[], scale=list(decided) if asked.scale else [])

    await bus.serve("status", subjects.SCHEDULER_STATUS, StatusRequest, answer, queue="scheduler")


async def test_the_last_decision_is_told_with_those_before_it(
    mesh: Mesh, connect: Connect, http: aiohttp.ClientSession
) -> None:
    steady = Decision(at_s=1.0, desired=2, reason="steady", current=2, starting=0, needed=2)
    await tell(await connect("brain"), [sized(steady, "other")], [sized(steady), sized(UP)])
    async with http.get(f"{mesh.url}/v1/scale") as answer:
        found = (await answer.json())["scale"]
    assert [one["base_model"] for one in found] == ["demo", "other"]
    demo = found[0]
    assert (demo["desired"], demo["current"], demo["starting"], demo["needed"]) == (4, 2, 1, 4)
    assert (demo["requests_s"], demo["forecast_requests_s"], demo["lead_s"]) == (12.5, 20.0, 42.0)
    assert demo["why"] == "4 are needed; seats would be exceeded first" and demo["overdue"] == ["worker-9"]
    assert [(one["desired"], one["reason"]) for one in demo["decisions"]] == [(2, "steady"), (4, "up")]
    async with http.get(f"{mesh.url}/v1/scale/demo") as answer:
        assert (await answer.json())["desired"] == 4
    async with http.get(f"{mesh.url}/v1/scale/nobody") as answer:
        assert answer.status == 404 and "nobody" in (await answer.json())["error"]["message"]


async def test_when_nobody_decides_the_answer_says_what_to_start(
    mesh: Mesh, connect: Connect, http: aiohttp.ClientSession
) -> None:
    await tell(await connect("brain"))
    async with http.get(f"{mesh.url}/v1/scale") as answer:
        assert answer.status == 404 and "--scale off" in (await answer.json())["error"]["message"]


async def test_the_command_prints_a_line_and_a_reason(mesh: Mesh, connect: Connect) -> None:
    await tell(await connect("brain"), [sized(UP)])
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "160"}).invoke, scale, ["--url", mesh.url])
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.startswith("demo "))
    assert row.split() == ["demo", "4", "2", "1", "4", "12.5", "20", "42", "s"]
    assert "demo: up (4 are needed; seats would be exceeded first)" in result.output and "worker-9" in result.output


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reason": "doubt", "missing": ("the reports of s1", "x")}, "nothing changes without the reports of s1 and x"),
        ({"reason": "impossible", "impossible": "an idle worker needs 33 ms"}, "more workers do not help: an idle worker"),
        ({"reason": "down", "leaves": "worker-2"}, "worker-2 holds the fewest bytes"),
        ({"reason": "up", "needed": 2}, "2 are needed, and no fewer than 4 are allowed"),
        ({"reason": "most", "needed": 9}, "9 are needed, and no more than 4 are allowed"),
    ],
)
def test_every_reason_is_a_sentence(changes: dict[str, object], expected: str) -> None:
    fields = {"at_s": 1.0, "desired": 4, "current": 4, "starting": 0, "needed": 4} | changes
    assert expected in why(Decision(**fields))  # type: ignore[arg-type]
    assert scale_of([sized(Decision(**fields))]).reason == changes["reason"]  # type: ignore[arg-type]
