"""`python -m bench.paced` is `motet`, but a worker's steps take at least MOTET_BENCH_STEP_MS, the rest of it asleep.

With MOTET_BENCH_TOKEN_MS each token of a prompt in the step makes it so much longer.

Workers that share the cores of one machine have no seat that is worth anything to another one: what one computes, the others
miss. With steps as long as those of a device of its own, each worker has a capacity of its own.
"""

from __future__ import annotations

import os
import sys
import time

from motet.cli.main import main
from motet.services.worker.engines.request import StepOutput
from motet.services.worker.native.engine import Engine
from motet.shared import clock

VARIABLE, TOKEN_VARIABLE = "MOTET_BENCH_STEP_MS", "MOTET_BENCH_TOKEN_MS"


def pace(step_ms: float, token_ms: float) -> None:
    """Make every step of this process that computes at least one row take `step_ms`, and `token_ms` for each prompt token."""
    step = Engine.step

    def paced(self: Engine, now_s: float) -> StepOutput:
        began_s = clock.now_s()
        output = step(self, now_s)
        if output.stats.decode_rows or output.stats.prefill_requests:
            takes_ms = step_ms + token_ms * output.stats.prefill_tokens
            time.sleep(max(0.0, takes_ms / 1000.0 - (clock.now_s() - began_s)))
        return output

    setattr(Engine, "step", paced)  # noqa: B010 - mypy knows no assignment to a method of another module


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        pace(float(os.environ[VARIABLE]), float(os.environ.get(TOKEN_VARIABLE, "0")))
    sys.exit(main())
