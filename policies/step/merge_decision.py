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

MAX_KNOWN = 4096
"""Credits are kept for this many adapters; beyond, those without a request here are forgotten, the oldest first."""
FOREVER = 1 << 30
ROUNDING = 1e-9
"""Smaller differences of credits than this share of the initial credits count as none."""


class Mode(NamedTuple):
    """How the next step runs."""

    merged: str = ""  # the adapter in the weights; "" for none
    only: frozenset[str] | None = None  # the adapters whose requests the step computes; None: all
    first: frozenset[str] = frozenset()  # the adapters whose waiting requests join before all others
    wanted: str = ""  # would be merged if its copy of the weights were whole


class Modes(Protocol):
    """Chooses the mode of each step of one worker."""

    merged: str
    """The adapter that is in the weights now."""
    whole: str | None
    """The adapter of which there is a merged copy, "" for none; None where a switch changes the weights themselves, and the
    engine stops for it."""

    def choose(self, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> Mode:
        """The mode of the next step, in which at most `most` requests are computed.

        Both maps count requests by adapter. `fcfs`: those that first come, first served would compute. `here`: those that could
        be computed if there were no other adapters.
        """

    def ran(self, steps: int) -> None:
        """`steps` steps ran in the mode chosen last, with the requests of that choice."""

    def steady(self) -> int:
        """How many steps the last choice holds for if the requests stay the same; at least 1."""

    def unmerge(self) -> None:
        """The chosen step had nothing to compute, so the next step runs unmerged."""


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


@dataclass(eq=False)
class Merging:
    """Algorithms 1 to 3 of the paper, for one worker."""

    costs: MergeCosts
    config: MergeConfig = field(default_factory=MergeConfig)
    merged: str = ""
    whole: str | None = None
    alpha: float = field(init=False)
    beta: float = field(init=False)
    credits: dict[str, float] = field(default_factory=dict)
    starving: set[str] = field(default_factory=set)
    _tally: _Tally = field(default_factory=_Tally)
    _step: _Tally = field(default_factory=_Tally)  # of one step in the mode chosen last
    _moves: dict[str, float] = field(default_factory=dict)  # credits that one such step moves
    _biggest: str = ""
    _asked: float = 0.0  # credits that the merged adapter needs to stay merged
    _worth: bool = False  # a copy of the biggest adapter would have paid by now
    _poor: set[str] = field(default_factory=set)  # adapters that could not pay, until they have their credits back
    _turned: bool = False  # the last choice changed the mode
    _rested_ms: float = 0.0  # time with resting requests, less the unmerged time since
    _step_ms: float = 0.0  # what one step in the mode chosen last adds to it
    _overdue: bool = False  # steps stay unmerged until that is 0

    def __post_init__(self) -> None:
        self.alpha, self.beta = self.config.alpha, self.config.beta

    def choose(self, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> Mode:
        """The mode of the next step."""
        self._turned = False
        self._know(here, fcfs)
        rows, wanted = sum(fcfs.values()), ""
        starving = self._served_first() & (fcfs.keys() | here.keys())
        self._overdue = self._rested_ms >= self.config.rest_ms or (self._overdue and self._rested_ms > 0.0)
        if starving or self._overdue:
            self._turn("")
            self._step, self._asked = _Tally(), 0.0
            self._step_ms = -self.costs.unmerged_ms(rows)
            self._moves = repay(starving, here, self.credits, self.config.credit, self.config.relief)
            return Mode(first=frozenset(starving))
        biggest = max((one for one in here if one), key=here.__getitem__, default="")
        pays = bool(biggest) and self._eligible(biggest, here, fcfs) and self._gains(biggest, rows, fcfs, here, most)
        if biggest != self._biggest:
            self._biggest = biggest
            self._break()
            self._worth = False
        elif self._tally.steps >= self.config.period and not self._may_pay_back():
            self._break()
        if self.merged:
            stays = self.merged in here and self._eligible(self.merged, here, fcfs)
            if not stays or not self._gains(self.merged, rows, fcfs, here, most) or here[self.merged] < self.beta * rows:
                self._turn("")
        elif pays and here[biggest] > self.alpha * rows:
            if self.whole is None or self.whole == biggest:
                self._turn(biggest)
            elif self._worth or self._tally.merged_wins(self.costs.switch_ms):
                wanted, self._worth = biggest, True
        self._compare(rows, fcfs, here, most)
        if not self.merged:
            self._asked, self._step_ms = 0.0, -self.costs.unmerged_ms(rows)
            if not pays or here[biggest] < self.config.drain * rows:
                self._moves = repay(here, here, self.credits, self.config.credit, self.config.relief)
                return Mode(wanted=wanted)
            self._moves = transfer(here, fcfs)
            return Mode(first=frozenset((biggest,)), wanted=wanted)
        batch = {self.merged: min(here[self.merged], most)}
        self._moves, self._asked = transfer(batch, fcfs), displaced(batch, fcfs)
        self._step_ms = self.costs.merged_ms(batch[self.merged]) if self._asked else 0.0
        return Mode(self.merged, frozenset(batch))

    def ran(self, steps: int) -> None:
        """Book credits, throughputs and the time for which requests rested."""
        self._tally.add(self._step, steps)
        self._rested_ms = max(0.0, self._rested_ms + steps * self._step_ms)
        for adapter, moved in self._moves.items():
            self.credits[adapter] += steps * moved

    def steady(self) -> int:
        """How many steps the last choice holds for: until a break point, or a credit passes a threshold, or requests have
        rested long enough. After a change of the mode it is 1.
        """
        if self._turned:
            return 1
        left: float = max(1, self.config.period - self._tally.steps)
        fair = self.config.credit
        if self._step_ms > 0.0:
            left = min(left, (self.config.rest_ms - self._rested_ms) / self._step_ms)
        elif self._overdue and self._step_ms:
            left = min(left, self._rested_ms / -self._step_ms)
        for adapter, moved in self._moves.items():
            held = self.credits[adapter]
            if adapter in self.starving:
                room = held - self.config.normal if moved < 0 else inf
            elif moved > 0:
                room = (self.config.starving if self.merged or held >= fair else fair) - held
            elif self.merged:
                room = held - self._asked if adapter == self.merged else inf
            else:
                room = held - fair if held > fair else inf
            left = min(left, room / abs(moved) if moved else inf)
        return max(1, int(left))

    def unmerge(self) -> None:
        """The next step runs unmerged, and no adapter is served first."""
        self._turn("")
        self._moves, self._step, self._step_ms = {}, _Tally(), 0.0

    # ---- credits

    def _know(self, here: Mapping[str, int], fcfs: Mapping[str, int]) -> None:
        credits, new = self.credits, self.config.credit
        for adapter in (*here, *fcfs):
            if adapter not in credits:
                credits[adapter] = new
        if len(credits) > MAX_KNOWN:
            for adapter in [one for one in credits if one not in here and one not in fcfs][: len(credits) - MAX_KNOWN]:
                del credits[adapter]
                self.starving.discard(adapter)
                self._poor.discard(adapter)

    def _served_first(self) -> set[str]:
        """The starving adapters, which are served before all others."""
        config, credits = self.config, self.credits
        self.starving.update([adapter for adapter, credit in credits.items() if credit > config.starving])
        self.starving = {one for one in self.starving if credits[one] > config.normal + ROUNDING * config.credit}
        return self.starving

    def _eligible(self, adapter: str, here: Mapping[str, int], fcfs: Mapping[str, int]) -> bool:
        """Whether the adapter's credits pay for one merged step.

        An adapter that could not pay must first have its credits back; otherwise it would be merged for single steps again and
        again.
        """
        if self.credits[adapter] < sum(fcfs.values()) - min(fcfs.get(adapter, 0), here[adapter]):
            self._poor.add(adapter)
        elif self.credits[adapter] >= self.config.credit * (1.0 - ROUNDING):
            self._poor.discard(adapter)
        return adapter not in self._poor

    # ---- thresholds

    def _turn(self, merged: str) -> None:
        if merged != self.merged:
            self._break()
            self.merged, self._turned = merged, True

    def _compare(self, rows: int, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> None:
        """Record what the next step computes in either mode, and how long it takes.

        `rows`: the number of requests in `fcfs`.
        """
        candidate = self.merged or self._biggest
        if not candidate or not rows:
            self._step = _Tally(steps=1)
            return
        alone, costs = self._alone(candidate, fcfs, here, most), self.costs
        self._step = _Tally(1, alone, costs.merged_ms(alone), rows, costs.unmerged_ms(rows))

    def _alone(self, adapter: str, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> int:
        """How many requests a merged step would compute."""
        alone = min(here[adapter], most)
        if self.whole is not None:  # with so few seats as a live engine has, those of resting requests are missing
            alone = min(alone, most - displaced({adapter: alone}, fcfs))
        return alone

    def _gains(self, adapter: str, rows: int, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> bool:
        """Whether a merged step computes more requests per time than an unmerged one, by at least the share `min_speedup`."""
        alone, costs, speedup = self._alone(adapter, fcfs, here, most), self.costs, self.config.min_speedup
        least = 0.0 if speedup is None else 1.0 + speedup
        return alone * costs.unmerged_ms(rows) > least * rows * costs.merged_ms(alone)

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

    def _break(self) -> None:
        """Algorithm 2: tune the threshold of the mode that ends or continues here."""
        seen, self._tally = self._tally, _Tally()
        if not seen.merged_rows or not seen.unmerged_rows:
            return
        config, switch_ms = self.config, self._switch_ms
        wins = seen.merged_wins(*((0.0, switch_ms) if self.merged else (switch_ms, 0.0)))
        if not self.merged:
            self._worth = wins
        threshold = self.beta if self.merged else self.alpha
        threshold = threshold - config.decrement if wins else threshold * config.multiply
        threshold = min(max(threshold, config.lowest_beta if self.merged else config.lowest), config.highest)
        if self.merged:
            self.beta = threshold
        else:
            self.alpha = threshold


@dataclass(eq=False)
class AlwaysMerged:
    """A baseline that is always merged, one adapter after another (the paper's merged-only, and PEFT).

    An adapter's turn ends when it has no requests left, or after `turn` steps if others wait.
    """

    turn: int = 300
    merged: str = ""
    whole: str | None = None
    _now: str = ""
    _steps: int = 0

    def choose(self, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> Mode:
        """The next adapter's turn, or the rest of the present one."""
        if self._now not in here or (self._steps >= self.turn and len(here) > 1):
            after = sorted(one for one in here if one > self._now)
            self._now = after[0] if after else min(here, default="")
            self._steps = 0
        self.merged = self._now
        return Mode(self.merged, frozenset((self._now,)))

    def ran(self, steps: int) -> None:
        """Count the steps of the turn."""
        self._steps += steps

    def steady(self) -> int:
        """The steps that are left of the turn."""
        return max(1, self.turn - self._steps)

    def unmerge(self) -> None:
        """The turn ends."""
        self.merged = ""
        self._steps = FOREVER


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
