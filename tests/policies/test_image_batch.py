"""Promise: requests of one size share steps whatever their adapters, the most urgent first; none starves, and none runs without
its adapters."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.step.image_batch import BYPASS_MAX, ImageBatch, ImageBatchLimits, ImagePlan, ImageSequence, due_s
from motet.policies.times.image_times import Bucket, ImageTimes
from motet.shared.model import Slo

SMALL, WIDE, LARGE = Bucket(8, 8), Bucket(8, 16), Bucket(128, 128)
SIZE = 100
_orders = iter(range(10**9))


def batch(*, slots: int = 4, knee: int = 8, **limits: int) -> ImageBatch[ImageSequence]:
    """An engine whose steps should have `knee` rows, of every size."""
    return ImageBatch(
        ImageBatchLimits(rows_most=lambda _: knee, **limits),
        slots=AdapterSlots(slots, slots * SIZE, asynchronous=True),
        times=ImageTimes(),
    )


def request(adapters: str = "", bucket: Bucket = SMALL, *, rows: int = 1, steps: int = 3, **more: Any) -> ImageSequence:
    """A request for the adapters whose names are the letters of `adapters`."""
    sizes = tuple((name, SIZE) for name in adapters)
    return ImageSequence(order=next(_orders), bucket=bucket, rows=rows, steps=steps, adapters=sizes, **more)


def step(engine: ImageBatch[ImageSequence], *, copies: bool = True, took_ms: float = 1.0) -> ImagePlan[ImageSequence]:
    """Plan a step and carry it out. With `copies` all copies arrive after it."""
    plan = engine.plan(0.0)
    engine.check()
    plan.requests, kept = [*plan.requests], plan.requests
    engine.done(plan, took_ms)
    assert plan.requests == kept
    engine.check()
    if copies:
        for digest in list(engine.slots.loading):
            engine.slots.arrived(digest)
    return plan


def drawn(engine: ImageBatch[ImageSequence], most: int = 10_000) -> list[ImagePlan[ImageSequence]]:
    """All steps until every request has its picture."""
    plans = []
    while len(engine):
        plans.append(step(engine))
        assert len(plans) < most, "a request starves"
    return plans


def test_a_request_is_encoded_denoised_step_by_step_and_decoded() -> None:
    engine, one = batch(), request(steps=3)
    engine.add(one)
    assert [plan.stage for plan in drawn(engine)] == ["encode", "denoise", "denoise", "denoise", "decode"]


def test_requests_with_different_adapters_and_steps_share_every_step() -> None:
    engine = batch()
    several = [request("a", steps=2), request("bc", steps=5), request(steps=3, step=1), request("a", steps=2)]
    for one in several:
        engine.add(one)
    others = {several[0], several[1], several[3]}
    plans = [step(engine) for _ in range(4)]
    assert [plan.stage for plan in plans] == ["encode", "denoise", "encode", "denoise"]
    assert [set(plan.requests) for plan in plans] == [{several[2]}, {several[2]}, others, {*several}]
    assert [seq.step for seq in several] == [1, 1, 3, 1]


def test_a_request_that_has_begun_on_another_worker_goes_before_those_that_came_earlier() -> None:
    engine = batch(knee=2)
    first, second = request(steps=9), request(steps=9)
    resumed = request(steps=9, step=6, resumed=True)
    for one in (first, second):
        engine.add(one)
    assert [step(engine).requests for _ in range(2)] == [[first, second]] * 2
    engine.add(resumed)
    plans = drawn(engine)
    assert [plan.requests for plan in plans[:4]] == [[resumed], *[[resumed, first]] * 3]
    assert [plan.requests for plan in plans if plan.stage == "decode"] == [[resumed], [first], [second]]


def test_sizes_never_share_a_step_and_the_size_of_the_most_urgent_request_is_next() -> None:
    engine = batch()
    for at, bucket in enumerate((SMALL, WIDE, SMALL, WIDE)):
        engine.add(request(bucket=bucket, steps=20, arrival_s=float(at)))
    plans = [plan.requests for plan in drawn(engine) if plan.stage == "denoise"]
    assert [(requests[0].bucket, len(requests)) for requests in plans] == [(SMALL, 2)] * 20 + [(WIDE, 2)] * 20


def test_the_least_slack_goes_first_and_who_has_no_objective_has_four_times_its_own_time() -> None:
    engine = batch(knee=1)
    for rows in (1, 2):
        engine.times.observe(SMALL, rows, 1000.0 * rows)  # a step takes a second
    loose = request(steps=5, arrival_s=0.0, due_s=21.0)  # has to start by 16
    usual = request(steps=5, arrival_s=0.0)  # by 0 + 4 * 5 - 5 = 15
    short = request(steps=2, arrival_s=8.0)  # by 8 + 4 * 2 - 2 = 14
    tight = request(steps=9, arrival_s=8.0, due_s=20.0)  # by 11
    late = request(steps=9, arrival_s=13.0, due_s=14.0)  # cannot be in time, so it may start when it came: by 13
    for one in (loose, usual, short, tight, late):
        engine.add(one)
    assert [one.start_by_s for one in (loose, usual, short, tight, late)] == pytest.approx([16.0, 15.0, 14.0, 11.0, 13.0])
    assert [plan.requests[0] for plan in drawn(engine) if plan.stage == "decode"] == [tight, late, short, usual, loose]


def test_a_timeout_that_nobody_asked_for_is_no_objective() -> None:
    assert due_s(Slo(e2e_slo_ms=3000.0), 7.0) == 10.0
    assert due_s(Slo(), 7.0) == due_s(Slo(e2e_slo_ms=3000.0, e2e_is_timeout=True), 7.0) == math.inf


def test_the_pictures_of_one_prompt_wait_as_long_as_they_take_together() -> None:
    engine = batch(knee=4)
    for rows, ms in ((1, 900.0), (2, 1000.0), (4, 1200.0)):
        engine.times.observe(SMALL, rows, ms)
    engine.times.observe_encode(2, 400.0)
    engine.times.observe_decode(SMALL, 2, 600.0)
    several, alone = request(rows=2, steps=10, pictures=5), request(rows=2, steps=10)
    engine.add(several)
    engine.add(alone)
    assert alone.start_by_s == pytest.approx(3 * (0.2 + 10 * 1.0 + 0.3))
    assert several.start_by_s == pytest.approx(3 * (0.2 + 10 * (2 * 1.2 + 1.0) + 5 * 0.3))


def test_nobody_is_passed_by_requests_that_come_after_it_had_to_start() -> None:
    engine = batch(knee=1)
    for rows in (1, 2):
        engine.times.observe(SMALL, rows, 1000.0 * rows)
    long = request(steps=10, arrival_s=0.0)  # has to start by 30
    engine.add(long)
    now_s = 0.0
    while long in list(engine):  # short ones come faster than they can be drawn
        engine.add(request(steps=1, arrival_s=now_s))
        step(engine, took_ms=1000.0)
        now_s += 1.0
        assert now_s < 120.0, "it starves"
    assert len(engine) > 10


def test_who_pauses_goes_on_where_it_was() -> None:
    engine = batch(knee=1)
    long, short = request(steps=6), request(steps=1, arrival_s=0.001)
    engine.add(long)
    for _ in range(3):
        step(engine)
    engine.add(short)
    order = [plan.requests[0] for plan in drawn(engine) if plan.stage == "denoise"]
    assert order == [short, *[long] * 4]
    assert (long.step, short.step) == (6, 1)


def test_a_step_has_as_many_rows_as_the_knee_and_the_first_come_are_first() -> None:
    engine = batch(knee=4)
    several = [request(rows=2, steps=2) for _ in range(4)]
    for one in several:
        engine.add(one)
    plans = [plan for plan in drawn(engine) if plan.stage == "denoise"]
    assert [plan.rows for plan in plans] == [4, 4, 4, 4]
    assert plans[0].requests == plans[1].requests == several[:2]


def test_the_knee_is_that_of_the_measured_times() -> None:
    engine = batch(knee=32)
    for rows, ms in ((1, 100.0), (2, 199.0), (4, 396.0)):
        engine.times.observe(LARGE, rows, ms)
    assert (engine.rows_limit(LARGE), batch(knee=32).rows_limit(LARGE)) == (1, 32)


def test_a_request_with_more_rows_than_the_knee_runs_alone() -> None:
    engine = batch(knee=1)
    engine.add(request(rows=2, steps=1))
    engine.add(request(rows=1, steps=1))
    assert [plan.rows for plan in drawn(engine) if plan.stage == "denoise"] == [2, 1]


def test_who_waits_for_a_copy_blocks_nobody() -> None:
    engine = batch(knee=2)
    waiting = [request("a") for _ in range(10)]
    for one in [*waiting, request()]:
        engine.add(one)
    stages = [step(engine, copies=False) for _ in range(5)]
    assert [plan.stage for plan in stages] == ["encode", "denoise", "denoise", "denoise", "decode"]
    assert engine.plan(0.0).stage is None and all(one.step == 0 for one in waiting)
    engine.slots.arrived("a")
    assert len(drawn(engine)) > 10


def test_who_finds_no_slot_blocks_nobody_and_is_not_passed_for_ever() -> None:
    engine = batch(slots=2, knee=4)
    engine.add(request("a", steps=2))
    step(engine)
    large = request("bc", steps=1)
    engine.add(large)
    for _ in range(40 * BYPASS_MAX):  # somebody always holds one of the two slots
        for name in "ad":
            if sum(one.adapters[0][0] == name for one in engine) < 2:
                engine.add(request(name, steps=4))
        step(engine)
        if large not in list(engine):
            break
    assert large not in list(engine)


def test_several_adapters_get_their_slots_at_once_or_none() -> None:
    engine = batch(slots=3)
    first, second, third = request("ab"), request("bcd"), request("c")
    for one in (first, second, third):
        engine.add(one)
    plan = engine.plan(0.0)
    assert (first.holds, second.holds, third.holds) == (True, False, True)
    assert sorted(digest for _, digest, _ in plan.loads) == ["a", "b", "c"]


def test_adapters_that_never_fit_are_refused() -> None:
    engine = batch(slots=2)
    assert engine.fits((("a", SIZE), ("b", SIZE))) and not engine.fits((("a", 2 * SIZE), ("b", SIZE)))
    with pytest.raises(ValueError, match="3 adapters do not fit in 2 slots"):
        engine.add(request("abc"))


def test_slots_are_free_once_the_last_step_is_done() -> None:
    engine, one = batch(), request("a", steps=1)
    engine.add(one)
    for _ in range(3):
        step(engine)
    assert one.stage == "decode" and engine.slots.users("a") == 0


@pytest.mark.parametrize(("encodes", "other_steps"), [(1, 6 + 7), (16, 1 + 7)], ids=["one encoded at once", "all at once"])
def test_between_two_steps_one_encoding_and_one_decoding_step_run_at_most(encodes: int, other_steps: int) -> None:
    engine = batch(decodes=1, encodes=encodes)
    engine.add(request(steps=50))
    step(engine)
    for _ in range(6):
        engine.add(request(steps=1))
    gaps: list[list[str | None]] = [[]]
    for plan in drawn(engine):
        if plan.stage == "denoise":
            gaps.append([])
        else:
            gaps[-1].append(plan.stage)
    assert len(gaps) > 50 and sum(map(len, gaps)) == other_steps
    assert all(len(gap) == len(set(gap)) for gap in gaps[:-1])


def test_large_pictures_are_decoded_one_at_a_time_and_small_ones_together() -> None:
    for bucket, expected in ((LARGE, [1, 1, 1]), (SMALL, [3])):
        engine = batch()
        for _ in range(3):
            engine.add(request(bucket=bucket, steps=1))
        assert [len(plan.requests) for plan in drawn(engine) if plan.stage == "decode"] == expected


def test_a_checkpoint_after_the_last_step_only_needs_its_decoding() -> None:
    engine = batch()
    engine.add(request("a", steps=3, step=3))
    assert [plan.stage for plan in drawn(engine)] == [None, "encode", "decode"]


def test_a_request_that_is_removed_within_a_step_is_forgotten() -> None:
    engine, one, other = batch(), request("a"), request("b")
    for each in (one, other):
        engine.add(each)
    step(engine)
    plan = engine.plan(0.0)
    engine.remove(one)
    engine.remove(one)
    assert engine.done(plan, 1.0) == [] and one.step == 0 and engine.slots.users("a") == 0
    engine.check()


def test_an_order_of_ones_own_decides_who_is_next() -> None:
    engine = ImageBatch[ImageSequence](
        ImageBatchLimits(rows_most=lambda _: 1),
        slots=AdapterSlots(1, SIZE, asynchronous=True),
        times=ImageTimes(),
        urgency=lambda seq: -seq.order,
    )
    first, last = request(steps=2), request(steps=2)
    engine.add(first)
    engine.add(last)
    assert [plan.requests[0] for plan in drawn(engine) if plan.stage == "denoise"] == [last, last, first, first]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), knee=st.integers(1, 6), slots=st.integers(3, 6))
def test_in_random_histories_every_picture_is_drawn_by_its_own_steps_alone(seed: int, knee: int, slots: int) -> None:
    chance = random.Random(seed)
    engine = batch(slots=slots, knee=knee, encodes=3, decodes=2)
    ran: Counter[ImageSequence] = Counter()
    asked: list[ImageSequence] = []
    removed: set[ImageSequence] = set()

    def one_step() -> None:
        plan = engine.plan(0.0)
        engine.check()
        for digest, _ in plan.evictions:
            assert digest not in engine.slots or any(digest == name for _, name, _ in plan.loads)
        if plan.stage == "denoise":
            assert plan.rows <= knee or len(plan.requests) == 1
            assert len({seq.bucket for seq in plan.requests}) == 1
            ran.update(plan.requests)
        for seq in plan.requests if plan.stage != "decode" else ():
            assert all(name in engine.slots and name not in engine.slots.loading for name, _ in seq.adapters)
        engine.done(plan, chance.uniform(0.5, 5.0))
        for digest in list(engine.slots.loading):
            if chance.random() < 0.5:
                engine.slots.arrived(digest)

    for _ in range(150):
        if chance.random() < 0.4:
            names = "".join(chance.sample("abcdefgh", chance.randint(0, 3)))
            one = request(names, chance.choice([SMALL, WIDE, LARGE]), rows=chance.choice([1, 2]), steps=chance.randint(1, 6))
            asked.append(one)
            engine.add(one)
        elif chance.random() < 0.1 and len(engine):
            one = chance.choice(list(engine))
            removed.add(one)
            engine.remove(one)
        else:
            one_step()
        engine.check()
    for _ in range(5000):
        if len(engine):
            one_step()
    assert not len(engine), "a request starves"
    assert all(ran[one] == one.steps for one in asked if one not in removed)
