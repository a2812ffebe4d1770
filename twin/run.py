"""A request inside a simulated engine, and the steps that the engine makes in one go.

A *run* is a number of decode steps that `policies.step.batch_state.steady_steps` says are all alike. It is one event. An
arrival in the middle shortens it to the end of the step it falls into, where the live engine would see it; a report in the
middle books the steps that have ended by then:

    step      |  1  |  2  |  3  |  4  |  5  |  6  |     planned
    report                   ^                          1 and 2 are booked, the run is now 3 to 6
    arrival                   ^                         the run ends after 3
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from motet.policies.step.batch_state import Sequence, StepPlan
from motet.policies.step.image_batch import ImageSequence
from motet.shared.model import RequestBrief
from motet.twin.steps import Batch, elapsed_ps, steps_within
from motet.twin.workload import Request


@dataclass(slots=True, eq=False, kw_only=True)
class Live(Sequence):
    """A request inside the engine."""

    request: Request
    end_length: int  # prompt and output tokens, when it ends
    brief: RequestBrief  # as the view shows it
    decoding: bool = False
    last_token_ps: int = -1  # of the first token, and of the last one before a preemption or a move
    rested_ps: int = -1  # when it began to rest, since another adapter is merged


@dataclass(slots=True, eq=False, kw_only=True)
class Drawn(ImageSequence):
    """A request inside an image engine."""

    request: Request
    brief: RequestBrief  # as the view shows it
    row_ranks: float  # its rows of 512 x 512 pixels, times the ranks of its adapters
    last_token_ps: int = -1  # of its latest output position
    complete: bool = False  # its picture is decoded

    @property
    def length(self) -> int:
        """The tokens of its prompt, and its output positions so far: its steps, and the picture."""
        return self.request.prompt_tokens + self.step + self.complete

    @property
    def end_length(self) -> int:
        """Its length at its end."""
        return self.request.prompt_tokens + self.steps + 1


AnyLive = Live | Drawn
"""A request inside an engine of either kind."""


class Run(msgspec.Struct, eq=False):
    """Running steps. `began_ps`: the start of the first step that is not booked yet."""

    plan: StepPlan[Live]
    batch: Batch
    slice_ps: int  # of its first step, before which a slice of the merged copy is made
    began_ps: int
    first_ps: int
    growth_ps: int
    steps: int
    left: int  # steps until the first of its decodes ends
    serial: int

    def ended_by(self, now_ps: int) -> int:
        """How many of its steps have ended by `now_ps`."""
        return steps_within(self.first_ps, self.growth_ps, now_ps - self.began_ps)

    def took_ps(self, steps: int) -> int:
        """The time of its first steps."""
        return elapsed_ps(self.first_ps, self.growth_ps, steps)

    def booked(self, steps: int) -> None:
        """Its first steps are booked, and the rest is the run."""
        self.began_ps += self.took_ps(steps)
        self.first_ps += self.growth_ps * steps
        self.steps -= steps
        self.left -= steps
