"""`python -m bench NAME [--quick] ...`: runs `bench.<NAME>.run`, records the result, ends with one line of JSON.

Every bench ends within ten minutes and says when the machine did not hold still (`bench.watch`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench import report
from bench.watch import Watch

HIDDEN = {"__init__", "__main__", "report", "watch"}


def names() -> list[str]:
    """The names of all benches."""
    here = Path(__file__).parent
    return sorted(p.stem for p in here.glob("*.py") if p.stem not in HIDDEN and "def run(args" in p.read_text())


def main() -> int:
    """Run a bench. Exit status 0 when it ran to its end."""
    benches = names()
    parser = argparse.ArgumentParser(prog="python -m bench", description="Reproducible measurements.")
    parser.add_argument("name", choices=benches, help="what to measure")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works; not recorded")
    parser.add_argument("--seconds", type=float, default=0.0, help="length of each measurement; 0 for the bench's own")
    chosen = next((word for word in sys.argv[1:] if word in benches), None)
    add_arguments = getattr(importlib.import_module(f"bench.{chosen}"), "arguments", None) if chosen else None
    if add_arguments is not None:  # the bench has options of its own
        add_arguments(parser)
    args = parser.parse_args()
    bench = importlib.import_module(f"bench.{args.name}")
    args.watch = watch = Watch()
    figures = bench.run(args)
    print(watch.says())
    if not args.quick and getattr(bench, "RECORDED", True):
        report.append(args.name, figures | {"watch": watch.figures()})
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
