"""The engine's running sequences as rows of persistent arrays, and the step batch gathered from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from motet.policies.step.batch_state import Sequence, StepPlan
from motet.services.worker.engines.request import EngineRequest, StepStats
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.model import RequestBrief

if TYPE_CHECKING:
    from motet.services.worker.native.grammars import Matcher


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSequence(Sequence):
    """A request inside the engine. `tokens` (of `Sequence`) is its prompt and all output so far."""

    request: EngineRequest
    prompt_tokens: int
    max_length: int  # prompt plus output at which it ends with "length"
    ending: set[int] = field(default_factory=set)  # EOS and stop token ids
    row: int = -1  # its seat while running
    reported: bool = False  # the first item has gone out
    admitted_s: float | None = None  # first admission
    cached_prompt_tokens: int = 0  # found in the prefix cache then
    cold_since_s: float = 0.0  # when its way in was first chosen, and the time to first token that was predicted then
    cold_ttft_ms: float = 0.0
    matcher: Matcher | None = None  # of its grammar, after the output so far

    @property
    def output_tokens(self) -> int:
        return self.length - self.prompt_tokens

    def brief(self) -> RequestBrief:
        """The facts of the request that schedulers need."""
        return self.request.brief(self.output_tokens, running=self.row >= 0)


class Seats:
    """Block tables and step buffers of all seats, allocated once. A batch consists of views, valid until the next `build`."""

    def __init__(self, *, seats: int, max_step_tokens: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((seats, -(-max_model_len // block_size)), np.int32)
        self._free = list(range(seats - 1, -1, -1))
        self._token_ids = np.zeros(max_step_tokens, np.int64)
        self._positions = np.zeros(max_step_tokens, np.int64)
        self._row_slot = np.zeros(max_step_tokens, np.int32)
        self._kv_slots = np.zeros(max_step_tokens, np.int64)
        self._seq_starts = np.zeros(seats + 1, np.int32)
        self._context_lens = np.zeros(seats, np.int32)
        self._count = np.arange(max(max_model_len, seats) + 1)

    def take(self, live: LiveSequence) -> None:
        """Seat a sequence that has just been admitted, with all its blocks."""
        live.row = self._free.pop()
        self._tables[live.row, : len(live.blocks)] = live.blocks

    def leave(self, live: LiveSequence) -> None:
        self._free.append(live.row)
        live.row = -1

    def grew(self, live: LiveSequence) -> None:
        """A sequence has got a new last block."""
        self._tables[live.row, len(live.blocks) - 1] = live.blocks[-1]

    def moved(self, live: LiveSequence) -> None:
        """The ids of a sequence's blocks have changed."""
        self._tables[live.row, : len(live.blocks)] = live.blocks

    def build(self, plan: StepPlan[LiveSequence], stats: StepStats) -> tuple[StepBatch, np.ndarray, np.ndarray]:
        """The plan as arrays, with the seats [n] and lengths [n] of the sequences that get a token, decodes first."""
        size, decodes, prefills = self._block_size, plan.decodes, plan.prefills
        at, sequences = len(decodes), len(decodes) + len(prefills)
        rows = np.array([live.row for live in decodes] + [live.row for live in prefills], np.int64)
        positions, kv_slots, context_lens = self._positions, self._kv_slots, self._context_lens
        self._token_ids[:at] = [live.tokens[-1] for live in decodes]
        self._row_slot[:at] = [live.slot for live in decodes]
        positions[:at] = [live.computed for live in decodes]
        decoded = positions[:at]
        kv_slots[:at] = self._tables[rows[:at], decoded // size]
        kv_slots[:at] *= size
        kv_slots[:at] += decoded % size
        self._seq_starts[: at + 1] = self._count[: at + 1]
        context_lens[:at] = decoded + 1
        drawn = list(range(at))
        logit_rows = list(range(at))
        for index, live in enumerate(prefills, at):
            start, end = live.computed, live.computed + live.scheduled
            chunk = slice(at, at + live.scheduled)
            self._token_ids[chunk] = live.tokens[start:end]
            self._row_slot[chunk] = live.slot
            here = self._count[start:end]
            positions[chunk] = here
            kv_slots[chunk] = self._tables[live.row, here // size]
            kv_slots[chunk] *= size
            kv_slots[chunk] += here % size
            at = chunk.stop
            self._seq_starts[index + 1] = at
            context_lens[index] = end
            if end == live.length:
                drawn.append(index)
                logit_rows.append(at - 1)
        contexts = context_lens[:sequences]
        stats.context_tokens, stats.longest_context = int(contexts.sum()), int(contexts.max())
        blocks = -(-stats.longest_context // size)
        batch = StepBatch(
            token_ids=self._token_ids[:at],
            positions=positions[:at],
            row_slot=self._row_slot[:at],
            seq_starts=self._seq_starts[: sequences + 1],
            context_lens=contexts,
            block_tables=self._tables[rows, :blocks],
            kv_slots=kv_slots[:at],
            logit_rows=np.array(logit_rows, np.int64),
        )
        return batch, rows[drawn], contexts[drawn].astype(np.int64)
