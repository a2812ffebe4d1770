"""Keeps sequences to their grammars: masks are computed beside the forward pass and applied before a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from motet.services.worker.native.grammars import Matcher


class Masks:
    """The masks of the sequences of one engine that have a grammar. One step at a time: `begin`, `apply`, `take`."""

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}  # by row
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def seat(self, row: int, matcher: Matcher) -> None:
        """The sequence of `row` may draw what its matcher allows."""
        self._matchers[row] = matcher

    def leave(self, row: int) -> None:
        """The sequence of `row` has ended or was preempted."""
        self._matchers.pop(row, None)

    def begin(self, rows: np.ndarray) -> None:
        """Compute the masks of these rows' next tokens in another thread; rows without a grammar have none."""
        found = [self._matchers[row] for row in rows.tolist() if row in self._matchers]
        if found:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._filling = self._thread.submit(_fill, found)

    def among(self, rows: np.ndarray) -> list[tuple[int, Matcher]]:
        """(index in `rows`, matcher) of the rows that have a grammar."""
        if not self._matchers:
            return []
        return [(at, self._matchers[row]) for at, row in enumerate(rows.tolist()) if row in self._matchers]

    def apply(self, logits: Tensor, among: Sequence[tuple[int, Matcher]]) -> None:
        """Set the logits of tokens that may not come to minus infinity. logits float32 [n, vocab], in place."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()
        for at, matcher in among:
            banned = np.unpackbits(~matcher.mask.view(np.uint8), count=logits.shape[1], bitorder="little")
            logits[at].masked_fill_(torch.from_numpy(banned.view(np.bool_)).to(logits.device, non_blocking=True), -torch.inf)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _fill(matchers: Sequence[Matcher]) -> None:
    for matcher in matchers:
        matcher.fill()
