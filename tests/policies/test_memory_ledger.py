"""Promise: every byte of a worker's memory is claimed once or free, and a claim never shrinks below what is held."""

from __future__ import annotations

import random

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.host_tier import HostTier, Load
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.ledger import Budget, device_budget, host_budget
from motet.shared.model import AdapterRef

BLOCK, ADAPTER = 10, 30


def test_device_memory_is_running_kv_prefixes_adapters_in_use_and_idle_ones() -> None:
    kv, slots = KvBlocks(20, 4, block_bytes=BLOCK), AdapterSlots(4, 4 * ADAPTER)
    budget = device_budget(kv, slots)
    assert budget.total_bytes == 20 * BLOCK + 4 * ADAPTER and budget.unclaimed_bytes == 0
    blocks = kv.allocate(3)
    kv.publish(blocks[0], b"key")
    kv.release(blocks[:1])
    slots.acquire("a", ADAPTER)
    slots.acquire("b", ADAPTER)
    slots.release("b")
    assert budget.held() == {
        ("kv", "running"): 2 * BLOCK,
        ("kv", "prefix"): BLOCK,
        ("adapters", "used"): ADAPTER,
        ("adapters", "idle"): ADAPTER,
    }
    kv_claim, adapters = budget.claims["kv"], budget.claims["adapters"]
    assert (kv_claim.free_bytes, adapters.free_bytes) == (17 * BLOCK, 2 * ADAPTER)
    budget.check()


def test_a_claim_grows_into_unclaimed_memory_and_shrinks_to_what_is_held() -> None:
    budget = Budget("device", 100)
    kv = budget.claim("kv", 60, lambda: {"running": 30, "prefix": 10})
    adapters = budget.claim("adapters", 20, dict)
    assert not adapters.resize(41) and adapters.resize(40) and budget.unclaimed_bytes == 0
    assert not kv.resize(39) and kv.resize(40) and budget.unclaimed_bytes == 20
    budget.check()


def test_claims_that_exceed_the_budget_or_a_name_that_is_taken_are_refused() -> None:
    budget = Budget("host", 100)
    budget.claim("adapters", 60, dict)
    with pytest.raises(ValueError, match=r"41 bytes of host, 40 are unclaimed"):
        budget.claim("more", 41, dict)
    with pytest.raises(ValueError, match="adapters"):
        budget.claim("adapters", 1, dict)


def test_holding_more_than_was_claimed_is_noticed() -> None:
    budget = Budget("device", 100)
    budget.claim("kv", 20, lambda: {"running": 21})
    with pytest.raises(AssertionError, match=r"device\.kv"):
        budget.check()


@pytest.mark.parametrize("seed", range(5))
def test_the_ledger_follows_host_memory_through_loads_holds_and_evictions(seed: int) -> None:
    chance = random.Random(seed)
    tier: HostTier[int] = HostTier(4 * ADAPTER, None)
    budget = host_budget(tier)
    held: list[str] = []
    loading: list[str] = []
    for number in range(500):
        match chance.randrange(3):
            case 0:
                name = f"d{chance.randrange(8)}"
                if tier.hold(AdapterRef(name=name, digest=name, rank=8, size_bytes=ADAPTER), number):
                    held.append(name)
            case 1 if held:
                tier.release(held.pop(chance.randrange(len(held))))
            case 2 if loading:
                name = loading.pop()
                held += [name for _ in tier.loaded(name, ADAPTER, ADAPTER)]
        loading += [action.adapter.digest for action in tier.take_actions() if isinstance(action, Load)]
        tier.check()
        budget.check()
        assert budget.held() == {
            ("adapters", "used"): len(set(held)) * ADAPTER,
            ("adapters", "loading"): len(loading) * ADAPTER,
            ("adapters", "idle"): (len(tier.copies) - len(set(held))) * ADAPTER,
        }
