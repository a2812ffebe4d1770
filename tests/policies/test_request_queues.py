from __future__ import annotations

import random

import pytest

from bench.rivals.queues import FIRST, SizeQueues
from motet.policies.step.batch_state import Sequence
from motet.policies.step.overtaking import steps_until_room
from motet.policies.step.request_queues import PutOff, make_queues
from motet.shared.model import Mechanism
from tests.policies.support_queues import TOKEN_BYTES, World

# ---- quotas


def test_higher_priorities_go_first_whatever_their_size() -> None:
    for name in ("sjf", "chameleon", "motet", "auto"):
        world = World(make_queues(name, total_tokens=1000.0, token_bytes=TOKEN_BYTES), seats=1)
        world.add(4, 2)
        urgent = world.add(40, 20, priority=-1)
        world.step()
        assert world.began == [urgent], name


@pytest.mark.parametrize("name", ["sjf", "static", "chameleon", "motet", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_the_accounts_add_up_in_random_histories(name: str, seed: int) -> None:
    chance = random.Random(seed)
    queues = make_queues(name, total_tokens=500.0, token_bytes=TOKEN_BYTES)
    world = World(queues, room=60, slots=4, seats=6, prefetch=2)
    here: list[Sequence] = []
    for turn in range(FIRST + 100):
        adapter = chance.choice(["", *"abcdefgh"])
        seq = world.add(
            chance.randint(1, 60),
            chance.randint(1, 30),
            predicted=chance.randint(1, 40),
            adapter=adapter,
            size=5 + 5 * "abcdefgh".find(adapter),
            tenant=chance.choice("xy"),
            priority=chance.choice([0, 0, 1]),
        )
        here.append(seq)
        world.step()
        if turn % 9 == 0 and (left := [one for one in here if one in world.core.state.waiting]):
            world.core.end(left[0])
    world.run()
    for name_of, book in vars(queues).items():
        if name_of in ("_facts", "_flows", "_tenants", "_places", "_late_s"):
            assert not book, name_of


def test_a_long_request_is_put_off_but_not_for_ever() -> None:
    world = World(PutOff(size=1.0, fair=0.0, shared=0.0), seats=1)
    for _ in range(3):
        world.add(10, 1)
    long = world.add(60, 1)
    for _ in range(100):
        world.add(10, 1)
        world.step()
        if long in world.began:
            break
    place = world.began.index(long)
    assert 5 < place < 60


def test_a_request_whose_adapter_is_in_use_goes_ahead() -> None:
    world = World(PutOff(size=0.0, fair=0.0, shared=0.5), seats=2)
    world.add(4, 50, adapter="a")
    world.add(4, 2)
    world.step()
    other, same = world.add(4, 2, adapter="b"), world.add(4, 2, adapter="a")
    for _ in range(8):
        world.step()
    assert world.began.index(same) < world.began.index(other)


def test_a_hot_adapter_does_not_starve_the_others() -> None:
    def wait_of_the_tail(queues: object) -> float:
        world = World(queues, seats=2, slots=8)
        chance = random.Random(0)
        came: dict[int, float] = {}
        waits = []
        for turn in range(300):
            for _ in range(3):
                world.add(16, 4, adapter="hot", size=5)
            if turn % 5 == 0:
                seq = world.add(16, 4, adapter=chance.choice("bcd"), size=5)
                came[seq.order] = world.now_s
            admitted = world.step().admitted
            waits += [world.now_s - came[seq.order] for seq in admitted if seq.order in came]
        return max(waits, default=float("inf"))

    assert wait_of_the_tail(PutOff(size=0.0, fair=50.0, shared=0.0)) < 0.5 * wait_of_the_tail(None)


# ---- passing by prediction


def test_others_pass_only_if_they_end_before_the_one_without_adapter_memory_finds_room() -> None:
    world = World(SizeQueues(10_000.0, TOKEN_BYTES), room=100, slots=8)
    world.add(4, 10, adapter="large", size=80)
    world.step()
    blocked = world.add(4, 5, adapter="other", size=70)
    late, early = world.add(4, 40, adapter="a", size=10), world.add(4, 3, adapter="b", size=10)
    world.step()
    assert early in world.began and late not in world.began and blocked not in world.began
    assert steps_until_room(world.core.state, 70) < 10
    world.run()
    assert world.began.index(blocked) < world.began.index(late)


def test_a_long_request_passes_too_if_its_adapter_is_in_use() -> None:
    world = World(SizeQueues(10_000.0, TOKEN_BYTES, ahead=0.0), room=100)
    world.add(4, 20, adapter="a", size=60)
    world.step()
    blocked = world.add(4, 4, adapter="b", size=80)
    long, shared = world.add(4, 60, adapter="c", size=30), world.add(4, 60, adapter="a", size=60)
    world.step()
    assert shared in world.began and blocked not in world.began and long not in world.began


def test_a_request_that_passed_by_a_wrong_prediction_is_preempted_and_loses_no_token() -> None:
    world = World(SizeQueues(10_000.0, TOKEN_BYTES), room=100, slots=8)
    large = world.add(4, 30, adapter="large", size=60)
    world.step()
    blocked = world.add(4, 5, adapter="other", size=90)
    wrong = world.add(4, 40, predicted=3, adapter="a", size=20)
    for _ in range(5):
        world.step()
    assert wrong in world.began and blocked not in world.began
    tokens = wrong.tokens.tolist()
    world.core.end(large)
    plan = world.step()
    assert plan.preempted == [wrong] and blocked in plan.admitted and world.core.squashed == 1
    assert wrong.tokens.tolist() == tokens, "recomputed later, not drawn again"
    world.run()
    assert wrong.length == world.ends[wrong.order]


# ---- late requests come last


def late_last(seats: int = 1) -> World:
    return World(make_queues("auto", total_tokens=1000.0, token_bytes=TOKEN_BYTES), seats=seats)


def test_requests_begin_in_order_while_the_first_one_is_in_time() -> None:
    world = late_last()
    asked = [world.add(4, 2) for _ in range(2)]  # the second one begins after 3 s; the objective is 5 s
    while world.core.busy:
        world.step()
    assert world.began == asked


def test_a_late_request_lets_those_in_time_go_first() -> None:
    world = late_last()
    world.add(4, 7)
    late = world.add(4, 1)
    for _ in range(4):
        world.step()
    in_time = world.add(4, 1)
    for _ in range(8):
        world.step()
    assert world.began[1:] == [in_time, late]


def test_the_first_request_begins_after_four_others_though_it_is_late() -> None:
    world = late_last()
    world.add(4, 7)
    late = [world.add(4, 1) for _ in range(2)]
    in_time = []
    for _ in range(20):
        world.step()
        in_time.append(world.add(4, 1))
    places = [world.began.index(one) for one in late]
    assert places[1] - places[0] == 5, "four in time begin between two late ones"
    assert all(one in in_time for one in world.began[places[0] + 1 : places[1]])


def test_priority_goes_before_lateness() -> None:
    world = late_last()
    world.add(4, 7)
    world.step()
    late = world.add(4, 1, priority=-1)
    for _ in range(5):
        world.step()
    world.add(4, 1)
    for _ in range(4):
        world.step()
    assert world.began[1] is late


def test_the_queues_say_how_many_requests_are_late() -> None:
    queues = make_queues("auto", total_tokens=1000.0, token_bytes=TOKEN_BYTES)
    world = World(queues, seats=1)
    world.add(4, 9)
    world.add(4, 1)
    assert world.core.mechanisms["queues"].state == "waiting"
    for _ in range(6):
        world.step()
    world.add(4, 1)
    assert world.core.mechanisms["queues"] == Mechanism("on", "1 of 2 waiting requests are late")
    world.run()
    assert world.core.mechanisms["queues"] == Mechanism("waiting", "no waiting request is late")
    assert "queues" not in World(None).core.mechanisms
