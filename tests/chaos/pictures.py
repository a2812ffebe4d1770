"""Pictures under faults: 200 of them while processes of a mesh are killed, frozen and cut off; none may be lost or drawn twice.

    python -m tests.chaos.pictures              20 faults, some five minutes on two cores
    python -m tests.chaos.pictures --quick      four faults and 24 pictures

A quiet run draws every picture once. Then each fault meets a wave of pictures: most of them run when it happens, the others
begin with it. Every picture, and every preview, is compared with that of the quiet run. Prints a table and, as its last line,
one line of JSON. Exit status 1 when a picture was lost, came twice or differs by more than `DIFFERENCE_MAX`.

MOTET_DEMO_IMAGES (or --images): a directory with `model` and `adapters`, instead of the ones that come with Motet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

from motet.examples.demo_images import BASE, DEMO_IMAGES
from motet.shared.clock import now_s
from motet.shared.model import PICTURE_STEPS_MAX
from tests.chaos import faults
from tests.chaos.faults import Fault
from tests.chaos.load import ASK_S, Attempt
from tests.chaos.mesh import TENANTS, ChaosMesh, MeshOptions, Served
from tests.chaos.picture_load import (
    DurablePictures,
    Pictures,
    RepeatedSteps,
    Shown,
    Steps,
    Way,
    make_pictures,
    steps_only,
    steps_run,
)
from tests.chaos.report import ms, say
from tests.chaos.run import BREAK_S, Books, Injected, Row, inject
from tests.support import eventually

DIFFERENCE_MAX = 2  # of 255
QUIET_LIMIT = 8  # pictures at once in the quiet run
WAYS: tuple[Way, ...] = ("steps", "whole", "steps", "durable", "steps")  # of the pictures of a wave, in turn
LATE_ONE_IN = 4  # pictures begin with the fault
UNDER_WAY_S = 1.5  # at most, from the first steps of a wave to its fault: some pictures have a checkpoint by then
PREVIEWS = 2
STEPS = Steps(200, 400)


@dataclass(frozen=True)
class PictureOptions:
    """How many pictures meet each fault, how many different ones there are, and how many steps they have."""

    each: int = 10
    asks: int = 50
    steps: Steps = STEPS
    settle_s: float = 0.0
    under_way_s: float = UNDER_WAY_S
    seed: int = 1


@dataclass
class Found:
    """The findings of a run."""

    rows: list[Row]
    trouble: list[str]
    pictures: int = 0
    max_difference: int = 0
    steps: int = 0  # of all pictures
    repeated: int = 0  # steps, of them
    resumptions: int = 0  # moves too
    step_s: list[float] = field(default_factory=list)  # between two steps of a stream, without faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.pictures")
    parser.add_argument("--quick", action="store_true", help="four faults and 24 pictures")
    parser.add_argument("--each", type=int, default=10, help="pictures that meet each fault")
    parser.add_argument("--steps", default=f"{STEPS.least}-{STEPS.most}", help="fewest and most denoising steps of a picture")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--images", default=os.environ.get("MOTET_DEMO_IMAGES", str(DEMO_IMAGES)), help="model and adapters")
    parser.add_argument("--keep", default="", help="directory for the data and logs; default: a temporary one")
    args = parser.parse_args()
    listed = faults.PICTURES_QUICK if args.quick else faults.PICTURES
    chosen = [fault for fault in listed if args.only in fault.name]
    least, most = map(int, args.steps.split("-"))
    options = PictureOptions(each=args.each, steps=Steps(least, most), seed=args.seed)
    if args.quick:
        options = PictureOptions(each=6, asks=12, steps=options.steps, seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="motet-pictures-") as temporary:
        mesh = MeshOptions(served=demo_images(Path(args.images)))
        found = uvloop.run(run_pictures(Path(args.keep or temporary), mesh, options, chosen, say))
    return report(found)


def demo_images(directory: Path) -> Served:
    """The image model in `directory`, as `motet up --demo-images` serves it."""
    given = {"engine": "images", "image_steps": 20, "image_max_steps": PICTURE_STEPS_MAX, "image_guidance": 2.0}
    return Served(directory / "model", BASE, directory / "adapters", draws=True, given=given)


async def run_pictures(
    directory: Path, mesh_options: MeshOptions, options: PictureOptions, listed: list[Fault], say: Callable[[str], None]
) -> Found:
    """Start a mesh in `directory`, draw under all faults, stop it."""
    mesh = ChaosMesh(directory, mesh_options)
    try:
        await mesh.start()
        say("the mesh is up; quiet run")
        asks = make_pictures(options.asks, mesh.adapters, mesh_options.served.base, options.steps, seed=options.seed)
        nats = await mesh.connect()
        quiet = Pictures(mesh.stack.urls, asks, previews=PREVIEWS)
        pictures = Pictures(mesh.stack.urls, asks, previews=PREVIEWS)
        run = _Run(mesh, options, quiet, pictures, DurablePictures(nats, asks, TENANTS))
        try:
            await run.quiet_run()
            say(f"{len(asks)} pictures drawn, {ms(run.found.step_s, 0.5)} a step")
            await run.repeated.listen(nats)
            for fault in listed:
                row = await run.wave(fault)
                say(f"{fault.name}: {row.in_flight} in flight, whole again after {row.healed_s:.1f} s")
            await run.judge()
        finally:
            await asyncio.gather(quiet.close(), pictures.close(), nats.close())
        return run.found
    finally:
        await mesh.stop()


class _Run:
    """The waves of one run, and the judge."""

    def __init__(
        self, mesh: ChaosMesh, options: PictureOptions, quiet: Pictures, pictures: Pictures, durable: DurablePictures
    ) -> None:
        self.mesh, self.options, self.durable = mesh, options, durable
        self.quiet, self.pictures = quiet, pictures
        self.repeated = RepeatedSteps()
        self.injected: list[Injected] = []
        self.right: dict[int, Shown] = {}
        self.found = Found([], [])
        self._books = Books(self.injected, self.found.rows)
        self._random = random.Random(options.seed)
        self._turn = 0
        self._last: list[Attempt] = []  # of each picture over HTTP

    async def quiet_run(self) -> None:
        """Draw every picture once. Raises AssertionError if one fails."""
        room = asyncio.Semaphore(QUIET_LIMIT)

        async def one(i: int) -> None:
            async with room:
                attempt = await self.quiet.ask(i, "steps")
                assert attempt.outcome == "done", f"the quiet run failed: {attempt.reason}"
                self.right[i] = self.quiet.shown[id(attempt)]

        await asyncio.gather(*(one(i) for i in range(self.options.asks)))
        for attempt in self.quiet.attempts:
            self.found.step_s += [b - a for (a, _), (b, _) in pairwise(steps_only(attempt).chunks)]

    async def wave(self, fault: Fault) -> Row:
        """Draw pictures, let the fault happen under way, and wait for all of them."""
        late = max(1, self.options.each // LATE_ONE_IN)
        early = [self._begin() for _ in range(self.options.each - late)]
        streams = sum(way == "steps" for way in (WAYS[i % len(WAYS)] for i in range(self.options.each - late)))
        await eventually(lambda: self.pictures.flowing() >= streams or any(one.done() for one in early), within_s=60)
        await asyncio.sleep(self._random.uniform(0.0, self.options.under_way_s))  # time: how far the pictures are
        running = sum(not one.done() for one in early)
        begun = asyncio.get_running_loop().create_task(self._begin_late(late))
        one, row = await inject(self.mesh, self.pictures.attempts, fault, self.options.settle_s)
        await asyncio.gather(*early, *await begun)
        one.until_s, row.in_flight = now_s(), running
        self.injected.append(one)
        self.found.rows.append(row)
        _note_pauses(one, row, self.pictures.attempts)
        return row

    async def _begin_late(self, count: int) -> list[asyncio.Task[None]]:
        return [self._begin() for _ in range(count)]

    def _begin(self) -> asyncio.Task[None]:
        turn, self._turn = self._turn, self._turn + 1
        i, way = turn % self.options.asks, WAYS[turn % self.options.each % len(WAYS)]
        self.found.pictures += 1
        self.found.steps += steps_run(self.quiet.asks[i])
        return asyncio.get_running_loop().create_task(self._draw(i, way, turn))

    async def _draw(self, i: int, way: Way, turn: int) -> None:
        if way == "durable":
            await self.durable.ask(i, TENANTS[turn % len(TENANTS)], f"picture-{turn}")
        else:
            self._last.append(await self.pictures.insist(i, way))

    # ---- the judge

    async def judge(self) -> None:
        """Compare everything with the quiet run."""
        for attempt in self._last:
            if attempt.outcome == "done":
                self._compare(attempt.ask, self.pictures.shown[id(attempt)], attempt.ended_s, attempt.request_id)
            elif attempt.outcome != "lost":  # those that were lost are noted below
                self._books.note("lost", attempt.ended_s, f"no picture within {ASK_S:g} s: {attempt.reason}")
        for attempt in self.pictures.attempts:
            self._judge_attempt(attempt)
        await self._judge_durable()
        self.found.trouble = self._books.trouble
        self.found.repeated, self.found.resumptions = self.repeated.steps, len(self.repeated.kept)

    def _judge_attempt(self, attempt: Attempt) -> None:
        row = self.found.rows[max((i for i, one in enumerate(self.injected) if one.at_s <= attempt.ended_s), default=0)]
        if attempt.outcome == "refused":
            row.refused += 1
        elif attempt.outcome == "lost":
            self._books.note("lost", attempt.ended_s, f"{attempt.request_id}: {attempt.reason}")
        elif attempt.outcome == "broken":
            deaths = self.mesh.killed.get(f"gateway-{attempt.gateway + 1}", [])
            if any(attempt.began_s < death < attempt.ended_s < death + BREAK_S for death in deaths):
                row.broken += 1
            else:
                self._books.note("lost", attempt.ended_s, f"{attempt.request_id}: {attempt.reason}")

    async def _judge_durable(self) -> None:
        counts, now = await self.durable.results(), now_s()
        for one in self.durable.sent:
            who, count = f"durable {one.request_id}", counts.get((one.tenant, one.request_id), 0)
            if count != 1:
                self._books.note("duplicated" if count else "lost", now, f"{who}: {count} results")
                continue
            try:
                self._compare(one.ask, Shown(await self.durable.picture_of(one)), now, who)
            except ValueError as error:
                self._books.note("lost", now, f"{who}: {error}")

    def _compare(self, i: int, shown: Shown, ended_s: float, who: str) -> None:
        for what in shown.twice:
            self._books.note("duplicated", ended_s, f"{who}: {what}")
        difference = self.right[i].difference(shown)
        self.found.max_difference = max(self.found.max_difference, difference)
        if difference > DIFFERENCE_MAX:
            self._books.note("changed", ended_s, f"{who}: picture {i} is off by {difference} of 255")


def _note_pauses(one: Injected, row: Row, attempts: list[Attempt]) -> None:
    """The times from the fault to the next new step: of the streams that were resumed, or of all if none had to be."""
    ran = [steps_only(attempt) for attempt in attempts if attempt.ran(one.at_s, one.at_s)]
    affected = [attempt for attempt in ran if not one.resumed or attempt.request_id in one.resumed]
    found = [attempt.pause_s(one.at_s, one.until_s) for attempt in affected]
    row.pauses_s = [pause_s for pause_s in found if pause_s is not None]


def report(found: Found) -> int:
    """Print the table and the line of JSON. Returns the exit status."""
    print(
        f"{'fault':<36} {'in flight':>9} {'resumed':>8} {'lost':>5} {'twice':>6} {'off':>4} {'broken':>7} {'refused':>8}"
        f" {'pause p50':>10} {'p99':>8} {'healed':>8}"
    )
    for row in found.rows:
        print(
            f"{row.fault:<36} {row.in_flight:>9} {row.resumed:>8} {row.lost:>5} {row.duplicated:>6} {row.changed:>4}"
            f" {row.broken:>7} {row.refused:>8} {ms(row.pauses_s, 0.5):>10} {ms(row.pauses_s, 0.99):>8} {row.healed_s:>6.1f} s"
        )
    for line in found.trouble[:20]:
        print("  " + line[:400])
    figures = {
        "pictures": found.pictures,
        "faults": len(found.rows),
        "lost": sum(row.lost for row in found.rows),
        "twice": sum(row.duplicated for row in found.rows),
        "max_pixel_difference": found.max_difference,
        "resume_p99_s": p99_s(found.rows, "death"),
        "resume_frozen_p99_s": p99_s(found.rows, "frozen"),
        "step_p50_s": round(float(np.median(found.step_s)), 3),
        "resumptions": found.resumptions,
        "steps_repeated_share": round(found.repeated / max(1, found.steps), 4),
    }
    print(json.dumps(figures))
    return 1 if found.trouble else 0


def p99_s(rows: list[Row], kind: str) -> float | None:
    """Of the pauses of resumed streams under faults of this kind."""
    pauses_s = [pause_s for row in rows if row.kind == kind and row.resumed for pause_s in row.pauses_s]
    return round(float(np.quantile(pauses_s, 0.99)), 2) if pauses_s else None


if __name__ == "__main__":
    sys.exit(main())
