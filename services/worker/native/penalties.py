"""Token counts of the sequences that are penalised for them: sparse, on the logits' device, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.shared.model import SamplingParams

_FIRST_SLOTS = 4
_FIRST_TOKENS = 64


@dataclass(slots=True)
class Penalised:
    """The penalised rows of one batch: their places in the batch and in the counts."""

    index: np.ndarray  # int64 [p], into the batch
    slots: np.ndarray  # int64 [p]
    index_on_device: Tensor
    slots_on_device: Tensor
    factors: Tensor  # float32 [p, 3]: repetition, frequency, presence


class PenaltyCounts:
    """For each penalised sequence a list of its distinct tokens and how often the output has them.

        _ids    [slots, capacity]  |-- distinct tokens of prompt and output --|-- 0 --|
        _counts [slots, capacity]  |-- times in the output, 0: prompt only  --|-- -1 -|

    repetition (HF, vLLM): logits of tokens in prompt or output are divided by the penalty if positive, else multiplied;
    frequency and presence (OpenAI): minus penalty * count, minus penalty if counted at all, over the output only.
    Both sizes grow by doubling, with the penalised sequences there are and their distinct tokens.
    """

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._places: list[dict[int, int]] = []  # by slot: token id -> column
        self._factors = np.zeros((0, 3), np.float32)
        self._ids = torch.zeros((0, _FIRST_TOKENS), dtype=torch.int64)
        self._counts = torch.full((0, _FIRST_TOKENS), -1, dtype=torch.int32)

    def seat(self, row: int, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Start counting for `row` if its parameters penalise anything. `tokens` is prompt and output so far."""
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return
        ids = np.unique(np.asarray(tokens, np.int64))
        counts = np.zeros(len(ids), np.int32)
        spoken, times = np.unique(np.asarray(tokens[prompt_tokens:], np.int64), return_counts=True)
        counts[np.searchsorted(ids, spoken)] = times
        if not self._free:
            self._resize(max(_FIRST_SLOTS, 2 * len(self._places)), self._ids.shape[1])
        self._make_room(len(ids))
        slot = self._slot_of[row] = self._free.pop()
        self._factors[slot] = factors
        self._places[slot] = {token: column for column, token in enumerate(ids.tolist())}
        self._counts[slot] = -1
        self._ids[slot, : len(ids)] = torch.from_numpy(ids)
        self._counts[slot, : len(ids)] = torch.from_numpy(counts)

    def leave(self, row: int) -> None:
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def among(self, rows: np.ndarray, device: torch.device) -> Penalised | None:
        """The penalised ones of `rows`; None if there are none. Valid until a row is seated or left."""
        found = [(index, self._slot_of[row]) for index, row in enumerate(rows.tolist()) if row in self._slot_of]
        if not found:
            return None
        self._ids, self._counts = self._ids.to(device), self._counts.to(device)
        index, slots = np.array(found, np.int64).T.copy()
        return Penalised(
            index=index,
            slots=slots,
            index_on_device=torch.from_numpy(index).to(device),
            slots_on_device=torch.from_numpy(slots).to(device),
            factors=torch.from_numpy(self._factors[slots]).to(device),
        )

    def apply(self, logits: Tensor, penalised: Penalised) -> None:
        """Penalise those rows of logits [n, vocab] in place."""
        width = max(len(self._places[slot]) for slot in penalised.slots.tolist())
        rows = penalised.index_on_device[:, None]
        ids = self._ids[penalised.slots_on_device, :width]
        counts = self._counts[penalised.slots_on_device, :width]
        repetition, frequency, presence = penalised.factors.split(1, dim=1)
        old = logits[rows, ids]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= frequency * counts.clamp(min=0) + presence * (counts > 0)
        # Added as a difference, so that the padding (id 0, difference 0) leaves the real token 0 alone.
        change = torch.where((counts >= 0) & old.isfinite(), new - old, 0.0)
        logits.index_put_((rows, ids), change, accumulate=True)

    def count(self, penalised: Penalised, tokens: np.ndarray) -> None:
        """Count tokens[i] in the output of row i, for the penalised rows of the batch."""
        drawn, slots = tokens[penalised.index].tolist(), penalised.slots.tolist()
        columns = []
        for slot, token in zip(slots, drawn, strict=True):
            places = self._places[slot]
            columns.append(places.setdefault(token, len(places)))
        self._make_room(max(columns) + 1)
        at = penalised.slots_on_device, torch.tensor(columns, device=self._ids.device)
        self._ids[at] = torch.tensor(drawn, device=self._ids.device)
        self._counts[at] = self._counts[at].clamp(min=0) + 1

    def _make_room(self, tokens: int) -> None:
        capacity = self._ids.shape[1]
        if tokens > capacity:
            self._resize(len(self._places), max(tokens, 2 * capacity))

    def _resize(self, slots: int, capacity: int) -> None:
        old, filled = self._ids.shape
        ids, counts = self._ids.new_zeros((slots, capacity)), self._counts.new_full((slots, capacity), -1)
        ids[:old, :filled], counts[:old, :filled] = self._ids, self._counts
        self._ids, self._counts = ids, counts
        self._factors = np.concatenate([self._factors, np.zeros((slots - old, 3), np.float32)])
        self._places += [{} for _ in range(slots - old)]
        self._free += range(slots - 1, old - 1, -1)
