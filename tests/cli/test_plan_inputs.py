"""The values of `motet plan`'s options: what they mean, and that a malformed one names the option, the part and the reason."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from motet.cli.plan_inputs import changed_objectives, changes, objectives, offer
from motet.shared.profile import write_profile
from motet.twin.planning.kinds import NativeKind, VllmKind
from motet.twin.profile import a10_llama2_7b


def test_a_worker_is_a_profile_or_a_published_calibration(tmp_path: Path) -> None:
    write_profile(tmp_path / "a10.json", a10_llama2_7b())
    native = offer(f"{tmp_path / 'a10.json'},cost=0.6,most=8")
    assert isinstance(native.kind, NativeKind)
    assert (native.kind.name, native.cost, native.most) == ("a10", 0.6, 8)
    vllm = offer("vllm:llama-3.1-8b@h100")
    assert isinstance(vllm.kind, VllmKind)
    assert (vllm.cost, vllm.most, vllm.kind.seats) == (1.0, None, 256)


def test_a_published_calibration_may_have_other_seats_and_is_named_so() -> None:
    """Two kinds with different seats can compete, and a plan that is checked later finds the right one."""
    few = offer("vllm:llama-3.1-8b@h100,seats=32,cost=2")
    assert isinstance(few.kind, VllmKind)
    assert (few.kind.seats, few.kind.name, few.cost) == (32, "vllm:llama-3.1-8b@h100,seats=32", 2.0)


def test_the_seats_of_a_native_worker_are_those_of_its_profile(tmp_path: Path) -> None:
    write_profile(tmp_path / "a10.json", a10_llama2_7b())
    with pytest.raises(click.UsageError, match="seats is for vllm: workers; a profile has its own"):
        offer(f"{tmp_path / 'a10.json'},seats=8")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nowhere.json", "there is no such file"),
        ("vllm:gpt@h100", "no published calibration is named 'gpt@h100'; there are llama-3.1-8b@h100"),
        ("vllm:llama-3.1-8b@h100,price=3", "'price=3' is none of cost=, most=, seats="),
        ("vllm:llama-3.1-8b@h100,cost=-1", "cost: -1 is not above 0"),
        ("vllm:llama-3.1-8b@h100,cost=nan", "cost: nan is not above 0"),
        ("vllm:llama-3.1-8b@h100,cost=cheap", "cost: 'cheap' is not a number"),
        ("vllm:llama-3.1-8b@h100,most=2.5", "most: 2.5 is not a whole number"),
        ("vllm:llama-3.1-8b@h100,most=0", "most: 0 is not above 0"),
        ("vllm:llama-3.1-8b@h100,seats=0", "seats: 0 is not above 0 and up to 4096"),
        ("vllm:llama-3.1-8b@h100,seats=1.5", "seats: 1.5 is not a whole number"),
        ("vllm:llama-3.1-8b@h100,cost=1,cost=2", "cost is there twice"),
    ],
)
def test_a_malformed_worker_is_refused(text: str, reason: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        offer(text)
    assert "--worker" in refused.value.message
    assert reason in refused.value.message


def test_objectives_by_class_fill_in_what_is_not_given() -> None:
    found = objectives(["chat:ttft=500,tpot=50,share=0.95", "batch:tpot=400"])
    assert (found["chat"].slo.ttft_slo_ms, found["chat"].slo.tpot_slo_ms, found["chat"].share) == (500, 50, 0.95)
    assert (found["batch"].slo.ttft_slo_ms, found["batch"].slo.tpot_slo_ms, found["batch"].share) == (2000, 400, 0.99)
    assert list(objectives([])) == ["standard"]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["chat"], "not CLASS:ttft=MS"),
        ([":ttft=5"], "not CLASS:ttft=MS"),
        (["chat:ttft=fast"], "ttft: 'fast' is not a number"),
        (["chat:share=2"], "share: 2 is not above 0 and up to 1"),
        (["chat:itl=20"], "'itl=20' is none of ttft=, tpot=, share="),
        (["chat:ttft=1", "chat:ttft=2"], "the class chat is there twice"),
    ],
)
def test_a_malformed_objective_is_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        objectives(texts)
    assert "--slo" in refused.value.message
    assert reason in refused.value.message


def test_changes_are_one_case_each_and_a_range_eleven() -> None:
    found = changes(["rate=2", "lose=1", "slo=standard:ttft=100", "rate=0.5..3"])
    assert [case.label for case in found[:3]] == ["rate=2", "lose=1", "slo=standard:ttft=100"]
    assert (found[0].rate, found[1].lose) == (2.0, 1)
    assert [case.rate for case in found[3:]] == pytest.approx([0.5 + 0.25 * step for step in range(11)])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["speed=2"], "it is none of rate=, lose=, worker=, slo="),
        (["rate=0"], "0 is not above 0"),
        (["rate=3..1"], "3 is not below 1"),
        (["lose=1.5"], "1.5 is not a whole number"),
        (["worker=nowhere"], "there is no such file"),
        (["rate=1..2"] * 3, "33 cases are more than 24"),
    ],
)
def test_a_malformed_change_is_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        changes(texts)
    assert reason in refused.value.message


def test_only_objectives_that_are_there_can_change() -> None:
    old = tuple(objectives(["chat:ttft=500", "batch:ttft=9000"]).values())
    (new,) = objectives(["chat:ttft=100"]).values()
    assert [one.slo.ttft_slo_ms for one in changed_objectives(old, new)] == [100, 9000]
    (unknown,) = objectives(["video:ttft=100"]).values()
    with pytest.raises(click.UsageError, match="no adapter has the class video"):
        changed_objectives(old, unknown)
