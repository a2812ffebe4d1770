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
    """Counts asks per tenant. Times are seconds on any one clock.

    An ask costs the same however many tenants there are, except the first one in a second, which forgets, and the ask by
    which the loudest tenant's weight grows.
    """

    def __init__(self) -> None:
        self._asks: dict[str, float] = {}  # as of `_since_s`, and still to be decayed from there on
        self._weights: dict[str, float] = {}
        self._since_s = 0.0
        self._all_asks = self._all_weights = 0.0
        self._largest, self._loudest = 0.0, ""  # most asks per weight, and whose they are

    def asked(self, tenant: str, weight: float, now_s: float) -> Standing:
        """Count one ask of `tenant`; where that leaves it."""
        if now_s - self._since_s > FORGET_EVERY_S:
            self._forget(now_s)
        count = self._asks[tenant] = self._asks.get(tenant, 0.0) + 1.0
        self._all_asks += 1.0
        self._all_weights += weight - self._weights.get(tenant, 0.0)
        self._weights[tenant] = weight
        own = count / weight
        if own >= self._largest:
            self._largest, self._loudest = own, tenant
        elif tenant == self._loudest:
            self._sum_up()  # its weight grew, so another one may be the loudest
        mean = self._all_asks / self._all_weights
        return Standing(own / mean, self._largest / mean)

    def _forget(self, now_s: float) -> None:
        left = exp((self._since_s - now_s) / MEMORY_S)
        self._asks = {tenant: count * left for tenant, count in self._asks.items() if count * left >= LEAST}
        self._weights = {tenant: self._weights[tenant] for tenant in self._asks}
        self._since_s = now_s
        self._sum_up()

    def _sum_up(self) -> None:
        """Sums and maximum over all tenants, from the start."""
        self._all_asks, self._all_weights = sum(self._asks.values()), sum(self._weights.values())
        self._largest, self._loudest = max(
            ((count / self._weights[tenant], tenant) for tenant, count in self._asks.items()), default=(0.0, "")
        )
