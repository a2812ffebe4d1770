"""One phase of a chaos run: a mesh, a quiet run for the right answers, then the same requests while faults happen."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from motet.shared.clock import now_s
from tests.chaos.faults import Fault, Kind
from tests.chaos.load import Answer, Attempt, Durable, DurableLoad, Streams, answer_of, burst_s, make_asks
from tests.chaos.mesh import BASE, TENANTS, ChaosMesh, MeshOptions
from tests.support import eventually

QUIET_LIMIT = 48  # questions at once in the quiet run
LASTS_S = 20.0  # a fault that takes longer is a restart of one process after the other
RESUMED_TOKENS = 115  # what a resumed request of this load has to compute again, on average
BREAK_S = 3.0  # a connection of a dead gateway breaks within this
_RESUMING = re.compile(r"resuming request_id=(?:(?:chat)?cmpl|img)-(\S+)-\d+ ")  # the prefix is not in X-Request-Id


@dataclass(frozen=True)
class LoadOptions:
    """How many requests run at once, how long the answers are, and how long they run on after each fault.

    `settle_s` is between a mesh that is whole again and the next fault: what has just started warms up on the same cores.
    """

    streams: int = 200
    max_tokens: int = 160
    questions: int = 100
    durable_each: int = 2  # per tenant
    settle_s: float = 3.0
    seed: int = 1


@dataclass
class Injected:
    """A fault that happened."""

    fault: Fault
    at_s: float
    took_s: float = 0.0
    until_s: float = float("inf")
    resumed: set[str] = field(default_factory=set)


@dataclass
class Row:
    """One line of the report. A pause is a stream's longest time without a token that began with the fault."""

    fault: str
    kind: Kind
    in_flight: int
    resumed: int
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    broken: int = 0
    refused: int = 0
    healed_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)


@dataclass
class Phase:
    """The findings of a phase."""

    rows: list[Row]
    asked: int
    durable: int
    refused: dict[str, int]  # by status; "no connection" while a gateway is down
    burst_s: list[float]
    """Times to first token when as many requests as one worker has come at once and nothing else is to do: no resumption can
    take less here."""
    trouble: list[str]


class Books:
    """Counts what went wrong, in the row of the last fault before the answer ended."""

    def __init__(self, injected: list[Injected], rows: list[Row]) -> None:
        self.injected, self.rows = injected, rows
        self.trouble: list[str] = []

    def note(self, what: str, ended_s: float, reason: str) -> None:
        at = max((i for i, one in enumerate(self.injected) if one.at_s <= ended_s), default=0)
        row = self.rows[at]
        setattr(row, what, getattr(row, what) + 1)
        self.trouble.append(f"{row.fault}: {what}: {reason}")

    def compare(self, right: Answer, said: Answer, ended_s: float, who: str) -> None:
        if right.same(said):
            return
        what = "changed"
        if len(said.text) < len(right.text) and _within(said.text, right.text):
            what = "lost"
        elif len(said.text) > len(right.text) and _within(right.text, said.text):
            what = "duplicated"
        self.note(what, ended_s, f"{who}: {right} became {said}")


def _within(short: str, long: str) -> bool:
    rest = iter(long)
    return all(letter in rest for letter in short)


async def run_phase(
    directory: Path, mesh_options: MeshOptions, load: LoadOptions, faults: list[Fault], say: Callable[[str], None]
) -> Phase:
    """Start a mesh in `directory`, inject all faults under load, stop it."""
    mesh = ChaosMesh(directory, mesh_options)
    try:
        await mesh.start()
        say(f"mesh of {mesh_options.nodes} broker node(s) is up; quiet run")
        return await _hurt(mesh, load, faults, say)
    finally:
        await mesh.stop()


async def _hurt(mesh: ChaosMesh, load: LoadOptions, faults: list[Fault], say: Callable[[str], None]) -> Phase:
    asks = make_asks(load.questions, mesh.adapters, BASE, max_tokens=load.max_tokens, seed=load.seed)
    quiet = Streams(mesh.stack.urls, asks, 0, seed=load.seed)
    began_s = now_s()
    await quiet.once(QUIET_LIMIT)
    bad = [attempt.reason for attempt in quiet.attempts if attempt.outcome != "done"]
    assert not bad, f"the quiet run failed: {bad[:3]}"
    right = {attempt.ask: attempt.answer() for attempt in quiet.attempts}
    say(f"quiet run of {len(asks)} questions took {now_s() - began_s:.0f} s; {load.streams} streams from now on")
    models, share = [*mesh.adapters, BASE], load.streams // mesh.options.workers
    burst: list[float] = []
    for _ in range(3):  # the last one finds every adapter loaded
        burst = await burst_s(mesh.stack.urls, models, share, RESUMED_TOKENS)
    streams = Streams(mesh.stack.urls, asks, load.streams, seed=load.seed)
    nats = await mesh.connect()
    durable = DurableLoad(nats, asks, TENANTS, load.durable_each, seed=load.seed)
    await streams.start()
    await durable.start()
    injected, rows = [], []
    for fault in faults:
        await eventually(lambda: streams.flowing() >= 0.7 * load.streams, within_s=60, every_s=0.1)
        one, row = await inject(mesh, streams.attempts, fault, load.settle_s)
        injected.append(one)
        rows.append(row)
        say(f"{fault.name}: {row.in_flight} in flight, whole again after {row.healed_s:.1f} s")
    await streams.stop()
    await durable.stop()
    say("the load has ended; comparing")
    books = Books(injected, rows)
    for one, row in zip(injected, rows, strict=True):
        _pauses(one, row, streams.attempts)
        row.refused = sum(a.outcome == "refused" and one.at_s <= a.ended_s < one.until_s for a in streams.attempts)
    _judge_streams(mesh, books, right, streams.attempts)
    await _judge_durable(books, right, durable)
    await nats.close()
    refused = dict(Counter(attempt.reason.split(":")[0] for attempt in streams.attempts if attempt.outcome == "refused"))
    return Phase(rows, len(streams.attempts), len(durable.sent), refused, burst, books.trouble)


async def inject(mesh: ChaosMesh, attempts: list[Attempt], fault: Fault, settle_s: float) -> tuple[Injected, Row]:
    """Let a fault happen and wait until the mesh is whole again and `settle_s` have passed."""
    gateways = [name for name in mesh.stack.names() if name.startswith("gateway")]
    offsets = {name: _size(mesh.log(name)) for name in gateways}
    one = Injected(fault, now_s())
    await fault.inject(mesh)
    one.took_s = now_s() - one.at_s
    await mesh.healed()
    healed_s = now_s() - one.at_s
    await asyncio.sleep(settle_s)  # time: streams run on, so that a late loss is seen
    one.until_s = now_s()
    for name in gateways:
        one.resumed |= set(_RESUMING.findall(_read_from(mesh.log(name), offsets[name])))
    in_flight = sum(attempt.in_flight(one.at_s) for attempt in attempts)
    return one, Row(fault.name, fault.kind, in_flight, len(one.resumed), healed_s=healed_s)


def _pauses(one: Injected, row: Row, attempts: list[Attempt]) -> None:
    """The pauses of the streams that were resumed, or of all streams if none had to be.

    A few resumed requests may have no pause: durable ones, and streams that began during the fault.
    """
    lasts_s = one.took_s if one.took_s > LASTS_S else 0.0
    ran = [a for a in attempts if a.ran(one.at_s, one.at_s + lasts_s)]
    affected = [a for a in ran if not one.resumed or a.request_id in one.resumed]
    found = [attempt.pause_s(one.at_s, one.until_s, lasts_s) for attempt in affected]
    row.pauses_s = [s for s in found if s is not None]
    known = any(a.request_id in one.resumed for a in attempts)
    assert row.pauses_s or known or len(one.resumed) <= row.in_flight // 4, (
        f"{row.fault}: {row.resumed} streams were resumed and none of them was watched"
    )


def _judge_streams(mesh: ChaosMesh, books: Books, right: dict[int, Answer], attempts: list[Attempt]) -> None:
    for attempt in attempts:
        who = attempt.request_id or "not accepted"
        if attempt.outcome == "done":
            books.compare(right[attempt.ask], attempt.answer(), attempt.ended_s, who)
        elif attempt.outcome == "lost":
            books.note("lost", attempt.ended_s, f"{who}: {attempt.reason}")
        elif attempt.outcome == "broken":
            deaths = mesh.killed.get(f"gateway-{attempt.gateway + 1}", [])
            if any(attempt.began_s < death < attempt.ended_s < death + BREAK_S for death in deaths):
                books.rows[max(i for i, x in enumerate(books.injected) if x.at_s <= attempt.ended_s)].broken += 1
            else:
                books.note("lost", attempt.ended_s, f"{who}: {attempt.reason}")


async def _judge_durable(books: Books, right: dict[int, Answer], durable: DurableLoad) -> None:
    counts = await durable.results()
    now = now_s()
    for one in durable.sent:
        who = f"durable {one.tenant}.{one.request_id}"
        count = counts.get((one.tenant, one.request_id), 0)
        if one.result is None or count == 0:
            books.note("lost", now, f"{who}: {count} results")
        elif count > 1:
            books.note("duplicated", now, f"{who}: {count} results")
        else:
            _judge_result(books, right, one, who, now)


def _judge_result(books: Books, right: dict[int, Answer], one: Durable, who: str, now: float) -> None:
    assert one.result is not None
    try:
        books.compare(right[one.ask], answer_of(one.result), now, who)
    except ValueError as error:
        books.note("lost", now, f"{who}: {error}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as source:
        source.seek(offset)
        return source.read().decode(errors="replace")
