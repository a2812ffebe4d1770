"""Tokens that a sequence may not draw: all outside `allowed_token_ids`, and those that would complete one of `bad_words`.

A bad word is a sequence of token ids. Its last token is banned when the output so far ends with all tokens before it; a word of
one token is always banned. Only the output counts, not the prompt (as in vLLM). So a sequence that continues on another worker
with its output so far has the same bans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from motet.shared.model import SamplingParams


class Bans:
    """The tokens that one sequence may not draw. `tokens` is its prompt and output so far."""

    __slots__ = ("_allowed", "_always", "_tail", "_words")

    def __init__(self, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> None:
        self._allowed = torch.tensor(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        single = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._always = torch.tensor(single) if single else None
        self._words = [(word[:-1], word[-1]) for word in sampling.bad_words if len(word) > 1]
        longest = max((len(before) for before, _ in self._words), default=0)
        self._tail: deque[int] = deque(tokens[max(len(tokens) - longest, prompt_tokens) :], maxlen=longest)

    @staticmethod
    def of(sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> Bans | None:
        """The bans of a sequence; None if every token may be drawn."""
        return Bans(sampling, tokens, prompt_tokens) if sampling.allowed_token_ids or sampling.bad_words else None

    def apply(self, logits: Tensor) -> None:
        """Set the logits of banned tokens to minus infinity. logits float32 [vocab], in place."""
        if self._allowed is not None:
            self._allowed = self._allowed.to(logits.device)
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
        if self._always is not None:
            self._always = self._always.to(logits.device)
            logits[self._always] = -torch.inf
        if self._words:
            tail = tuple(self._tail)
            completing = [last for before, last in self._words if tail[-len(before) :] == before]
            if completing:
                logits[completing] = -torch.inf

    def count(self, token: int) -> None:
        """Add a token to the output."""
        self._tail.append(token)
