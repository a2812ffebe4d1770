"""Promise: quantiles are close to the true ones, follow a change, stay bounded, and never exceed what is allowed."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np
import pytest

from motet.policies.lengths import quantiles as length_quantiles
from motet.policies.lengths.quantiles import DECAY, DEFAULT_TOKENS, EDGES, MIN_SAMPLES, Estimate, LengthQuantiles

HUGE = 1 << 30


def learned(lengths, digest: str = "d", **options) -> LengthQuantiles:
    quantiles = LengthQuantiles(**({"max_adapters": 100} | options))
    for length in lengths:
        quantiles.observe(digest, int(length))
    return quantiles


def test_before_anything_was_seen_the_answer_is_a_clipped_default():
    assert learned([]).estimate("d", HUGE) == Estimate(p50_tokens=DEFAULT_TOKENS, p90_tokens=DEFAULT_TOKENS, samples=0)
    assert learned([]).estimate("d", 16) == Estimate(p50_tokens=16, p90_tokens=16, samples=0)
    assert learned([]).mean_tokens() == DEFAULT_TOKENS


@pytest.mark.parametrize(("mean", "sigma"), [(3.0, 0.5), (5.0, 0.8), (8.0, 0.3)])
def test_quantiles_of_a_skewed_distribution_are_within_a_few_percent(mean, sigma):
    lengths = np.random.default_rng(5).lognormal(mean, sigma, 4000).clip(1).astype(int)
    found = learned(lengths).estimate("d", HUGE)
    recent = lengths[-1000:]
    assert found.p50_tokens == pytest.approx(np.quantile(recent, 0.5), rel=0.15)
    assert found.p90_tokens == pytest.approx(np.quantile(recent, 0.9), rel=0.15)
    assert found.samples == 4000


def test_short_answers_are_exact():
    for length in (1, 2, 5, 12):
        found = learned([length] * 20).estimate("d", HUGE)
        assert (found.p50_tokens, found.p90_tokens) == (length, length)


def test_the_answer_is_clipped_to_what_the_request_allows():
    quantiles = learned([1000] * 20)
    assert quantiles.estimate("d", 50) == Estimate(p50_tokens=50, p90_tokens=50, samples=20)
    assert quantiles.estimate("d", 0).p50_tokens == 1


def test_a_change_of_behaviour_is_followed():
    quantiles = learned([400] * 2000 + [20] * 500)
    assert quantiles.estimate("d", HUGE).p50_tokens == pytest.approx(20, abs=2)
    assert quantiles.mean_tokens() == pytest.approx(20 + 380 * 0.996**500, rel=0.02)


def test_an_adapter_with_few_samples_answers_from_all_requests():
    quantiles = learned([300] * 50, "busy")
    for _ in range(MIN_SAMPLES - 1):
        quantiles.observe("new", 3)
    assert quantiles.estimate("new", HUGE).p50_tokens > 250
    quantiles.observe("new", 3)
    assert quantiles.estimate("new", HUGE) == Estimate(p50_tokens=3, p90_tokens=3, samples=MIN_SAMPLES)


def test_adapters_are_bounded_and_the_idlest_is_forgotten():
    quantiles = learned([5] * 20, "old", max_adapters=3)
    for digest in ("a", "b"):
        for _ in range(20):
            quantiles.observe(digest, 500)
    quantiles.estimate("old", HUGE)  # asked for: not idle
    quantiles.observe("c", 500)
    assert quantiles.adapters == 3
    assert quantiles.estimate("old", HUGE).samples == 20
    assert quantiles.estimate("a", HUGE).samples == 61  # forgotten: from all requests


def test_extreme_lengths_and_very_many_samples_do_no_harm():
    quantiles = learned([0, -3, HUGE, *([7] * 30_000)])
    assert quantiles.estimate("d", HUGE) == Estimate(p50_tokens=7, p90_tokens=7, samples=30_003)
    assert quantiles.mean_tokens() == pytest.approx(7)


def test_after_any_history_the_quantiles_are_those_of_a_recount(monkeypatch):
    monkeypatch.setattr(length_quantiles, "RENORMALISE_AT", 20.0)  # every few hundred samples
    rng = np.random.default_rng(9)
    quantiles, weights = LengthQuantiles(max_adapters=1), {}
    for number in range(3000):
        mean = 3.0 + 3.0 * (number // 500 % 2)  # the median moves far, up and down
        tokens = int(rng.lognormal(mean, 0.7)) + 1
        quantiles.observe("d", tokens)
        bucket = bisect_right(EDGES, tokens) - 1
        weights = {at: weight * DECAY for at, weight in weights.items()}
        weights[bucket] = weights.get(bucket, 0.0) + 1.0
        if number % 50:
            continue
        found = quantiles.estimate("d", HUGE)
        assert quantiles.expected_tokens("d", HUGE) == found.p50_tokens
        for tokens, share in ((found.p50_tokens, 0.5), (found.p90_tokens, 0.9)):
            upto = np.cumsum([weights[at] for at in sorted(weights)])
            at = sorted(weights)[int(np.searchsorted(upto, share * upto[-1]))]
            assert EDGES[at] <= tokens <= EDGES[at + 1] - 1


def test_lengths_are_exact_up_to_twelve_tokens_and_then_within_eight_percent() -> None:
    """The next edge is 1.08 times the last one, rounded up: 13, 15 (14.04), 17 (16.2), 19 (18.36), ..."""
    edges = list(EDGES)
    assert edges[:17] == [*range(1, 14), 15, 17, 19, 21]
    assert max(b / a for a, b in pairwise(edges[13:])) < 1.15 and edges[-2] < length_quantiles.MAX_TOKENS <= edges[-1]
