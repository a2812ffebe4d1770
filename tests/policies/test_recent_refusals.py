"""Promise: a refusal is repeated for a moment, and only to requests that would be refused anyway."""

from __future__ import annotations

import pytest

from motet.policies.owner.recent_refusals import HOLD_S, KEYS_MAX, LASTING_S, Kind, RecentRefusals

BATCH = Kind("acme", 10_000.0, 2000.0, 0)


def refused(retry_after_s: float = 8.0, *, prompt_tokens: int = 50, rank: int = 8) -> RecentRefusals:
    """The memory of one refusal at 100 s."""
    refusals = RecentRefusals()
    refusals.add(BATCH, prompt_tokens, rank, "too late", retry_after_s, 100.0)
    return refusals


def test_a_request_that_asks_for_as_much_or_more_is_refused_again_with_the_time_that_is_left():
    refusals = refused()
    assert refusals.find(BATCH, 50, 8, 100.125) == ("too late", pytest.approx(7.875))
    assert refusals.find(BATCH, 51, 16, 100.0) == ("too late", 8.0)


@pytest.mark.parametrize(
    ("kind", "prompt_tokens", "rank"),
    [
        (Kind("umbrella", 10_000.0, 2000.0, 0), 50, 8),
        (Kind("acme", 500.0, 2000.0, 0), 50, 8),
        (Kind("acme", 10_000.0, 50.0, 0), 50, 8),
        (Kind("acme", 10_000.0, 2000.0, 1), 50, 8),
        (Kind("acme", 10_000.0, 2000.0, 0, ("structured",)), 50, 8),
        (BATCH, 49, 8),
        (BATCH, 50, 0),
    ],
    ids=["tenant", "ttft", "tpot", "priority", "needs", "shorter prompt", "smaller rank"],
)
def test_a_request_that_might_be_served_is_asked_for(kind: Kind, prompt_tokens: int, rank: int):
    assert refused().find(kind, prompt_tokens, rank, 100.0) is None


def test_a_refusal_is_repeated_for_a_moment_only():
    assert refused().find(BATCH, 50, 8, 100.0 + HOLD_S) is None


def test_a_refusal_for_a_short_time_is_not_repeated():
    assert refused(LASTING_S - 0.01).find(BATCH, 50, 8, 100.0) is None


def test_repeated_refusals_are_counted_per_tenant_until_they_are_taken():
    refusals = refused()
    for _ in range(3):
        refusals.find(BATCH, 50, 8, 100.0)
    refusals.find(BATCH, 1, 8, 100.0)
    assert (refusals.take_repeated("acme"), refusals.take_repeated("acme"), refusals.take_repeated("umbrella")) == (3, 0, 0)


def test_the_memory_is_bounded_and_makes_room_as_refusals_grow_old():
    refusals = RecentRefusals()
    for number in range(KEYS_MAX + 10):
        refusals.add(Kind(f"t{number}", 1.0, 1.0, 0), 1, 0, "", 5.0, 100.0)
    assert refusals.find(Kind(f"t{KEYS_MAX + 5}", 1.0, 1.0, 0), 1, 0, 100.0) is None
    refusals.add(Kind("late", 1.0, 1.0, 0), 1, 0, "", 5.0, 100.0 + HOLD_S / 2)
    assert refusals.find(Kind("late", 1.0, 1.0, 0), 1, 0, 100.0 + HOLD_S / 2) is None, "all are still held"
    refusals.add(BATCH, 1, 0, "", 5.0, 101.0)
    assert refusals.find(BATCH, 1, 0, 101.0) is not None
    assert refusals.find(Kind("t0", 1.0, 1.0, 0), 1, 0, 100.0) is None, "forgotten, not only too old"


def test_the_room_that_is_made_is_that_of_old_refusals_only():
    refusals = RecentRefusals()
    for number in range(KEYS_MAX):
        refusals.add(Kind(f"t{number}", 1.0, 1.0, 0), 1, 0, "", 5.0, 0.0 if number else 0.2)
    refusals.add(BATCH, 1, 0, "", 5.0, 0.3)
    found = [number for number in range(KEYS_MAX) if refusals.find(Kind(f"t{number}", 1.0, 1.0, 0), 1, 0, 0.2) is not None]
    assert found == [0] and refusals.find(BATCH, 1, 0, 0.3) is not None
