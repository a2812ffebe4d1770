"""Promise: the index knows for every prompt how many of its first blocks each worker has, in bounded time and memory."""

from __future__ import annotations

import random

import pytest

from motet.policies.cluster.prefix_index import EXPECTED_S, PrefixIndex


def depths(index: PrefixIndex, keys: list[int]) -> dict[int, int]:
    """Blocks by row."""
    found: dict[int, int] = {}
    for depth in index.depths(keys):
        for row in depth.rows.tolist():
            assert row not in found, "a worker is found once"
            found[row] = depth.keys
    return found


def plain_depths(have: dict[int, set[int]], keys: list[int]) -> dict[int, int]:
    """The same from sets of keys."""
    counted = {row: next((i for i, key in enumerate(keys) if key not in own), len(keys)) for row, own in have.items()}
    return {row: count for row, count in counted.items() if count}


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_one_set_of_keys_per_worker(seed: int) -> None:
    draw, index, have = random.Random(seed), PrefixIndex(), dict[int, set[int]]()
    chains = [[draw.getrandbits(60) for _ in range(40)] for _ in range(15)]
    for second in range(3_000):
        row, chain, cut = draw.randrange(12), draw.choice(chains), draw.randrange(41)
        match draw.choice(["add", "add", "remove", "forget", "look"]):
            case "add":
                index.add(row, chain[:cut])
                have.setdefault(row, set()).update(chain[:cut])
            case "remove":
                index.remove(row, chain[cut:])
                have.setdefault(row, set()).difference_update(chain[cut:])
            case "forget" if draw.random() < 0.2:
                index.forget(row)
                have.pop(row, None)
        index.settle(float(second))
        asked = draw.choice(chains)[: draw.randrange(1, 41)]
        assert depths(index, asked) == plain_depths(have, asked)
    for _ in range(2_000):
        index.settle(0.0)
    assert len(index) == len(set().union(*have.values())), "what nobody has takes no room"


def test_a_prompt_of_many_blocks_takes_few_lookups() -> None:
    index, keys = PrefixIndex(), list(range(1, 8_193))
    for row in range(3):
        index.add(row, keys[: 2_000 * (row + 1)])
    looked: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, at):  # type: ignore[no-untyped-def, override]
            looked.append(at)
            return super().__getitem__(at)

    assert {int(depth.rows[0]): depth.keys for depth in index.depths(Counted(keys))} == {0: 2_000, 1: 4_000, 2: 6_000}
    assert len(looked) < 60


def test_a_full_index_takes_no_new_keys_and_still_forgets() -> None:
    index = PrefixIndex(most=10)
    index.add(0, range(20))
    assert len(index) == 10
    index.remove(0, range(5))
    index.add(1, range(100, 103))
    assert len(index) == 8
    assert index.has(1, 102)


def test_blocks_of_an_assigned_request_are_expected_for_a_while() -> None:
    index = PrefixIndex()
    index.expect(3, [1, 2, 3], 0.0)
    assert depths(index, [1, 2, 3, 4]) == {3: 3}
    index.add(3, [1])
    index.settle(EXPECTED_S - 0.1)
    assert depths(index, [1, 2, 3]) == {3: 3}
    index.settle(EXPECTED_S)
    assert depths(index, [1, 2, 3]) == {3: 1}, "only what the worker has confirmed"


def test_a_refused_request_brings_no_blocks() -> None:
    index = PrefixIndex()
    index.add(3, [1])
    index.expect(3, [1, 2, 3], 0.0)
    index.disappoint(3, [1, 2, 3])
    assert depths(index, [1, 2, 3]) == {3: 1}


def test_a_lost_worker_is_not_found_and_its_row_can_be_another_worker() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2])
    index.add(1, [1])
    index.expect(0, [3], 0.0)
    index.forget(0)
    assert depths(index, [1, 2]) == {1: 1}
    index.add(0, [2])
    index.settle(EXPECTED_S + 1.0)
    assert depths(index, [1, 2]) == {1: 1}
    assert depths(index, [2]) == {0: 1}
