"""`python -m bench.paced` is `motet`, but a worker's steps take the time of a `Pace`, what they do not compute of it asleep.

A step that ends late, because other processes had the cores, is followed by shorter ones until its delay is made up: a busy
worker's steps take their time on average.

Workers that share the cores of one machine have no seat that is worth anything to another one: what one computes, the others
miss. With steps as long as those of a device of its own, each worker has a capacity of its own.

With MOTET_BENCH_SEED_ENDS=1 an answer ends after as many tokens as its request's seed says, and not at the model's ending
tokens. So a client knows how long an answer will be, and no service of the mesh does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from motet.cli.main import main
from motet.policies.step.batch_state import StepPlan
from motet.policies.times.step_record import Step
from motet.services.worker.engines.request import StepOutput, StepStats
from motet.services.worker.native import engine
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.sampler import Drawn
from motet.services.worker.native.seats import LiveSequence
from motet.shared import clock, telemetry
from motet.shared.model import FinishReason, SamplingParams

VARIABLE, SEED_ENDS = "MOTET_BENCH_PACE", "MOTET_BENCH_SEED_ENDS"
PACED_S = telemetry.counter("motet_bench_paced_seconds", "what the steps should have taken")
COMPUTED_S = telemetry.counter("motet_bench_computed_seconds", "what they took before they slept")
BEHIND_S = telemetry.counter("motet_bench_behind_seconds", "how late the steps ended, summed over all")
LOST_S = telemetry.counter("motet_bench_lost_seconds", "delays that were not made up")
MOST_BEHIND_S = 0.2  # a longer delay is not made up


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a step takes, in milliseconds: one pass over the weights, and what its rows add to it.

    `token_ms`: per token of a prompt; `row_ms`: per request that decodes; `rank_ms`: per rank, summed over the step's requests.
    """

    step_ms: float
    token_ms: float = 0.0
    row_ms: float = 0.0
    rank_ms: float = 0.0

    def takes_ms(self, step: Step) -> float:
        """The time of a step that computes at least one row."""
        ranks = step.decode_rank_sum + step.prefill_rank_sum
        return self.step_ms + self.token_ms * step.prefill_tokens + self.row_ms * step.decode_rows + self.rank_ms * ranks

    def variables(self) -> dict[str, str]:
        """It as a variable for the processes that keep it."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Pace:
        """The pace that the variable says. Raises KeyError without it, and msgspec.ValidationError naming a wrong field."""
        return msgspec.json.decode(variables[VARIABLE], type=cls)


class Schedule:
    """When the steps of one engine should end. Times in seconds."""

    def __init__(self) -> None:
        self._due_s: float | None = None  # the end of the last step, while there is work

    def end_s(self, began_s: float, takes_s: float) -> float:
        """When a step should end that began now and takes so long."""
        if self._due_s is None:
            self._due_s = began_s
        elif began_s - self._due_s > MOST_BEHIND_S:
            LOST_S.inc(began_s - self._due_s - MOST_BEHIND_S)
            self._due_s = began_s - MOST_BEHIND_S
        self._due_s += takes_s
        return self._due_s

    def ended(self, now_s: float, *, busy: bool) -> None:
        """The step has ended. Not `busy`: the next one begins when a request comes."""
        assert self._due_s is not None, "a step has begun"
        behind_s = max(0.0, now_s - self._due_s)
        BEHIND_S.inc(behind_s)
        if not busy:
            LOST_S.inc(behind_s)
            self._due_s = None


def keep(pace: Pace) -> None:
    """Make every step of this process that computes at least one row take its time, as the engine measures it too."""
    step, run, schedule = Engine.step, Engine._run, Schedule()
    began_s = 0.0

    def paced_run(self: Engine, plan: StepPlan[LiveSequence], stats: StepStats) -> Drawn | None:
        drawn = run(self, plan, stats)
        if stats.decode_rows or stats.prefill_requests:
            takes_s, computed_s = pace.takes_ms(stats) / 1000.0, clock.now_s() - began_s
            time.sleep(max(0.0, schedule.end_s(began_s, takes_s) - clock.now_s()))
            PACED_S.inc(takes_s)
            COMPUTED_S.inc(computed_s)
        return drawn

    def paced_step(self: Engine, now_s: float) -> StepOutput:
        nonlocal began_s
        began_s = clock.now_s()
        output = step(self, now_s)
        stats = output.stats
        if stats.decode_rows or stats.prefill_requests:
            schedule.ended(clock.now_s(), busy=stats.running + stats.waiting > 0)
        return output

    setattr(Engine, "_run", paced_run)  # noqa: B010 - mypy knows no assignment to a method of another module
    setattr(Engine, "step", paced_step)  # noqa: B010


def end_by_seed() -> None:
    """End every answer of this process after as many tokens as its request's seed says."""

    def finish(live: LiveSequence) -> FinishReason | None:
        return "stop" if live.output_tokens >= (live.request.sampling.seed or 1) else None

    def no_ending(self: Engine, sampling: SamplingParams) -> set[int]:
        return set()

    setattr(engine, "_finish_of", finish)  # noqa: B010
    setattr(Engine, "_ending", no_ending)  # noqa: B010


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        keep(Pace.of(os.environ))
        if os.environ.get(SEED_ENDS) == "1":
            end_by_seed()
    sys.exit(main())
