"""How many workers there should be: the scheduler that plans -> schedulers and gateways, and on to people and autoscalers."""

from __future__ import annotations

from typing import Literal

import msgspec

OLD_MS = 60_000
"""A decision of this age says nothing about now: while somebody decides, one comes every 15 s."""

Reason = Literal["steady", "up", "down", "settling", "doubt", "impossible", "most", "idle", "asleep", "woken"]


class Decision(msgspec.Struct, frozen=True):
    """How many workers there should be, and why (`policies.scale.sizing`)."""

    at_s: float  # by the clock of the scheduler that decided
    desired: int
    reason: Reason
    current: int  # ready and starting
    starting: int
    needed: int  # by the forecast and what waits
    limit: str = ""  # what more load would exceed first
    leaves: str = ""  # the worker that should go
    overdue: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    impossible: str = ""


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about one base model, and what it was made from."""

    base_model: str
    scheduler_id: str
    at_unix_ms: int
    decision: Decision
    requests_s: float  # now, the refused ones too
    forecast_requests_s: float  # when a worker that starts now is ready: at most so many, in 95 of 100 looks
    lead_s: float  # from the start of a worker to its first request


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Requests wait at a gateway, and no worker of their base model is there. Sent while they do."""

    base_model: str
    gateway_id: str
    waiting: int  # requests
