"""The second copy of the weights that a live engine merges an adapter into: its adapter, its memory, and its cost.

    no copy ───want──> memory is claimed, KV blocks first come free ──> it is made beside the steps ──made──> whole
        ^                                                                    │ another adapter is wanted        │
        └──────────────── drop: KV blocks are short, or the adapter is gone ─┴──────────────────────────────────┘

`policies.step.merge_decision` says which adapter should be merged. Where a copy has to be made first, steps run unmerged until
it is whole; from then on both modes are one step away. The copy is a cache: it takes KV blocks without users, leaves a quarter
of the KV share free, and gives all blocks back as soon as a sequence finds none. Where KV cache and adapters have fixed
regions, as on a GPU, it takes memory that neither has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from motet.policies.memory.ledger import Budget, Class
from motet.policies.step.batch_state import S, Sequence, StepPlan
from motet.policies.step.merge_decision import CopyModes, MergeConfig, MergeCosts
from motet.policies.times.perf_model import MIB
from motet.policies.times.step_record import Step
from motet.policies.times.step_times import OnlineFit
from motet.shared.model import Mechanism, PerfModel

MERGE = MergeConfig(
    alpha=0.9,
    beta=0.85,
    lowest=0.8,
    lowest_beta=0.8,
    highest=1.0,
    period=50,
    credit=200.0,
    starving=240.0,
    normal=200.0,
    rest_ms=500.0,
    min_speedup=0.01,
)
"""The constants of a live engine. LoRA costs its steps 5 to 15%, so an adapter has to be nearly alone, and no threshold falls
far below that however long merging has won. A switch costs nothing once the copy is whole. With these credits a lone request
rests for some 40 steps before it is served first, and for half a second at most where steps are long."""
NOTHING_KNOWN = MergeCosts(switch_ms=0.0, step_ms=0.0, row_ms=0.0, lora=0.0)
"""The costs before the first step."""
START_MS_PER_MIB, START_PASSES = 1.0, 4.0
"""Assumed time of making a copy until one has been made: at most so many passes of one row through the model, each of which
reads the weights once."""
PRIOR_LORA = 0.25
"""Expected cost of LoRA before merged and unmerged steps have been compared, as a share of the start values' cost. The start
values hold for batches of any ranks and may be far off for one adapter; a value that is too small only delays the first
merge. A policy that compares merged steps with others tries the start values themselves."""
SHAPE = 2e-5
"""Weight of the start values' proportions (`OnlineFit.SHAPE`). It is small, because batches do not look alike here: the same
requests run with LoRA and without."""
SHARE = 0.2
"""Share of a step's time that a slice takes, and so of the time between two tokens while a copy is made."""
EVERY = 4
"""One in this many steps is weighed, because the fit would be a noticeable part of a small model's step."""


class Lender(Protocol):
    """The lender of the copy's memory: `policies.memory.boundary.Boundary` or `SpareMemory`."""

    @property
    def lent_bytes(self) -> int:
        """The bytes lent to the copy."""

    def lends(self, held: Callable[[], Mapping[Class, int]]) -> None:
        """From now on a copy may borrow. `held` returns its bytes by class."""

    def lend(self, size_bytes: int, *, careful: bool = False) -> bool:
        """Change the memory lent to the copy to `size_bytes`; returns whether the copy has that much now.

        `careful`: only memory that nothing else uses is lent.
        """


class SpareMemory:
    """Memory of a device beside fixed regions for KV cache and adapters.

    It only books the copy's bytes; whether the device has that much is known when the copy is allocated.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.lent_bytes = 0

    def lends(self, held: Callable[[], Mapping[Class, int]]) -> None:
        self._claim = self._budget.claim("merged", 0, held)

    def lend(self, size_bytes: int, *, careful: bool = False) -> bool:
        self._budget.total_bytes += size_bytes - self.lent_bytes
        self.lent_bytes = self._claim.size_bytes = size_bytes
        return True


class CopySlices:
    """The work on a copy, a slice before each step: when it is dropped and begun, how long a slice is, when it is whole.

    A slice runs on the threads of the steps, between two steps. A separate thread would take a core from the threads of a step,
    which all wait for the slowest of them. Times are in any unit; `ms` converts them.
    """

    def __init__(self, copy: MergedCopy, ms: float) -> None:
        self._copy, self._ms = copy, ms
        self._making = ""  # the adapter of the present copy
        self._refused = False  # the system had no memory for it
        self._wanted = False  # the last plan goes on with it
        self._took = 0.0

    def dropped(self, plan: StepPlan[S]) -> bool:
        """Whether the plan drops the present copy. Its memory is freed before the boundary of KV blocks and adapters moves."""
        if plan.dropped:
            self._making = ""
        return plan.dropped

    def begun(self, plan: StepPlan[S]) -> bool:
        """Whether a copy for `plan.copy_started` begins, after the boundary has moved."""
        begins = plan.copy_started not in ("", self._making)
        if begins:
            self._making, self._refused, self._took = plan.copy_started, False, 0.0
        self._wanted = bool(plan.copy_started) and not self._refused
        return begins

    def refuse(self) -> None:
        """The system has no memory for the copy: steps stay unmerged, and another adapter's copy may fit."""
        self._refused, self._wanted = True, False

    def slice(self, step: float) -> float:
        """How long to work on the copy before the next step, after one of this length; 0: not at all."""
        return SHARE * step if self._wanted else 0.0

    def worked(self, took: float, *, whole: bool) -> None:
        """A slice took so long; `whole`: the copy is complete."""
        self._took += took
        if whole:
            self._wanted = False
            self._copy.made(self._took * self._ms)


class MergedCopy:
    """The merged copy of one engine. `merging` learns when it is complete.

    `careful`: it takes memory that nothing else uses. `block_size`: tokens of a KV block; 0: prefixes count as nothing.
    """

    def __init__(
        self, merging: CopyModes, boundary: Lender, perf: PerfModel, *, careful: bool = False, block_size: int = 0
    ) -> None:
        self._merging, self._boundary, self._careful, self._block_size = merging, boundary, careful, block_size
        self._prefill_token_ms = perf.prefill_token_ms
        prior_ms = perf.decode_lora_ms * (1.0 if careful else PRIOR_LORA)
        self._times = OnlineFit([perf.decode_base_ms, perf.decode_row_ms, prior_ms], shape=SHAPE)
        self._ms_per_mib: float | None = None  # of the last copy
        self._start_ms = START_PASSES * (perf.decode_base_ms + perf.decode_row_ms)
        self._least_lora_ms = prior_ms  # until a copy has been whole: it has to be tried once
        self._steps = 0
        self.adapter = ""
        """The adapter of the copy, also while it is being made."""
        self.size_bytes = 0
        """The size of the complete copy."""
        self.whole = False
        merging.whole = ""
        boundary.lends(lambda: {"used" if merging.merged else "idle": boundary.lent_bytes})

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the KV blocks that are lent to the copy."""
        return self._boundary.lent_bytes

    @property
    def lora(self) -> float:
        """What LoRA adds to an unmerged step of the last batch, as a share of the step without it."""
        return self._merging.costs.lora

    @property
    def mechanism(self) -> Mechanism:
        """Whether an adapter is merged, and why, for people."""
        return self._merging.mechanism

    def want(self, adapter: str, size_bytes: int) -> bool:
        """Claim memory for a copy of this adapter, a part in each step. Returns whether the copy can be made now."""
        if adapter != self.adapter:
            self.adapter, self.size_bytes, self.whole = adapter, size_bytes, False
            self._merging.whole = ""
        return self._boundary.lend(size_bytes, careful=self._careful)

    def made(self, took_ms: float) -> None:
        """The copy is complete. Making it took `took_ms` from the steps."""
        self.whole, self._merging.whole = True, self.adapter
        self._least_lora_ms = 0.0
        self._ms_per_mib = took_ms * MIB / self.size_bytes

    def drop(self) -> None:
        """Drop the copy. The next step runs unmerged."""
        if self._merging.merged:
            self._merging.unmerge()
        self.adapter, self.size_bytes, self.whole, self._merging.whole = "", 0, False, ""
        self._boundary.lend(0)

    # ---- what it costs and saves

    def observe(self, step: Step) -> None:
        """Take in a step that has run. Ranks of a merged step are 0. Only steps without prefills count."""
        self._merging.timed(step)
        self._steps += 1
        if self._steps % EVERY:
            return
        if step.decode_rows and not step.prefill_requests and not step.cold_rows:
            self._times.observe((1.0, step.decode_rows, step.decode_rank_sum), step.time_ms)

    @property
    def steady(self) -> int:
        """How many steps run before one is weighed again."""
        return EVERY - self._steps % EVERY

    def weigh(self, running: Collection[Sequence]) -> None:
        """Tell the policy how long a step of these sequences takes in either mode, and what their prefixes cost."""
        if self._steps % EVERY:
            return
        found = {block for seq in running if seq.found for block in seq.blocks[: seq.found]}
        self._merging.prefix_ms = len(found) * self._block_size * self._prefill_token_ms
        step_ms, row_ms, lora_ms = self._times.weights
        plain_ms = step_ms + row_ms * len(running)
        size = self.size_bytes or max([seq.merged_bytes for seq in running], default=0)
        self._merging.costs = MergeCosts(
            switch_ms=self._making_ms(size),
            step_ms=step_ms,
            row_ms=row_ms,
            lora=max(lora_ms, self._least_lora_ms) * sum([seq.rank for seq in running]) / plain_ms if plain_ms else 0.0,
        )

    def _making_ms(self, size_bytes: int) -> float:
        """How long it takes to make a copy."""
        if self._ms_per_mib is not None:
            return self._ms_per_mib * size_bytes / MIB
        return min(START_MS_PER_MIB * size_bytes / MIB, self._start_ms)
