"""The rules that come with the package: few, without gaps, and the same as their trees."""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np
import pytest

from motet.policies.plan import features
from motet.policies.plan.surrogate import Trees, decode
from motet.twin.surrogate.rules import FILE, encode, rules
from motet.twin.surrogate.rules import decode as decode_rules
from motet.twin.surrogate.train import MOST_RULES
from motet.twin.vllm.published import MODELS

SIZES = (400.0, 600.0, 1.6, 32.0, 32.0, 12.0, 400.0)  # of the paper's features, at most
TASKS = ("throughput", "starvation")
CONDITION = re.compile(r"(?:(\S+) < )?(\w+)(?: > (\S+))?(?: <= (\S+))?")


def tree(name: str, task: str) -> Trees:
    return getattr(rules(name), task)


def region(conditions: tuple[str, ...]) -> np.ndarray:
    """What is above, and what is at most: [2, features]."""
    found = np.array([np.full(len(SIZES), -math.inf), np.full(len(SIZES), math.inf)])
    for text in conditions:
        below, name, above, most = CONDITION.fullmatch(text).groups()
        found[:, features.PAPER.index(name)] = float(below or above or -math.inf), float(most or math.inf)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_every_rule_says_what_the_tree_says_within_its_region(name: str, task: str) -> None:
    found = list(tree(name, task).rules())
    assert 1 < len(found) <= MOST_RULES
    rng = np.random.default_rng(0)
    for conditions, value in found:
        low, high = region(conditions)
        low, high = np.maximum(low, 0.0), np.where(np.isfinite(high), high, np.maximum(SIZES, 2 * np.maximum(low, 1.0)))
        inside = low + (high - low) * rng.uniform(0.05, 0.95, (50, len(SIZES)))  # four digits are printed of an end
        assert tree(name, task).predict(inside) == pytest.approx(np.full(50, value))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_a_worker_meets_exactly_one_rule_and_it_is_the_trees(name: str, task: str) -> None:
    x = np.random.default_rng(1).uniform(0, SIZES, (500, len(SIZES)))
    regions = [(region(conditions), value) for conditions, value in tree(name, task).rules()]
    met = np.array([((ends[0] < x) & (x <= ends[1])).all(axis=1) for ends, _ in regions])
    clear = met.sum(axis=0) == 1
    assert clear.mean() > 0.98  # the others are within the rounding of an end
    values = np.array([value for _, value in regions])[met.argmax(axis=0)]
    assert np.mean(tree(name, task).predict(x)[clear] == pytest.approx(values[clear])) == 1.0


def test_the_file_is_small_and_is_read_as_it_was_written() -> None:
    data = FILE.read_bytes()
    assert len(data) < 20_000
    read = decode_rules(data)
    assert encode(read) == data
    assert set(read) == set(MODELS)
    for name in MODELS:
        for task in TASKS:
            written = msgspec.json.encode(msgspec.json.decode(data)[name][task])
            assert decode(written) == tree(name, task)


@pytest.mark.parametrize("name", MODELS)
def test_shipped_rules_are_as_good_as_the_papers_small_trees(name: str) -> None:
    assert rules(name).f1 >= 0.97 and rules(name).smape_percent < 10.25


def test_light_loads_do_not_starve_and_heavy_ones_do() -> None:
    light, heavy = [8, 0.05, 0, 8, 8, 0, 8], [384, 300, 0.5, 32, 20, 10, 16]
    for name in MODELS:
        low, high = tree(name, "starvation").predict(np.array([light, heavy], float))
        assert low < 0.5 < high


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"there are no rules of 'gpt@a10'; there are those of llama-3\.1-8b@h100, qwen"):
        rules("gpt@a10")
