"""`make chaos`: the whole mesh under load while processes of every kind are killed, frozen and cut off from NATS.

    python -m tests.chaos                       everything, about ten minutes on two cores
    python -m tests.chaos --quick               four faults
    python -m tests.chaos --streams 48 --only worker

Prints a table and, as its last line, one line of JSON. Exit status 1 when anything was lost, repeated or changed.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import uvloop

from tests.chaos import faults, virtual
from tests.chaos.mesh import MeshOptions
from tests.chaos.report import ms, say
from tests.chaos.run import LoadOptions, Phase, Row, run_phase

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--questions", type=int, default=100, help="different requests")
    parser.add_argument("--random", type=int, default=6, help="faults at random after those in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="four faults, one broker node")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--phase", choices=["single", "cluster", "upgrade", "all"], default="all")
    parser.add_argument("--upgrade-from", default="HEAD~1", help="commit whose services are restarted into the present ones")
    parser.add_argument("--keep", default="", help="directory for the data and logs; default: a temporary one")
    parser.add_argument("--virtual", action="store_true", help="a simulated mesh instead of a real one (tests.chaos.virtual)")
    parser.add_argument("--seeds", type=int, default=2000, help="with --virtual: how many, from --seed on")
    args = parser.parse_args()
    if args.virtual:
        return virtual.main(args.seeds, args.seed)
    load = LoadOptions(streams=args.streams, max_tokens=args.tokens, questions=args.questions, seed=args.seed)
    single = faults.QUICK if args.quick else [*faults.SINGLE, *faults.at_random(args.random, args.seed, nodes=1)]
    plan = [("single", 1, single), ("cluster", 3, faults.CLUSTER), ("upgrade", 1, [faults.UPGRADE])]
    rows: list[Row] = []
    burst_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="motet-chaos-") as temporary:
        root = Path(args.keep or temporary)
        for name, nodes, listed in plan:
            chosen = [fault for fault in listed if args.only in fault.name]
            if not chosen or args.phase not in ("all", name) or (args.quick and name != "single"):
                continue
            directory = root / name
            directory.mkdir(parents=True)
            options = MeshOptions(nodes=nodes, source=checkout(args.upgrade_from, root) if name == "upgrade" else None)
            say(f"phase {name}")
            phase = uvloop.run(run_phase(directory, options, load, chosen, say))
            show(phase)
            rows += phase.rows
            burst_s = burst_s or phase.burst_s
    return report(rows, burst_s)


def checkout(revision: str, root: Path) -> Path:
    """The files of a commit, unpacked."""
    target = root / "before"
    target.mkdir()
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")
    return target


def show(phase: Phase) -> None:
    """Print the table of a phase, and what went wrong."""
    print(
        f"{'fault':<36} {'in flight':>9} {'resumed':>8} {'lost':>5} {'dup.':>5} {'chg.':>5} {'broken':>7} {'refused':>8}"
        f" {'pause p50':>13} {'p99':>8} {'healed':>8}"
    )
    for row in phase.rows:
        print(
            f"{row.fault:<36} {row.in_flight:>9} {row.resumed:>8} {row.lost:>5} {row.duplicated:>5} {row.changed:>5}"
            f" {row.broken:>7} {row.refused:>8} {ms(row.pauses_s, 0.5):>13} {ms(row.pauses_s, 0.99):>8} {row.healed_s:>6.1f} s"
        )
    print(f"{phase.asked} streams, refused: {phase.refused or 'none'}, {phase.durable} durable requests")
    for line in phase.trouble[:20]:
        print("  " + line[:400])
    print(flush=True)


def report(rows: list[Row], burst_s: list[float]) -> int:
    """Print the line of JSON. Returns the exit status."""
    totals = {name: sum(getattr(row, name) for row in rows) for name in ("lost", "duplicated", "changed")}
    figures = {"faults": len(rows), **totals}
    figures |= {"resume_p99_ms": p99_ms(rows, "death"), "resume_frozen_p99_ms": p99_ms(rows, "frozen")}
    figures["burst_p99_ms"] = round(np.quantile(burst_s, 0.99) * 1000)
    print(json.dumps(figures))
    errors = sum(row.refused + row.broken for row in rows if row.kind == "restart")
    return 1 if errors or any(totals.values()) else 0


def p99_ms(rows: list[Row], kind: str) -> float | None:
    values_s = [s for row in rows if row.kind == kind and row.resumed for s in row.pauses_s]
    return round(np.quantile(values_s, 0.99) * 1000) if values_s else None


if __name__ == "__main__":
    sys.exit(main())
