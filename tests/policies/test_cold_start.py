"""Promise: a cold request starts in the way with the least predicted cost, and no step waits for its layers."""

from __future__ import annotations

import random

import msgspec
import pytest

from motet.policies.step.cold_start import (
    MARGIN,
    TOLERANCE,
    AssistRates,
    ColdStarts,
    Copy,
    CpuTimes,
    assisted_ms,
    choose,
    step_ms,
)
from motet.shared.model import PerfModel

LAYERS = 8
PERF = PerfModel(
    prefill_base_ms=4.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.0,
    decode_base_ms=4.0,
    decode_row_ms=0.1,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=0.0,
)


def random_case(draw: random.Random) -> tuple[Copy, list[float], list[float] | None, int]:
    layers = draw.choice([1, 2, 8, 32])
    loaded = draw.randint(0, layers - 1)
    copy = Copy(layers, loaded, draw.choice([0.0, draw.uniform(-0.5, 50)]), draw.uniform(0.01, 10))
    chunks = [draw.uniform(1, 100) for _ in range(draw.randint(1, 4))]
    cpu = [draw.uniform(0.01, 4) * chunk / layers for chunk in chunks] if draw.random() < 0.7 else None
    return copy, chunks, cpu, draw.choice([0, 0, 1, 5, 40])


@pytest.mark.parametrize("launches", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(200))
def test_the_chosen_way_is_never_predicted_to_cost_more_than_another(seed: int, launches: float) -> None:
    copy, chunks, cpu, others = random_case(random.Random(seed))
    choice = choose(copy, chunks, CpuTimes(cpu) if cpu else None, others=others, launch_ms=launches * chunks[0])
    assert choice.cost_ms[choice.mode] * (1 - MARGIN) <= min(choice.cost_ms.values())
    assert choice.ttft_ms[choice.mode] >= sum(chunks) * (1 - 1e-9), "nothing is faster than an adapter that is there"
    assert choice.ttft_ms["layerwise"] <= choice.ttft_ms["blocking"] + max(0.0, launches - 1) * chunks[0] * (1 + 1e-9)
    assert (choice.wait_ms > 0 or choice.joins) and (choice.mode != "assist" or choice.joins)


@pytest.mark.parametrize("seed", range(50))
def test_without_processes_nothing_is_assisted_whatever_is_asked_for(seed: int) -> None:
    copy, chunks, _, others = random_case(random.Random(seed))
    assert "assist" not in choose(copy, chunks, None, others=others).cost_ms
    forced = choose(copy, chunks, None, others=others, forced="assist")
    assert (forced.mode, forced.reason) == ("layerwise", "no_processes")


def test_with_nothing_to_overlap_a_request_waits_for_the_whole_copy() -> None:
    choice = choose(Copy(1, 0, 3.0, 5.0), [10.0], None)
    assert (choice.mode, choice.reason, choice.joins, choice.wait_ms) == ("blocking", "one_layer", False, 8.0)


def test_a_copy_that_stays_ahead_of_the_layers_lets_its_request_in_at_once() -> None:
    choice = choose(Copy(LAYERS, 1, 0.0, 1.0), [16.0], CpuTimes([5.0]))
    assert (choice.mode, choice.reason, choice.joins) == ("layerwise", "copy_ahead", True)
    assert choice.ttft_ms["layerwise"] == 16.0


def test_a_step_that_takes_the_host_longer_to_launch_than_the_copy_takes_is_not_worth_its_overlap() -> None:
    copy = Copy(LAYERS, 0, 0.0, 2.0)  # 16 ms; a step takes 16 as a graph, 40 launched kernel by kernel
    choice = choose(copy, [16.0], None, others=3, launch_ms=40.0)
    assert (choice.mode, choice.reason, choice.joins, choice.wait_ms) == ("blocking", "launches", False, 16.0)
    assert choice.ttft_ms == {"blocking": 32.0, "layerwise": 2.0 + 40.0}
    assert choice.cost_ms == {"blocking": 32.0, "layerwise": choice.ttft_ms["layerwise"] + 3 * 24.0}


@pytest.mark.parametrize(("chunk_ms", "mode"), [(40.0, "layerwise"), (39.0, "layerwise"), (20.0, "blocking")])
def test_a_step_that_computes_longer_than_it_is_launched_overlaps(chunk_ms: float, mode: str) -> None:
    copy = Copy(LAYERS, 0, 0.0, 2.0)
    assert choose(copy, [chunk_ms], None, others=3, launch_ms=40.0).mode == mode


def test_launches_delay_everybody_beside_an_assisted_request_until_its_copy_is_complete() -> None:
    copy = Copy(LAYERS, 0, 0.0, 20.0)  # 160 ms
    choice = choose(copy, [10.0], CpuTimes([0.5], decode=(5.0, 0.1)), others=2, launch_ms=40.0)
    assert choice.ttft_ms["assist"] == pytest.approx(40.0), "not 10"
    assert choice.cost_ms["assist"] == pytest.approx(40.0 + 2 * 30.0 + 3 * (120.0 / 40.0) * 35.0), (
        "three decode steps of 40, not 5"
    )


@pytest.mark.parametrize("seed", range(100))
def test_a_request_that_joins_layer_by_layer_delays_its_step_by_no_more_than_the_tolerance(seed: int) -> None:
    copy, chunks, _, _ = random_case(random.Random(seed))
    copy = Copy(copy.layers, copy.loaded, copy.queue_ms, copy.each_ms * random.Random(seed).choice([1.0, 0.1, 0.01]))
    choice = choose(copy, chunks, None, forced="layerwise")
    later = Copy(copy.layers, copy.loaded, copy.queue_ms - choice.wait_ms, copy.each_ms)
    took = step_ms(chunks[0], copy.layers, [], 0.0, [(copy if choice.joins else later, 0.0)])
    assert took <= chunks[0] * (1 + TOLERANCE) + 1e-9


@pytest.mark.parametrize("each_ms", [1.0, 4.0, 10.0])
def test_others_in_the_step_do_not_wait_in_its_layers_when_it_takes_no_longer_than_its_longer_part(each_ms: float) -> None:
    decodes_ms, prefill_ms = 20.0, 18.0  # each reads all weights; a step that does both reads them once
    for loaded in range(LAYERS):
        copy = Copy(LAYERS, loaded, 0.0, each_ms)
        choice = choose(copy, [decodes_ms + prefill_ms], None, others=4, between_ms=decodes_ms)
        if choice.joins:
            assert step_ms(decodes_ms, LAYERS, [], 0.0, [(copy, 0.0)]) <= decodes_ms * (1 + 2 * TOLERANCE)


def test_a_request_joins_at_once_when_processes_keep_up_with_the_base_model() -> None:
    choice = choose(Copy(LAYERS, 0, 0.0, 10.0), [16.0], CpuTimes([1.5]))
    assert (choice.mode, choice.reason, choice.joins) == ("assist", "cpu_ahead", True)
    assert choice.ttft_ms == {"blocking": 96.0, "layerwise": 82.0, "assist": 16.0}


def test_processes_that_take_longer_than_the_copy_are_left_alone() -> None:
    choice = choose(Copy(LAYERS, 0, 0.0, 3.0), [16.0], CpuTimes([30.0]))
    assert (choice.mode, choice.reason) == ("layerwise", "cpu_slower")


def test_delays_of_other_requests_weigh_as_much_as_the_own_wait() -> None:
    copy, cpu = Copy(LAYERS, 0, 0.0, 6.0), CpuTimes([4.0])  # a layer of the base takes 2
    alone, crowded = (choose(copy, [16.0], cpu, others=others) for others in (0, 8))
    assert alone.mode == "assist" and alone.ttft_ms["assist"] == pytest.approx(2 * 16.0)
    assert (crowded.mode, crowded.reason) == ("layerwise", "others")
    assert crowded.cost_ms["assist"] == pytest.approx(32.0 + 8 * 16.0)


def test_an_assisted_step_takes_the_device_from_the_layer_where_the_copy_has_overtaken_it() -> None:
    copy = Copy(4, 0, 0.0, 2.0)  # layers arrive at 2, 4, 6, 8
    # layer 0 on CPU until 3, layer 1 (there at 4) on CPU until 6, layer 2 is there, layer 3 (there at 8) on CPU until 10
    assert step_ms(4.0, 4, [(copy, 0.0)], 3.0, []) == 3 + 3 + 1 + 3
    assert assisted_ms(copy, [4.0, 4.0], [3.0, 3.0]) == 10 + 4
    assert step_ms(4.0, 4, [], 0.0, [(copy, 0.0)]) == 8 + 1
    assert step_ms(4.0, 4, [(copy, 8.0)], 3.0, [(copy, 8.0)]) == 4.0


def test_processes_share_a_layers_rows_and_each_hand_over_takes_its_time() -> None:
    rates = AssistRates(processes=2, mib_row_ms=0.01, hop_ms=0.1, mib_ms=0.5)
    assert rates.layer_ms(4.0, 400.0, LAYERS) == pytest.approx(0.1 + (4 * 0.5 + 400 * 0.01 / 2) / LAYERS)


def test_what_processes_spare_the_device_counts_until_the_copy_is_whole() -> None:
    copy = Copy(4, 0, 0.0, 2.0)  # layers arrive at 2, 4, 6, 8
    # layers 0 to 3 begin at 0, 3, 6, 9 and take 5 less 2 where they are not there: 0 and 1
    assert step_ms(20.0, 4, [(copy, 0.0)], 1.0, [], saved_ms=2.0) == 3 + 3 + 5 + 5
    assert step_ms(20.0, 4, [(copy, 0.0)], 4.0, [], saved_ms=2.0) == 4 + 5 + 5 + 5, "no faster than the processes"
    on_cpu, on_gpu = (AssistRates(2, mib_row_ms=0.01, mib_ms=0.5, relief=relief) for relief in (0.5, 0.0))
    assert on_cpu.saved_ms(4.0, 400.0, LAYERS) == pytest.approx(0.5 * (4 * 0.5 + 400 * 0.01) / LAYERS)
    assert on_gpu.saved_ms(4.0, 400.0, LAYERS) == 0


def test_a_copy_that_is_ahead_is_not_waited_for_when_processes_help_meanwhile() -> None:
    copy = Copy(LAYERS, 0, 0.0, 0.5)  # whole after 4 ms of 80
    alone, helped = (choose(copy, [80.0], CpuTimes([5.0], saved_ms=[saved])) for saved in (0.0, 4.0))
    assert alone.mode == "layerwise" and helped.mode == "assist"
    assert helped.ttft_ms["assist"] == pytest.approx(80 - 4), "the first layer"


def test_a_waiting_request_joins_between_two_steps_of_the_others() -> None:
    copy, chunks, cpu = Copy(LAYERS, 0, 0.0, 1.0), [16.0], CpuTimes([3.2])
    alone, beside = (choose(copy, chunks, cpu, others=others, between_ms=step) for others, step in ((0, 0.0), (1, 10.0)))
    assert alone.ttft_ms["layerwise"] == 17.0 and alone.ttft_ms["blocking"] == 24.0 and alone.mode == "layerwise"
    assert beside.ttft_ms["layerwise"] == beside.ttft_ms["blocking"] == 26.0 and beside.mode == "assist"
    assert choose(Copy(LAYERS, 0, 0.0, 0.01), chunks, None, between_ms=10.0).ttft_ms["layerwise"] == 16.01, "it joins now"


def test_processes_that_take_longer_to_begin_than_the_first_layer_to_arrive_are_left_alone() -> None:
    copy, chunks = Copy(LAYERS, 0, 0.0, 0.5), [16.0]
    awake, asleep = (choose(copy, chunks, CpuTimes([1.0], start_ms=start_ms)) for start_ms in (0.0, 0.6))
    assert awake.mode == "assist"
    assert (asleep.mode, asleep.reason) == ("layerwise", "cpu_slower")
    assert asleep.ttft_ms["assist"] == awake.ttft_ms["assist"] + 0.6


def test_copying_takes_part_of_a_core_from_the_processes_that_would_assist() -> None:
    rates = AssistRates(processes=3, mib_row_ms=0.0, start_ms=0.5, core_share=0.8)
    assert rates.begin_ms(10.0) == pytest.approx(0.5 + 0.8 * 10.0 / 4)
    ask = {"rank": 8, "tokens": 100, "room": 512, "others": 0}
    for share, mode in ((0.0, "assist"), (0.9, "layerwise")):
        starts = cold()
        starts.copies["first"] = Copy(LAYERS, 0, 0.0, 1.0)  # 8 ms of a prefill of 14
        starts.assist = AssistRates(1, mib_row_ms=0.0, core_share=share)
        assert starts.consider("first", 8_000_000, **ask).mode == mode


def test_decodes_that_processes_would_hold_up_count_too() -> None:
    copy, chunks = Copy(LAYERS, 0, 0.0, 10.0), [16.0]
    free, slow = (choose(copy, chunks, CpuTimes([1.9], decode=(8.0, each)), others=2) for each in (1.0, 40.0))
    assert free.mode == "assist" and free.cost_ms["assist"] == free.ttft_ms["assist"]
    assert slow.mode == "layerwise" and slow.cost_ms["assist"] > slow.cost_ms["layerwise"]
    assert slow.ttft_ms == free.ttft_ms, "the first token does not wait for them"


@pytest.mark.parametrize("seed", range(30))
def test_decodes_until_the_copy_is_whole_are_predicted_as_they_would_go(seed: int) -> None:
    draw = random.Random(seed)
    each, decode_ms, slower = draw.uniform(5, 20), draw.uniform(2, 6), draw.uniform(1.5, 4)
    copy, cpu_ms = Copy(LAYERS, 0, 0.0, each), slower * decode_ms / LAYERS
    choice = choose(copy, [4.0], CpuTimes([0.5], decode=(decode_ms, cpu_ms)))
    now, held = choice.ttft_ms["assist"], 0.0
    while now < copy.whole_ms:
        took = step_ms(decode_ms, LAYERS, [(copy, now)], cpu_ms, [])
        now, held = now + took, held + took - decode_ms
    assert choice.cost_ms["assist"] - choice.ttft_ms["assist"] == pytest.approx(held, rel=0.35)


def cold(**options) -> ColdStarts:
    starts = ColdStarts(LAYERS, 512, **options)
    starts.observe(perf=PERF, bytes_per_s=1e9, queued_bytes=10e6, under_way={"first": (8e6, 10e6, 2)}, assist=None)
    return starts


def test_what_a_launch_takes_is_taken_in_with_the_state_of_the_link() -> None:
    starts = cold()
    ask = {"rank": 8, "tokens": 100, "room": 512, "others": 1}
    before = starts.consider("first", 8_000_000, **ask).ttft_ms["layerwise"]
    under_way = {"first": (8e6, 10e6, 2)}
    starts.observe(perf=PERF, bytes_per_s=1e9, queued_bytes=10e6, under_way=under_way, assist=None, launch_ms=500.0)
    assert starts.consider("first", 8_000_000, **ask).ttft_ms["layerwise"] > before + 400.0


def test_a_copy_that_begins_now_is_the_last_one_on_the_link() -> None:
    starts = cold()
    starts.begun("second", 8_000_000)
    assert starts.copies["first"].whole_ms == pytest.approx(10.0)
    assert starts.copies["second"].whole_ms == pytest.approx(18.0) and starts.copies["second"].queue_ms == pytest.approx(10.0)


def test_waiting_requests_give_the_time_when_the_first_of_them_may_join() -> None:
    starts = cold(forced="blocking")
    starts.begun("second", 8_000_000)
    for digest in ("second", "first"):
        choice = starts.consider(digest, 8_000_000, rank=8, tokens=100, room=512, others=0)
        assert not choice.joins
    assert starts.wait_ms == pytest.approx(10.0) and starts.modes == {}


def test_an_adapter_stays_assisted_while_one_of_its_requests_is() -> None:
    starts = cold(forced="assist")
    starts.assist = AssistRates(1, mib_row_ms=0.001)
    starts.consider("first", 8_000_000, rank=8, tokens=100, room=512, others=0)
    starts.assist = None  # the process died
    starts.copies["first"] = Copy(LAYERS, LAYERS - 1, 0.0, 0.001)
    assert starts.consider("first", 8_000_000, rank=8, tokens=10, room=512, others=1).mode == "layerwise"
    assert starts.modes == {"first": "assist"}
    starts.observe(perf=PERF, bytes_per_s=1e9, queued_bytes=0, under_way={}, assist=None)
    assert starts.modes == {}, "its copy is whole"


def test_busy_processes_take_no_more_rows() -> None:
    starts = cold()
    starts.assist = AssistRates(1, mib_row_ms=0.01)
    ask = {"rank": 8, "tokens": 100, "room": 512, "others": 1}
    assert starts.consider("first", 8_000_000, **ask).mode == "assist"
    assert starts.consider("first", 8_000_000, **ask, assisted=(8_000_000, 40_000_000_000)).mode == "layerwise"


def test_a_long_prompt_counts_all_of_its_steps_and_what_others_need_in_each() -> None:
    starts = cold(forced="blocking")
    choice = starts.consider("first", 8_000_000, rank=8, tokens=1000, room=100, others=2)
    steps = [(4.0 + 2 * 0.1) + 4.0 + 0.1 * tokens for tokens in (100, 512, 388)]
    waits = 3 * (4.0 + 2 * 0.1)  # the copy takes 10 ms, which is more than two steps of the others
    assert choice.ttft_ms["blocking"] == pytest.approx(waits + sum(steps))


@pytest.mark.parametrize("prefill_base_ms", [4.0, 20.0, 60.0])
def test_decodes_never_wait_for_layers_because_a_prefill_was_expected_to_take_longer(prefill_base_ms: float) -> None:
    """Prefills beside copies are not measured, so their base may be out of date; the time of decodes is measured all along."""
    starts = cold()
    starts.perf = msgspec.structs.replace(PERF, prefill_base_ms=prefill_base_ms)
    decodes_ms = PERF.decode_base_ms + 4 * PERF.decode_row_ms
    for loaded in range(LAYERS):
        starts.copies["first"] = copy = Copy(LAYERS, loaded, 0.0, 3.0)
        if starts.consider("first", 8_000_000, rank=8, tokens=2, room=512, others=4).joins:
            assert step_ms(decodes_ms, LAYERS, [], 0.0, [(copy, 0.0)]) <= decodes_ms * (1 + 2 * TOLERANCE)


def test_a_long_prefill_still_overlaps_its_copy_beside_decodes() -> None:
    starts = cold()
    starts.copies["first"] = Copy(LAYERS, 1, 0.0, 3.0)
    short, long = (starts.consider("first", 8_000_000, rank=8, tokens=tokens, room=512, others=4) for tokens in (2, 500))
    assert long.joins and not short.joins


def test_without_processes_a_request_waits_for_the_layers_and_the_reason_says_so() -> None:
    choice = choose(Copy(LAYERS, 0, 0.0, 10.0), [16.0], None)
    assert (choice.mode, choice.reason, choice.joins) == ("layerwise", "no_processes", False)
    assert choice.ttft_ms == {"blocking": 96.0, "layerwise": 82.0}, "the last layer of 2 ms follows the copy's 80 ms"


def test_a_step_waits_for_the_first_missing_layer_or_for_the_last_one() -> None:
    assert Copy(4, 4, 9.0, 2.0).stall_ms(1.0) == 0.0, "all layers are there"
    assert Copy(4, 1, 3.0, 2.0).stall_ms(1.0) == 6.0, "layers arrive at 5, 7 and 9, and the last one begins at 3"
    assert Copy(4, 1, 9.0, 2.0).stall_ms(5.0) == 6.0, "layers arrive at 11, 13 and 15, and the first of them begins at 5"
    assert Copy(4, 2, -5.0, 2.0).stall_ms(5.0) == 0.0
