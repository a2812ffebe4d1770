"""Promise: adapters are at home where they load little, workers are level, and a plan made again moves little."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.policies.cluster.homes import APART, Homes, bytes_to_load, match, of_adapters, plan

MIB = 1 << 20
LOAD = {f"a{place:03}": 1.0 / place for place in range(1, 201)}
SIZE = dict.fromkeys(LOAD, MIB)
WORKERS = [f"w{number}" for number in range(8)]


def empty(workers: list[str]) -> dict[str, tuple[str, ...]]:
    return {worker: () for worker in workers}


def loads(homes: Homes, load: dict[str, float]) -> list[float]:
    copies = {one: len(there) for one, there in of_adapters(homes).items()}
    return [sum(load[one] / copies[one] for one in adapters) for adapters in homes.values()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bins_go_to_the_workers_that_load_the_fewest_bytes_for_them_all_together(data: st.DataObject) -> None:
    names, workers = [*"abcdef"], ["u", "v", "w"]
    size = {name: data.draw(st.integers(1, 50)) for name in names}
    bins = [data.draw(st.lists(st.sampled_from(names), unique=True)) for _ in range(data.draw(st.integers(1, 3)))]
    held = {worker: data.draw(st.sets(st.sampled_from(names))) for worker in workers}

    def missing(bins_of: dict[str, list[str]]) -> int:
        return sum(size[one] for worker, adapters in bins_of.items() for one in adapters if one not in held[worker])

    found = match(bins, size, held)
    assert sorted(map(list, (one for one in found.values() if one))) == sorted(one for one in bins if one)
    least = min(missing(dict(zip(order, bins, strict=False))) for order in permutations(workers, len(bins)))
    assert missing({worker: list(one) for worker, one in found.items()}) == least


def test_of_two_workers_that_load_as_much_the_one_that_was_home_before_stays_it() -> None:
    held: dict[str, tuple[str, ...]] = {"u": (), "v": ()}
    for before, home in (({"u": ("a",)}, "u"), ({"v": ("a",)}, "v")):
        assert match([["a"]], {"a": MIB}, held, before)[home] == ("a",)


def test_more_bins_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 bins for 1 workers"):
        match([["a"], ["b"]], {"a": 1, "b": 1}, {"w": ()})


def test_every_adapter_has_a_home_and_all_workers_are_level() -> None:
    homes = plan(LOAD, SIZE, empty(WORKERS))
    assert of_adapters(homes).keys() == LOAD.keys()
    mean = sum(LOAD.values()) / len(WORKERS)
    assert max(loads(homes, LOAD)) <= APART * mean and min(loads(homes, LOAD)) >= mean / APART
    assert all(list(one) == sorted(one, key=lambda name: (-LOAD[name], name)) for one in homes.values())


def test_an_adapter_with_more_load_than_a_worker_should_have_gets_several_homes() -> None:
    homes = of_adapters(plan({"hot": 4.0, "a": 1.0, "b": 1.0, "c": 2.0}, dict.fromkeys(["hot", *"abc"], 1), empty(WORKERS[:4])))
    assert len(homes["hot"]) == 3 and all(len(homes[one]) == 1 for one in "ab")


def test_the_first_plan_leaves_adapters_where_they_are_loaded() -> None:
    homes = plan(LOAD, SIZE, empty(WORKERS))
    elsewhere = dict(zip(reversed(WORKERS), homes.values(), strict=True))
    assert plan(LOAD, SIZE, elsewhere) == dict(sorted(elsewhere.items()))


def test_rates_that_differ_by_chance_move_nothing() -> None:
    homes = plan(LOAD, SIZE, empty(WORKERS))
    noisy = {one: rate * (1.05 if number % 2 else 0.95) for number, (one, rate) in enumerate(LOAD.items())}
    assert bytes_to_load(plan(noisy, SIZE, empty(WORKERS), homes), SIZE, homes) == 0


def test_a_new_worker_gets_its_part_of_the_load_with_fewer_adapters_than_hashing_moves() -> None:
    homes = plan(LOAD, SIZE, empty(WORKERS))
    more = plan(LOAD, SIZE, empty([*WORKERS, "w8"]), homes)
    mean = sum(LOAD.values()) / 9
    assert loads(more, LOAD)[8] >= mean / APART
    assert 0 < bytes_to_load(more, SIZE, homes) < len(LOAD) / 9 * MIB


def test_when_a_worker_leaves_only_its_adapters_move_and_few_others() -> None:
    homes = plan(LOAD, SIZE, empty(WORKERS))
    fewer = plan(LOAD, SIZE, empty(WORKERS[1:]), homes)
    assert of_adapters(fewer).keys() == LOAD.keys()
    assert bytes_to_load(fewer, SIZE, homes) <= (len(homes["w0"]) + 4) * MIB


def test_without_workers_or_load_there_are_no_homes() -> None:
    assert plan(LOAD, SIZE, {}) == {}
    assert plan({"a": 0.0}, {"a": 1}, empty(["w"])) == {"w": ()}
