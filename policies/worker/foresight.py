"""Chooses the adapter to bring one tier up before a request asks for it, while no other copy is under way.

The chosen adapter is the one that is most likely to be requested soon (`policies.times.load_forecast`). Each call considers
only a part of the adapters that were requested before; the next call considers the next part. The copy uses empty memory, or
memory of adapters that are clearly less likely. A copy takes time in proportion to its bytes, so adapters are compared by their
chance per byte (`policies.memory.worth`). A budget of copies that were never used limits the cost of wrong forecasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from motet.policies.times.load_forecast import Forecast
from motet.shared.model import Mechanism

HORIZON_S = 15.0
"""A request counts as soon within this time."""
LATER_S = 60.0
LEAST = 0.2
"""No adapter is brought that is less likely than this."""
MARGIN = 1.5
"""An adapter leaves only for one that is so many times as likely."""
LOOKED_AT = 64
"""Adapters at a time, which bounds the work."""
AGAIN_S = 5.0
"""An adapter that was to be brought and did not come is left alone for this time."""
CREDIT, CREDIT_PER_S, CREDIT_PER_HIT = 8.0, 0.1, 2.0
"""Adapters that may be brought in vain: at first and at most, more per second, more for each one that was asked for in time.
Where adapters leave before they are asked for, few copies are made."""

UNKNOWN, WEIGHT = 0.5, 1 / 16
"""The assumed share of forecasts that come true, and the weight of the latest one in it."""
DRAG = 0.1
PROBE_S = 60.0


@dataclass
class Foresight:
    """Learns from requests, and from whether the adapters that it brought were used.

    Ask `next` and `weaker` when a link is idle. `careful`: an adapter comes only where that is predicted to pay. A forecast
    that comes true saves a request the wait for a copy; one that fails costs each running request `DRAG` of a copy's time. It
    failed if the adapter left unused, or another one that left for it was asked for sooner. Where copies do not pay, one in
    `PROBE_S` is made to find out whether that has changed.
    """

    careful: bool = False
    came_true: float = UNKNOWN
    """The share of the last forecasts that came true."""
    forecast: Forecast = field(default_factory=Forecast)
    _turns: deque[str] = field(default_factory=deque)  # known adapters that were not looked at in this round
    _tried_s: dict[str, float] = field(default_factory=dict)
    _brought: set[str] = field(default_factory=set)
    _over: dict[str, str] = field(default_factory=dict)  # adapters that may leave -> for which
    _made_way: dict[str, str] = field(default_factory=dict)  # those that left, and were not asked for since
    _probe_s: float = 0.0  # when one was last brought
    _running: int = 0
    _credit: float = CREDIT
    _credit_s: float = 0.0

    def asked(self, digest: str, now_s: float) -> None:
        """A request for the adapter has arrived."""
        self.forecast.used(digest, now_s)
        self._tried_s.pop(digest, None)
        if digest in self._brought:
            self._brought.remove(digest)
            self._credit = min(CREDIT, self._credit + CREDIT_PER_HIT)
            self._judge(came_true=True)
        if self._made_way.pop(digest, "") in self._brought:
            self._judge(came_true=False)

    def came(self, digest: str) -> None:
        """The adapter is in a higher tier now, perhaps because `next` said so."""
        if digest in self._tried_s:
            self._brought.add(digest)
            self._credit -= 1.0

    def left(self, digest: str) -> None:
        """The adapter has left the tier that it was brought to."""
        if digest in self._over:
            self._made_way[digest] = self._over.pop(digest)
        if digest in self._brought:
            self._brought.remove(digest)
            self._judge(came_true=False)

    def _judge(self, *, came_true: bool) -> None:
        self.came_true += WEIGHT * (came_true - self.came_true)

    def pays(self, running: int) -> bool:
        """Whether copies beside so many running requests are predicted to pay."""
        return not self.careful or self.came_true >= (1.0 - self.came_true) * DRAG * running

    @property
    def mechanism(self) -> Mechanism:
        """Whether copies pay beside as many running requests as last, for people."""
        why = f"{self.came_true:.0%} of its forecasts come true"
        if self.pays(self._running):
            return Mechanism("on", why)
        return Mechanism("waiting", f"{why}, and {self._running} requests run")

    def next(self, now_s: float, may_come: Callable[[str], bool], *, running: int = 0) -> str | None:
        """The adapter to bring: the most likely of those that `may_come`, if it is likely enough. It counts as tried.

        None if a copy beside the `running` requests does not pay.
        """
        self._tried_s = {digest: at_s for digest, at_s in self._tried_s.items() if now_s < at_s + AGAIN_S}
        self._credit = min(CREDIT, self._credit + CREDIT_PER_S * (now_s - self._credit_s))
        self._credit_s, self._running = now_s, running
        if self._credit < 1.0 or not (self.pays(running) or now_s >= self._probe_s + PROBE_S):
            return None
        best: str | None = None
        most = LEAST
        for _ in range(min(LOOKED_AT, len(self.forecast))):
            if not self._turns:
                self._turns.extend(self.forecast)
            digest = self._turns.popleft()
            if digest not in self._tried_s and may_come(digest):
                chance = self.forecast.chance(digest, now_s, HORIZON_S)
                if chance > most:
                    best, most = digest, chance
        if best is not None:
            self._tried_s[best] = now_s
            self._probe_s = now_s
        return best

    def weaker(self, digest: str, others: Iterable[str], now_s: float) -> list[str]:
        """Those of `others` that may be evicted for this adapter, in the order of eviction.

        An adapter may be evicted if a request for it within HORIZON_S is unlikely enough. Of adapters equally unlikely within
        HORIZON_S, the least likely within LATER_S comes first.
        """
        limit = self.forecast.chance(digest, now_s, HORIZON_S) / MARGIN
        chances = {one: self.forecast.chance(one, now_s, HORIZON_S) for one in others}
        leaving = [
            (chance, self.forecast.chance(one, now_s, LATER_S), one) for one, chance in chances.items() if chance < limit
        ]
        self._over = {one: digest for _, _, one in leaving}
        return [one for _, _, one in sorted(leaving)]
