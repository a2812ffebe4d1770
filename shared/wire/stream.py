"""Token frames: worker -> gateway, one message per gateway per engine step."""

from __future__ import annotations

import msgspec

from motet.shared.errors import ErrorInfo
from motet.shared.model import FinishReason


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a drawn token and of the most likely tokens, most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StreamItem(msgspec.Struct, array_like=True):
    """New tokens of one request. `tokens[0]` has output index `index`.

    `finish` is set on the last item. With finish "stop" the last token is the EOS or stop token that ended it
    (`stop_token` repeats its id); it counts as usage and is not shown. With finish "error", `error` says why.
    """

    request_id: str
    epoch: int
    index: int
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0  # on the first item: prompt tokens served from the prefix cache
    queue_ms: float = 0.0  # on the first item: from arrival at the worker to its first prefill chunk
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first item: one per prompt token, None for the first
    embedding: bytes = b""  # little-endian float32; the item has finish "stop" and no tokens
    prompt_tokens: int = 0  # on the first item of a prompt with images: its tokens with theirs


class TokenFrame(msgspec.Struct, array_like=True):
    """All new tokens of one gateway's requests after one engine step."""

    worker_id: str
    step: int
    items: list[StreamItem]
