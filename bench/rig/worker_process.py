"""`python -m bench.rig.worker_process BYTES_PER_S [FILE]`: a worker as `motet worker` runs it, from MOTET_* variables.

Its adapter copies take as long as over a link of that speed (0: as fast as memory), and it records its steps in FILE.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import astuple, dataclass
from typing import Any

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.report import StepReport
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


def main(link_bytes_per_s: float, records: str = "") -> int:
    """Run the worker to its end."""
    config = load(WorkerConfig, {})
    with open(records or os.devnull, "w", buffering=1) as file:

        def record(report: StepReport) -> None:
            if report.output.stats.time_ms:
                file.write(json.dumps(astuple(StepSeen.of(report))) + "\n")

        observe: dict[str, Any] = {"observe": record} if records else {}
        return run(WorkerService(config, link_bytes_per_s=link_bytes_per_s, **observe), config)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
