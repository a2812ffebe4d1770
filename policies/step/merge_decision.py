"""Decides before every step whether an adapter is merged into the base weights (dLoRA section 4.2 and appendix A.1).

    unmerged    a step computes any mixture of adapters, and LoRA makes every step longer
    merged      a step computes one adapter's requests without LoRA; all other requests rest, with what they hold

Algorithm 1: merge the adapter with the most requests when there are more than `alpha` times as many of them as first come,
first served would compute; unmerge when there are fewer than `beta` times as many. Algorithm 2: at every break point (the mode
changed, another adapter has the most requests, or `period` steps have passed) the threshold of the present mode is tuned by the
throughput that both modes would have had since the last one. Algorithm 3: credits keep adapters from starving. A step moves
one credit per request that it displaces from the adapters that it computes to those of the displaced requests; the sum stays
the same. An adapter above `starving` credits is served before all others until it is below `normal`.

Where a copy of the weights is made beside the steps (`policies.step.merged_copy`), steps stay unmerged until it is whole.
Making it is the switch's cost. A copy is made once the time that merged steps would have saved, since the adapter has the most
requests, exceeds this cost. So a copy that does not pay costs at most as much as it would have to save. It may take longer than
`period` steps save: a break point that only this cost decides is put off, and the saved time adds up.

What the paper leaves open, and what holds here. The rule for `beta` mirrors the one for `alpha`: the other mode pays for the
switch. Steps with starving requests are unmerged and have all other requests too, as far as there is room: the paper's step has
the starving ones alone, but empty places help no request. In every unmerged step adapters with more credits than at the start
give back `relief` of them per request, to those that have less: a starving adapter while it is served, and the others too, or
an adapter that has paid all it had would never be merged again. Base requests (adapter "") rest and starve like the others and
are never merged.

Three things are not in the paper. A resting request keeps its seat and its KV blocks, so a merged batch is the smaller the more
requests rest. So from a share of `drain` on, the biggest adapter's waiting requests join an unmerged batch first: the others
end, few are left to rest, and then the adapter is merged. And `rest_ms` bounds the gap between two tokens of a resting request,
whatever the credits say: after so much time with resting requests, steps are unmerged for as long. And with `min_speedup` an
adapter is merged only while its requests, in the seats that the resting ones leave, are computed so much faster than all
requests unmerged: thresholds on its share know neither how many seats there are nor what LoRA costs this batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from motet.policies.step.batch_state import AdmissionState, S
from motet.policies.times.step_record import Step
from motet.shared.model import Mechanism

MAX_KNOWN = 4096
"""Credits are kept for this many adapters; beyond, those without a request here are forgotten, the oldest first."""
ROUNDING = 1e-9
"""Smaller differences of credits than this share of the initial credits count as none."""


class Mode(NamedTuple):
    """How the next step runs."""

    merged: str = ""  # the adapter in the weights; "" for none
    only: frozenset[str] | None = None  # the adapters whose requests the step computes; None: all
    first: frozenset[str] = frozenset()  # the adapters whose waiting requests join before all others
    candidate: str = ""  # would be merged if its copy of the weights were whole


class Modes(Protocol):
    """Chooses the mode of each step of one worker."""

    merged: str
    """The adapter that is in the weights now."""
    whole: str | None
    """The adapter of which there is a merged copy, "" for none; None where a switch changes the weights themselves, and the
    engine stops for it."""

    def choose(self, fcfs: Mapping[str, int], alone: Mapping[str, int], seats: int) -> Mode:
        """The mode of the next step, in which at most `seats` requests are computed.

        Both maps count requests by adapter. `fcfs`: those that first come, first served would compute. `alone`: those that
        could be computed if there were no other adapters.
        """

    def ran(self, steps: int) -> None:
        """`steps` steps ran in the mode chosen last, with the requests of that choice."""

    def steady(self) -> int:
        """How many steps the last choice holds for if the requests stay the same; at least 1."""

    def unmerge(self) -> None:
        """The chosen step had nothing to compute, so the next step runs unmerged."""


class CopyModes(Modes, Protocol):
    """Chooses the modes of an engine that makes a merged copy beside its steps."""

    costs: MergeCosts
    """The present estimate."""
    prefix_ms: float
    """The time to compute again the prefixes that the running requests found in the cache."""

    def looks(self, state: AdmissionState[S], now_s: float) -> bool:
        """Whether `choose` has to be asked about the next step. If not, the step is unmerged."""

    def timed(self, step: Step) -> None:
        """A step in the mode chosen last, and how long it took."""

    @property
    def gives_up(self) -> bool:
        """Whether the copy is to be dropped."""

    @property
    def mechanism(self) -> Mechanism:
        """Whether it merges, and the reason, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeCosts:
    """Step times of an engine with merged weights, in milliseconds.

    `lora`: what LoRA adds to an unmerged step, as a share of the step without it.
    """

    switch_ms: float
    step_ms: float
    row_ms: float
    lora: float

    def merged_ms(self, rows: int) -> float:
        """The time of a merged step with `rows` requests."""
        return self.step_ms + self.row_ms * rows

    def unmerged_ms(self, rows: int) -> float:
        """The time of an unmerged step with `rows` requests of any adapters."""
        return self.merged_ms(rows) * (1.0 + self.lora)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """The constants of the policy. One credit is one displaced request in one step.

    The paper states no values; these are the choice of `python -m bench dlora --tune`.
    """

    alpha: float = 0.75  # thresholds at the start
    beta: float = 0.6
    decrement: float = 0.02  # gamma_dec and gamma_mul
    multiply: float = 1.05
    lowest: float = 0.3  # alpha's lower bound
    lowest_beta: float = 0.3
    highest: float = 1.5  # of both
    period: int = 100  # steps between two break points, at most
    credit: float = 20_000.0  # of an adapter that the policy has not seen yet
    starving: float = 24_000.0  # T_starve
    normal: float = 20_000.0  # T_normal
    relief: float = 1.0  # credits that are given back per request and unmerged step
    drain: float = inf  # share of the biggest adapter from which on its waiting requests join first
    rest_ms: float = inf  # the longest time for which requests rest
    min_speedup: float | None = None  # merge only if merged steps are predicted to be this share faster; None: always


@dataclass(slots=True)
class _Tally:
    """What both modes would have computed since the last break point."""

    steps: int = 0
    merged_rows: float = 0.0
    merged_ms: float = 0.0
    unmerged_rows: float = 0.0
    unmerged_ms: float = 0.0

    def add(self, other: _Tally, times: int) -> None:
        """Add `other` this many times."""
        self.steps += times * other.steps
        self.merged_rows += times * other.merged_rows
        self.merged_ms += times * other.merged_ms
        self.unmerged_rows += times * other.unmerged_rows
        self.unmerged_ms += times * other.unmerged_ms

    def merged_wins(self, merged_extra_ms: float = 0.0, unmerged_extra_ms: float = 0.0) -> bool:
        """Whether merged steps would have computed more rows per time, if each mode had taken this much longer."""
        merged_ms, unmerged_ms = self.merged_ms + merged_extra_ms, self.unmerged_ms + unmerged_extra_ms
        return self.merged_rows * unmerged_ms > self.unmerged_rows * merged_ms


class _Demand(NamedTuple):
    """The requests of one decision, see `Modes.choose`."""

    fcfs: Mapping[str, int]
    alone: Mapping[str, int]
    seats: int
    rows: int  # requests in `fcfs`: so many an unmerged step computes

    def biggest(self) -> str:
        """The adapter with the most requests; "" without any."""
        return max((one for one in self.alone if one), key=self.alone.__getitem__, default="")


@dataclass(frozen=True, slots=True)
class _PerStep:
    """What each step in the chosen mode adds to the accounts."""

    tally: _Tally = field(default_factory=_Tally)
    credits: Mapping[str, float] = field(default_factory=dict)  # that move, by adapter
    displaced: int = 0  # requests; the merged adapter pays a credit for each
    rest_ms: float = 0.0  # to the time with resting requests; negative: off it


@dataclass(eq=False)
class Merging:
    """Algorithms 1 to 3 of the paper, for one worker."""

    costs: MergeCosts
    config: MergeConfig = field(default_factory=MergeConfig)
    merged: str = ""
    whole: str | None = None
    prefix_ms: float = 0.0  # not counted
    alpha: float = field(init=False)
    beta: float = field(init=False)
    credits: dict[str, float] = field(default_factory=dict)
    starving: set[str] = field(default_factory=set)
    _repaying: set[str] = field(default_factory=set)  # adapters that could not pay, until they have their credits back
    _rested_ms: float = 0.0  # time with resting requests, less the unmerged time since
    _overdue: bool = False  # steps stay unmerged until that is 0
    _biggest: str = ""
    _copy_pays: bool = False  # a copy of the biggest adapter would have paid by now
    _tally: _Tally = field(default_factory=_Tally)  # since the last break point
    _turned: bool = False  # the last choice changed the mode
    _per_step: _PerStep = field(default_factory=_PerStep)  # of the mode chosen last

    def __post_init__(self) -> None:
        self.alpha, self.beta = self.config.alpha, self.config.beta

    def choose(self, fcfs: Mapping[str, int], alone: Mapping[str, int], seats: int) -> Mode:
        """The mode of the next step."""
        demand = _Demand(fcfs, alone, seats, sum(fcfs.values()))
        self._turned = False
        self._know(alone, fcfs)
        starving = self._served_first() & (fcfs.keys() | alone.keys())
        if self._rested_too_long() or starving:
            return self._relieve(demand, starving)
        biggest = demand.biggest()
        pays = bool(biggest) and self._pays(biggest, demand)
        self._look_for_break(biggest)
        candidate = ""
        if self.merged:
            if not self._stays(demand):
                self._turn("")
        elif pays and alone[biggest] > self.alpha * demand.rows:
            candidate = self._merge(biggest)
        if self.merged:
            return self._merged_mode(demand)
        drains = pays and not alone[biggest] < self.config.drain * demand.rows
        return self._unmerged_mode(demand, candidate, biggest if drains else "")

    def ran(self, steps: int) -> None:
        """Book credits, throughputs and the time for which requests rested."""
        each = self._per_step
        self._tally.add(each.tally, steps)
        self._rested_ms = max(0.0, self._rested_ms + steps * each.rest_ms)
        for adapter, moved in each.credits.items():
            self.credits[adapter] += steps * moved

    def steady(self) -> int:
        """How many steps the last choice holds for: until a break point, or a credit passes a threshold, or requests have
        rested long enough. After a change of the mode it is 1.
        """
        if self._turned:
            return 1
        left: float = max(1, self.config.period - self._tally.steps)
        fair, each = self.config.credit, self._per_step
        if each.rest_ms > 0.0:
            left = min(left, (self.config.rest_ms - self._rested_ms) / each.rest_ms)
        elif self._overdue and each.rest_ms:
            left = min(left, self._rested_ms / -each.rest_ms)
        for adapter, moved in each.credits.items():
            held = self.credits[adapter]
            if adapter in self.starving:
                room = held - self.config.normal if moved < 0 else inf
            elif moved > 0:
                room = (self.config.starving if self.merged or held >= fair else fair) - held
            elif self.merged:
                room = held - each.displaced if adapter == self.merged else inf
            else:
                room = held - fair if held > fair else inf
            left = min(left, room / abs(moved) if moved else inf)
        return max(1, int(left))

    def unmerge(self) -> None:
        """The next step runs unmerged, and no adapter is served first."""
        self._turn("")
        self._per_step = _PerStep()

    def looks(self, state: AdmissionState[S], now_s: float) -> bool:
        """Credits are kept of every step."""
        return True

    def timed(self, step: Step) -> None:
        """Nothing is compared: `costs` say what both modes take."""

    @property
    def gives_up(self) -> bool:
        """A copy stays until its memory is needed."""
        return False

    @property
    def mechanism(self) -> Mechanism:
        """Whether an adapter is merged, and by how much its steps are predicted to be shorter."""
        return Mechanism("on" if self.merged else "waiting", f"LoRA costs {self.costs.lora:.1%} of a step")

    # ---- modes

    def _relieve(self, demand: _Demand, starving: set[str]) -> Mode:
        """An unmerged step because adapters starve, which come first, or because requests have rested for too long."""
        self._turn("")
        self._per_step = _PerStep(credits=self._repay(starving, demand), rest_ms=-self.costs.unmerged_ms(demand.rows))
        return Mode(first=frozenset(starving))

    def _unmerged_mode(self, demand: _Demand, candidate: str, drained: str) -> Mode:
        """An unmerged step. `drained`: the adapter whose waiting requests come first, so that few others are left to rest."""
        self._per_step = _PerStep(
            self._compare(demand),
            transfer(demand.alone, demand.fcfs) if drained else self._repay(demand.alone, demand),
            rest_ms=-self.costs.unmerged_ms(demand.rows),
        )
        return Mode(first=frozenset((drained,) if drained else ()), candidate=candidate)

    def _merged_mode(self, demand: _Demand) -> Mode:
        """A step with the merged adapter's requests alone."""
        batch = {self.merged: min(demand.alone[self.merged], demand.seats)}
        resting = displaced(batch, demand.fcfs)
        self._per_step = _PerStep(
            self._compare(demand),
            transfer(batch, demand.fcfs),
            displaced=resting,
            rest_ms=self.costs.merged_ms(batch[self.merged]) if resting else 0.0,
        )
        return Mode(self.merged, frozenset(batch))

    def _merge(self, adapter: str) -> str:
        """Merge the adapter, or return it when a copy of its weights must be made first and would pay."""
        if self.whole is None or self.whole == adapter:
            self._turn(adapter)
        elif self._copy_pays or self._tally.merged_wins(self.costs.switch_ms):
            self._copy_pays = True
            return adapter
        return ""

    def _stays(self, demand: _Demand) -> bool:
        """Whether the merged adapter stays merged."""
        alone = demand.alone
        return self.merged in alone and self._pays(self.merged, demand) and not alone[self.merged] < self.beta * demand.rows

    def _pays(self, adapter: str, demand: _Demand) -> bool:
        """Whether the adapter has the credits for a merged step, and such a step is fast enough."""
        return self._eligible(adapter, demand) and self._gains(adapter, demand)

    def _rested_too_long(self) -> bool:
        self._overdue = self._rested_ms >= self.config.rest_ms or (self._overdue and self._rested_ms > 0.0)
        return self._overdue

    # ---- credits

    def _know(self, alone: Mapping[str, int], fcfs: Mapping[str, int]) -> None:
        credits, new = self.credits, self.config.credit
        for adapter in (*alone, *fcfs):
            if adapter not in credits:
                credits[adapter] = new
        if len(credits) > MAX_KNOWN:
            for adapter in [one for one in credits if one not in alone and one not in fcfs][: len(credits) - MAX_KNOWN]:
                del credits[adapter]
                self.starving.discard(adapter)
                self._repaying.discard(adapter)

    def _served_first(self) -> set[str]:
        """The starving adapters, which are served before all others."""
        config, credits = self.config, self.credits
        self.starving.update([adapter for adapter, credit in credits.items() if credit > config.starving])
        self.starving = {one for one in self.starving if credits[one] > config.normal + ROUNDING * config.credit}
        return self.starving

    def _eligible(self, adapter: str, demand: _Demand) -> bool:
        """Whether the adapter's credits pay for one merged step.

        An adapter that could not pay must first have its credits back; otherwise it would be merged for single steps again and
        again.
        """
        if self.credits[adapter] < demand.rows - min(demand.fcfs.get(adapter, 0), demand.alone[adapter]):
            self._repaying.add(adapter)
        elif self.credits[adapter] >= self.config.credit * (1.0 - ROUNDING):
            self._repaying.discard(adapter)
        return adapter not in self._repaying

    def _repay(self, givers: Collection[str], demand: _Demand) -> dict[str, float]:
        return repay(givers, demand.alone, self.credits, self.config.credit, self.config.relief)

    # ---- thresholds

    def _turn(self, merged: str) -> None:
        if merged != self.merged:
            self._break()
            self.merged, self._turned = merged, True

    def _compare(self, demand: _Demand) -> _Tally:
        """What the next step computes in either mode, and how long it takes."""
        candidate = self.merged or self._biggest
        if not candidate or not demand.rows:
            return _Tally(steps=1)
        rows, merged_rows, costs = demand.rows, self._merged_rows(candidate, demand), self.costs
        return _Tally(1, merged_rows, costs.merged_ms(merged_rows), rows, costs.unmerged_ms(rows))

    def _merged_rows(self, adapter: str, demand: _Demand) -> int:
        """How many requests a merged step would compute."""
        rows = min(demand.alone[adapter], demand.seats)
        if self.whole is not None:  # with so few seats as a live engine has, those of resting requests are missing
            rows = min(rows, demand.seats - displaced({adapter: rows}, demand.fcfs))
        return rows

    def _gains(self, adapter: str, demand: _Demand) -> bool:
        """Whether a merged step computes more requests per time than an unmerged one, by at least the share `min_speedup`."""
        rows, merged_rows, costs = demand.rows, self._merged_rows(adapter, demand), self.costs
        least = 0.0 if self.config.min_speedup is None else 1.0 + self.config.min_speedup
        return merged_rows * costs.unmerged_ms(rows) > least * rows * costs.merged_ms(merged_rows)

    def _may_pay_back(self) -> bool:
        """Whether merged steps would have been faster, but not by as much as it costs to make a copy.

        Then the break point is put off, and the saved time adds up.
        """
        if self.merged or self.whole is None:
            return False
        return self._tally.merged_wins() and not self._tally.merged_wins(self._switch_ms)

    @property
    def _switch_ms(self) -> float:
        """The cost of the next switch.

        Where copies are made, only a switch to an adapter without a complete copy costs time.
        """
        made = self.whole is not None and (bool(self.merged) or self.whole == self._biggest)
        return 0.0 if made else self.costs.switch_ms

    def _look_for_break(self, biggest: str) -> None:
        """The break points of Algorithm 2 that do not change the mode."""
        if biggest != self._biggest:
            self._biggest = biggest
            self._break()
            self._copy_pays = False
        elif self._tally.steps >= self.config.period and not self._may_pay_back():
            self._break()

    def _break(self) -> None:
        """Algorithm 2: tune the threshold of the mode that ends or continues here."""
        seen, self._tally = self._tally, _Tally()
        if not seen.merged_rows or not seen.unmerged_rows:
            return
        config, switch_ms = self.config, self._switch_ms
        wins = seen.merged_wins(*((0.0, switch_ms) if self.merged else (switch_ms, 0.0)))
        if not self.merged:
            self._copy_pays = wins
        threshold = self.beta if self.merged else self.alpha
        threshold = threshold - config.decrement if wins else threshold * config.multiply
        threshold = min(max(threshold, config.lowest_beta if self.merged else config.lowest), config.highest)
        if self.merged:
            self.beta = threshold
        else:
            self.alpha = threshold


def displaced(batch: Mapping[str, int], fcfs: Mapping[str, int]) -> int:
    """The number of requests in `fcfs` that are not in `batch`."""
    return sum(max(0, count - batch.get(adapter, 0)) for adapter, count in fcfs.items())


def transfer(batch: Mapping[str, int], fcfs: Mapping[str, int]) -> dict[str, float]:
    """The credits that each adapter gets (negative: pays) for a step that computes `batch` instead of `fcfs`.

    Their sum is 0.
    """
    moves = {adapter: float(gone) for adapter, count in fcfs.items() if (gone := count - batch.get(adapter, 0)) > 0}
    owed, rows = sum(moves.values()), sum(batch.values())
    if not owed or not rows:
        return {}
    for adapter, count in batch.items():
        moves[adapter] = moves.get(adapter, 0.0) - owed * count / rows
    return moves


def repay(
    givers: Collection[str], here: Mapping[str, int], credits: Mapping[str, float], fair: float, relief: float = 1.0
) -> dict[str, float]:
    """The credits that adapters give back in an unmerged step. The sum over all adapters is 0.

    Those of `givers` with more than the fair amount give, per request in the step; those with less get, in proportion to what
    they lack.
    """
    rows = {adapter: here[adapter] for adapter in givers if adapter in here and credits[adapter] > fair}
    if not rows:
        return {}
    lack = {adapter: fair - credit for adapter, credit in credits.items() if credit < fair}
    lacking, paid = sum(lack.values()), min(relief * sum(rows.values()), sum(lack.values()))
    if not paid:
        return {}
    total = sum(rows.values())
    moves = {adapter: paid * short / lacking for adapter, short in lack.items()}
    for adapter, count in rows.items():
        moves[adapter] = moves.get(adapter, 0.0) - paid * count / total
    return moves
