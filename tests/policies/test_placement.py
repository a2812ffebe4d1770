"""Promise: adapters are loaded where a burst of their requests would find memory, and no copy makes the worst case worse."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.homes import Homes
from motet.policies.cluster.placement import Placing, Room, preload
from motet.policies.cluster.worker_book import Known
from motet.shared.model import AdapterRef
from tests.support_worker import PERF, worker_limits

SIZE = dict.fromkeys("abcdefgh", 10)


def tolerance(
    placed: dict[str, tuple[str, ...]], load: dict[str, float], size: dict[str, int], rooms: dict[str, Room]
) -> float:
    """The lowest burst tolerance, from its definition."""
    free = {worker: rooms[worker].free_bytes - sum(size[one] for one in adapters) for worker, adapters in placed.items()}
    return min(
        (sum(free[worker] for worker in placed if one in placed[worker]) / rate for one, rate in load.items() if rate > 0.0),
        default=0.0,
    )


loads = st.dictionaries(st.sampled_from("abcdefgh"), st.one_of(st.just(0.0), st.floats(0.001, 50.0)), min_size=1)
sizes = st.fixed_dictionaries({name: st.integers(1, 40) for name in "abcdefgh"})
rooms_of = st.dictionaries(
    st.sampled_from(("w0", "w1", "w2", "w3")),
    st.builds(Room, free_bytes=st.integers(0, 400), slots=st.integers(0, 8)),
    min_size=1,
)


@settings(max_examples=200, deadline=None)
@given(loads, sizes, rooms_of)
def test_a_placement_fits_and_contains_adapters_with_requests_only(
    load: dict[str, float], size: dict[str, int], rooms: dict[str, Room]
) -> None:
    placed = preload(load, size, rooms)
    assert placed.keys() == rooms.keys()
    for worker, adapters in placed.items():
        assert len(set(adapters)) == len(adapters) <= rooms[worker].slots
        assert sum(size[one] for one in adapters) <= rooms[worker].free_bytes
        assert all(load[one] > 0.0 for one in adapters)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 8).map(float), min_size=1),
    st.integers(2, 3),
    st.integers(30, 100),
)
def test_a_small_placement_is_near_the_best_of_all(load: dict[str, float], workers: int, free: int) -> None:
    rooms = {f"w{index}": Room(free_bytes=free, slots=8) for index in range(workers)}
    names = sorted(load)
    sets = [tuple(one for one, there in zip(names, bits, strict=True) if there) for bits in product((0, 1), repeat=len(names))]
    most = max(
        tolerance(dict(zip(rooms, choice, strict=True)), load, SIZE, rooms)
        for choice in product(sets, repeat=workers)
        if all(len(one) * 10 <= free for one in choice)
    )
    assert tolerance(preload(load, SIZE, rooms), load, SIZE, rooms) >= 0.5 * most


def test_the_adapter_with_most_of_the_load_is_on_every_worker_and_a_rare_one_on_few() -> None:
    rooms = {f"w{index}": Room(free_bytes=1000, slots=8) for index in range(8)}
    placed = preload({"a": 80.0, "b": 9.0, "c": 1.0}, SIZE, rooms)
    copies = {name: sum(name in adapters for adapters in placed.values()) for name in "abc"}
    assert copies == {"a": 8, "b": 1, "c": 1}


def test_copies_go_to_the_workers_whose_adapters_expect_the_least() -> None:
    rooms = {"w0": Room(free_bytes=1000, slots=2), "w1": Room(free_bytes=1000, slots=2)}
    assert preload({"a": 10.0, "b": 9.0, "c": 5.0}, SIZE, rooms) == {"w0": ("a",), "w1": ("b", "c")}


def test_where_memory_is_short_every_adapter_comes_before_a_second_copy_of_any() -> None:
    rooms = {"w0": Room(free_bytes=20, slots=8), "w1": Room(free_bytes=20, slots=8)}
    placed = preload({"a": 10.0, "b": 1.0, "c": 1.0}, SIZE, rooms)
    assert {one for adapters in placed.values() for one in adapters} == {"a", "b", "c"}


def test_an_adapter_without_load_is_not_placed() -> None:
    rooms = {"w0": Room(free_bytes=100, slots=8)}
    assert preload({"a": 1.0, "b": 0.0}, SIZE, rooms) == {"w0": ("a",)}
    assert preload({}, {}, rooms) == {"w0": ()} and preload({"a": 1.0}, SIZE, {}) == {}


def test_homes_come_before_copies_and_copies_get_only_the_room_that_they_leave() -> None:
    rooms = {"w0": Room(free_bytes=1000, slots=2), "w1": Room(free_bytes=1000, slots=2)}
    placed = preload({"a": 10.0, "b": 1.0, "c": 1.0}, SIZE, rooms, first={"w0": ("b", "c"), "w1": ("a",)})
    assert placed == {"w0": ("b", "c"), "w1": ("a",)}, "a second copy of b or c would lower the tolerance of a"
    placed = preload({"a": 10.0, "b": 1.0}, SIZE, rooms, first={"w0": ("b",), "w1": ("a",)})
    assert placed == {"w0": ("b", "a"), "w1": ("a",)}, "w0 has room for a copy of a"


def test_a_worker_keeps_all_its_homes_even_where_it_may_hold_fewer() -> None:
    rooms = {"w0": Room(free_bytes=10, slots=1)}
    assert preload({"a": 2.0, "b": 1.0}, SIZE, rooms, first={"w0": ("a", "b")}) == {"w0": ("a", "b")}


def known(worker_id: str, base_model: str = "demo") -> Known:
    return Known(worker_id, "first", worker_limits(base_model=base_model, pin_slots=4))


def asked(placing: Placing, name: str, count: int, base_model: str = "demo") -> None:
    ref = AdapterRef(name=name, digest=name, rank=8, size_bytes=10)
    for number in range(count):
        placing.asked(ref, base_model, float(number))


def placed_by(placing: Placing, workers: list[Known], now_s: float, before: Homes) -> dict[str, tuple[str, ...]]:
    state = ClusterState()
    for one in workers:
        state.put_worker(one.worker_id, one.limits, PERF)
    return {worker: digests for look in placing.look(workers, state, now_s, before) for worker, digests in look.place().items()}


def test_adapters_are_placed_on_workers_of_their_base_model() -> None:
    placing = Placing()
    asked(placing, "a", 5)
    asked(placing, "z", 5, "other")
    assert placed_by(placing, [known("w0"), known("w1", "other")], 10.0, {}) == {"w0": ("a",), "w1": ("z",)}


def test_a_scheduler_that_has_just_started_leaves_homes_of_adapters_that_it_does_not_know_yet() -> None:
    placing = Placing()
    assert placed_by(placing, [known("w0")], 0.0, {"w0": ("old",)}) == {"w0": ("old",)}
    asked(placing, "a", 5)
    assert placed_by(placing, [known("w0")], 10.0, {"w0": ("old",)}) == {"w0": ("a", "old")}
    asked(placing, "a", 1200)
    assert placed_by(placing, [known("w0")], 1200.0, {"w0": ("old",)}) == {"w0": ("a",)}


def test_an_adapter_that_only_some_workers_can_run_gets_no_place() -> None:
    placing = Placing()
    asked(placing, "a", 5)
    for number in range(5):
        placing.asked(AdapterRef(name="z", digest="z", rank=8, size_bytes=10, targets=("lm_head",)), "demo", float(number))
    able = worker_limits(pin_slots=4, lora_targets=("lm_head",))
    both = [Known("w0", "first", able), Known("w1", "first", able)]
    assert {one for digests in placed_by(placing, both, 10.0, {}).values() for one in digests} == {"a", "z"}
    mixed = [both[0], known("w1")]
    assert {one for digests in placed_by(placing, mixed, 10.0, {}).values() for one in digests} == {"a"}
