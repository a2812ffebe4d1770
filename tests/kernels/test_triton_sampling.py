"""Draws by the Triton kernels against the rules of kernels/sampling.py in fp64; interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_stages.draws import Exact, random_logits, random_rules
from motet.kernels import sampling as plain
from motet.kernels.triton import sampling
from motet.kernels.triton.launch import Kernel
from motet.kernels.triton.sampling import kernels_for
from motet.kernels.types import DrawRules

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = 1 - 2**-53  # the largest noise


def draw(logits: np.ndarray, rules: DrawRules, noise: np.ndarray) -> np.ndarray:
    tokens, best = sampling.Draws(rules, logits.shape[1], DEVICE).draw(torch.from_numpy(logits).to(DEVICE), noise)
    assert np.array_equal(best, logits.max(1), equal_nan=True)
    return tokens


def rules_of(rows: int, *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> DrawRules:
    return DrawRules(
        np.full(rows, temperature, np.float32), np.full(rows, min_p, np.float32), np.full(rows, top_k), np.full(rows, top_p)
    )


def kept(logits: np.ndarray, rules: DrawRules) -> set[int]:
    """The tokens that one row of logits draws with noise from one end to the other."""
    count = 9
    noise = np.append(np.arange(count - 1) / count, LAST)
    repeated = DrawRules(*(np.repeat(values, count) for values in (rules.temperature, rules.min_p, rules.top_k, rules.top_p)))
    return set(draw(np.repeat(logits[None], count, 0), repeated, noise).tolist())


@pytest.mark.parametrize("room", [sampling.ROOM, 16], ids=["gathered", "whole rows"])
@pytest.mark.parametrize("vocab", [288, 4096, 9001])
def test_tokens_are_those_of_the_rules_in_fp64(vocab: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ROOM", room)
    rng = np.random.default_rng(vocab + room)
    rows, unclear = 24, 0
    logits, rules, noise = random_logits(rng, rows, vocab), random_rules(rng, rows, vocab), rng.random(rows)
    tokens = draw(logits, rules, noise)
    by_torch, _ = plain.PlainDraws(rules, DEVICE).draw(torch.from_numpy(logits.copy()).to(DEVICE), noise)
    for row in range(rows):
        exact = Exact(logits[row], rules, row)
        if exact.unclear(noise[row]):
            unclear += 1
        else:
            assert tokens[row] == by_torch[row] == exact.token(noise[row]), f"row {row}: {exact}"
    assert unclear <= 1


def test_a_row_draws_the_same_bits_alone_in_any_batch_and_again() -> None:
    rng = np.random.default_rng(3)
    rows, vocab = 9, 5000
    logits, rules, noise = random_logits(rng, rows, vocab), random_rules(rng, rows, vocab), rng.random(rows)

    def sums(order: list[int]) -> tuple[list[int], torch.Tensor]:
        fields = (rules.temperature, rules.min_p, rules.top_k, rules.top_p)
        draws = sampling.Draws(DrawRules(*(values[order] for values in fields)), vocab, DEVICE)
        tokens, _ = draws.draw(torch.from_numpy(logits[order]).to(DEVICE), noise[order])
        return tokens.tolist(), draws.workspace.sums

    together, weights = sums(list(range(rows)))
    assert sums(list(range(rows)))[0] == together
    order = rng.permutation(rows).tolist()
    shuffled, same = sums(order)
    assert shuffled == [together[row] for row in order] and torch.equal(same, weights[order])
    for row in range(rows):
        alone, same = sums([row])
        assert alone == [together[row]] and torch.equal(same[0], weights[row])


def test_the_order_in_which_keys_are_gathered_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    logits, noise = torch.from_numpy(random_logits(rng, 8, 5000)).to(DEVICE), rng.random(8)
    draws = sampling.Draws(rules_of(8, temperature=1.5, top_k=300, top_p=0.9), 5000, DEVICE)
    before = draws.draw(logits, noise)[0].tolist(), draws.workspace.cuts.clone()
    select = draws.kernels["select_key"]

    def shuffled(*arguments: Any) -> None:
        for row, count in enumerate(draws.workspace.gathered.tolist()):
            keys = draws.workspace.found[row]
            assert 300 < count < sampling.ROOM
            keys[:count] = keys[:count][torch.randperm(count).to(DEVICE)]
        select(*arguments)

    draws.kernels["select_key"] = shuffled  # type: ignore[assignment]
    assert draws.draw(logits, noise)[0].tolist() == before[0] and torch.equal(draws.workspace.cuts, before[1])


@pytest.mark.parametrize(
    ("rules", "tokens"),
    [
        (rules_of(1, top_k=2), {0, 1, 2}),
        (rules_of(1, top_p=0.31), {0, 1, 2}),
        (rules_of(1, top_p=0.29), {0}),
        (rules_of(1, top_p=0.0), {0}),
        (rules_of(1, top_k=2, top_p=0.7), {0, 1, 2}),
        (rules_of(1, top_k=1, top_p=0.99), {0}),
        (rules_of(1, min_p=0.6), {0, 1, 2}),
        (rules_of(1, min_p=1.0), {0}),
        (rules_of(1, min_p=0.6, top_k=4, top_p=0.99), {0, 1, 2}),
        (rules_of(1, temperature=0.001), {0}),
        (rules_of(1), {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_tokens_equal_to_the_threshold_stay(rules: DrawRules, tokens: set[int]) -> None:
    p = np.zeros(300, np.float32)
    p[:5] = [0.3, 0.2, 0.2, 0.16, 0.14]
    with np.errstate(divide="ignore"):
        logits = np.log(p)
    logits[2] = logits[1]
    at = np.random.default_rng(0).permutation(300)[:5]  # banned tokens between them
    scattered = np.full(300, -np.inf, np.float32)
    scattered[at] = logits[:5]
    found = kept(scattered, rules)
    assert found == {int(at[token]) for token in tokens}


def test_a_row_of_equal_logits_draws_evenly_whatever_its_filters_are() -> None:
    for rules in (rules_of(1, top_k=3), rules_of(1, top_p=0.1), rules_of(1, min_p=1.0)):
        assert kept(np.full(6, 2.5, np.float32), rules) == set(range(6))


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01, "top_k": 9, "top_p": 0.5}], ids=str)
def test_the_only_token_that_is_left_is_drawn(filters: dict[str, Any]) -> None:
    logits = np.full((5, 4500), -np.inf, np.float32)
    for row, token in enumerate((0, 1, 4095, 4096, 4499)):
        logits[row, token] = -7.0
    for noise in (0.0, 0.5, LAST):
        assert draw(logits, rules_of(5, **filters), np.full(5, noise)).tolist() == [0, 1, 4095, 4096, 4499]


def test_no_token_of_probability_0_is_drawn_at_either_end_of_the_noise() -> None:
    logits = np.full((3, 9000), -np.inf, np.float32)
    logits[0, [300, 8000]], logits[1, [5000, 8999]], logits[2, [0, 4200]] = [0, -20], [0, -27], [-60, 3]
    assert draw(logits, rules_of(3), np.zeros(3)).tolist() == [300, 5000, 4200]
    assert draw(logits, rules_of(3), np.full(3, LAST)).tolist() == [8000, 8999, 4200]


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_largest_logit_says_so_and_leaves_the_others_alone(bad: float) -> None:
    rng = np.random.default_rng(9)
    rows, vocab = 6, 4200
    logits, noise = random_logits(rng, rows, vocab), rng.random(rows)
    rules = rules_of(rows, temperature=0.8, top_k=50, top_p=0.9)
    well = draw(logits, rules, noise)
    logits[2] = -np.inf
    logits[2, 4100:] = bad
    logits[4, 17] = -np.inf if bad == -np.inf else bad
    tokens, best = sampling.Draws(rules, vocab, DEVICE).draw(torch.from_numpy(logits).to(DEVICE), noise)
    assert np.isfinite(best).tolist() == [True, True, False, True, bad == -np.inf, True]
    assert tokens[2] == (0 if bad == -np.inf else 4100) and 0 <= tokens[4] < vocab
    others = [0, 1, 3, 5]
    assert tokens[others].tolist() == well[others].tolist()


def test_temperature_zero_is_the_first_largest_logit() -> None:
    logits = np.zeros((4, 8300), np.float32)
    logits[0, [8299, 50]], logits[1, :40] = 3.0, -0.0
    logits[2] = -1e30
    logits[2, 8000], logits[3] = -1e29, -5.0
    rules = rules_of(4, temperature=0.0, top_k=3, top_p=0.2)
    tokens, best = sampling.Draws(rules, 8300, DEVICE).draw(torch.from_numpy(logits).to(DEVICE), None)
    assert tokens.tolist() == [50, 0, 8000, 0] and best.tolist() == logits.max(1).tolist()


def test_a_batch_launches_what_its_rows_need_and_preparing_launches_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def noted(vocab_size: int, room: int) -> dict[str, Any]:
        def noting(name: str, kernel: Kernel) -> Callable[..., None]:
            def launch(*arguments: Any) -> None:
                launched.append(name)
                kernel(*arguments)

            return launch

        return {name: noting(name, kernel) for name, kernel in kernels_for(vocab_size, room).items()}

    monkeypatch.setattr(sampling, "kernels_for", noted)
    sampling.prepare(300, DEVICE)
    assert launched == list(sampling.WARPS)
    for rules, some in (
        (rules_of(2, temperature=0.0, top_p=0.5), ["peak_tiles", "pick_token"]),
        (rules_of(2, min_p=0.1), ["peak_tiles", "weigh_tiles", "pick_token"]),
    ):
        launched.clear()
        draw(np.zeros((2, 300), np.float32), rules, np.zeros(2))
        assert launched == some


def test_a_device_has_its_own_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(1)
    assert isinstance(plain.draws_for(rules, 10, torch.device("cpu")), plain.PlainDraws)
    monkeypatch.setattr(sampling, "Draws", lambda *arguments: arguments)
    assert plain.draws_for(rules, 10, torch.device("cuda", 0)) == (rules, 10, torch.device("cuda", 0))
