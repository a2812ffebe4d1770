"""Refusals that a gateway repeats for a moment instead of asking the predictor and the scheduler again.

A scheduler that refuses a request for L seconds says how long it will take until a worker may serve such a request. Just after
that, a request that asks for no less gets the same answer, so under overload most refusals need no other service. A refusal is
repeated if all of this holds:

- The tenant, the objectives, the priority, the needed capabilities and a picture's rows and steps are equal, and the prompt and
  the adapter's rank are not smaller.
- L was at least `LASTING_S`. Two requests of one class differ by less, even if one must wait for its adapter.
- At most `HOLD_S` have passed. A worker that starts, or requests that are cancelled, are noticed within that time.

Schedulers count how much every tenant sends (`demand`), so repeated refusals are reported with the tenant's next request.
"""

from __future__ import annotations

import msgspec

LASTING_S = 1.0
HOLD_S = 0.25
KEYS_MAX = 1024


class Kind(msgspec.Struct, frozen=True):
    """The properties in which two requests must agree so that a refusal of one applies to the other."""

    tenant: str
    ttft_slo_ms: float
    tpot_slo_ms: float
    priority: int
    needs: tuple[str, ...] = ()  # capabilities, sorted, and the layers of its adapter that not every worker can change
    e2e_slo_ms: float = 0.0
    picture: tuple[float, int] = (0.0, 0)  # rows and steps


class _Refusal(msgspec.Struct, frozen=True):
    prompt_tokens: int
    rank: int
    message: str
    at_s: float
    retry_after_s: float


class RecentRefusals:
    """The last refusal of each kind of request. At most `KEYS_MAX` kinds are known."""

    def __init__(self) -> None:
        self._last: dict[Kind, _Refusal] = {}
        self._repeated: dict[str, int] = {}  # per tenant

    def add(self, kind: Kind, prompt_tokens: int, rank: int, message: str, retry_after_s: float, now_s: float) -> None:
        """A request was refused, and may be served in `retry_after_s`. `rank` is 0 for the base model."""
        if retry_after_s < LASTING_S:
            return
        if kind not in self._last and len(self._last) >= KEYS_MAX:
            self._last = {k: refusal for k, refusal in self._last.items() if now_s - refusal.at_s < HOLD_S}
            if len(self._last) >= KEYS_MAX:
                return
        self._last[kind] = _Refusal(prompt_tokens, rank, message, now_s, retry_after_s)

    def find(self, kind: Kind, prompt_tokens: int, rank: int, now_s: float) -> tuple[str, float] | None:
        """The message and the remaining seconds if this request would be refused too; None if the scheduler must decide."""
        last = self._last.get(kind)
        if last is None or now_s - last.at_s >= HOLD_S or prompt_tokens < last.prompt_tokens or rank < last.rank:
            return None
        if kind.tenant in self._repeated or len(self._repeated) < KEYS_MAX:
            self._repeated[kind.tenant] = self._repeated.get(kind.tenant, 0) + 1
        return last.message, last.retry_after_s - (now_s - last.at_s)

    def take_repeated(self, tenant: str) -> int:
        """How many refusals were repeated to this tenant since the last call."""
        return self._repeated.pop(tenant, 0)
