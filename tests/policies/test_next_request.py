from __future__ import annotations

import random
from itertools import pairwise

import pytest

from motet.policies.memory import next_request
from motet.policies.memory.next_request import LEAST_ROOM, MAX_ADAPTERS, NextRequest


def learned(requests: list[str]) -> NextRequest:
    model = NextRequest()
    for digest in requests:
        model.used(digest)
    return model


def test_with_steady_popularity_the_prediction_comes_close_to_the_true_shares() -> None:
    draw = random.Random(0)
    shares = {"often": 0.6, "seldom": 0.3, "rare": 0.1}
    model = learned(draw.choices(list(shares), list(shares.values()), k=4000))
    assert model.chances(shares) == pytest.approx(list(shares.values()), abs=0.06)


def test_with_bursts_what_was_asked_for_just_now_is_likelier_than_what_was_popular_before() -> None:
    bursts = [f"burst-{number}" for number in range(200) for _ in range(10)]
    just_now, before = learned(["popular"] * 100 + bursts).chances(["burst-199", "popular"])
    assert just_now > 10 * before


def test_with_steady_popularity_one_late_request_does_not_make_an_adapter_likely() -> None:
    draw = random.Random(1)
    often = [f"often-{number}" for number in range(8)]
    *others, once = learned([*draw.choices(often, k=2000), "once"]).chances([*often, "once"])
    assert all(chance > 2 * once for chance in others)


def test_the_memories_are_longer_where_there_is_room_for_more_adapters() -> None:
    small, large = NextRequest(), NextRequest()
    large.room(32 * LEAST_ROOM)
    for model in (small, large):
        for digest in ["before"] * 50 + ["now"] * 200:
            model.used(digest)
    assert large.chances(["before"])[0] > 2 * small.chances(["before"])[0]


def test_a_credit_is_worth_as_much_as_the_request_that_it_stands_for() -> None:
    model = learned(["a", "b"])
    assert model.chances(["unknown"]) == [0]
    late, ahead = model.chances(["b", "unknown"], {"unknown": model.one()})
    assert late == pytest.approx(ahead) and ahead > 0


def test_scaling_the_counts_down_changes_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    requests = draw.choices("abcdefgh", k=1500)
    plain = learned(requests).chances("abcdefgh")
    monkeypatch.setattr(next_request, "LARGEST", 4.0)
    assert learned(requests).chances("abcdefgh") == pytest.approx(plain)


def test_a_bounded_number_of_adapters_is_kept_the_last_ones_asked_for() -> None:
    model = learned([str(number) for number in range(MAX_ADAPTERS + 10)])
    assert len(model) == MAX_ADAPTERS
    forgotten, kept = model.chances(["9", "10"])
    assert forgotten == 0 < kept


def test_predictions_add_up_to_no_more_than_one() -> None:
    draw = random.Random(3)
    model = NextRequest()
    for _, after in pairwise(draw.choices("abcdef", [9, 5, 3, 2, 1, 1], k=500)):
        model.used(after)
        assert sum(model.chances("abcdef")) <= 1 + 1e-9
