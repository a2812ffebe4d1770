from __future__ import annotations

import random

import pytest

from bench.rivals import EVICTIONS
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.eviction import Eviction, Gdsf, NextUse, make_eviction


def used(order: Eviction, digest: str, *, at: float, size_bytes: int = 10) -> None:
    """A request uses the adapter for a moment."""
    order.now_s = at
    order.use(digest, size_bytes)
    order.release(digest)


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_orders_the_idle_adapters_and_no_others(name: str, seed: int) -> None:
    chance = random.Random(seed)
    slots = AdapterSlots(6, 100, eviction=make_eviction(name))
    users: dict[str, int] = {}
    for turn in range(300):
        slots.eviction.now_s = turn / 10
        digest = chance.choice("abcdefghij")
        if chance.random() < 0.5 and users.get(digest):
            slots.release(digest)
            users[digest] -= 1
        elif slots.acquire(digest, 10 + ord(digest) - ord("a")):
            users[digest] = users.get(digest, 0) + 1
        for gone, _ in slots.unkept():
            assert name == "none" and not users.get(gone)
        slots.check({digest: count for digest, count in users.items() if count})


def test_gdsf_ages_so_that_what_was_popular_once_leaves() -> None:
    order = Gdsf()
    for _ in range(3):
        used(order, "popular", at=0.0)
    for turn in range(6):  # each of them leaves, and the age grows with it
        used(order, f"new-{turn}", at=1.0)
        if turn < 5:
            order.forget(f"new-{turn}")
    assert list(order) == ["popular", "new-5"]


def test_next_use_keeps_what_is_asked_for_often_and_is_costly_to_bring_back() -> None:
    order = NextUse(cost=lambda digest, size_bytes: 10.0 if digest.startswith("far") else 1.0)
    used(order, "rare", at=0.0)
    used(order, "far-rare", at=0.0)
    for at in range(10):
        used(order, "steady", at=1.0 + at)
    assert list(order) == ["rare", "far-rare", "steady"]


@pytest.mark.parametrize("make", [NextUse, Gdsf])
def test_of_two_adapters_that_cost_the_same_to_bring_back_the_larger_one_leaves_first(make: type[NextUse] | type[Gdsf]) -> None:
    """A policy values what keeping a byte saves. Both cost 1 s, so a byte of the small one is worth ten times as much."""
    order = make(cost=lambda digest, size_bytes: 1.0)
    used(order, "small", at=0.0, size_bytes=100)
    used(order, "large", at=0.0, size_bytes=1000)
    assert list(order) == ["large", "small"]
    values = order.values()
    assert values["small"] == pytest.approx(10 * values["large"], rel=0.05), "earlier requests count a little less"


def test_gdsf_values_an_adapter_by_its_uses_times_its_cost_per_byte_plus_the_caches_age() -> None:
    order = Gdsf(cost=lambda digest, size_bytes: 2.0 + size_bytes)
    for at in range(3):
        used(order, "a", at=at, size_bytes=8)
    used(order, "b", at=3.0, size_bytes=4)
    assert order.values() == {"a": pytest.approx(3 * 10 / 8), "b": pytest.approx(6 / 4)}
    order.forget("b")
    order.come("c", 2)
    order.release("c")
    assert order.values()["c"] == pytest.approx(1.5 + 4 / 2), "the age is the value of what left last"


def test_next_use_remembers_how_often_an_adapter_was_asked_for_that_has_left() -> None:
    order = NextUse()
    for at in range(5):
        used(order, "popular", at=at)
    order.forget("popular")
    for digest in ("twice", "twice", "popular"):
        used(order, digest, at=9.0)
    assert list(order) == ["twice", "popular"]


def test_next_use_keeps_an_adapter_that_came_ahead_until_its_request_has_come() -> None:
    order = NextUse()
    used(order, "once", at=0.0)
    order.come("ahead", 10)
    order.release("ahead")
    assert list(order) == ["once", "ahead"]


def pinned_waited_and_idle() -> AdapterSlots:
    """Three slots, all taken: `a` is pinned, a request waits for `b`, and `c` is idle."""
    slots = AdapterSlots(3, 100)
    for digest in "abc":
        assert slots.acquire(digest, 10)
        slots.release(digest)
    slots.pinned = {"a"}
    slots.waited = lambda: {"b"}
    return slots


def test_adapters_that_requests_wait_for_leave_after_the_others_and_pinned_ones_last() -> None:
    slots = pinned_waited_and_idle()
    gone = []
    for digest in "xyz":
        grant = slots.acquire(digest, 10)
        assert grant is not None, "a pinned adapter is evicted when only pinned ones are left"
        gone += [one for one, _ in grant.evicted]
    assert gone == ["c", "b", "a"]


def test_a_prefetch_takes_no_room_from_what_is_waited_for_or_pinned() -> None:
    slots = pinned_waited_and_idle()
    grant = slots.prefetch("x", 10)
    assert grant is not None and [digest for digest, _ in grant.evicted] == ["c"]
    slots.waited = lambda: {"b", "x"}
    assert slots.prefetch("y", 10) is None
    slots.check({})


def test_a_prefetch_that_lacks_bytes_and_no_slot_costs_no_more_adapters_than_it_needs() -> None:
    slots = AdapterSlots(3, 30)
    for digest in "ab":
        assert slots.acquire(digest, 10)
        slots.release(digest)
    grant = slots.prefetch("x", 20)
    assert grant is not None and [digest for digest, _ in grant.evicted] == ["a"]
    assert "b" in slots and slots.bytes_free == 0


@pytest.mark.parametrize("name", ["score", "gdsf", "next-use"])
def test_a_copy_ahead_of_its_request_and_the_request_count_as_one_use(name: str) -> None:
    """The adapter that was copied ahead came last. If its copy counted as a use too, it would be evicted after the other."""
    slots = AdapterSlots(2, 100, eviction=make_eviction(name))
    for digest, ahead in (("twice", False), ("twice", False), ("ahead", True)):
        slots.eviction.now_s += 1.0
        if ahead:
            assert slots.prefetch(digest, 10)
        assert slots.acquire(digest, 10)
        slots.release(digest)
    slots.eviction.now_s += 1.0
    assert next(iter(slots.eviction)) == "ahead"
