"""Draws the next token of many sequences at once.

A sequence has a *row* in the sampler's arrays from its admission to its end; a step names the rows it wants tokens for.
Per row, in this order (vLLM's): raw log-probabilities are read off (before anything below changes the logits),
allowed_token_ids, bad_words, logit_bias, ban of ending tokens before min_tokens, repetition penalty over prompt and output,
frequency and presence penalty over the output; then either the argmax (temperature 0), or temperature, min_p, top_k, top_p,
and one draw.

min_p, top_k and top_p are thresholds on the probability, found from the largest few values without sorting the
vocabulary; tokens equal to the threshold stay, so the outcome does not depend on an order among ties.

Noise: one uniform number per token, a hash of (seed, position in prompt + output), through the inverse of the cumulative
distribution *in order of token id*. A Gumbel draw would need vocabulary-size noise per row; an inverse over *sorted*
probabilities would let two near-equal tokens that swap places move all others. Neither state nor batch enters, so a
sequence that is preempted or continued elsewhere draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motet.services.worker.native.bans import Bans
from motet.services.worker.native.penalties import Penalised, PenaltyCounts
from motet.shared.model import SamplingParams
from motet.shared.wire.stream import TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures under this are 0: dividing by them would overflow
CANDIDATES = 128  # largest values looked at for top_p, then so many times more, until they are enough
MORE_CANDIDATES = 16
TILE = 256  # token ids per partial sum of the cumulative distribution

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK_64 = (1 << 64) - 1


@dataclass(slots=True)
class Drawn:
    """One token for each row. `broken`: indices of rows whose logits were not finite, so that their token means nothing."""

    tokens: np.ndarray  # int64 [n]
    broken: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index


@dataclass(slots=True)
class _Batch:
    """Parameters of a set of rows, gathered once and used until the set or a row's parameters change."""

    rows: np.ndarray
    min_length: np.ndarray | None
    bias: tuple[Tensor, Tensor, Tensor] | None  # index in batch, token id, value; flat over all biased rows
    bans: list[tuple[int, Bans]]  # index in batch
    penalised: Penalised | None
    drawing: np.ndarray  # indices of rows with a temperature
    temperature: Tensor | None  # of those, [d, 1]; None if all are 1
    min_p: np.ndarray  # [d]
    top_k: np.ndarray  # [d], 0 for off
    top_p: np.ndarray  # [d], 1 or more for off
    logprobs: list[tuple[int, int]]  # index, how many rivals


class Sampler:
    """Draws tokens for up to `seats` sequences. Sampling parameters are on the host; logits may be on any device."""

    def __init__(self, seats: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._temperature = np.zeros(seats, np.float32)
        self._min_p = np.zeros(seats, np.float32)
        self._top_k = np.zeros(seats, np.int64)
        self._top_p = np.ones(seats, np.float64)
        self._seed = np.zeros(seats, np.uint64)
        self._logprobs = np.full(seats, -1, np.int64)
        self._min_length = np.zeros(seats, np.int64)
        self._ending: dict[int, list[int]] = {}  # rows with min_tokens
        self._bias: dict[int, dict[int, float]] = {}  # rows with logit_bias
        self._bans: dict[int, Bans] = {}  # rows that may not draw everything
        self._penalties = PenaltyCounts()
        self._batch: _Batch | None = None

    @torch.inference_mode()
    def seat(self, row: int, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int, ending: set[int]) -> None:
        """A sequence takes `row`. `tokens` is its prompt and output so far; `ending` are the ids that would end it."""
        drawing = sampling.temperature >= GREEDY_BELOW
        self._temperature[row] = sampling.temperature if drawing else 0.0
        self._min_p[row] = sampling.min_p
        self._top_k[row] = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        self._top_p[row] = sampling.top_p
        self._seed[row] = sampling.seed & _MASK_64
        self._logprobs[row] = -1 if sampling.logprobs is None else min(sampling.logprobs, self.vocab_size)
        self._min_length[row] = 0
        if sampling.min_tokens > 0 and ending:
            self._min_length[row] = prompt_tokens + sampling.min_tokens
            self._ending[row] = sorted(token for token in ending if 0 <= token < self.vocab_size)
        if sampling.logit_bias:
            self._bias[row] = sampling.logit_bias
        if (bans := Bans.of(sampling, tokens, prompt_tokens)) is not None:
            self._bans[row] = bans
        self._penalties.seat(row, sampling, tokens, prompt_tokens)
        self._batch = None

    def leave(self, row: int) -> None:
        """The sequence of `row` has ended or was preempted."""
        self._ending.pop(row, None)
        self._bias.pop(row, None)
        self._bans.pop(row, None)
        self._penalties.leave(row)
        self._batch = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Drawn:
        """The next token of each row.

        logits float32 [n, vocab], changed in place; rows int64 [n]; lengths int64 [n]: tokens of prompt and output so
        far, which is the position that the drawn token will have.
        """
        batch = self._batch
        if batch is None or not np.array_equal(batch.rows, rows):
            batch = self._batch = self._gather(rows, logits.device)
        raw = _raw_logprobs(logits, batch.logprobs)
        for at, bans in batch.bans:
            bans.apply(logits[at])
        if batch.bias is not None:
            index, ids, values = batch.bias
            logits.index_put_((index, ids), values, accumulate=True)
        if batch.min_length is not None:
            self._ban_endings(logits, rows, lengths < batch.min_length)
        if batch.penalised is not None:
            self._penalties.apply(logits, batch.penalised)
        tokens, best = argmax(logits)
        if batch.drawing.size:
            tokens[batch.drawing] = self._draw(logits, batch, rows, lengths)
        if batch.penalised is not None:
            self._penalties.count(batch.penalised, tokens)
        for at, bans in batch.bans:
            bans.count(int(tokens[at]))
        finite = np.isfinite(best)
        broken = [] if finite.all() else np.flatnonzero(~finite).tolist()
        return Drawn(tokens, broken, _read_logprobs(raw, batch.logprobs, tokens))

    def _gather(self, rows: np.ndarray, device: torch.device) -> _Batch:
        drawing = np.flatnonzero(self._temperature[rows] > 0)
        drawn_rows = rows[drawing]
        min_length = self._min_length[rows]
        biased = [(i, token, value) for i, row in enumerate(rows.tolist()) for token, value in self._bias.get(row, {}).items()]
        bias = None
        if biased:
            index, ids, values = zip(*biased, strict=True)
            bias = (
                torch.tensor(index, device=device),
                torch.tensor(ids, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        temperature = self._temperature[drawn_rows][:, None]
        wanted = self._logprobs[rows]
        return _Batch(
            rows=rows.copy(),
            min_length=min_length if min_length.any() else None,
            bias=bias,
            bans=[(i, self._bans[row]) for i, row in enumerate(rows.tolist()) if row in self._bans] if self._bans else [],
            penalised=self._penalties.among(rows, device),
            drawing=drawing,
            temperature=torch.from_numpy(temperature).to(device) if (temperature != 1).any() else None,
            min_p=self._min_p[drawn_rows],
            top_k=self._top_k[drawn_rows],
            top_p=self._top_p[drawn_rows],
            logprobs=[(int(i), int(wanted[i])) for i in np.flatnonzero(wanted >= 0)],
        )

    def _ban_endings(self, logits: Tensor, rows: np.ndarray, too_short: np.ndarray) -> None:
        for index in np.flatnonzero(too_short).tolist():
            logits[index, self._ending[int(rows[index])]] = -torch.inf

    def _draw(self, logits: Tensor, batch: _Batch, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        drawing = batch.drawing
        scaled = logits if drawing.size == rows.size else logits[_on(logits, drawing)]
        if batch.temperature is not None:
            scaled /= batch.temperature
        p = torch.softmax(scaled, dim=-1)
        filter_probabilities(p, batch.min_p, batch.top_k, batch.top_p)
        noise = uniforms(self._seed[rows[drawing]], lengths[drawing])
        return invert_cdf(p, _on(logits, noise)).cpu().numpy()


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) per (seed, position): SplitMix64's stream of the mixed seed, at `position`."""
    state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def argmax(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The largest logit's id and value per row; NaN counts as largest. int64 [n], float32 [n]."""
    if logits.device.type == "cpu":  # numpy's is vectorised, several times as fast as torch's there
        values = logits.numpy()
        ids = values.argmax(axis=1)
        return ids, values[np.arange(len(ids)), ids]
    best, ids_on_device = logits.max(dim=-1)
    return ids_on_device.cpu().numpy(), best.cpu().numpy()


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
    # A row of NaN has no weight anywhere; its caller throws the token away, but it must be one.
    return (tile[:, 0] * TILE + (inside <= rest).sum(-1)).clamp(max=vocab_size - 1)


def _tile_sums(weights: Tensor) -> Tensor:
    whole = weights.shape[-1] // TILE * TILE
    tiles = weights[:, :whole].unflatten(-1, (-1, TILE)).sum(-1)
    if whole == weights.shape[-1]:
        return tiles
    return torch.cat([tiles, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)


def _raw_logprobs(logits: Tensor, wanted: list[tuple[int, int]]) -> Tensor | None:
    if not wanted:
        return None
    return torch.log_softmax(logits[[index for index, _ in wanted]], dim=-1)


def _read_logprobs(raw: Tensor | None, wanted: list[tuple[int, int]], tokens: np.ndarray) -> dict[int, TokenLogprobs]:
    if raw is None:
        return {}
    most = max(count for _, count in wanted)
    drawn = torch.from_numpy(tokens[[index for index, _ in wanted]]).to(raw.device)
    chosen = raw.gather(-1, drawn[:, None])[:, 0].tolist()
    best = raw.topk(most, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return {index: TokenLogprobs(chosen[i], ids[i][:count], values[i][:count]) for i, (index, count) in enumerate(wanted)}
