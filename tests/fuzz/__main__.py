"""`make fuzz`: malformed input on every interface, while the mesh keeps serving.

    python -m tests.fuzz                     every part, eight to ten minutes on two cores
    python -m tests.fuzz --only owner,bus    some of them
    python -m tests.fuzz --seed 7            other cases

Prints a table and, as its last line, one line of JSON. Exit status 1 when a promise was broken, with the reason above.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import table
from motet.shared.clock import now_s
from tests.fuzz import adapters, bus, connections, doors, http, messages, owner, stalls
from tests.fuzz.mesh import FuzzMesh

PARTS = ("owner", "messages", "adapters", "http", "connections", "stalls", "bus", "restart", "doors")
OWNER_CASES, MESSAGE_CASES, BUS_CASES = 8000, 1500, 30_000
HTTP_S = 200.0
IDLE, SLOW = 10_000, 200
RACES, SILENT_TLS = 60, 3_000
STALLS_EVERY = 10  # of the shapes of large bodies; the seed says which


@dataclass
class Found:
    """The findings of all parts. `figures` are printed in the line of JSON."""

    figures: dict[str, int] = field(
        default_factory=lambda: {
            "cases": 0,
            "server_errors": 0,
            "malformed_adapters": 0,
            "accepted_malformed": 0,
            "worst_stall_ms": 0,
        }
    )
    rows: list[tuple[str, int, str, float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, **figures: int) -> None:
        for name, count in figures.items():
            self.figures[name] += count


class Fuzz:
    """The parts of the fuzzer. Each returns how many cases it tried, what it saw and what was wrong."""

    def __init__(self, mesh: FuzzMesh, directory: Path, seed: int, found: Found) -> None:
        self.mesh, self.directory, self.seed, self.found = mesh, directory, seed, found

    async def owner(self) -> tuple[int, str, list[str]]:
        return await self._property(owner.fuzz, OWNER_CASES, "histories of frames, epochs and losses")

    async def messages(self) -> tuple[int, str, list[str]]:
        return await self._property(messages.fuzz, MESSAGE_CASES, "byte strings read as messages")

    async def _property(self, fuzz: Callable[[int, int], int], count: int, what: str) -> tuple[int, str, list[str]]:
        try:
            return await asyncio.to_thread(fuzz, count, self.seed), what, []
        except AssertionError as error:
            return count, what, ["\n".join([str(error), *getattr(error, "__notes__", [])])]

    async def adapters(self) -> tuple[int, str, list[str]]:
        corpus = adapters.corpus(self.mesh)
        accepted, wrong = await adapters.fuzz(self.mesh, corpus)
        self.found.add(malformed_adapters=len(corpus), accepted_malformed=len(accepted))
        return len(corpus), f"malformed archives, accepted: {len(accepted)}", wrong

    async def http(self) -> tuple[int, str, list[str]]:
        seen = await http.fuzz(self.mesh, HTTP_S, self.seed, self.directory)
        self.found.add(server_errors=seen.server_errors)
        return seen.cases, f"HTTP requests by schemathesis, answered with 5xx: {seen.server_errors}", seen.failures

    async def connections(self) -> tuple[int, str, list[str]]:
        seen = await connections.fuzz(self.mesh, IDLE, SLOW)
        what = f"silent and slow connections, MiB they cost: {seen.grown_bytes >> 20}, still open: {seen.open_afterwards}"
        return seen.connections, what, [seen.trouble] if seen.trouble else []

    async def doors(self) -> tuple[int, str, list[str]]:
        seen = await doors.fuzz(self.directory / "doors", RACES, SILENT_TLS)
        what = (
            f"races for an API key, revoked ones that work: {seen.alive}; silent TLS clients, MiB they cost:"
            f" {seen.grown_bytes >> 20}, slowest good request: {seen.slowest_s:.2f} s"
        )
        return seen.cases, what, [seen.trouble] if seen.trouble else []

    async def stalls(self) -> tuple[int, str, list[str]]:
        seen = await stalls.fuzz(self.mesh, STALLS_EVERY, self.seed)
        self.found.add(worst_stall_ms=round(seen.worst_stall_ms))
        what = f"large bodies; ms in which nobody was answered: {seen.worst_stall_ms:.0f}, before: {seen.quiet_ms:.0f};"
        what += f" between two tokens of others: {seen.worst_gap_ms:.0f}; MiB for bodies under way: {seen.grown_bytes >> 20}"
        return seen.cases, what, seen.wrong

    async def bus(self) -> tuple[int, str, list[str]]:
        sent, trouble = await bus.fuzz(self.mesh, BUS_CASES, self.seed)
        return sent, f"messages as {len(bus.users())} users of the bus", [trouble] if trouble else []

    async def restart(self) -> tuple[int, str, list[str]]:
        trouble = await self.mesh.restarted()
        return 1, "restart of every service on what the others left", [trouble] if trouble else []


async def run(parts: list[str], seed: int, directory: Path) -> Found:
    """Start a mesh in `directory`, try the parts in turn, stop it."""
    found, mesh = Found(), FuzzMesh(directory)
    fuzz = Fuzz(mesh, directory, seed, found)
    try:
        await mesh.start()
        for part in parts:
            began_s = now_s()
            print(f"{part} ...", file=sys.stderr, flush=True)
            trying: Callable[[], Awaitable[tuple[int, str, list[str]]]] = getattr(fuzz, part)
            cases, what, wrong = await trying()
            found.add(cases=cases)
            found.rows.append((part, cases, what, now_s() - began_s, "no" if wrong else "yes"))
            found.wrong += [f"{part}: {one}" for one in wrong]
    finally:
        mesh.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--only", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="directory for the data and logs; default: a temporary one")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="motet-fuzz-") as temporary:
        directory = Path(args.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(run(parts, args.seed, directory))
    for one in found.wrong:
        print(one[:4000])
    print(table("Malformed input", ("part", "cases", "of what", "seconds", "kept"), found.rows))
    print(json.dumps(found.figures))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
