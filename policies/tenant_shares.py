"""Divides one resource among tenants that nobody knows beforehand: bytes of bodies, places in a queue, uploads.

Dynamic thresholds, as switches divide the memory of their packets (Choudhury and Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches", 1998): a tenant may take more while it holds less than is free. A single tenant thus gets half
of the whole, two get a third each, and a newcomer always finds room, however greedy the others are.
"""

from __future__ import annotations


class TenantShares:
    """Who holds how much of `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._held: dict[str, int] = {}

    def held(self, tenant: str) -> int:
        """The amount that this tenant holds."""
        return self._held.get(tenant, 0)

    def fits(self, tenant: str, amount: int) -> bool:
        """Whether the tenant may take `amount` more."""
        free = self.total - self.used
        return amount <= free and self.held(tenant) < free

    def take(self, tenant: str, amount: int) -> bool:
        """Take `amount` for the tenant; False, and nothing is taken, where it does not fit."""
        if not self.fits(tenant, amount):
            return False
        self.used += amount
        self._held[tenant] = self.held(tenant) + amount
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        """Return `amount` that was taken."""
        left = self._held[tenant] - amount
        assert left >= 0, f"{tenant} gives back {amount} and holds {left + amount}"
        self.used -= amount
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]


class Part:
    """What one holder has of a resource, e.g. one request of the bytes of all bodies."""

    def __init__(self, shares: TenantShares, tenant: str) -> None:
        self._shares, self._tenant = shares, tenant
        self.amount = 0

    def take(self, amount: int) -> bool:
        """Take `amount` more; False, and nothing is taken, where it does not fit."""
        taken = self._shares.take(self._tenant, amount)
        self.amount += amount if taken else 0
        return taken

    def release(self) -> None:
        """Return all of it."""
        if self.amount:
            self._shares.give_back(self._tenant, self.amount)
            self.amount = 0
