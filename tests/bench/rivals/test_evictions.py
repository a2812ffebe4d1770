"""Promise: the evictions that Motet is compared with are those of their papers."""

from __future__ import annotations

import pytest

from bench.rivals.evictions import REFRESH_S, Score
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.eviction import make_eviction
from tests.policies.test_eviction import used


def test_the_score_keeps_what_is_used_often_recently_and_large() -> None:
    order = Score()
    for at in range(10):
        used(order, "often", at=at)
    used(order, "once", at=10.0)
    assert list(order) == ["once", "often"]
    used(order, "large", at=11.0, size_bytes=100)
    assert next(iter(order)) == "once", "small and rare"
    # .45 * 1/10 + .10 * 0 + .45 * 10/100 = .09 for "once" were it used longest ago; see the terms one by one:
    values = order.values()
    assert values["often"] == pytest.approx(0.45 * 1 + 0.10 * 0 + 0.45 * 0.1)
    assert values["large"] == pytest.approx(0.45 * 0.1 + 0.10 * 1 + 0.45 * 1)


def test_the_size_of_an_adapter_that_has_left_is_no_measure_for_the_others() -> None:
    """Beside the huge one, .45 * 2/3 + .45 * 10/100 < .45 + .45 * 4/100; without it, .45 * 2/3 + .45 > .45 + .45 * 4/10."""
    order = Score()
    for digest, size_bytes in (("medium", 10), ("medium", 10), *[("small", 4)] * 3, ("huge", 100)):
        used(order, digest, at=0.0, size_bytes=size_bytes)
    assert next(iter(order)) == "medium"
    order.forget("huge")
    assert list(order) == ["small", "medium"]


def test_uses_before_the_refresh_time_count_no_more() -> None:
    order = Score()
    for _ in range(5):
        used(order, "before", at=0.0)
    used(order, "now", at=REFRESH_S + 1)
    assert list(order) == ["before", "now"]


def test_uses_leave_the_count_one_by_one_as_they_grow_old() -> None:
    order = Score(recency=0.0, size=0.0)
    for at in (0.0, 0.0, 200.0, 200.0):
        used(order, "a", at=at)
    for at in (200.0, 250.0, 250.0, 250.0):
        used(order, "b", at=at)
    assert order.values() == {"a": pytest.approx(0.45), "b": pytest.approx(0.45)}
    order.now_s = REFRESH_S + 1.0
    assert order.values() == {"a": pytest.approx(0.45 * 2 / 4), "b": pytest.approx(0.45)}


def test_fair_share_weighs_its_terms_alike() -> None:
    order = make_eviction("fair-share")
    assert isinstance(order, Score) and order.frequency == order.recency == order.size == 1 / 3


def test_without_a_cache_adapters_leave_unless_a_request_waits_for_them() -> None:
    slots = AdapterSlots(3, 100, eviction=make_eviction("none"))
    for digest in "ab":
        assert slots.acquire(digest, 10)
        slots.release(digest)
    slots.waited = lambda: {"a"}
    assert [digest for digest, _ in slots.unkept()] == ["b"]
    assert slots.digests() == ["a"]
