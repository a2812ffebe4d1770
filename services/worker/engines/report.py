"""What an engine tells the event loop about a step."""

from __future__ import annotations

from dataclasses import dataclass

from motet.services.worker.engines.request import StepOutput


@dataclass(slots=True)
class StepReport:
    """The event loop's report of one step, which began at `began_s`; its duration is in the statistics.

    `failures` counts consecutive failing steps, this one included.
    """

    step: int
    began_s: float
    output: StepOutput
    failures: int
    kv_blocks_free: int
    adapter_bytes_free: int
