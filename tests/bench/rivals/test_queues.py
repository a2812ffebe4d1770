"""Promise: the queues that Motet is compared with are those of their papers."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from bench.rivals.queues import FIRST, ShortestFirst, SizeQueues, clusters, cut_offs, least_quota, quotas, silhouette
from motet.policies.step.batch_state import Sequence
from tests.policies.support_queues import TOKEN_BYTES, World


@pytest.mark.parametrize("seed", range(5))
def test_k_means_in_one_dimension_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.sort(rng.random(9))

    def within(begins: list[int]) -> float:
        return sum(float(((part - part.mean()) ** 2).sum()) for part in np.split(points, begins[1:]))

    best = min(within([0, i, j]) for i in range(1, 8) for j in range(i + 1, 9))
    assert within(clusters(points, 3)) == pytest.approx(best)


def test_as_many_queues_as_there_are_sizes_apart_and_the_cuts_lie_midway() -> None:
    rng = np.random.default_rng(0)
    for centres in ([1.0, 5.0], [1.0, 5.0, 9.0], [1.0, 5.0, 9.0, 20.0]):
        sizes = np.concatenate([rng.normal(centre, 0.1, 100) for centre in centres])
        assert cut_offs(sizes) == pytest.approx([(a + b) / 2 for a, b in pairwise(centres)], abs=0.1)


def test_one_queue_for_sizes_that_are_all_alike() -> None:
    assert cut_offs(np.full(100, 3.0)) == []


def test_the_silhouette_is_one_for_points_far_apart_and_low_within_one_heap() -> None:
    apart = np.array([0.0, 0.0, 100.0, 100.0])
    assert silhouette(apart, [0, 2]) == pytest.approx(1.0)
    heap = np.sort(np.random.default_rng(1).normal(0.0, 1.0, 200))
    assert silhouette(heap, clusters(heap, 4)) < 0.6


def test_quotas_are_the_minima_of_the_m_m_1_bound_and_the_rest_in_proportion() -> None:
    assert least_quota(tokens=100, duration_s=2.0, slo_s=5.0, rate=0.3) == pytest.approx(100 * 2 * (0.2 + 0.3))
    assert quotas([100.0, 300.0], 800.0) == [200.0, 600.0]
    assert quotas([0.0, 0.0], 10.0) == [5.0, 5.0]


def test_short_requests_have_a_lane_of_their_own_and_long_ones_do_not_starve() -> None:
    queues: SizeQueues[Sequence] = SizeQueues(400.0, TOKEN_BYTES, refresh_s=20.0)
    world = World(queues, seats=64)
    chance = random.Random(0)
    for _ in range(60):
        for _ in range(4):
            short = chance.random() < 0.8
            world.add(4 if short else 60, 3 if short else 40, adapter="s" if short else "l", size=5 if short else 100)
        world.step()
    assert len(queues.lanes) >= 2 and queues.cuts == sorted(queues.cuts)
    assert sum(lane.quota for lane in queues.lanes) == pytest.approx(400.0)
    world.run()
    assert len(world.began) >= 240
    assert all(lane.used == pytest.approx(0.0) and not lane.running for lane in queues.lanes), "everything was given back"
    assert queues.borrowed == pytest.approx(0.0) and not queues.facts


def test_what_empty_queues_spare_goes_to_those_with_requests() -> None:
    queues: SizeQueues[Sequence] = SizeQueues(100.0, TOKEN_BYTES)
    world = World(queues, seats=64)
    small, large = [world.add(4, 6) for _ in range(3)], [world.add(14, 14) for _ in range(3)]
    queues.cuts = [queues.size(queues.facts[small[0].order]) * 1.5]
    queues.lanes = [type(queues.lanes[0])(30.0), type(queues.lanes[0])(60.0)]
    for facts in queues.facts.values():
        facts.lane = int(facts.prompt > 4)
    chosen = queues.candidates(world.core.state, 0.0)
    assert chosen == [*small, *large[:2]], "the small ones take their 30 tokens, two large ones 56 of 60"
    for seq in small:
        world.core.end(seq)
    assert queues.candidates(world.core.state, 0.0) == large, "the 30 tokens of the empty queue pay for a third"


def two_lanes(small: float, large: float) -> tuple[SizeQueues[Sequence], World]:
    """A queue for requests of sizes below 10, one for larger ones, and their quotas in tokens."""
    queues: SizeQueues[Sequence] = SizeQueues(small + large, TOKEN_BYTES, cuts=[10.0])
    queues.lanes = [type(queues.lanes[0])(small), type(queues.lanes[0])(large)]
    return queues, World(queues, seats=64)


def test_running_requests_count_against_the_quota_of_their_queue() -> None:
    """A small request costs 4 + 6 tokens and a large one 14 + 14; both queues have requests, so none has tokens to spare."""
    queues, world = two_lanes(30.0, 60.0)
    running = [world.add(4, 6) for _ in range(2)]
    world.step()
    assert world.began == running
    small, large = [world.add(4, 6) for _ in range(3)], [world.add(14, 14) for _ in range(3)]
    assert queues.candidates(world.core.state, world.now_s) == [small[0], *large[:2]], "20 of the 30 tokens are in use"
    world.core.end(running[0])
    assert queues.candidates(world.core.state, world.now_s) == [*small[:2], *large[:2]], "10 tokens were given back"


def test_borrowed_tokens_are_lent_once_and_go_back_to_the_common_pool() -> None:
    """The small queue is empty and lends its 30 tokens to one large request of 28; its own quota pays for another one."""
    queues, world = two_lanes(30.0, 28.0)
    own, borrowing, third = (world.add(14, 14) for _ in range(3))
    world.step()
    assert world.began == [own, borrowing]
    assert queues.candidates(world.core.state, world.now_s) == [], "2 tokens of the pool are left"
    world.core.end(borrowing)
    assert queues.candidates(world.core.state, world.now_s) == [third]


def test_a_queue_without_running_requests_admits_one_that_is_larger_than_its_quota() -> None:
    queues, world = two_lanes(30.0, 20.0)
    small = world.add(4, 24)
    large = [world.add(14, 14) for _ in range(2)]
    assert queues.candidates(world.core.state, world.now_s) == [small, large[0]]
    world.step()
    assert world.began == [small, large[0]] and queues.candidates(world.core.state, world.now_s) == []


def fed(queues: SizeQueues[Sequence], world: World, *sizes: tuple[int, int, int]) -> list[Sequence]:
    """Requests (prompt, output, adapter bytes) by turns, as many as the first queues take."""
    return [
        world.add(prompt, output, adapter=str(size) if size else "", size=size)
        for prompt, output, size in (sizes * FIRST)[:FIRST]
    ]


def test_the_weighted_size_is_four_tenths_prompt_and_six_tenths_output_times_the_adapters_share() -> None:
    """Chameleon section 4.3.1; the largest prompt, output and adapter are 100, 50 and 64."""
    queues: SizeQueues[Sequence] = SizeQueues(1e6, TOKEN_BYTES)
    world = World(queues, room=10_000)
    sizes = (100, 50, 64), (50, 25, 32), (100, 50, 0), (100, 5, 64), (10, 50, 64)
    seqs = fed(queues, world, *sizes)[:5]
    queues.candidates(world.core.state, 1.0)
    weighted = [queues.size(queues.facts[seq.order]) for seq in seqs]
    assert weighted == pytest.approx([1.0, 0.5 * 32 / 64, 32 / 64, 0.4 + 0.6 * 0.1, 0.4 * 0.1 + 0.6])


def test_queues_are_made_of_the_first_requests_and_anew_when_twice_as_much_was_seen_and_then_every_refresh_time() -> None:
    """Two sizes make two queues, three later sizes three; quotas follow, and requests that wait or run change their queue."""
    queues: SizeQueues[Sequence] = SizeQueues(1e6, TOKEN_BYTES, refresh_s=20.0)
    world = World(queues, seats=FIRST, room=10_000)
    for _ in range(FIRST - 1):
        world.add(4, 4)
    queues.candidates(world.core.state, 0.0)
    assert queues.cuts == [], "one request is missing"
    waiting = world.add(60, 60)
    world.now_s = 1.0
    queues.candidates(world.core.state, 1.0)
    (cut,) = queues.cuts
    assert cut == pytest.approx((0.4 * 4 / 60 + 0.6 * 4 / 60 + 1.0) / 2) and len(queues.lanes) == 2
    assert queues.facts[waiting.order].lane == 1
    world.now_s = 1.9
    fed(queues, world, (4, 4, 0), (60, 60, 0), (120, 120, 0))
    queues.candidates(world.core.state, 1.9)
    assert queues.cuts == [cut], "a second was seen, and another one has not passed"
    queues.candidates(world.core.state, 2.1)
    cuts = queues.cuts
    assert cuts == pytest.approx([(4 / 120 + 0.5) / 2, 0.75], rel=0.02)
    assert queues.facts[waiting.order].lane == 1 and sum(lane.quota for lane in queues.lanes) == pytest.approx(1e6)
    queues.candidates(world.core.state, 50.0)
    world.now_s = 69.0
    fed(queues, world, (4, 4, 0), (60, 60, 0))
    queues.candidates(world.core.state, 69.9)
    assert queues.cuts == cuts, "20 s have not passed"
    queues.candidates(world.core.state, 70.1)
    assert len(queues.cuts) == 1


def test_the_quotas_of_a_refresh_are_the_bounds_of_what_came_to_each_queue() -> None:
    """S * D * (1 / SLO + lambda): 96 requests of 4 + 4 tokens and 32 of 60 + 60 came within 8 s; the SLO is 5 s and D 1 s."""
    queues: SizeQueues[Sequence] = SizeQueues(1000.0, TOKEN_BYTES)
    world = World(queues)
    world.now_s = 50.0
    fed(queues, world, (4, 4, 0), (4, 4, 0), (60, 60, 0), (4, 4, 0))
    queues.candidates(world.core.state, 58.0)
    least = [8 * (1 / 5 + 96 / 8), 120 * (1 / 5 + 32 / 8)]
    assert [lane.quota for lane in queues.lanes] == pytest.approx([1000 * one / sum(least) for one in least])


def test_the_time_of_a_request_is_that_of_its_own_queue() -> None:
    """Small requests took 2 s from admission to end and large ones 10 s."""
    queues: SizeQueues[Sequence] = SizeQueues(1e5, TOKEN_BYTES)
    world = World(queues)
    for seq in fed(queues, world, (4, 4, 0), (60, 60, 0)):
        queues.began(seq, 0.0)
        queues.stopped(seq, 2.0 if seq.length == 4 else 10.0)
    queues.candidates(world.core.state, 8.0)
    least = [8 * 2 * (1 / 5 + 64 / 8), 120 * 10 * (1 / 5 + 64 / 8)]
    assert [lane.quota for lane in queues.lanes] == pytest.approx([1e5 * one / sum(least) for one in least])


def test_quotas_that_do_not_fit_make_one_queue_and_memory_is_its_limit() -> None:
    """The least quotas are 97.6 and 504 tokens (as above, after 8 s)."""
    made = {}
    for tokens in (600.0, 603.0):
        queues: SizeQueues[Sequence] = SizeQueues(tokens, TOKEN_BYTES)
        world = World(queues)
        seqs = fed(queues, world, (4, 4, 0), (4, 4, 0), (60, 60, 0), (4, 4, 0))
        made[tokens] = queues.candidates(world.core.state, 8.0)
        assert len(queues.lanes) == (2 if tokens > 602 else 1)
    assert made[600.0] == seqs[:0] + sorted(made[600.0], key=lambda seq: seq.order) and len(made[600.0]) == FIRST
    assert len(made[603.0]) < FIRST, "quotas bind"


@pytest.mark.parametrize(("ahead", "first"), [(1.0, "here"), (0.0, "elsewhere")])
def test_a_request_whose_adapter_is_on_the_device_goes_ahead_by_the_share_of_those_whose_adapter_is_not(
    ahead: float, first: str
) -> None:
    """Half of the waiting requests lack their adapter, so it is half an objective of 5 s."""
    queues: SizeQueues[Sequence] = SizeQueues(1e6, TOKEN_BYTES, ahead=ahead)
    world = World(queues, room=100)
    world.add(4, 1, adapter="here", size=10)
    world.step()
    elsewhere = world.add(4, 4, adapter="elsewhere", size=10)
    world.now_s += 2.4
    here = world.add(4, 4, adapter="here", size=10)
    expected = [here, elsewhere] if first == "here" else [elsewhere, here]
    assert queues.candidates(world.core.state, world.now_s) == expected
    world.core.end(here)
    world.now_s += 0.2
    late = world.add(4, 4, adapter="here", size=10)
    assert queues.candidates(world.core.state, world.now_s) == [elsewhere, late], "2.6 s later is too late"


def test_shortest_first_takes_the_least_predicted_output() -> None:
    world = World(ShortestFirst(), seats=1)
    world.add(4, 9)
    short = world.add(30, 2)
    world.step()
    assert world.began == [short]


def test_static_queues_divide_the_range_of_the_first_sizes_and_the_tokens_evenly_and_stay() -> None:
    """Sizes from 1 / 10 to 1 in four ranges."""
    queues: SizeQueues[Sequence] = SizeQueues(1000.0, TOKEN_BYTES, refresh_s=1.0, static=True)
    world = World(queues)
    fed(queues, world, (10, 10, 0), (100, 100, 0))
    queues.candidates(world.core.state, 0.0)
    cuts = queues.cuts
    assert cuts == pytest.approx([0.1 + 0.9 * part / 4 for part in (1, 2, 3)])
    assert [lane.quota for lane in queues.lanes] == [250.0] * 4
    world.now_s = 5.0
    fed(queues, world, (10, 10, 0), (1000, 1000, 0))
    queues.candidates(world.core.state, 5.0)
    assert queues.cuts == cuts and [lane.quota for lane in queues.lanes] == [250.0] * 4
