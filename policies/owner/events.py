"""What an owner hears, and what it wants to be done. Errors are opaque; `Why` is what they mean to an owner."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from motet.policies.owner.life import Owned

Why = Literal["lost", "declined", "overloaded", "unavailable", "late", "final"]
"""lost: the worker is gone. declined: it can never serve the request. overloaded, unavailable: not now. late: there was no
answer, so a worker may have the request. final: no worker will serve it."""


class Trouble(NamedTuple):
    """An error, what it means, and its code for metrics."""

    why: Why
    code: str
    error: Any


# ---- events; of tokens `OwnerCore.frame` hears


class Submitted(NamedTuple):
    """A new request."""

    owned: Owned


class Answered(NamedTuple):
    """A scheduler's answer: the worker has the request of this epoch."""

    owned: Owned
    epoch: int
    worker_id: str


class Refused(NamedTuple):
    """The submission of this epoch has failed."""

    owned: Owned
    epoch: int
    trouble: Trouble


class PauseOver(NamedTuple):
    """The pause of `Pause` is over."""

    owned: Owned
    serial: int


class Newcomer(NamedTuple):
    """A worker serves that was not there before."""


class WorkerGone(NamedTuple):
    """A worker is dead, frozen or cut off."""

    worker_id: str


class MoveAsked(NamedTuple):
    """A scheduler wants the request of this epoch on the worker `to`. `kv`: a new token for its KV blocks; "": without them."""

    request_id: str
    epoch: int
    to: str
    kv: str = ""


class Cancelled(NamedTuple):
    """The caller does not want the request any more."""

    owned: Owned


class Ended(NamedTuple):
    """The request is to end with an error: its time is over, its reader is too slow, the process stops."""

    owned: Owned
    error: Any
    outcome: str


class Tick(NamedTuple):
    """Time passes. `connected`: messages can be heard."""

    connected: bool = True


Event = Submitted | Answered | Refused | PauseOver | Newcomer | WorkerGone | MoveAsked | Cancelled | Ended | Tick


# ---- actions


class Submit(NamedTuple):
    """Submit the request in its present epoch; `Answered` or `Refused` follows, at the latest after `timeout_s`.

    `to`: the worker to be tried first. `kv`: the worker that holds its KV blocks, and the token for them.
    """

    owned: Owned
    epoch: int
    timeout_s: float
    to: str = ""
    kv: tuple[str, str] | None = None


class Pause(NamedTuple):
    """`PauseOver` with this serial after `pause_s`."""

    owned: Owned
    serial: int
    pause_s: float


class CancelAt(NamedTuple):
    """Stop a request of this epoch or an older one at a worker. `kv`: it holds the KV blocks for whoever knows the token."""

    worker_id: str
    request_id: str
    epoch: int
    kv: str = ""


class Placed(NamedTuple):
    """A worker has the request for the first time."""

    owned: Owned
    worker_id: str


class Parked(NamedTuple):
    """A new request waits for a worker that starts."""

    owned: Owned


class Over(NamedTuple):
    """The request has ended. `outcome`: how, for metrics; "": as its `finish` says."""

    owned: Owned
    outcome: str


class Regained(NamedTuple):
    """A request that was resumed has a new token, so long after it lost its worker."""

    owned: Owned
    after_s: float


class Told(NamedTuple):
    """Something to be counted and logged: a resumption with its reason, a move, or a stray item."""

    what: Literal["resumed", "moved", "stray"]
    why: str
    owned: Owned | None


Action = Submit | Pause | CancelAt | Placed | Parked | Over | Regained | Told
