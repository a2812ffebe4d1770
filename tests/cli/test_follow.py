"""Promise: decisions are carried out once, within bounds, and not while they are old or nobody answers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from motet.cli import follow, scale
from motet.cli.client import ApiError
from motet.cli.follow import Follower
from motet.cli.scale import AGAIN_S, CommandFollower
from motet.shared.clock import unix_ms
from motet.shared.wire.scale import OLD_MS, Decision, Reason, Sized


class Hands:
    """Workers of a stack, as names."""

    def __init__(self, *names: str) -> None:
        self.names, self.broken = list(names), False

    @property
    def workers(self) -> list[str]:
        return list(self.names)

    async def grow(self, count: int) -> None:
        self.names += [f"w{i}" for i in range(len(self.names), count)] if not self.broken else []

    async def shrink(self, worker: str) -> None:
        self.names.remove(worker if worker in self.names else self.names[-1])


def sized(desired: int, reason: Reason = "up", *, leaves: str = "", age_ms: int = -1000) -> Sized:
    """A decision, of a moment later by default: the clock of a test stands still for less than a millisecond."""
    decision = Decision(at_s=0.0, desired=desired, reason=reason, current=1, starting=0, needed=desired, leaves=leaves)
    rates = {"requests_s": 1.0, "forecast_requests_s": 1.0, "lead_s": 5.0}
    return Sized(base_model="demo", scheduler_id="s", at_unix_ms=unix_ms() - age_ms, decision=decision, **rates)


async def test_workers_start_at_once_and_leave_one_by_one_within_bounds() -> None:
    hands, said = Hands("w0"), list[str]()
    follower = Follower(hands, 1, 3, said.append)
    await follower.follow(sized(9))
    assert hands.names == ["w0", "w1", "w2"] and said == ["workers: 1 -> 3 (up)"]
    await follower.follow(sized(2, "down", leaves="w1", age_ms=-2000))
    assert hands.names == ["w0", "w2"]
    await follower.follow(sized(0, "idle", age_ms=-3000))
    await follower.follow(sized(0, "idle", age_ms=-4000))
    assert hands.names == ["w0"], "never below the fewest"


async def test_a_decision_from_before_the_last_change_and_an_old_one_change_nothing() -> None:
    hands = Hands("w0")
    follower = Follower(hands, 1, 9, lambda _: None)
    before = sized(5, age_ms=1)
    await follower.follow(sized(3))
    await follower.follow(before)
    assert len(hands.names) == 3
    late = Hands("w0")
    await Follower(late, 1, 9, lambda _: None).follow(sized(4, age_ms=OLD_MS + 1))
    assert late.names == ["w0"]


async def test_after_a_worker_that_could_not_start_the_next_try_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(follow, "now_s", lambda: clock[0])
    hands, said = Hands("w0"), list[str]()
    follower = Follower(hands, 1, 9, said.append)
    await follower.follow(sized(2))
    hands.names, hands.broken = ["w0"], True
    await follower.follow(sized(2, age_ms=-2000))
    assert "1 of 2 workers run: one could not start" in said[-1]
    hands.broken = False
    await follower.follow(sized(2, age_ms=-3000))
    assert hands.names == ["w0"]
    clock[0] += follow.REST_S
    await follower.follow(sized(2, age_ms=-4000))
    assert hands.names == ["w0", "w1"]


def test_the_log_of_a_followers_connection_does_not_come_between_the_lines_of_progress() -> None:
    """NATS that is away for four minutes made 154 lines "bus error". Outside pytest, whose handlers take such lines."""
    program = """
import asyncio
from types import SimpleNamespace
from motet.cli.follow import followed
from motet.shared.telemetry import logger
async def failed(): logger("motet.bus").warning("bus error")
asyncio.run(followed(SimpleNamespace(options=SimpleNamespace(workers_most=0, workers_least=0), failed=failed), print))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr == ran.stdout == ""


def told(desired: int, current: int) -> dict[str, Any]:
    return {"base_model": "demo", "desired": desired, "current": current, "leaves": "worker-2", "reason": "up"}


def test_a_command_runs_when_the_number_should_change_and_again_when_it_did_not() -> None:
    ran, said, status = list[list[str]](), list[str](), [0]

    def run(argv: list[str]) -> int:
        ran.append(argv)
        return status[0]

    follower = CommandFollower(["scale", "worker={desired}", "{base_model}:{leaves}"], run, said.append)
    follower.look(lambda: told(2, 2), 0.0)
    assert ran == []
    follower.look(lambda: told(3, 2), 1.0)
    assert ran == [["scale", "worker=3", "demo:worker-2"]]
    follower.look(lambda: told(3, 2), 2.0)
    assert len(ran) == 1, "its worker has not told yet that it starts"
    follower.look(lambda: told(4, 2), 3.0)
    assert ran[-1][1] == "worker=4", "another number is not waited for"
    status[0] = 7
    follower.look(lambda: told(4, 2), 3.0 + AGAIN_S)
    assert len(ran) == 3 and said[-1].startswith("exit status 7")


def test_while_nobody_answers_nothing_is_run_and_it_is_said_once() -> None:
    said = list[str]()

    def silent() -> dict[str, Any]:
        raise ApiError("the gateway is away", 503)

    def run(argv: list[str]) -> int:
        raise AssertionError(argv)

    follower = CommandFollower(["true"], run, said.append)
    follower.look(silent, 0.0)
    follower.look(silent, 2.0)
    (once,) = said
    assert "the gateway is away" in once


def test_a_command_that_cannot_be_run_is_told_and_tried_again() -> None:
    said = list[str]()
    follower = CommandFollower(["/nowhere/kubectl", "{desired}"], scale.run_command, said.append)
    follower.look(lambda: told(3, 2), 0.0)
    follower.look(lambda: told(3, 2), AGAIN_S)
    assert [line for line in said if line.startswith(f"exit status {scale.CANNOT_RUN}")] == said[1::2] and len(said) == 4


def test_where_a_mesh_has_several_base_models_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"scale": [told(1, 1), told(1, 1) | {"base_model": "other"}]}
    monkeypatch.setattr(scale, "ask", lambda *_: both)
    refused = CliRunner().invoke(scale.scale, ["follow", "--", "true"])
    assert refused.exit_code == 2 and "this mesh serves demo, other" in refused.output
