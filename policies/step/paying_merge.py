"""Decides when an adapter is merged into the copy of the weights: the policy of `--merge auto`, only while it pays.

    mixed ──most requests use one adapter──> wanted ──its steps would have saved the cost of a copy──> copy is made ──whole──┐
      ^                                        ^                                                                             v
      ├──────────others wait too much──────────┤<───────────── merged steps are not faster: wait, twice as long ─────── compared
      └────────────────────────────────────────┴──others wait too much── merged <─────────────they are faster────────────────┘

`policies.step.merge_decision` (`--merge on`) is dLoRA's: thresholds and credits. Here costs and savings are compared:

- A merged step pays if its requests together save more time than the others lose, which rest meanwhile: with 32 requests and
  LoRA at 6% of a step one may rest, with LoRA at 3% none. They rest for `REST_MS` at most; then all are computed for as long.
- A copy is made once merged steps would have saved as much time as it costs to make.
- Then `BLOCK` steps of each kind run in turn, merged, unmerged, unmerged, merged. Merged steps go on if their median is `LEAST`
  faster, and after `AGAIN` of them they are compared again, then after twice as many. If they are not, the copy is dropped, and
  no other one is made for `RETRY_S` or `RETRY_COSTS` times what a copy costs, and for twice as long after each failure.
- K and V of merged and unmerged steps differ, so requests do not find prefixes of the other kind in the cache. The time to
  compute those again that the running requests found has to be saved before a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from motet.policies.step.batch_state import AdmissionState, S
from motet.policies.step.merge_decision import MergeCosts, Mode
from motet.policies.times.step_record import Step
from motet.shared.model import Mechanism

LEAST, LEAST_MS = 0.01, 0.05
"""Merged steps pay if they are this share and this much faster. Deciding about them takes a few hundredths of a millisecond."""
BLOCK = 16
TURNS = (True, False, False, True)
"""Whether the blocks of a comparison are merged: in this order a steady drift of step times favours neither kind."""
SETTLING = 1
"""First steps of a block that do not count: new weights come to the caches."""
AGAIN, MOST_AGAIN = 2_000, 64_000
RETRY_S, RETRY_COSTS, MOST_RETRY_S = 10.0, 200.0, 3600.0
LOOK_S = 0.1
"""Where LoRA costs too little, merging is considered again after this time, since steps wait for that."""
REST_MS = 500.0
MOST = 0.75
"""With a smaller share of the requests merging cannot pay."""
MAX_KNOWN = 8
"""Adapters of which it is known what merged steps would have saved."""
LONG = 1 << 40


@dataclass(slots=True)
class _Comparison:
    """Step times of both kinds, over what the fitted times say of a merged step with as many rows."""

    adapter: str
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
class PayingMerge:
    """The policy of one worker."""

    costs: MergeCosts
    merged: str = ""
    whole: str | None = ""
    prefix_ms: float = 0.0
    gain: float | None = None
    """How much faster merged steps were in the last comparison, as a share; None before the first one."""
    adapter: str = ""
    """The adapter that had most requests last."""
    _saved_ms: dict[str, float] = field(default_factory=dict)  # by adapter: what merged steps would have saved
    _saves_ms: float = 0.0  # a step of the last choice; negative: loses
    _each_ms: float = 0.0  # such a step takes
    _rests_ms: float = 0.0  # added to `_rested_ms` by it
    _rested_ms: float = 0.0  # time with resting requests, less the unmerged time since
    _overdue: bool = False  # steps stay unmerged until that is 0
    _comparison: _Comparison | None = None
    _again: int = AGAIN  # merged steps from one comparison to the next
    _again_left: int = 0
    _compared: str = ""  # the adapter of the last comparison
    _retry_s: float = RETRY_S
    _again_s: float = 0.0  # when a copy may be made again
    _look_s: float = 0.0  # when merging is considered again
    _now_s: float = 0.0
    _turned: bool = False

    # ---- before a step

    def looks(self, state: AdmissionState[S], now_s: float) -> bool:
        """Whether one adapter may have so many requests that merging pays; otherwise `choose` need not be asked."""
        self._now_s = now_s
        if self.merged:
            return True
        if now_s < self._look_s:
            return False
        here = [seq.adapter for seq in state.running or state.waiting[:1]]
        adapter = here[len(here) // 2] if here else ""
        return bool(adapter) and here.count(adapter) >= MOST * len(here)

    def choose(self, fcfs: Mapping[str, int], alone: Mapping[str, int], seats: int) -> Mode:
        """The mode of the next step."""
        self._turned = False
        self.adapter = adapter = max((one for one in fcfs if one), key=fcfs.__getitem__, default="")
        rows, count = sum(fcfs.values()), fcfs.get(adapter, 0)
        if not self._pays(rows, count):
            return self._unmerged()
        if self.whole != adapter:
            owed_ms = self.costs.switch_ms + self._prefixes_ms
            return self._unmerged(adapter if self._saved_ms.get(adapter, 0.0) > owed_ms else "")
        if not self._goes_on(adapter):
            return self._unmerged()
        self._turn(adapter)
        self._rests_ms = self.costs.merged_ms(count) if rows > count else 0.0
        return Mode(adapter, frozenset((adapter,)))

    def _pays(self, rows: int, count: int) -> bool:
        """Whether a merged step with `count` of the `rows` requests is predicted to pay."""
        costs = self.costs
        if not count:
            self._saves_ms = self._each_ms = self._rests_ms = 0.0
            return False
        self._each_ms, merged_ms = costs.unmerged_ms(rows), costs.merged_ms(count)
        self._saves_ms = (count * (self._each_ms - merged_ms) - (rows - count) * merged_ms) / rows
        self._rests_ms = -self._each_ms
        self._overdue = self._rested_ms >= REST_MS or (self._overdue and self._rested_ms > 0.0)
        if costs.lora < LEAST or self._each_ms - costs.merged_ms(rows) < LEAST_MS:
            self._look_s = self._now_s + LOOK_S
            return False
        return self._saves_ms > 0.0 and not self._overdue and not self.gives_up

    def _goes_on(self, adapter: str) -> bool:
        """Whether the next step is merged, now that the adapter's copy is whole: merged and unmerged steps may be compared."""
        if self._comparison is not None and self._comparison.adapter != adapter:
            self._comparison = None
        if self.merged != adapter and self._saved_ms.get(adapter, 0.0) < self._prefixes_ms:
            return False
        if self._comparison is None and self._due:
            self._comparison = _Comparison(adapter)
        return self._comparison is None or self._comparison.wants_merged

    def _unmerged(self, candidate: str = "") -> Mode:
        self._turn("")
        return Mode(candidate=candidate)

    @property
    def _prefixes_ms(self) -> float:
        """What the prefixes of a comparison's switches to merged steps cost, or of a single one."""
        return self.prefix_ms * (2 if self._due else 1)

    @property
    def _due(self) -> bool:
        """Whether merged steps of the adapter with a whole copy have to be compared with unmerged ones."""
        return self._again_left <= 0 or self._compared != self.whole

    def _turn(self, merged: str) -> None:
        if merged == self.merged:
            return
        self.merged, self._turned = merged, True
        if merged and self._comparison is None:
            self._saved_ms[merged] = 0.0

    # ---- after a step

    def ran(self, steps: int) -> None:
        """Book the time that merged steps would have saved, the time with resting requests, and the time to wait."""
        adapter, saved_ms = self.adapter, self._saved_ms
        if self.merged:
            if len(saved_ms) > 1:
                self._saved_ms = {self.merged: saved_ms.get(self.merged, 0.0)}
            if self._comparison is None:
                self._again_left -= steps
        elif adapter:
            if adapter not in saved_ms and len(saved_ms) >= MAX_KNOWN:
                del saved_ms[min(saved_ms, key=saved_ms.__getitem__)]
            saved_ms[adapter] = max(0.0, saved_ms.get(adapter, 0.0) + steps * self._saves_ms)
        self._rested_ms = max(0.0, self._rested_ms + steps * self._rests_ms)

    def timed(self, step: Step) -> None:
        """A step of the last choice took so long. Steps with prefills say nothing."""
        comparison, rows = self._comparison, step.decode_rows
        if comparison is None or step.prefill_requests or step.cold_rows or not rows:
            return
        if self.adapter != self.whole or bool(self.merged) != comparison.wants_merged or not self._each_ms:
            return
        if comparison.add(step.time_ms / self.costs.merged_ms(rows)):
            self._comparison, self._compared, self.gain = None, comparison.adapter, comparison.gain
            self._judge()

    def _judge(self) -> None:
        """Merged steps go on, or the copy is given up."""
        assert self.gain is not None, "it was measured"
        if self.gain >= LEAST:
            self._again_left, self._again = self._again, min(2 * self._again, MOST_AGAIN)
            self._retry_s = RETRY_S
        else:
            self._retry_s = max(self._retry_s, RETRY_COSTS * self.costs.switch_ms / 1e3)
            self._again_s = self._look_s = self._now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)
            self._again, self._again_left = AGAIN, 0
            self._saved_ms.clear()

    @property
    def gives_up(self) -> bool:
        """Whether the copy is to be dropped, because merged steps were not faster."""
        return self._now_s < self._again_s

    def steady(self) -> int:
        """How many steps the last choice holds for if the requests stay the same; at least 1."""
        if self._turned or self._comparison is not None or not self._each_ms:
            return 1
        left: float = LONG
        if self.merged:
            left = self._again_left
            if self._rests_ms > 0.0:
                left = min(left, (REST_MS - self._rested_ms) / self._rests_ms)
        elif self._saves_ms > 0.0:
            owed_ms = self._prefixes_ms + (0.0 if self.whole == self.adapter else self.costs.switch_ms)
            left = (owed_ms - self._saved_ms.get(self.adapter, 0.0)) / self._saves_ms
            if self._overdue:
                left = min(left, self._rested_ms / self._each_ms)
        return max(1, int(left))

    def unmerge(self) -> None:
        """The next step runs unmerged: the chosen one had nothing to compute, or the copy is dropped."""
        self._turn("")
        self._rests_ms = -self._each_ms

    # ---- for people

    @property
    def mechanism(self) -> Mechanism:
        """Whether an adapter is merged, and why, for people."""
        if self.gives_up:
            left_s = self._again_s - self._now_s
            return Mechanism("waiting", f"merged steps were {self.gain:+.1%} faster; next try in {left_s:.0f} s")
        if self.whole and (self._comparison is not None or self.gain is None):
            return Mechanism("on", "merged and unmerged steps are being compared")
        if self.merged:
            return Mechanism("on", f"merged steps are {self.gain:.1%} faster")
        if self.costs.lora < LEAST:
            return Mechanism("waiting", f"LoRA costs {self.costs.lora:.1%} of a step")
        if self._saves_ms <= 0.0:
            return Mechanism("waiting", "no adapter has enough of the requests")
        return Mechanism("waiting", "a copy has not been worth its cost yet, or lacks empty memory")
