"""Draws follow the distribution, filters equal their naive definitions, and the noise depends on (seed, position) only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels.sampling import filter_probabilities, invert_cdf
from motet.kernels.triton import sampling as triton_sampling
from motet.kernels.triton.lora import INTERPRETED
from motet.services.worker.native import sampler as sampler_module
from motet.services.worker.native.sampler import Drawn, Sampler, uniforms
from motet.shared.model import SamplingParams

DRAWS = 4000


def logits_of(rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sampler_of(params: list[SamplingParams], vocab: int, *, ending: set[int] | None = None) -> Sampler:
    """Row i has params[i], a prompt of one token (0) and no output."""
    sampler = Sampler(len(params), vocab)
    for row, one in enumerate(params):
        sampler.seat(row, one, [0], 1, ending or set())
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int] | None = None, *, length: int = 1) -> Drawn:
    chosen = np.arange(logits.shape[0]) if rows is None else np.array(rows)
    return sampler.sample(logits.clone(), chosen, np.full(len(chosen), length))


def naive_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [vocab], straight from the definitions: temperature, min_p, top_k, top_p on what is left."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    p = torch.where(p >= params.min_p * p.max(), p, 0)
    if params.top_k:
        p = torch.where(p >= p.sort(descending=True).values[min(params.top_k, len(p)) - 1], p, 0)
    p = p / p.sum()
    if params.top_p < 1:
        values = p.sort(descending=True).values
        needed = int((values.cumsum(-1) < params.top_p).sum())
        p = torch.where(p >= values[needed], p, 0)
    return p / p.sum()


def assert_follows(tokens: np.ndarray, p: torch.Tensor) -> None:
    """Pearson's chi-square over ids with at least 5 expected draws, the rest in one bin; four deviations are too many."""
    observed, expected = np.bincount(tokens, minlength=len(p)).astype(float), p.numpy() * len(tokens)
    assert not observed[p.numpy() == 0].any(), "a filtered token was drawn"
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 1e-3], expected[expected > 1e-3]
    freedom = len(expected) - 1
    if freedom:
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom), f"chi-square {chi_square:.1f} at {freedom} degrees"


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.7},
    {"temperature": 3.0, "top_p": 0.95, "min_p": 0.01},
    {"top_p": 0.0},
    {"top_k": 1},
    {"temperature": 50.0, "top_p": 0.9},  # almost flat: more than the first candidates are needed
    {"temperature": 50.0, "top_k": 150},
]


@pytest.mark.parametrize("vocab", [40, 1000])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(changes: dict[str, Any], vocab: int) -> None:
    row = logits_of(1, vocab, seed=vocab)
    params = [SamplingParams(seed=seed, **changes) for seed in range(DRAWS)]
    tokens = draw(sampler_of(params, vocab), row.expand(DRAWS, -1)).tokens
    assert_follows(tokens, naive_probabilities(row[0], params[0]))


def test_draws_of_one_sequence_follow_the_distribution_too() -> None:
    row = logits_of(1, 60)
    sampler = sampler_of([SamplingParams(seed=11)], 60)
    tokens = np.concatenate([draw(sampler, row, length=length).tokens for length in range(1, DRAWS)])
    assert_follows(tokens, naive_probabilities(row[0], SamplingParams()))


@pytest.mark.parametrize("seed", range(6))
def test_filters_keep_exactly_what_their_definitions_keep(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, rows = 700, 40
    logits = logits_of(rows, vocab, seed=seed, spread=float(rng.uniform(0.05, 6)))
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.2, 4)),
            top_k=int(rng.choice([0, 1, 7, 129, 699, 700, 5000])),
            top_p=float(rng.choice([1.0, 0.01, 0.5, 0.9, 0.999])),
            min_p=float(rng.choice([0.0, 0.001, 0.2, 1.0])),
        )
        for _ in range(rows)
    ]
    p = torch.softmax(logits / torch.tensor([[one.temperature] for one in params]), -1)
    filter_probabilities(
        p,
        np.array([one.min_p for one in params], np.float32),
        np.array([one.top_k if one.top_k < vocab else 0 for one in params]),
        np.array([one.top_p for one in params]),
    )
    for i, one in enumerate(params):
        naive = naive_probabilities(logits[i], one) > 0
        assert ((p[i] > 0) != naive).sum() <= 1, f"row {i}: {one}"  # one token may lie on the border, up to rounding


def test_equal_values_at_the_border_all_stay() -> None:
    p = torch.tensor([[0.4, 0.2, 0.2, 0.15, 0.05]] * 3)
    filter_probabilities(p, np.zeros(3, np.float32), np.array([2, 0, 0]), np.array([1.0, 0.5, 1.0]))
    assert (p > 0).tolist() == [[True] * 3 + [False] * 2, [True] * 3 + [False] * 2, [True] * 5]


def test_temperature_zero_is_the_argmax() -> None:
    logits = logits_of(5, 300)
    params = [SamplingParams(temperature=0.0, top_p=0.1, seed=seed) for seed in range(5)]
    assert draw(sampler_of(params, 300), logits).tokens.tolist() == logits.argmax(-1).tolist()


def test_a_tiny_temperature_counts_as_zero() -> None:
    logits = logits_of(1, 300) * 1e6
    drawn = draw(sampler_of([SamplingParams(temperature=1e-30)], 300), logits)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist() and not drawn.broken


def mixed(rows: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"top_k": 3, "repetition_penalty": 1.3},
        {"min_p": 0.1, "logit_bias": {3: 4.0}},
        {"temperature": 30.0, "top_p": 0.99},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
        {},
    ]
    return [SamplingParams(seed=100 + i, **kinds[i % len(kinds)]) for i in range(rows)]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rows, vocab = 21, 513
    params, logits = mixed(rows), logits_of(rows, vocab)
    together = draw(sampler_of(params, vocab), logits).tokens.tolist()
    alone = sampler_of(params, vocab)
    assert [int(draw(alone, logits[i : i + 1], [i]).tokens[0]) for i in range(rows)] == together
    order = np.random.default_rng(0).permutation(rows).tolist()
    shuffled = draw(sampler_of(params, vocab), logits[order], order).tokens.tolist()
    assert shuffled == [together[i] for i in order]


@pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")
def test_the_kernels_of_a_gpu_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 21, 4300
    params, logits = mixed(rows), logits_of(rows, vocab)
    want = draw(sampler_of(params, vocab), logits)
    monkeypatch.setattr(sampler_module, "draws_for", triton_sampling.Draws)
    found = draw(sampler_of(params, vocab), logits)
    assert found.tokens.tolist() == want.tokens.tolist() and found.logprobs == want.logprobs
    logits[3, 5] = math.nan
    assert draw(sampler_of(params, vocab), logits).broken == [3]


def test_a_draw_repeats_itself_and_another_seed_or_position_does_not() -> None:
    logits = logits_of(1, 500, spread=0.5).expand(200, -1)
    params = [SamplingParams(seed=5)] * 200
    same = [draw(sampler_of(params, 500), logits, length=9).tokens.tolist() for _ in range(2)]
    assert same[0] == same[1] and len(set(same[0])) == 1
    sampler = sampler_of([SamplingParams(seed=seed) for seed in range(200)], 500)
    by_seed = draw(sampler, logits, length=9).tokens.tolist()
    by_position = [int(draw(sampler, logits[:1], [0], length=length).tokens[0]) for length in range(200)]
    assert len(set(by_seed)) > 100 and len(set(by_position)) > 100


def test_seeds_of_any_size_and_sign_are_taken() -> None:
    params = [SamplingParams(seed=seed) for seed in (-1, 0, 2**63, 2**64 + 17, -(2**70))]
    assert len(draw(sampler_of(params, 50), logits_of(5, 50)).tokens) == 5


@pytest.mark.parametrize("along", ["seeds", "positions", "both"])
def test_the_noise_is_uniform_and_uncorrelated_along_seeds_and_positions(along: str) -> None:
    numbers, fixed = np.arange(100_000), np.full(100_000, 3)
    seeds = (fixed if along == "positions" else numbers).astype(np.uint64)
    u = uniforms(seeds, fixed if along == "seeds" else numbers)
    assert u.min() >= 0 and u.max() < 1
    bins = np.bincount((u * 100).astype(int), minlength=100)
    assert ((bins - 1000) ** 2 / 1000).sum() < 99 + 4 * math.sqrt(198)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(len(u))


def test_no_token_without_weight_is_drawn_at_either_end_of_the_noise() -> None:
    weights = torch.zeros(4, 768)
    weights[0, 300], weights[1, 0], weights[2, 511], weights[3, [5, 600]] = 1e-30, 1.0, 3.0, torch.tensor([1.0, 1e-7])
    for noise in (0.0, 0.5, 1 - 2**-53):
        ids = invert_cdf(weights, torch.full((4,), noise, dtype=torch.float64))
        assert (weights[torch.arange(4), ids] > 0).all(), noise


def test_logit_bias_moves_logits_and_can_forbid() -> None:
    logits = torch.zeros(3, 30)
    params = [
        SamplingParams(temperature=0.0, logit_bias={17: 1.0}),
        SamplingParams(temperature=0.0, logit_bias={i: -100.0 for i in range(29)}),
        SamplingParams(temperature=0.0),
    ]
    assert draw(sampler_of(params, 30), logits).tokens.tolist() == [17, 29, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn_and_the_others_of_the_batch_are_free(temperature: float) -> None:
    logits = logits_of(3, 40, spread=1.0)
    params = [
        SamplingParams(temperature=temperature, allowed_token_ids=(3, 17, 30), seed=row)
        if row != 1
        else SamplingParams(temperature=0.0)
        for row in range(3)
    ]
    sampler = sampler_of(params, 40)
    for length in range(1, 30):
        drawn = draw(sampler, logits, length=length).tokens.tolist()
        assert {drawn[0], drawn[2]} <= {3, 17, 30}
        assert drawn[1] == int(logits[1].argmax())
    if temperature:
        allowed = torch.full((40,), -torch.inf)
        allowed[[3, 17, 30]] = logits[0, [3, 17, 30]]
        tokens = np.array([int(draw(sampler, logits, length=n).tokens[0]) for n in range(1, DRAWS)])
        assert_follows(tokens, naive_probabilities(allowed, params[0]))


def test_a_bad_word_of_several_tokens_is_banned_at_its_last_token_only() -> None:
    logits = torch.zeros(1, 30)
    logits[0, 7], logits[0, 8] = 9.0, 8.0
    sampler = sampler_of([SamplingParams(temperature=0.0, bad_words=((7, 7, 7), (8, 7)))], 30)
    assert [int(draw(sampler, logits).tokens[0]) for _ in range(7)] == [7, 7, 8, 8, 8, 8, 8]
    single = sampler_of([SamplingParams(temperature=0.0, bad_words=((7,), (8,)))], 30)
    assert int(draw(single, logits).tokens[0]) == 0


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    logits = torch.zeros(1, 30)
    logits[0, 7] = 9.0
    sampler = Sampler(1, 30)
    sampler.seat(0, SamplingParams(temperature=0.0, bad_words=((5, 7),)), [4, 5], 2, set())
    assert int(draw(sampler, logits).tokens[0]) == 7
    sampler.seat(0, SamplingParams(temperature=0.0, bad_words=((5, 7),)), [4, 5], 1, set())  # now 5 is output
    assert int(draw(sampler, logits).tokens[0]) == 0


def test_ending_tokens_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, 30)
    logits[0, 4], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    sampler = sampler_of([SamplingParams(temperature=0.0, min_tokens=3)], 30, ending={4, 5, 10_000})
    by_length = [int(draw(sampler, logits, length=length).tokens[0]) for length in range(1, 6)]
    assert by_length == [6, 6, 6, 4, 4]  # the prompt has one token


def naive_penalties(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    result = logits.clone()
    for token in set(prompt + output):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return result


def test_penalties_follow_their_definitions_while_the_output_grows() -> None:
    rng = np.random.default_rng(1)
    vocab, rows = 40, 12
    params = [
        SamplingParams(
            temperature=0.0,
            repetition_penalty=float(rng.choice([1.0, 0.7, 1.4])),
            frequency_penalty=float(rng.choice([0.0, 0.6, -0.3])),
            presence_penalty=float(rng.choice([0.0, 1.1, -0.5])),
        )
        for _ in range(rows)
    ]
    prompts = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(rows)]
    outputs = [rng.integers(0, vocab, rng.integers(0, 5)).tolist() for _ in range(rows)]  # of an earlier epoch
    sampler = Sampler(rows, vocab)
    for row in range(rows):
        sampler.seat(row, params[row], prompts[row] + outputs[row], len(prompts[row]), set())
    for step in range(15):
        present = [row for row in range(rows) if (row + step) % 3]  # others are not in this step
        logits = logits_of(len(present), vocab, seed=step, spread=1.0)
        tokens = draw(sampler, logits, present).tokens.tolist()
        for i, row in enumerate(present):
            assert tokens[i] == int(naive_penalties(logits[i], params[row], prompts[row], outputs[row]).argmax())
            outputs[row].append(tokens[i])


def test_a_row_taken_again_starts_without_what_its_predecessor_left() -> None:
    vocab = 20
    penalised = SamplingParams(temperature=0.0, presence_penalty=5.0, logit_bias={1: 50.0}, min_tokens=4, logprobs=1)
    sampler = sampler_of([penalised], vocab, ending={2})
    draw(sampler, torch.zeros(1, vocab))
    sampler.leave(0)
    sampler.seat(0, SamplingParams(temperature=0.0), [0], 1, {2})
    logits = torch.zeros(1, vocab)
    logits[0, 2] = 1.0
    drawn = draw(sampler, logits)
    assert drawn.tokens.tolist() == [2] and not drawn.logprobs
    sampler.leave(0)
    sampler.seat(0, penalised, [0], 1, set())
    assert draw(sampler, logits).tokens.tolist() == [1]


def test_logprobs_are_those_of_the_raw_distribution_most_likely_first() -> None:
    logits = logits_of(3, 50)
    params = [
        SamplingParams(temperature=0.3, seed=1, logprobs=4, logit_bias={7: 30.0}, repetition_penalty=2.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    drawn = draw(sampler_of(params, 50), logits)
    expected = torch.log_softmax(logits, -1)
    best = expected[0].topk(4)
    assert set(drawn.logprobs) == {0, 2}
    assert drawn.tokens[0] == 7
    assert drawn.logprobs[0].logprob == pytest.approx(expected[0, 7].item())
    assert drawn.logprobs[0].top_ids == best.indices.tolist()
    assert drawn.logprobs[0].top_logprobs == pytest.approx(best.values.tolist())
    assert drawn.logprobs[2].logprob == pytest.approx(expected[2].max().item())
    assert drawn.logprobs[2].top_ids == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", [{"temperature": 0.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}], ids=str)
def test_logits_that_are_not_finite_break_their_own_row_only(value: float, broken: dict[str, Any]) -> None:
    vocab = 300
    logits = logits_of(3, vocab)
    params = [SamplingParams(seed=1), SamplingParams(**broken), SamplingParams(seed=3, top_k=4)]
    well = draw(sampler_of(params, vocab), logits).tokens.tolist()
    logits[1, 123] = value
    drawn = draw(sampler_of(params, vocab), logits)
    assert drawn.broken == [1]
    assert [drawn.tokens[0], drawn.tokens[2]] == [well[0], well[2]]


def test_a_row_with_everything_forbidden_is_broken() -> None:
    logits = torch.full((1, 10), -torch.inf)
    assert draw(sampler_of([SamplingParams(temperature=0.0)], 10), logits).broken == [0]
