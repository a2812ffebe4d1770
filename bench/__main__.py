"""`python -m bench NAME [--quick] ...`: runs `bench.<NAME>.run`, records the result, ends with one line of JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench import report

HIDDEN = {"__init__", "__main__", "report"}


def main() -> int:
    """Exit status 0 when the bench ran to its end."""
    here = Path(__file__).parent
    names = sorted(p.stem for p in here.glob("*.py") if p.stem not in HIDDEN and "def run(args" in p.read_text())
    parser = argparse.ArgumentParser(prog="python -m bench", description="Reproducible measurements.")
    parser.add_argument("name", choices=names, help="what to measure")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works; not recorded")
    parser.add_argument("--seconds", type=float, default=0.0, help="length of each measurement; 0 for the bench's own")
    chosen = next((word for word in sys.argv[1:] if word in names), None)
    add_arguments = getattr(importlib.import_module(f"bench.{chosen}"), "arguments", None) if chosen else None
    if add_arguments is not None:  # the bench has options of its own
        add_arguments(parser)
    args = parser.parse_args()
    bench = importlib.import_module(f"bench.{args.name}")
    figures = bench.run(args)
    if not args.quick and getattr(bench, "RECORDED", True):
        report.append(args.name, figures)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
