"""Token counts of the sequences that are penalised for them, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.model import SamplingParams


@dataclass(slots=True)
class Penalised:
    """The penalised rows of one batch: where they are in it, and where their counts are."""

    index: np.ndarray  # int64 [p], into the batch
    index_on_device: Tensor
    slots: Tensor  # int64 [p]
    factors: Tensor  # float32 [p, 3]


class PenaltyCounts:
    """Counts over the vocabulary for the rows that need them: memory grows with those, by doubling, and not with `seats`.

    repetition (HF, vLLM): logits of tokens in prompt or output are divided by the penalty if positive, else multiplied;
    frequency and presence (OpenAI): minus penalty * count, minus penalty if counted at all, over the output only.
    """

    def __init__(self, seats: int, vocab_size: int) -> None:
        self._seats = seats
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32)  # over the output
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool)  # in prompt or output
        self._factors = np.zeros((0, 3), np.float32)  # repetition, frequency, presence

    def seat(self, row: int, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Start counting for `row` if its parameters penalise anything. `tokens` is prompt and output so far."""
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return
        if not self._free:
            self._grow()
        slot = self._slot_of[row] = self._free.pop()
        self._factors[slot] = factors
        known = torch.tensor(tokens, dtype=torch.int64, device=self._counts.device)
        self._seen[slot] = False
        self._seen[slot, known] = True
        self._counts[slot] = torch.bincount(known[prompt_tokens:], minlength=self._counts.shape[1])

    def leave(self, row: int) -> None:
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def among(self, rows: np.ndarray, device: torch.device) -> Penalised | None:
        """Which of `rows` are penalised; None if none is. Good until a row is seated or left."""
        found = [(index, self._slot_of[row]) for index, row in enumerate(rows.tolist()) if row in self._slot_of]
        if not found:
            return None
        self._counts, self._seen = self._counts.to(device), self._seen.to(device)
        index, slots = np.array(found, np.int64).T.copy()
        return Penalised(
            index=index,
            index_on_device=torch.from_numpy(index).to(device),
            slots=torch.from_numpy(slots).to(device),
            factors=torch.from_numpy(self._factors[slots]).to(device),
        )

    def apply(self, logits: Tensor, penalised: Penalised) -> None:
        """Penalise those rows of logits [n, vocab] in place."""
        index, slots = penalised.index_on_device, penalised.slots
        repetition, frequency, presence = penalised.factors.split(1, dim=1)
        values, counts = logits[index], self._counts[slots]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self._seen[slots], repeated, values)
        logits[index] = values - frequency * counts - presence * (counts > 0)

    def count(self, penalised: Penalised, tokens: np.ndarray) -> None:
        """One more of tokens[i] in the output of row i, for the penalised rows of the batch."""
        ids = torch.from_numpy(tokens[penalised.index]).to(self._counts.device)
        self._counts[penalised.slots, ids] += 1
        self._seen[penalised.slots, ids] = True

    def _grow(self) -> None:
        old = self._counts.shape[0]
        new = min(self._seats, max(4, 2 * old))
        more = (new - old, self._counts.shape[1])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more)])
        self._factors = np.concatenate([self._factors, np.zeros((new - old, 3), np.float32)])
        self._free.extend(range(new - 1, old - 1, -1))
