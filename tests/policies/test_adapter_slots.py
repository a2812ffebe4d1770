from __future__ import annotations

import random
from collections import Counter

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots


def resident(slots: AdapterSlots, *digests: str, size_bytes: int = 10) -> None:
    """Load these adapters and release them, in this order."""
    for digest in digests:
        assert slots.acquire(digest, size_bytes)
        slots.release(digest)


def test_a_new_adapter_gets_a_slot_of_its_own_and_must_be_loaded() -> None:
    slots = AdapterSlots(2, 100)
    a, b = slots.acquire("a", 30), slots.acquire("b", 50)
    assert a and b
    assert a.load and b.load
    assert {a.slot, b.slot} == {0, 1}
    assert slots.bytes_free == 20
    slots.check({"a": 1, "b": 1})


def test_an_adapter_that_is_there_is_shared_without_loading() -> None:
    slots = AdapterSlots(2, 100)
    first, second = slots.acquire("a", 30), slots.acquire("a", 30)
    assert first and second
    assert second.slot == first.slot
    assert not second.load
    assert slots.users("a") == 2
    slots.check({"a": 2})


def test_an_adapter_stays_after_its_last_user_until_its_place_is_needed() -> None:
    slots = AdapterSlots(1, 100)
    resident(slots, "a")
    assert "a" in slots
    grant = slots.acquire("b", 10)
    assert grant and grant.evicted == [("a", 0)]
    assert "a" not in slots


def test_the_least_recently_used_adapter_leaves_first() -> None:
    slots = AdapterSlots(3, 100)
    resident(slots, "a", "b", "c", "a")
    grant = slots.acquire("d", 10)
    assert grant and [digest for digest, _ in grant.evicted] == ["b"]


def test_as_many_leave_as_the_bytes_need() -> None:
    slots = AdapterSlots(4, 40)
    resident(slots, "a", "b", "c", "d")
    grant = slots.acquire("big", 25)
    assert grant and [digest for digest, _ in grant.evicted] == ["a", "b", "c"]
    slots.check({"big": 1})


def test_an_adapter_in_use_is_never_evicted() -> None:
    slots = AdapterSlots(2, 100)
    slots.acquire("a", 10)
    slots.acquire("b", 10)
    assert slots.acquire("c", 10) is None
    slots.release("b")
    grant = slots.acquire("c", 10)
    assert grant and [digest for digest, _ in grant.evicted] == ["b"]
    assert "a" in slots


def test_no_adapter_is_evicted_if_that_does_not_make_enough_room() -> None:
    slots = AdapterSlots(4, 40)
    slots.acquire("used", 30)
    resident(slots, "idle")
    assert slots.acquire("big", 20) is None
    assert "idle" in slots
    slots.check({"used": 1})


def test_fitting_without_eviction_looks_at_free_room_only() -> None:
    slots = AdapterSlots(2, 100)
    resident(slots, "a", "b")
    assert slots.fits(10)
    assert not slots.fits(10, evicting=False)
    assert not slots.fits(101)


def test_dropping_an_adapter_in_use_is_refused() -> None:
    slots = AdapterSlots(1, 100)
    slots.acquire("a", 10)
    with pytest.raises(ValueError, match="in use"):
        slots.drop("a")
    slots.release("a")
    assert slots.drop("a") == 0
    assert slots.bytes_free == 100
    slots.check({})


@pytest.mark.parametrize("seed", range(5))
def test_accounts_add_up_after_any_sequence_of_operations(seed: int) -> None:
    draw = random.Random(seed)
    slots = AdapterSlots(4, 100)
    sizes = {f"a{i}": draw.randint(5, 60) for i in range(10)}
    users: Counter[str] = Counter()
    for _ in range(500):
        if draw.random() < 0.5:
            digest = draw.choice(list(sizes))
            if slots.acquire(digest, sizes[digest]):
                users[digest] += 1
        elif +users:
            digest = draw.choice(sorted((+users).elements()))
            slots.release(digest)
            users[digest] -= 1
        slots.check(+users)


def test_several_adapters_are_acquired_at_once_or_not_at_all():
    slots = AdapterSlots(3, 300)
    assert [grant.load for grant in slots.acquire_all([("a", 100), ("b", 100)]) or []] == [True, True]
    assert slots.acquire_all([("a", 100), ("c", 100), ("d", 100)]) is None
    slots.check({"a": 1, "b": 1})
    slots.release("a")
    slots.release("b")
    grants = slots.acquire_all([("c", 100), ("d", 100), ("b", 100)])  # b stays, though it is idle when c needs room
    assert grants is not None and [grant.load for grant in grants] == [True, True, False]
    assert [digest for grant in grants for digest, _ in grant.evicted] == ["a"]
    slots.check({"b": 1, "c": 1, "d": 1})
    assert slots.acquire_all([("b", 100), ("e", 1)]) is None and slots.acquire_all([]) == []
    slots.check({"b": 1, "c": 1, "d": 1})
