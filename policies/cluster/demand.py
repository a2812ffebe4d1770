"""Counts how many requests each tenant sends, to distinguish a loud tenant from one that sent a few requests at once.

The requests that a tenant has on the workers do not show this: a loud tenant is limited, so it may have no more of them than a
quiet one that sent three in a row. So all requests that it sends are counted, refused ones too, and fade over `MEMORY_S`.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

MEMORY_S = 10.0  # an ask counts 1/e after this
LEAST = 0.05  # a tenant whose asks count less is forgotten
FORGET_EVERY_S = 1.0


class Standing(NamedTuple):
    """The recent requests of a tenant per weight, relative to the mean of all tenants with recent requests."""

    own: float
    largest: float


class Demand:
    """Counts requests per tenant. Times are seconds on one clock.

    The cost of a request does not depend on the number of tenants, with two exceptions: the first request in a second forgets
    old tenants, and a request that changes the loudest tenant's weight searches for the loudest again.
    """

    def __init__(self) -> None:
        self._asks: dict[str, float] = {}  # as of `_since_s`, before the decay since then
        self._weights: dict[str, float] = {}
        self._since_s = 0.0
        self._all_asks = self._all_weights = 0.0
        self._largest, self._loudest = 0.0, ""  # the most asks per weight, and the tenant that has them

    def asked(self, tenant: str, weight: float, now_s: float, asks: int = 1) -> Standing:
        """Count `asks` requests of `tenant`; returns its standing."""
        if now_s - self._since_s > FORGET_EVERY_S:
            self._forget(now_s)
        count = self._asks[tenant] = self._asks.get(tenant, 0.0) + asks
        self._all_asks += asks
        self._all_weights += weight - self._weights.get(tenant, 0.0)
        self._weights[tenant] = weight
        own = count / weight
        if own >= self._largest:
            self._largest, self._loudest = own, tenant
        elif tenant == self._loudest:
            self._sum_up()  # its weight grew, so another tenant may be the loudest
        mean = self._all_asks / self._all_weights
        return Standing(own / mean, self._largest / mean)

    def _forget(self, now_s: float) -> None:
        left = exp((self._since_s - now_s) / MEMORY_S)
        self._asks = {tenant: count * left for tenant, count in self._asks.items() if count * left >= LEAST}
        self._weights = {tenant: self._weights[tenant] for tenant in self._asks}
        self._since_s = now_s
        self._sum_up()

    def _sum_up(self) -> None:
        """Compute sums and maximum over all tenants anew."""
        self._all_asks, self._all_weights = sum(self._asks.values()), sum(self._weights.values())
        self._largest, self._loudest = max(
            ((count / self._weights[tenant], tenant) for tenant, count in self._asks.items()), default=(0.0, "")
        )
