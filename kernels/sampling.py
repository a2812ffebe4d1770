"""Draws the next token of each row of logits, in plain torch; kernels/triton/sampling.py does it on a GPU.

A row with temperature 0 takes the first largest logit. Any other takes the softmax of its logits divided by the temperature,
removes tokens by min_p, then by top_k, then by top_p of what is left, without normalising again in between, and makes one draw.

    min_p    keeps what has at least min_p of the largest probability
    top_k    keeps the k largest
    top_p    keeps the smallest set of the largest whose sum reaches top_p of the sum that is left

All three are thresholds, found without sorting the vocabulary. Tokens equal to the threshold stay, so the outcome does not
depend on an order among ties.

A draw takes one number `noise` in [0, 1): the token is the first, *in order of token id*, at which the sum of the probabilities
that are left exceeds `noise` times all of them. (A Gumbel draw would need a number for each token of the vocabulary; with
*sorted* probabilities two nearly equal tokens that swap places would move all others.) So a row's token depends on its logits,
rules and noise alone, not on other rows. A token of probability 0 is never drawn.

On a GPU a row's sums are of integers (2^40 times the probability relative to the largest), so they do not depend on their order
either. Where a probability and a threshold, or a sum and the noise, differ by less than rounding, the two ways may differ.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from motet.kernels.to_device import fetch
from motet.kernels.types import DrawRules

CANDIDATES = 128  # largest values looked at for top_p, then so many times more, until they are enough
MORE_CANDIDATES = 16
TILE = 256  # token ids per partial sum of the cumulative distribution


class Draws(Protocol):
    """Draws for a set of rows with given rules, prepared once and used until the set or its rules change."""

    def draw(self, logits: Tensor, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Each row's token, int64 [n], and its largest logit, float32 [n]; NaN counts as largest.

        logits float32 [n, vocab], contiguous, may be changed; noise float64 [n], in [0, 1), read for rows with a temperature
        only, so it may be None if there are none. If a row's largest logit is not finite, its token is any.
        """


def draws_for(rules: DrawRules, vocab_size: int, device: torch.device) -> Draws:
    """The plain ones on a CPU, the Triton kernels on a GPU (imported only then)."""
    if device.type == "cuda":
        from motet.kernels.triton import sampling

        return sampling.Draws(rules, vocab_size, device)
    return PlainDraws(rules, device)


def prepare(vocab_size: int, device: torch.device) -> None:
    """Compile what `draws_for` uses on this device."""
    if device.type == "cuda":
        from motet.kernels.triton import sampling

        sampling.prepare(vocab_size, device)


class PlainDraws:
    """The `Draws` of plain torch, for any device."""

    def __init__(self, rules: DrawRules, device: torch.device) -> None:
        self._drawing = drawing = np.flatnonzero(rules.drawing)
        temperature = rules.temperature[drawing][:, None]
        self._temperature = torch.from_numpy(temperature).to(device) if (temperature != 1).any() else None
        self._min_p, self._top_k, self._top_p = rules.min_p[drawing], rules.top_k[drawing], rules.top_p[drawing]

    def draw(self, logits: Tensor, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """As `Draws` says."""
        tokens, best = argmax(logits)
        if noise is not None and self._drawing.size:
            tokens[self._drawing] = self._draw(logits, noise[self._drawing])
        return tokens, best

    def _draw(self, logits: Tensor, noise: np.ndarray) -> np.ndarray:
        scaled = logits if len(noise) == len(logits) else logits[_on(logits, self._drawing)]
        if self._temperature is not None:
            scaled /= self._temperature
        p = torch.softmax(scaled, dim=-1)
        filter_probabilities(p, self._min_p, self._top_k, self._top_p)
        return fetch(invert_cdf(p, _on(logits, noise)))


def argmax(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The largest logit's id and value per row; NaN counts as largest. int64 [n], float32 [n]."""
    if logits.device.type == "cpu":  # numpy's is vectorised, several times as fast as torch's there
        values = logits.numpy()
        ids = values.argmax(axis=1)
        return ids, values[np.arange(len(ids)), ids]
    best, ids_on_device = logits.max(dim=-1)
    return fetch(ids_on_device), fetch(best)


def filter_probabilities(p: Tensor, min_p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """Set to 0 in place what may not be drawn: first by min_p and top_k, then by top_p of the rest.

    p [d, vocab], each row summing to 1; min_p [d], relative to the row's largest; top_k [d], 0 for off; top_p [d], at least 1
    for off. Rows are not normalised again.
    """
    if min_p.any():
        _cut(p, p.amax(-1, keepdim=True) * _on(p, min_p)[:, None])
    limited = np.flatnonzero(top_k > 0)
    if limited.size:
        best = largest(_rows(p, limited), int(top_k.max()))
        kth = p.new_zeros(len(p), 1)
        kth[_on(p, limited)] = best.gather(-1, _on(p, top_k[limited] - 1)[:, None])
        _cut(p, kth)
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size:
        _cut(p, _nucleus_cuts(p, nucleus, top_p))


def _nucleus_cuts(p: Tensor, rows: np.ndarray, top_p: np.ndarray) -> Tensor:
    """The smallest probability in the smallest set of tokens whose sum reaches top_p, [d, 1]; 0 outside `rows`."""
    cuts = p.new_zeros(len(p), 1)
    vocab_size = p.shape[-1]
    candidates = min(CANDIDATES, vocab_size)
    while rows.size:
        index = _on(p, rows)
        chosen = _rows(p, rows)
        best = largest(chosen, candidates)
        sums = best.cumsum(-1, dtype=torch.float64)
        total = sums[:, -1:] if candidates == vocab_size else _tile_sums(chosen).sum(-1, keepdim=True, dtype=torch.float64)
        short = (sums < _on(p, top_p[rows])[:, None] * total).sum(-1, keepdim=True)  # so many fall short, the next reaches it
        cuts[index] = best.gather(-1, short.clamp(max=candidates - 1))
        rows = rows[(short[:, 0] == candidates).cpu().numpy()]
        candidates = min(candidates * MORE_CANDIDATES, vocab_size)
    return cuts


def largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, in descending order, [d, count]."""
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values
    array = values.numpy()  # numpy selects and sorts with vector instructions, ten times as fast as torch on a CPU
    if count < array.shape[1]:
        array = np.partition(array, array.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=1)[:, ::-1].copy())


def _cut(p: Tensor, threshold: Tensor) -> None:
    p.masked_fill_(p < threshold, 0.0)


def _rows(values: Tensor, rows: np.ndarray) -> Tensor:
    return values if rows.size == len(values) else values[_on(values, rows)]


def _on(like: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def invert_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """The token id at which the cumulative distribution passes `noise` (float64 [d], in [0, 1)), int64 [d].

    weights [d, vocab] >= 0, not normalised. Two levels: find the tile by the sums, then the id inside, in float64.
    """
    vocab_size = weights.shape[-1]
    sums = _tile_sums(weights)
    ends = sums.cumsum(-1, dtype=torch.float64)
    target = noise[:, None] * ends[:, -1:]
    tile = (ends <= target).sum(-1, keepdim=True).clamp(max=ends.shape[1] - 1)
    rest = target - (ends - sums).gather(-1, tile)
    ids = tile * TILE + torch.arange(TILE, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=vocab_size - 1)) * (ids < vocab_size)
    inside = inside.cumsum(-1, dtype=torch.float64)
    # The tile's sum in float32 may exceed its float64 one by a rounding: stay below the end, so the id has weight.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 1e-12))
    # A row of NaN has no weight anywhere. Its token is not used, but has to be a valid id.
    return (tile[:, 0] * TILE + (inside <= rest).sum(-1)).clamp(max=vocab_size - 1)


def _tile_sums(weights: Tensor) -> Tensor:
    whole = weights.shape[-1] // TILE * TILE
    tiles = weights[:, :whole].unflatten(-1, (-1, TILE)).sum(-1)
    if whole == weights.shape[-1]:
        return tiles
    return torch.cat([tiles, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)
