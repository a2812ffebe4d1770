"""How much each tenant asks for, lately: what tells a loud tenant from one that had a few requests at once.

What a tenant holds says little about that. A loud one is held down, so it may hold no more than a quiet one that had three
requests in a row. So asks are counted, refused ones too, and forgotten over `MEMORY_S`.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

MEMORY_S = 10.0  # an ask counts 1/e after this
LEAST = 0.05  # a tenant whose asks count less is forgotten
FORGET_EVERY_S = 1.0


class Standing(NamedTuple):
    """Asks per weight, relative to the mean of all tenants that asked lately."""

    own: float
    largest: float


class Demand:
    """Counts asks per tenant. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._asks: dict[str, float] = {}  # as of `_since_s`, and still to be decayed from there on
        self._weights: dict[str, float] = {}
        self._since_s = 0.0

    def asked(self, tenant: str, weight: float, now_s: float) -> Standing:
        """Count one ask of `tenant`; where that leaves it."""
        if now_s - self._since_s > FORGET_EVERY_S:
            self._forget(now_s)
        asks, weights = self._asks, self._weights
        asks[tenant] = asks.get(tenant, 0.0) + 1.0
        weights[tenant] = weight
        mean = sum(asks.values()) / sum(weights.values())
        largest = max(count / weights[name] for name, count in asks.items())
        return Standing(asks[tenant] / weight / mean, largest / mean)

    def _forget(self, now_s: float) -> None:
        left = exp((self._since_s - now_s) / MEMORY_S)
        self._asks = {tenant: count * left for tenant, count in self._asks.items() if count * left >= LEAST}
        self._weights = {tenant: self._weights[tenant] for tenant in self._asks}
        self._since_s = now_s
