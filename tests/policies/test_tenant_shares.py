"""Promise: however much one tenant takes, another finds room, and what is given back can be taken again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet.policies.tenant_shares import Part, TenantShares


def taken(shares: TenantShares, tenant: str) -> int:
    """How much a tenant gets that takes one after another until it is refused."""
    while shares.take(tenant, 1):
        pass
    return shares.held(tenant)


def test_one_tenant_gets_half_and_each_next_one_half_of_the_rest() -> None:
    shares = TenantShares(80)
    assert [taken(shares, tenant) for tenant in "abcd"] == [40, 20, 10, 5]


def test_tenants_that_take_by_turns_get_the_same() -> None:
    shares = TenantShares(90)
    while any([shares.take(tenant, 1) for tenant in "ab"]):
        pass
    assert (shares.held("a"), shares.held("b")) == (30, 30)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))), st.integers(1, 60))
def test_no_more_is_held_than_there_is_and_all_of_it_comes_back(asked: list[tuple[str, int]], total: int) -> None:
    shares = TenantShares(total)
    parts = [(Part(shares, tenant), amount) for tenant, amount in asked]
    for part, amount in parts:
        before = part.amount
        assert part.amount == before + amount if part.take(amount) else part.amount == before
        assert shares.used == sum(one.amount for one, _ in parts) <= total
    assert shares.used == total or shares.fits("newcomer", 1)
    for part, _ in parts:
        part.release()
        part.release()
    assert shares.used == 0 and shares.fits("a", total)
