"""Decides when an adapter that is alone in the batch is merged into the copy of the weights: the policy of `--merge auto`.

    mixed ──one adapter has all requests──> alone ──its steps would have saved the cost of a copy──> copy is made ──whole──┐
      ^                                       ^                                                                            v
      ├────────another request joins──────────┤<──────────── merged steps are not faster: wait, twice as long ──────── compared
      └───────────────────────────────────────┴────another request joins──────────── merged <──they are faster───────────────┘

`policies.step.merge_decision` (`--merge on`) lets other requests rest while an adapter is merged. Here none ever rests: steps are
merged only while all requests that first come, first served would compute use the adapter, and a switch is free once the copy
is whole. So all that merging can cost is the copy, its memory, and steps that are slower than predicted:

- A copy is made once the steps with the adapter alone would have saved as much time as it costs to make.
- Then `BLOCK` steps of each kind run in turn, merged, unmerged, unmerged, merged. Merged steps go on if their median is `LEAST`
  faster. Otherwise the copy is dropped, and no other one is made for `RETRY_MS`, for twice as long after each failure. The
  comparison is repeated after `AGAIN` merged steps, then after twice as many.
- K and V of merged and unmerged steps differ, so requests do not find prefixes of the other kind in the cache. The time to compute
  those again that the running requests found has to be saved before a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from motet.policies.step.batch_state import AdmissionState, S
from motet.policies.step.merge_decision import MergeCosts, Mode
from motet.policies.times.step_record import Step

LEAST = 0.01
"""Merged steps pay if they are this share faster."""
BLOCK = 8
TURNS = (True, False, False, True)
"""Whether the blocks of a comparison are merged: in this order a steady drift of step times favours neither kind."""
SETTLING = 1
"""First steps of a block that do not count: new weights come to the caches."""
AGAIN, MOST_AGAIN = 2_000, 64_000
RETRY_MS, MOST_RETRY_MS = 10_000.0, 3_600_000.0
LONG = 1 << 40


@dataclass(slots=True)
class _Comparison:
    """Step times of both kinds, over what the fitted times say of a merged step with as many rows."""

    block: int = 0
    steps: int = 0  # of the block
    merged: list[float] = field(default_factory=list)
    unmerged: list[float] = field(default_factory=list)

    @property
    def wants_merged(self) -> bool:
        """Whether the present block is merged."""
        return TURNS[self.block]

    def add(self, time: float) -> bool:
        """Take in a step of the present block. Returns whether the comparison is complete."""
        self.steps += 1
        if self.steps > SETTLING:
            (self.merged if self.wants_merged else self.unmerged).append(time)
        if self.steps < SETTLING + BLOCK:
            return False
        if self.block + 1 == len(TURNS):
            return True
        self.block, self.steps = self.block + 1, 0
        return False

    @property
    def gain(self) -> float:
        """How much faster merged steps were, as a share."""
        return median(self.unmerged) / median(self.merged) - 1.0


@dataclass(eq=False)
class LoneMerging:
    """The policy of one worker."""

    costs: MergeCosts
    merged: str = ""
    whole: str | None = ""
    prefix_ms: float = 0.0
    """The time to compute again the prefixes that the running requests found in the cache."""
    gain: float | None = None
    """How much faster merged steps were in the last comparison, as a share; None before the first one."""
    adapter: str = ""
    """The adapter that was alone last."""
    _saved_ms: float = 0.0  # by merged steps, had all since the adapter was alone been merged
    _saves_ms: float = 0.0  # each step of the last choice
    _each_ms: float = 0.0  # one such step takes
    _comparison: _Comparison | None = None
    _again: int = AGAIN  # merged steps from one comparison to the next
    _again_left: int = 0
    _retry_ms: float = RETRY_MS
    _wait_ms: float = 0.0  # until a copy may be made again, in time with an adapter alone
    _turned: bool = False

    # ---- before a step

    def looks(self, state: AdmissionState[S]) -> bool:
        """Whether one adapter could be alone in the next step; otherwise `choose` need not be asked."""
        if self.merged:
            return True
        here = state.running or state.waiting[:1]
        adapter = here[0].adapter if here else ""
        return bool(adapter) and here[-1].adapter == adapter and all([seq.adapter == adapter for seq in here])

    def choose(self, fcfs: Mapping[str, int], alone: Mapping[str, int], seats: int) -> Mode:
        """The mode of the next step: merged if the adapter of all requests has a whole copy and merged steps pay."""
        self._turned, self._saves_ms, self._each_ms = False, 0.0, 0.0
        adapter = next(iter(fcfs), "") if len(fcfs) == 1 else ""
        if not adapter:
            self._turn("")
            return Mode()
        if adapter != self.adapter:
            self.adapter, self._saved_ms = adapter, 0.0
        rows = fcfs[adapter]
        self._each_ms = self.costs.unmerged_ms(rows)
        self._saves_ms = self._each_ms - self.costs.merged_ms(rows)
        if self._wait_ms > 0.0 or self.costs.lora < LEAST:
            self._turn("")
            return Mode()
        if self.whole != adapter:
            self._turn("")
            return Mode(candidate=adapter if self._saved_ms > self.costs.switch_ms + self._prefixes_ms else "")
        merged = self.merged == adapter or self._saved_ms >= self._prefixes_ms
        if merged and self._comparison is None and self._again_left <= 0:
            self._comparison = _Comparison()
        if self._comparison is not None and not self._comparison.wants_merged:
            merged = False
        self._turn(adapter if merged else "")
        return Mode(adapter, frozenset((adapter,))) if merged else Mode()

    @property
    def _prefixes_ms(self) -> float:
        """What the prefixes of a comparison's switches to merged steps cost, or of a single one."""
        return self.prefix_ms * (2 if self._again_left <= 0 else 1)

    def _turn(self, merged: str) -> None:
        if merged == self.merged:
            return
        self.merged, self._turned = merged, True
        if merged and self._comparison is None:
            self._saved_ms = 0.0

    # ---- after a step

    def ran(self, steps: int) -> None:
        """Book the time that merged steps would have saved, and the time to wait."""
        self._saved_ms += steps * self._saves_ms
        if self._wait_ms > 0.0:
            self._wait_ms -= steps * self._each_ms
        if self.merged and self._comparison is None:
            self._again_left -= steps

    def timed(self, step: Step) -> None:
        """A step of the last choice took so long. Steps with prefills say nothing."""
        comparison, rows = self._comparison, step.decode_rows
        if comparison is None or step.prefill_requests or step.cold_rows or not rows:
            return
        if self.adapter != self.whole or bool(self.merged) != comparison.wants_merged or not self._each_ms:
            return
        if comparison.add(step.time_ms / self.costs.merged_ms(rows)):
            self._comparison, self.gain = None, comparison.gain
            self._judge()

    def _judge(self) -> None:
        """Merged steps go on, or the copy is given up."""
        assert self.gain is not None, "it was measured"
        if self.gain >= LEAST:
            self._again_left, self._again = self._again, min(2 * self._again, MOST_AGAIN)
            self._retry_ms = RETRY_MS
        else:
            self._wait_ms, self._retry_ms = self._retry_ms, min(2 * self._retry_ms, MOST_RETRY_MS)
            self._again, self._again_left, self._saved_ms = AGAIN, 0, 0.0

    @property
    def gives_up(self) -> bool:
        """Whether the copy is to be dropped, because merged steps were not faster."""
        return self._wait_ms > 0.0

    def steady(self) -> int:
        """How many steps the last choice holds for if the requests stay the same; at least 1."""
        if self._turned or self._comparison is not None:
            return 1
        if self._wait_ms > 0.0:
            return max(1, int(self._wait_ms / self._each_ms)) if self._each_ms else LONG
        if self.merged:
            return max(1, self._again_left)
        owed_ms = self._prefixes_ms - self._saved_ms + (0.0 if self.whole == self.adapter else self.costs.switch_ms)
        return max(1, int(owed_ms / self._saves_ms)) if self._saves_ms > 0.0 else LONG

    def unmerge(self) -> None:
        """The next step runs unmerged: the chosen one had nothing to compute, or the copy is dropped."""
        self._turn("")

    # ---- for people

    @property
    def why(self) -> tuple[str, str]:
        """(on, waiting; the reason)."""
        if self.merged:
            if self.gain is None or self._comparison is not None:
                return "on", "merged and unmerged steps are being compared"
            return "on", f"merged steps are {self.gain:.1%} faster"
        if self._wait_ms > 0.0 and self.gain is not None:
            return "waiting", f"merged steps were {self.gain:+.1%} faster; another try after {self._wait_ms / 1e3:.0f} s"
        if not self._each_ms:
            return "waiting", "no adapter has all requests"
        if self.costs.lora < LEAST:
            return "waiting", f"LoRA costs {self.costs.lora:.1%} of a step"
        if self.whole == self.adapter:
            return "on", "merged and unmerged steps are being compared"
        return "waiting", "a copy has not been worth its cost yet, or has no empty memory"
