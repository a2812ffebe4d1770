"""A worker with an emulated link to its device, or with a record of its steps: `python -m bench.rig.worker_process --help`.

It is configured by MOTET_* variables, as `motet worker`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import astuple, dataclass
from typing import Any

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.request import StepReport
from motet.services.worker.service import WorkerService
from motet.shared.config import load
from motet.shared.service import run


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step as the worker reported it. `merge_s`: how long the merged copy was made before the step."""

    began_s: float
    time_ms: float
    merge_s: float
    merged: bool
    resting: int  # requests that it left out
    decoding: int  # requests that computed one token; 0 if others computed a prompt

    @classmethod
    def of(cls, report: StepReport) -> StepSeen:
        """The same of a report."""
        stats, merging = report.output.stats, report.output.stats.merging
        return cls(
            report.began_s,
            stats.time_ms,
            stats.merge_s,
            merging is not None and bool(merging.merged),
            merging.resting if merging is not None else 0,
            0 if stats.prefill_requests else stats.decode_rows,
        )


def main() -> int:
    """Run the worker to its end. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.rig.worker_process", description=__doc__)
    parser.add_argument("bytes_per_s", type=float, help="speed of the link to the device; 0: as fast as memory")
    parser.add_argument("file", nargs="?", default="", help="where each step is recorded, a line of JSON each")
    args = parser.parse_args()
    config = load(WorkerConfig, {})
    with open(args.file or os.devnull, "w", buffering=1) as file:

        def record(report: StepReport) -> None:
            if report.output.stats.time_ms:
                file.write(json.dumps(astuple(StepSeen.of(report))) + "\n")

        observe: dict[str, Any] = {"observe": record} if args.file else {}
        return run(WorkerService(config, link_bytes_per_s=args.bytes_per_s, **observe), config)


if __name__ == "__main__":
    sys.exit(main())
