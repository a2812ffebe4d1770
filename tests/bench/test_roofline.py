"""Shares of the machine follow from what a batch reads and multiplies."""

from __future__ import annotations

import pytest

from bench import roofline
from bench.models import RANKS, SHAPES, adapter_modules
from bench.roofline import Limits


def test_the_probes_find_a_machine() -> None:
    limits = roofline.probe(1, vector=1 << 20, matrix=256)
    assert limits.bytes_per_s > 1e8 and limits.flops_per_s > 1e8


def test_one_request_reads_all_weights_for_every_token() -> None:
    shape = SHAPES["S"]
    weights = shape.layers * sum(a * b for a, b in shape.projections().values()) + shape.hidden * shape.vocabulary
    limits = Limits(bytes_per_s=2.0 * weights, flops_per_s=1e15)  # a step a second, and arithmetic for nothing
    found = roofline.share(limits, shape, [-1], 1, 10, 20.0, weight_bytes=2)
    assert found.bandwidth == pytest.approx(0.5, rel=1e-2) and found.flops < 0.01
    assert found.limit == pytest.approx(found.bandwidth)


def test_a_token_reads_and_multiplies_the_keys_and_values_of_all_before_it() -> None:
    shape, limits = SHAPES["M"], Limits(1.0, 1.0)

    def of(prompt_tokens: int) -> roofline.Share:
        return roofline.share(limits, shape, [-1, -1], prompt_tokens, 2, 1.0, weight_bytes=2)

    keys_and_values = 2 * 2 * shape.kv_heads * (shape.hidden // shape.heads) * shape.layers  # bytes of a token
    assert of(101).bandwidth - of(100).bandwidth == 2 * keys_and_values
    more = [of(n + 1).flops - of(n).flops for n in (100, 101)]
    assert more[1] - more[0] == 2 * 4 * shape.hidden * shape.layers  # q k and weights v, a multiplication and an addition each


def test_adapters_are_read_once_each_and_multiplied_by_all_of_their_tokens() -> None:
    limits, shape = Limits(1e10, 1e12), SHAPES["S"]

    def of(*adapters: int) -> roofline.Share:
        return roofline.share(limits, shape, adapters, 16, 16, 1.0, weight_bytes=2)

    base, shared, distinct = of(-1, -1), of(3, 3), of(3, 7)
    assert base.bandwidth < shared.bandwidth < distinct.bandwidth
    assert base.flops < shared.flops == distinct.flops


def test_a_batch_keeps_the_speed_that_is_left_when_its_adapters_bytes_are_read_for_themselves() -> None:
    shape = SHAPES["S"]
    adapter = RANKS[0] * shape.layers * sum(sum(shape.projections()[module]) for module in adapter_modules(0))
    second = 2.0 * adapter  # bytes that a step reads
    assert roofline.kept_with_adapters(second, shape, [0, 0], 10, 30.0) == pytest.approx(0.75)
    assert roofline.kept_with_adapters(second, shape, [-1], 10, 30.0) == 1.0


def test_the_limits_of_the_moment_can_be_measured_again() -> None:
    present = roofline.Present(1, Limits(1.0, 1.0), vector=1 << 20)
    for limits in (present(), present()):
        assert limits.bytes_per_s > 1e8 and limits.flops_per_s > 1e8


def test_the_limits_around_a_lap_are_the_mean_of_those_before_and_after() -> None:
    assert Limits(1.0, 100.0, bytes_beside=4).mean(Limits(3.0, 200.0, bytes_beside=4)) == Limits(2.0, 150.0, bytes_beside=4)


def test_whole_numbers_are_multiplied_as_many_at_once_as_fit_beside_each_other() -> None:
    assert Limits(1.0, 100.0, bytes_beside=4).of_whole_numbers == Limits(1.0, 400.0)
    assert Limits(1.0, 100.0).better(Limits(2.0, 50.0, bytes_beside=4)) == Limits(2.0, 100.0, bytes_beside=4)
