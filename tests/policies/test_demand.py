"""Promises of `policies.cluster.demand`: a loud tenant is recognised by its recent requests, not by how many it has running."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.cluster.demand import FORGET_EVERY_S, LEAST, MEMORY_S, Demand


def test_a_tenant_alone_asks_for_its_share():
    demand = Demand()
    for number in range(100):
        assert demand.asked("a", 2.0, number / 10) == (1.0, 1.0)


def test_a_loud_tenant_stands_far_above_the_mean_and_the_others_below_it_also_after_a_few_requests_at_once():
    demand = Demand()
    for second in range(30):
        for part in range(20):
            loud = demand.asked("loud", 1.0, second + part / 20)
        for quiet in "abcde":
            standing = demand.asked(quiet, 1.0, second + 0.99)
    assert loud.own == pytest.approx(20 / (25 / 6), rel=0.1) and loud.own == loud.largest
    assert standing.own == pytest.approx(1 / (25 / 6), rel=0.1)
    for _ in range(5):
        standing = demand.asked("a", 1.0, 30.0)
    assert standing.own < 1.0 < 3.0 < standing.largest


def test_several_asks_at_once_count_like_as_many_single_ones():
    at_once, single = Demand(), Demand()
    at_once.asked("quiet", 1.0, 0.0), single.asked("quiet", 1.0, 0.0)
    standing = at_once.asked("loud", 1.0, 0.5, 7)
    for _ in range(7):
        alone = single.asked("loud", 1.0, 0.5)
    assert standing == alone


def test_shares_go_by_weight():
    demand = Demand()
    for second in range(20):
        for _ in range(4):
            heavy = demand.asked("heavy", 4.0, float(second))
        light = demand.asked("light", 1.0, float(second))
    assert heavy.own == pytest.approx(1.0, rel=0.05) and light.own == pytest.approx(1.0, rel=0.05)


def test_what_was_asked_long_ago_is_forgotten_and_so_are_tenants():
    demand = Demand()
    for _ in range(1000):
        demand.asked("once", 1.0, 0.0)
    before = demand.asked("now", 1.0, 1.0)
    assert before.own < 0.01
    after = demand.asked("now", 1.0, 12 * MEMORY_S)
    assert after == (1.0, 1.0) and list(demand._asks) == ["now"]  # private: what it remembers is seen nowhere else


class Plain:
    """The same class, by its definition: it sums over all tenants at every request."""

    def __init__(self) -> None:
        self.asks: dict[str, tuple[float, float]] = {}  # tenant -> (asks, weight)
        self.since_s = 0.0

    def asked(self, tenant: str, weight: float, now_s: float) -> tuple[float, float]:
        if now_s - self.since_s > FORGET_EVERY_S:
            left = exp((self.since_s - now_s) / MEMORY_S)
            self.asks = {one: (count * left, w) for one, (count, w) in self.asks.items() if count * left >= LEAST}
            self.since_s = now_s
        self.asks[tenant] = self.asks.get(tenant, (0.0, 0.0))[0] + 1.0, weight
        mean = sum(count for count, _ in self.asks.values()) / sum(w for _, w in self.asks.values())
        return self.asks[tenant][0] / weight / mean, max(count / w for count, w in self.asks.values()) / mean


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0]), st.sampled_from([0.0, 0.1, 0.6, 5.0, 40.0])
        ),
        max_size=80,
    )
)
def test_running_sums_give_what_sums_over_all_tenants_give(asks: list[tuple[str, float, float]]):
    demand, plain, now_s = Demand(), Plain(), 0.0
    for tenant, weight, later_s in asks:
        now_s += later_s
        assert demand.asked(tenant, weight, now_s) == pytest.approx(plain.asked(tenant, weight, now_s), rel=1e-12)
