"""Where a request's next worker may fetch KV blocks: a request carries it, and schedulers decide it."""

from __future__ import annotations

import msgspec


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Names a worker from which the next worker of a request may fetch KV blocks.

    Those of a moved request are held under `token`, with which they may be read once. Without a token, they are those of the
    request's first `to_tokens` tokens in that worker's prefix cache; the next worker is expected to have `from_tokens` of them.
    """

    worker_id: str
    token: str = ""
    from_tokens: int = 0
    to_tokens: int = 0

    @property
    def cached(self) -> bool:
        """Whether the blocks are cached ones."""
        return self.to_tokens > 0
