"""Trees as flat arrays: predictions by hand, rules in words, and damaged files refused."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from motet.policies.plan.surrogate import Trees, decode

#          busy <= 1
#         /         \
#       10       slots <= 2
#                 /     \
#                20     30
FIELDS = {
    "target": "ms",
    "features": ("busy", "slots"),
    "roots": (0,),
    "feature": (0, 0, 1, 0, 0),
    "threshold": (1.0, 0.0, 2.0, 0.0, 0.0),
    "left": (1, 1, 3, 3, 4),
    "right": (2, 1, 4, 3, 4),
    "value": (0.0, 10.0, 0.0, 20.0, 30.0),
    "depth": 2,
}
TREE = Trees(**FIELDS)
ROWS = np.array([[1.0, 9.0], [1.1, 2.0], [1.1, 2.1], [0.0, 0.0]])


def test_each_row_ends_in_its_leaf() -> None:
    assert TREE.predict(ROWS).tolist() == [10.0, 20.0, 30.0, 10.0]
    assert TREE.predict(ROWS[:0]).tolist() == []


def test_a_forest_divides_and_boosting_starts_somewhere() -> None:
    again = Trees(**FIELDS | {"roots": (0, 2), "start": 5.0, "divisor": 2.0})  # the second tree begins at the right branch
    assert again.predict(ROWS).tolist() == [(5 + 10 + 30) / 2, (5 + 20 + 20) / 2, (5 + 30 + 30) / 2, (5 + 10 + 20) / 2]


def test_log_odds_become_a_probability() -> None:
    odds = Trees(**FIELDS | {"log_odds": True, "start": -20.0})
    assert odds.predict(ROWS)[1] == 0.5
    assert odds.predict(ROWS)[2] == pytest.approx(1 / (1 + math.exp(-10)))


def test_rules_say_the_way_to_each_leaf() -> None:
    assert list(TREE.rules()) == [
        (("busy <= 1",), 10.0),
        (("busy > 1", "slots <= 2"), 20.0),
        (("busy > 1", "slots > 2"), 30.0),
    ]


def test_conditions_on_one_feature_are_joined() -> None:
    twice = Trees(**FIELDS | {"feature": (0, 0, 0, 0, 0)})
    assert [rule for rule, _ in twice.rules()] == [("busy <= 1",), ("1 < busy <= 2",), ("busy > 2",)]


def test_json_keeps_every_bit() -> None:
    odd = Trees(**FIELDS | {"threshold": (1 / 3, 0.0, math.pi, 0.0, 0.0)})
    assert decode(odd.encode()) == odd


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left": (1, 1, 3, 3, 5)}, "left: entries are from 0 to 4"),
        ({"right": (2, 1, -1, 3, 4)}, "right: entries"),
        ({"feature": (0, 0, 2, 0, 0)}, "feature: entries are from 0 to 1"),
        ({"roots": (7,)}, "roots: entries"),
        ({"roots": ()}, "there is a tree"),
        ({"value": (1.0,)}, "one entry for each node"),
        ({"depth": 9}, "depth is below"),
        ({"divisor": 0.0}, "divisor above 0"),
        ({"motet_surrogate": 2}, "motet_surrogate 2 is not known"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_damaged_model_is_refused(changes: dict[str, object], reason: str) -> None:
    data = msgspec.json.encode(FIELDS | changes)
    with pytest.raises(msgspec.ValidationError, match=reason):
        decode(data)
