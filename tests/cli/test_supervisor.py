"""The supervisor, with real processes in the place of services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.cli import process, supervisor
from motet.cli.process import BoundedLog, ServiceProcess, ServiceSpec, tail
from motet.cli.supervisor import StartFailed, State, Supervisor
from motet.shared.clock import now_s
from tests.support import eventually

FAKE = Path(__file__).with_name("fake_service.py")


class Stage:
    """A directory, a journal of the actions of the fake processes, and the supervisors of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.journal_path = directory, directory / "journal"
        self.history: list[tuple[str, State, str]] = []
        self.supervisors: list[Supervisor] = []

    def fake(self, name: str, *flags: str, after: tuple[str, ...] = (), stop_rank: int = 0) -> ServiceProcess:
        argv = [sys.executable, "-S", str(FAKE)]
        spec = ServiceSpec(
            name=name,
            argv=lambda port: [*argv, str(port), name, str(self.journal_path), *flags],
            after=after,
            stop_rank=stop_rank,
        )
        return ServiceProcess(spec, self.directory / "logs")

    def supervise(self, *children: ServiceProcess) -> Supervisor:
        self.supervisors.append(Supervisor(children, self))
        return self.supervisors[-1]

    def changed(self, name: str, state: State, note: str) -> None:
        self.history.append((name, state, note))

    def journal(self) -> list[str]:
        return self.journal_path.read_text().splitlines() if self.journal_path.exists() else []


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for one in stage.supervisors:
        one.hurry()
        await one.stop(drain_s=0.5)


async def test_a_child_starts_when_what_it_needs_is_ready(stage: Stage) -> None:
    hold = stage.directory / "hold"
    hold.touch()
    first = stage.fake("first", "--not-ready-while", str(hold))
    starting = asyncio.create_task(stage.supervise(first, stage.fake("second", after=("first",))).start())
    await eventually(lambda: ("first", "starting", "warming up") in stage.history)
    assert stage.journal() == ["first started"]
    hold.unlink()
    await asyncio.wait_for(starting, timeout=10)
    assert stage.journal() == ["first started", "second started"]


async def test_ranks_are_drained_one_after_the_other(stage: Stage) -> None:
    doors, engines, floor = (
        stage.fake("door", "--drain-s", "0.2", stop_rank=0),
        stage.fake("engine", "--drain-s", "0.1", stop_rank=1),
        stage.fake("floor", stop_rank=2),
    )
    running = stage.supervise(floor, engines, doors)
    await running.start()
    await running.stop(drain_s=5)
    assert stage.journal()[3:] == [
        f"{name} {event}" for name in ("door", "engine", "floor") for event in ("draining", "drained")
    ]


async def test_a_crashed_child_is_restarted_and_its_neighbours_are_left_alone(stage: Stage) -> None:
    crashing, steady = stage.fake("crashing"), stage.fake("steady")
    running = stage.supervise(crashing, steady)
    await running.start()
    first_pid, steady_pid = crashing.pid, steady.pid
    os.kill(first_pid, signal.SIGKILL)
    await eventually(lambda: crashing.pid != first_pid and stage.history[-1][:2] == ("crashing", "ready"))
    assert running.restarts == {"crashing": 1, "steady": 0}
    assert steady.pid == steady_pid
    notes = [note for name, state, note in stage.history if state == "restarting"]
    assert notes[0].startswith("killed by SIGKILL; again in 0.25 s")


async def test_the_pause_doubles_while_a_child_keeps_dying(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    child = stage.fake("child")
    await stage.supervise(child).start()

    def restarts() -> list[str]:
        return [note.split(";")[1].split(",")[0] for _, state, note in stage.history if state == "restarting"]

    for count in range(1, 4):
        await eventually(lambda: child.exit_code() is None)
        os.kill(child.pid, signal.SIGKILL)
        await eventually(lambda expected=count: len(restarts()) == expected)
    assert restarts() == [" again in 0.05 s", " again in 0.1 s", " again in 0.2 s"]


async def test_a_child_that_never_becomes_ready_ends_the_start_with_its_last_log_lines(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    with pytest.raises(StartFailed) as failure:
        await stage.supervise(stage.fake("broken", "--exit", "1"), stage.fake("healthy")).start()
    assert "broken cannot start: exit status 1" in str(failure.value)
    assert str(failure.value).count("| broken has a problem") == 1, "the words of the last attempt, not of every one"
    assert stage.journal().count("broken started") == supervisor.START_ATTEMPTS


@pytest.mark.parametrize(
    ("name", "number", "helps"),
    [
        ("worker-1", signal.SIGSEGV, True),
        ("worker-2", signal.SIGILL, True),
        ("worker-3", signal.SIGKILL, False),
        ("gateway-1", signal.SIGSEGV, False),
    ],
)
async def test_a_worker_that_dies_of_its_instructions_is_told_of_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals, helps: bool
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    program = f"import os; os.kill(os.getpid(), {int(number)})"
    child = ServiceProcess(ServiceSpec(name=name, argv=lambda _: [sys.executable, "-S", "-c", program]), stage.directory)
    with pytest.raises(StartFailed, match=f"{name} cannot start: killed by {number.name}") as failure:
        await stage.supervise(child).start()
    assert ("MOTET_CPU_ISA" in str(failure.value)) == helps


async def test_a_configuration_error_is_not_tried_again(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="exit status 2"):
        await stage.supervise(stage.fake("misconfigured", "--exit", "2")).start()
    assert stage.journal() == ["misconfigured started"]


async def test_a_configuration_error_is_told_in_the_childs_own_line(stage: Stage, tmp_path: Path) -> None:
    program = "import sys; print('12:00 info starting'); print('motet worker: --device: there is no GPU'); sys.exit(2)"
    spec = ServiceSpec(name="worker-1", argv=lambda _: [sys.executable, "-c", program])
    with pytest.raises(StartFailed) as failure:
        await stage.supervise(ServiceProcess(spec, tmp_path)).start()
    assert str(failure.value) == "worker-1 cannot start: --device: there is no GPU"


async def test_a_child_that_ignores_the_drain_is_killed_at_the_deadline(stage: Stage) -> None:
    running = stage.supervise(child := stage.fake("deaf", "--deaf"))
    await running.start()
    await running.stop(drain_s=0.3)
    assert child.exit_code() == -signal.SIGKILL


async def test_hurry_passes_a_second_signal_on(stage: Stage) -> None:
    running = stage.supervise(stage.fake("slow", "--drain-s", "30"))
    await running.start()
    stopping = asyncio.create_task(running.stop(drain_s=60))
    await eventually(lambda: "slow draining" in stage.journal())
    began = now_s()
    running.hurry()
    await stopping
    assert stage.journal()[-1] == "slow hurried"
    assert now_s() - began < supervisor.HURRY_S


async def test_stop_during_the_start_leaves_nothing_behind(stage: Stage) -> None:
    hold = stage.directory / "hold"
    hold.touch()
    child = stage.fake("warming", "--not-ready-while", str(hold))
    running = stage.supervise(child)
    starting = asyncio.create_task(running.start())
    await eventually(lambda: child.pid)
    starting.cancel()
    await running.stop(drain_s=2)
    assert child.exit_code() is not None


async def test_a_start_that_is_given_up_does_not_wait_for_children_that_were_never_ready(stage: Stage) -> None:
    (hold := stage.directory / "hold").touch()
    child = stage.fake("warming", "--deaf", "--not-ready-while", str(hold))
    running = stage.supervise(child)
    starting = asyncio.create_task(running.start())
    await eventually(lambda: "warming started" in stage.journal())
    starting.cancel()
    began = now_s()
    await running.stop(drain_s=60)
    assert child.exit_code() is not None and now_s() - began < supervisor.HURRY_S


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from tests.cli.test_supervisor import Stage
async def main():
    stage = Stage(Path({str(tmp_path)!r}))
    children = [stage.fake(f"child-{{i}}") for i in range(3)]
    await stage.supervise(*children).start()
    print(*(child.pid for child in children), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await eventually(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie, whose parent has not waited for it, does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_a_successor_takes_over_when_it_is_ready_and_only_then_the_other_drains(stage: Stage) -> None:
    hold = stage.directory / "hold"
    hold.touch()
    running = stage.supervise(first := stage.fake("first"), stage.fake("other"))
    await running.start()
    successor = stage.fake("first", "--not-ready-while", str(hold))
    replacing = asyncio.create_task(running.replace(successor, ready_s=10, drain_s=5, wait=True))
    await eventually(lambda: stage.journal().count("first started") == 2)
    assert first.exit_code() is None and "first draining" not in stage.journal()
    hold.unlink()
    await replacing
    assert first.exit_code() == 0 and successor.exit_code() is None
    assert running.restarts == {"first": 0, "other": 0}
    os.kill(successor.pid, signal.SIGKILL)
    await eventually(lambda: running.restarts["first"] == 1 and successor.exit_code() is None)


async def test_a_successor_that_cannot_start_changes_nothing(stage: Stage) -> None:
    running = stage.supervise(first := stage.fake("first"))
    await running.start()
    with pytest.raises(StartFailed, match="the old one stays"):
        await running.replace(stage.fake("first", "--exit", "1"), ready_s=10, drain_s=5, wait=True)
    assert first.exit_code() is None and running.children == [first]


async def test_a_successor_that_is_killed_while_it_starts_is_started_again(stage: Stage) -> None:
    hold = stage.directory / "hold"
    hold.touch()
    running = stage.supervise(first := stage.fake("first"))
    await running.start()
    successor = stage.fake("first", "--not-ready-while", str(hold))
    replacing = asyncio.create_task(running.replace(successor, ready_s=30, drain_s=5, wait=True))
    for times in range(2, 3 + supervisor.START_ATTEMPTS):
        await eventually(lambda times=times: stage.journal().count("first started") == times)
        os.kill(successor.pid, signal.SIGKILL)
    hold.unlink()
    await replacing
    assert first.exit_code() == 0 and successor.exit_code() is None


async def test_a_child_that_crashes_as_it_is_restarted_is_not_waited_for_twice(stage: Stage) -> None:
    running = stage.supervise(only := stage.fake("only"))
    await running.start()
    os.kill(only.pid, signal.SIGKILL)
    await eventually(lambda: running.restarts["only"] == 1, every_s=0.01)
    await running.bounce("only", ready_s=10)
    assert only.exit_code() is None and stage.journal().count("only started") == 2
    before = only.pid
    await running.bounce("only", ready_s=10)
    assert only.pid != before


async def test_a_predecessor_that_still_drains_ends_with_the_supervisor(stage: Stage) -> None:
    running = stage.supervise(first := stage.fake("first", "--drain-s", "60"))
    await running.start()
    await running.replace(stage.fake("first"), ready_s=10, drain_s=60, wait=False)
    await eventually(lambda: "first draining" in stage.journal())
    await running.stop(drain_s=0.1)
    assert first.exit_code() is not None and "first hurried" in stage.journal()


async def test_a_child_comes_beside_the_others_and_drains_when_it_leaves(stage: Stage) -> None:
    running = stage.supervise(stage.fake("first"))
    await running.start()
    running.add(stage.fake("second", "--drain-s", "0.2"))
    await eventually(lambda: ("second", "ready", "") in stage.history)
    os.kill(next(child.pid for child in running.children if child.name == "second"), signal.SIGKILL)
    await eventually(lambda: stage.history[-1][:2] == ("second", "ready") and running.restarts["second"] == 1)
    await running.remove("second", drain_s=5)
    assert running.leaving == ["second"]
    await eventually(lambda: not running.leaving)
    assert stage.journal()[-2:] == ["second draining", "second drained"]
    assert [child.name for child in running.children] == ["first"]
    assert not await running.children[0].not_ready()


async def test_a_further_child_that_never_becomes_ready_goes_again_and_harms_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    running = stage.supervise(stage.fake("first"))
    await running.start()
    running.add(stage.fake("second", "--exit", "1"))
    await eventually(lambda: [child.name for child in running.children] == ["first"])
    assert stage.history[-1] == ("second", "stopped", "second cannot start: exit status 1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.failed(), 0.1)


async def test_a_successor_stays_when_the_further_child_that_it_replaces_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    (hold := stage.directory / "hold").touch()
    running = stage.supervise(stage.fake("first"))
    await running.start()
    running.add(further := stage.fake("second", "--not-ready-while", str(hold)))
    await eventually(lambda: ("second", "starting", "warming up") in stage.history)
    successor = stage.fake("second", "--not-ready-while", str(hold))
    replacing = asyncio.create_task(running.replace(successor, ready_s=30, drain_s=5, wait=True))
    await eventually(lambda: successor.pid)
    for _ in range(supervisor.START_ATTEMPTS):
        await eventually(lambda: further.exit_code() is None)
        os.kill(further.pid, signal.SIGKILL)
        await eventually(lambda: further.exit_code() is not None or further not in running.children)
    await eventually(lambda: further not in running.children)
    hold.unlink()
    await replacing
    assert successor in running.children
    os.kill(successor.pid, signal.SIGKILL)
    await eventually(lambda: running.restarts["second"] and successor.exit_code() is None)


async def test_a_child_that_leaves_while_it_starts_is_gone(stage: Stage) -> None:
    hold = stage.directory / "hold"
    hold.touch()
    running = stage.supervise(stage.fake("first"))
    await running.start()
    running.add(stage.fake("second", "--not-ready-while", str(hold)))
    await eventually(lambda: ("second", "starting", "warming up") in stage.history)
    await running.remove("second", drain_s=5)
    assert [child.name for child in running.children] == ["first"]
    await eventually(lambda: stage.history[-1] == ("second", "stopped", "ended"))


async def test_output_goes_to_the_childs_log(stage: Stage) -> None:
    child = stage.fake("talker")
    await stage.supervise(child).start()
    await eventually(lambda: tail(child.log_path) == "talker says hello")


def test_a_log_never_takes_more_than_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 100)
    log = BoundedLog(tmp_path / "service.log")
    for number in range(50):
        log.write(f"line {number}\n".encode())
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["service.log", "service.log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    assert tail(tmp_path / "service.log").endswith("line 49")
