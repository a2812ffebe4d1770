"""How far merging can get where no adapter dominates: an estimate for `bench.dlora`, in the manner of a fluid queue.

A policy that computes one adapter's requests merged, then the next one's, saves what LoRA costs these requests and pays for
every change. The batch is full of the last adapter's requests then. They can go on alone while fewer and fewer are left, or
give up their KV and compute it again in their next turn; resting with their KV or going on unmerged costs more. `change_ms` is
the cheapest point to stop at. Few changes need long cycles, and with long cycles many requests wait. An adapter with the rate
r whose turn comes every c seconds has r c (1 - r / served per second) / 2 waiting requests on average, so that with Q waiting
ones the most that can be saved is

    maximise  sum_i (r_i saved_ms - change_ms / c_i)    over the adapters that are merged and their c_i,
    such that sum_i r_i c_i (1 - r_i / served) / 2 <= Q

and the best c_i are proportional to 1 / sqrt(r_i (1 - r_i / served)). While the queue grows over the run, more can be saved.
The rest is a search for the rate at which the average latency is the objective. Everything is known in advance here and nothing
is lost to chance, so a policy reaches less. Recorded arrivals come in bursts and these do not. So only the place of the found
rate between that without merging and that without LoRA is used, with the rates that the twin finds for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from motet.shared.model import PerfModel

STEPS = 600
"""Time steps of the queue's growth."""
SAMPLES = 20_000
EVERY = 20
"""Steps between the points at which a batch may stop to shrink."""
Floats = NDArray[np.float64]


class Grouping:
    """One worker that groups requests by adapter.

    `prompt`, `output`: tokens per request; `kv_tokens`: room of a batch; `context_token_ms`: time of attention per token;
    `lora`: what LoRA adds to all other time of a step, as a share.
    """

    def __init__(
        self, prompt: Floats, output: Floats, perf: PerfModel, *, kv_tokens: float, context_token_ms: float, lora: float
    ) -> None:
        draw = np.random.default_rng(0)
        running = draw.choice(len(output), SAMPLES, p=output / output.sum())  # long ones are met more often
        age = draw.random(SAMPLES) * output[running]
        left = output[running] - age
        held = prompt[running] + age
        self.batch = kv_tokens / float(held.mean())
        self._tokens = float(output.mean())
        row_ms = perf.decode_row_ms + context_token_ms * float(held.mean())
        own_ms = self._tokens * (perf.decode_base_ms / self.batch + row_ms) + float(prompt.mean()) * perf.prefill_token_ms
        attention_ms = self._tokens * context_token_ms * float(held.mean())
        self.saved_ms = lora * (own_ms - attention_ms)
        self.unmerged_ms = own_ms + self.saved_ms
        """The worker's time that a request takes if all its steps are unmerged."""
        steps = EVERY * np.arange(50)
        stay = left > steps[:, None]
        shrink_ms = perf.decode_base_ms * EVERY * np.cumsum(1.0 - stay.mean(axis=1))
        again_ms = self.batch * (stay * (held + steps[:, None])).mean(axis=1) * perf.prefill_token_ms
        self.change_ms = float((shrink_ms + again_ms).min())
        """The time of the cheapest change from one adapter to another."""

    def saved(self, rates: Floats, waiting: float, changes: float) -> float:
        """The largest share of the worker's time that merging saves, with `waiting` waiting requests.

        `rates`: requests/s of each adapter; `changes`: factor on the cost of changes between adapters.
        """
        per_s = 1000.0 / (self.unmerged_ms - self.saved_ms)
        weight = np.sort(rates)[::-1]
        best = 0.0
        for count in range(1, len(weight) + 1):
            some = weight[:count]
            cost = some * np.maximum(0.0, 1.0 - some / per_s) / 2.0
            changes_ms = changes * self.change_ms * float(np.sqrt(cost).sum()) ** 2 / waiting  # per second
            best = max(best, (float(some.sum()) * self.saved_ms - changes_ms) / 1000.0)
        return best

    def latency_ms(self, shares: Sequence[float], rate: float, seconds: float, saves: float, changes: float) -> float:
        """Average latency per output token at this rate. `saves`, `changes`: factors on what merging saves and changes cost."""
        waiting, total = 1e-9, 0.0
        rates, step_s = rate * np.asarray(shares) / sum(shares), seconds / STEPS
        for _ in range(STEPS):
            busy_ms = self.unmerged_ms / 1000.0 - saves * self.saved(rates, waiting, changes) / rate
            waiting = max(1e-9, waiting + (rate - 1.0 / busy_ms) * step_s)
            total += (waiting + self.batch) * step_s
        total += waiting * waiting * self.unmerged_ms / 2000.0  # those left at the end
        return 1000.0 * total / (rate * seconds) / self._tokens

    def sustained(
        self, shares: Sequence[float], seconds: float, slo_ms: float, *, saves: float = 1.0, changes: float = 1.0
    ) -> float:
        """The rate at which the average latency equals the objective, requests/s."""
        low, high = 1.0, 20.0
        while high - low > 1e-3:
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.latency_ms(shares, middle, seconds, saves, changes) < slo_ms else (low, middle)
        return low

    def part(self, shares: Sequence[float], seconds: float, slo_ms: float) -> float:
        """Where the rate of `sustained` lies between that without merging (0) and that without LoRA (1).

        0 if the run is too short for any of them to miss the objective.
        """
        none, found, free = (
            self.sustained(shares, seconds, slo_ms, saves=saves, changes=changes)
            for saves, changes in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.0))
        )
        return (found - none) / (free - none) if free > none else 0.0
