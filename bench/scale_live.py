"""`motet up --workers 0..3 --scale act` under a load that comes and goes: nothing may be lost, changed or refused.

    round      a crowd until three workers serve, then one client that pauses between its requests until one worker serves,
               then nobody until none is left, then single requests that wake the mesh
    kills      the same round again, and at every step the scheduler that plans is killed: as workers are started, as one
               leaves, while none is there, and while a request waits for the first

The answers are sampled with a seed, and a quiet run comes first. An answer counts as changed if its text differs from that of
the quiet run, as lost if it ends early, and as an error if its status is above 399. The time to the first token after a wake is
told without the time that the worker took to start, from its launch to its readiness.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from motet.cli.client import ApiError, Client
from motet.cli.follow import followed
from motet.cli.stack import Stack
from motet.cli.supervisor import State
from motet.cli.up import up
from motet.cli.up_options import stack_options
from motet.examples.demo import BASE
from motet.examples.demo.tasks import TASKS
from motet.shared.clock import now_s

MOST, CROWD, SEATS = 3, 24, 8
ASKS, TOKENS = 48, 120
WAKES, WAKES_QUICK = 3, 1
PAUSE_S = 0.5
"""Between two requests of the one client. Without it, it asks for a quarter of what one worker can do."""
STEP_S = 240.0
"""For a step that takes longer the bench ends with an error."""
COLUMNS = (
    "round",
    "requests",
    "resumed",
    "lost",
    "changed",
    "errors",
    "wake to first token s",
    "of it the start s",
    "over it s",
)


@dataclass(slots=True)
class Answer:
    """How one request went."""

    text: str = ""
    whole: bool = False
    error: str = ""
    first_s: float = 0.0  # after it was asked


@dataclass(slots=True)
class Tally:
    """What happened to the requests of one round."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    wakes: list[tuple[float, float]] = field(default_factory=list)  # (to the first token, of it the worker's start)
    resumed: int = 0

    def figures(self, right: dict[int, str]) -> dict[str, Any]:
        """The figures of the round."""
        over = [total - start for total, start in self.wakes]
        return {
            "requests": len(self.answers),
            "resumed": self.resumed,
            "lost": sum(not one.error and not one.whole for _, one in self.answers),
            "changed": sum(one.whole and one.text != right[ask] for ask, one in self.answers),
            "errors": sum(bool(one.error) for _, one in self.answers),
            "wake_s": round(statistics.median(total for total, _ in self.wakes), 3),
            "start_s": round(statistics.median(start for _, start in self.wakes), 3),
            "first_token_after_wake_s": round(statistics.median(over), 3),
            "first_token_after_wake_worst_s": round(max(over), 3),
        }


class Mesh:
    """A stack as `motet up` starts it, and what its processes did when."""

    def __init__(self, directory: Path) -> None:
        words = ["--demo", "--port", "0", "--data-dir", str(directory), "--threads", "1", "--schedulers", "2"]
        words += ["--workers", f"0..{MOST}", "--scale", "act", "--scale-down-s", "5", "--scale-idle-s", "5"]
        words += ["--max-running", str(SEATS), "--admission", "room"]
        self.stack = Stack(stack_options(up.make_context("up", words).params), self)
        self.seen: list[tuple[float, str, State]] = []
        self.said: list[str] = []

    def changed(self, name: str, state: State, note: str) -> None:
        """A process has another state."""
        self.seen.append((now_s(), name, state))

    async def workers(self, count: int) -> None:
        """Wait until so many workers serve and no other is there."""
        await until(lambda: len(self.stack.workers) == count == len(self.serving()), f"{count} workers")

    def serving(self) -> list[str]:
        """The workers that are ready."""
        last = {name: state for _, name, state in self.seen}
        return [name for name in self.stack.workers if last.get(name) == "ready"]

    def start_s(self, since_s: float) -> float:
        """How long the first worker that was started after `since_s` took."""
        began_s, name = next((at, name) for at, name, state in self.seen if at >= since_s and _starts(name, state))
        return next(at for at, other, state in self.seen if at >= began_s and (other, state) == (name, "ready")) - began_s

    async def kill_planner(self) -> None:
        """Kill the scheduler that decides. The other one goes on, and a new one is started."""
        async with Client(self.stack.urls[0]) as client:
            decided = (await client.call("GET", f"/v1/scale/{BASE}"))["scheduler_id"]
        planner = next(child for child in self.stack.children if child.name == decided)
        planner.signal(signal.SIGKILL)


def _starts(name: str, state: State) -> bool:
    return name.startswith("worker") and state == "starting"


async def until(done: Callable[[], bool], what: str) -> None:
    """Wait for a step of the bench."""
    deadline_s = now_s() + STEP_S
    while not done():
        if now_s() > deadline_s:
            raise RuntimeError(f"{what}: not within {STEP_S:g} s")
        await asyncio.sleep(0.02)


# ---- requests


async def ask(client: Client, number: int) -> Answer:
    """One streamed completion of exactly `TOKENS` sampled tokens, the same for the same number."""
    task, found, began_s, used = TASKS[number % len(TASKS)], Answer(), now_s(), 0
    body = {
        "model": task.adapter,
        "prompt": task.prompt(f"Gdud flwi {number}"),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream_options": {"include_usage": True},
    }
    try:
        async for event in client.events("/v1/completions", body):
            for choice in event["choices"]:
                found.first_s = found.first_s or now_s() - began_s
                found.text += choice["text"]
            used = (event.get("usage") or {}).get("completion_tokens", used)
    except ApiError as error:
        found.error = f"{error.status}: {error}"
    found.whole = used == TOKENS
    return found


class Crowd:
    """Clients that ask one request after the other until they are sent home."""

    def __init__(self, url: str, tally: Tally) -> None:
        self._url, self._tally = url, tally
        self._next = 0

    @contextlib.asynccontextmanager
    async def of(self, clients: int, pause_s: float = 0.0) -> Any:
        """So many clients, for the length of the block. What they have asked is answered before it ends."""
        home = asyncio.Event()
        tasks = [asyncio.create_task(self._one(home, pause_s)) for _ in range(clients)]
        try:
            yield
        finally:
            home.set()
            await asyncio.gather(*tasks)

    async def _one(self, home: asyncio.Event, pause_s: float) -> None:
        async with Client(self._url) as client:
            while not home.is_set():
                number, self._next = self._next % ASKS, self._next + 1
                self._tally.answers.append((number, await ask(client, number)))
                await asyncio.sleep(pause_s)


# ---- rounds


Strike = Callable[[], Awaitable[None]]


async def whole_round(mesh: Mesh, strike: Strike, wakes: int, *, quick: bool) -> Tally:
    """Up, down, to zero and back; `strike` is called at every step."""
    tally = Tally()
    crowd = Crowd(mesh.stack.urls[0], tally)
    resumed = await resumptions(mesh)
    if not quick:
        async with crowd.of(CROWD):
            await until(lambda: len(mesh.stack.workers) > 1, "a second worker")
            await strike()
            await mesh.workers(MOST)
        async with crowd.of(1, PAUSE_S):
            await until(lambda: len(mesh.stack.workers) < MOST, "a worker less")
            await strike()
            await mesh.workers(1)
    for number in range(wakes):
        await mesh.workers(0)
        if number == 0:
            await strike()
        tally.wakes.append(await wake(mesh, tally, number, strike if number == 1 else nothing))
    tally.resumed = await resumptions(mesh) - resumed
    return tally


async def wake(mesh: Mesh, tally: Tally, number: int, strike: Strike) -> tuple[float, float]:
    """One request to a mesh without a worker: seconds to its first token, and of them the start of its worker."""
    began_s = now_s()
    async with Client(mesh.stack.urls[0]) as client:
        asking = asyncio.create_task(ask(client, number))
        await until(lambda: bool(mesh.stack.workers), "a woken worker")
        await strike()
        answer = await asking
    tally.answers.append((number, answer))
    return answer.first_s, mesh.start_s(began_s)


async def resumptions(mesh: Mesh) -> int:
    """How many requests have gone on on another worker."""
    async with Client(mesh.stack.urls[0]) as client:
        lines = (await client.call("GET", "/metrics")).splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("motet_requests_resumed_total")))


async def nothing() -> None:
    """No scheduler is killed."""


async def round_of(right: dict[int, str], wakes: int, *, kills: bool, quick: bool) -> dict[str, Any]:
    """A round on a mesh of its own. Fills `right`, the answers of a quiet run, where it is empty."""
    with tempfile.TemporaryDirectory() as directory:
        mesh = Mesh(Path(directory))
        following: asyncio.Task[None] | None = None
        try:
            await mesh.stack.start()
            following = asyncio.create_task(followed(mesh.stack, mesh.said.append))
            if not right:
                async with Client(mesh.stack.urls[0]) as client:
                    right |= {number: (await ask(client, number)).text for number in range(8 if quick else ASKS)}
            tally = await whole_round(mesh, mesh.kill_planner if kills else nothing, wakes, quick=quick)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await mesh.stack.stop()
    print("; ".join(mesh.said), flush=True)
    return tally.figures(right)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both rounds; prints the table, returns the figures."""
    right: dict[int, str] = {}
    found = {"as it is": await round_of(right, WAKES_QUICK if args.quick else WAKES, kills=False, quick=args.quick)}
    if not args.quick:
        found["planner killed"] = await round_of(right, 2, kills=True, quick=False)
    rows = [[name, *one.values()][: len(COLUMNS)] for name, one in found.items()]
    print(report.table("Workers follow the load", COLUMNS, rows))
    return {
        **{name: sum(one[name] for one in found.values()) for name in ("requests", "resumed", "lost", "changed", "errors")},
        "first_token_after_wake_s": found["as it is"]["first_token_after_wake_s"],
        "first_token_after_wake_worst_s": max(one["first_token_after_wake_worst_s"] for one in found.values()),
        "rounds": found,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the bench."""
    return asyncio.run(measure(args))
