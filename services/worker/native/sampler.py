"""Draws the next token of many sequences at once.

A sequence has a *row* in the sampler's arrays from its admission to its end; a step names the rows it wants tokens for.
Per row, in this order (vLLM's): raw log-probabilities are read off (before anything below changes the logits), tokens
outside of its grammar (`masks`), allowed_token_ids, bad_words, logit_bias, ban of ending tokens before min_tokens, repetition
penalty over prompt and output, frequency and presence penalty over the output; then either the argmax (temperature 0), or
temperature, min_p, top_k, top_p, and one draw, by the rules of kernels/sampling.py.

The noise of a draw is one uniform number, a hash of (seed, position in prompt + output). Neither state nor batch enters, so a
sequence that is preempted or continued elsewhere draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from motet.kernels.sampling import Draws, draws_for
from motet.kernels.types import DrawRules
from motet.services.worker.native.bans import Bans
from motet.services.worker.native.masks import Masks
from motet.services.worker.native.penalties import Penalised, PenaltyCounts
from motet.shared.model import SamplingParams
from motet.shared.wire.stream import TokenLogprobs

if TYPE_CHECKING:
    from motet.services.worker.native.grammars import Matcher

GREEDY_BELOW = 1e-5  # temperatures under this are 0: dividing by them would overflow

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
    matchers: list[tuple[int, Matcher]]  # index in batch, of rows with a grammar
    penalised: Penalised | None
    draws: Draws
    drawing: bool  # whether any row has a temperature
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
        self.masks = Masks()
        """Of the rows with a grammar."""
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
        self.masks.leave(row)
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
        if batch.matchers:
            self.masks.apply(logits, batch.matchers)
        for at, bans in batch.bans:
            bans.apply(logits[at])
        if batch.bias is not None:
            index, ids, values = batch.bias
            logits.index_put_((index, ids), values, accumulate=True)
        if batch.min_length is not None:
            self._ban_endings(logits, rows, lengths < batch.min_length)
        if batch.penalised is not None:
            self._penalties.apply(logits, batch.penalised)
        noise = uniforms(self._seed[rows], lengths) if batch.drawing else None
        tokens, best = batch.draws.draw(logits, noise)
        if batch.penalised is not None:
            self._penalties.count(batch.penalised, tokens)
        for at, bans in batch.bans:
            bans.count(int(tokens[at]))
        finite = np.isfinite(best)
        for at, matcher in batch.matchers:
            if finite[at]:
                matcher.take((int(tokens[at]),))
        broken = [] if finite.all() else np.flatnonzero(~finite).tolist()
        return Drawn(tokens, broken, _read_logprobs(raw, batch.logprobs, tokens))

    def _gather(self, rows: np.ndarray, device: torch.device) -> _Batch:
        rules = DrawRules(self._temperature[rows], self._min_p[rows], self._top_k[rows], self._top_p[rows])
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
        wanted = self._logprobs[rows]
        return _Batch(
            rows=rows.copy(),
            min_length=min_length if min_length.any() else None,
            bias=bias,
            bans=[(i, self._bans[row]) for i, row in enumerate(rows.tolist()) if row in self._bans] if self._bans else [],
            matchers=self.masks.among(rows),
            penalised=self._penalties.among(rows, device),
            draws=draws_for(rules, self.vocab_size, device),
            drawing=bool(rules.drawing.any()),
            logprobs=[(int(i), int(wanted[i])) for i in np.flatnonzero(wanted >= 0)],
        )

    def _ban_endings(self, logits: Tensor, rows: np.ndarray, too_short: np.ndarray) -> None:
        for index in np.flatnonzero(too_short).tolist():
            logits[index, self._ending[int(rows[index])]] = -torch.inf


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) per (seed, position): SplitMix64's stream of the mixed seed, at `position`."""
    state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


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
