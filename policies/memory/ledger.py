"""Accounts for a worker's memory: how many bytes each of its users has, on the device and on the host.

    device budget   |-- claim "kv" -----------------------|-- claim "adapters" --------------|-- unclaimed --|
                    | running | prefix | free             | used | idle | free               |
                    a merged copy of the weights is a third claim: used while an adapter is merged, else idle
    host budget     |-- claim "adapters" ----------------------------------------------------|
                    | used | loading | idle | free

A `Budget` is one memory; a `Claim` is the part of it that one claimant may fill. `policies.memory.boundary` moves room between
the device's claims by `Claim.resize`; without it they are fixed regions. Each claimant counts its own memory (`KvBlocks`,
`AdapterSlots`, `HostTier`) and states the bytes of each class only when asked, so the ledger costs a step nothing.

Classes: `running` KV and `used` adapters belong to requests and stay until these release them. Memory of `loading` copies is
reserved. `prefix` blocks and `idle` adapters are caches and are evicted when room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.host_tier import HostTier
from motet.policies.memory.kv_blocks import KvBlocks

Class = Literal["running", "used", "loading", "prefix", "idle"]


class Claim:
    """A claimant's part of a budget, in bytes. `held()` returns the bytes held by class, counted by the claimant."""

    def __init__(self, budget: Budget, name: str, size_bytes: int, held: Callable[[], Mapping[Class, int]]) -> None:
        self._budget, self.name, self.size_bytes, self.held = budget, name, size_bytes, held

    @property
    def held_bytes(self) -> int:
        """Bytes of all classes."""
        return sum(self.held().values())

    @property
    def free_bytes(self) -> int:
        """Bytes that the claimant may still fill."""
        return self.size_bytes - self.held_bytes

    def resize(self, size_bytes: int) -> bool:
        """Change the size of the claim. False, and no change, if it would be less than the held bytes or exceed the budget."""
        if size_bytes < self.held_bytes or size_bytes - self.size_bytes > self._budget.unclaimed_bytes:
            return False
        self.size_bytes = size_bytes
        return True


class Budget:
    """One memory of `total_bytes` and the claims on it."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name, self.total_bytes = name, total_bytes
        self.claims: dict[str, Claim] = {}

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that belong to no claim."""
        return self.total_bytes - sum(claim.size_bytes for claim in self.claims.values())

    def claim(self, name: str, size_bytes: int, held: Callable[[], Mapping[Class, int]]) -> Claim:
        """A new claim on this budget. Raises ValueError when the budget has no room for it, or the name is taken."""
        if name in self.claims or size_bytes > self.unclaimed_bytes:
            raise ValueError(f"{name} claims {size_bytes} bytes of {self.name}, {self.unclaimed_bytes} are unclaimed")
        made = self.claims[name] = Claim(self, name, size_bytes, held)
        return made

    def held(self) -> dict[tuple[str, Class], int]:
        """Bytes by claim and class."""
        return {(claim.name, kind): size for claim in self.claims.values() for kind, size in claim.held().items()}

    def check(self) -> None:
        """Assert that the claims fit in the budget, and that no claim holds more than its size."""
        assert self.unclaimed_bytes >= 0, f"{self.name}: claims exceed the budget"
        for claim in self.claims.values():
            held = claim.held()
            assert all(size >= 0 for size in held.values()), f"{self.name}.{claim.name}: {held}"
            assert claim.free_bytes >= 0, f"{self.name}.{claim.name} holds {held} of {claim.size_bytes} bytes"


def device_budget(kv: KvBlocks, adapters: AdapterSlots) -> Budget:
    """The budget of the device's memory, all of it claimed. The KV claim is empty where `kv.block_bytes` is 0."""
    block_bytes = kv.block_bytes
    budget = Budget("device", kv.total * block_bytes + adapters.bytes_total)
    budget.claim(
        "kv",
        kv.total * block_bytes,
        lambda: {"running": (kv.total - kv.free) * block_bytes, "prefix": kv.idle * block_bytes},
    )
    budget.claim(
        "adapters",
        adapters.bytes_total,
        lambda: {
            "used": adapters.bytes_total - adapters.bytes_free - adapters.idle_bytes,
            "idle": adapters.idle_bytes,
        },
    )
    return budget


def host_budget(tier: HostTier) -> Budget:
    """The budget of host memory for adapters.

    A copy may turn out larger than announced, and then exceed the claim while all other copies are held.
    """
    budget = Budget("host", tier.host_bytes or 0)
    budget.claim(
        "adapters",
        budget.total_bytes,
        lambda: {
            "used": tier.host_used_bytes - tier.idle_bytes,
            "loading": tier.reserved_bytes,
            "idle": tier.idle_bytes,
        },
    )
    return budget
