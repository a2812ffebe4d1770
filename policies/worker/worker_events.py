"""The events that a worker's core takes in and the actions that it returns (`policies.worker.worker_core`).

Events are facts, actions are orders; both are immutable. They are structs because some are made in every step. Reasons are
opaque to the core: the code that carries out an `Answer` interprets them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, Literal, Protocol

import msgspec

from motet.policies.memory import host_tier
from motet.policies.worker.request_life import Entry, Key, R
from motet.shared.model import AdapterRef, FinishReason, Mechanism, RequestBrief

# ---- events


class Assign(msgspec.Struct, Generic[R], frozen=True):
    """A valid request was assigned to this worker. The core accepts it, or answers `Refuse`."""

    brief: RequestBrief
    owner: str
    adapters: tuple[AdapterRef, ...]
    payload: R
    fetch: bool = False
    """Another worker holds its KV blocks, and they are worth waiting for: `Fetched` says when the wait is over."""


class CancelRequest(msgspec.Struct, frozen=True):
    """Stop a request of this epoch or an older one."""

    request_id: str
    epoch: int


class OwnerLost(msgspec.Struct, frozen=True):
    """A gateway is gone, so its requests are cancelled."""

    owner: str


class Close(msgspec.Struct, frozen=True):
    """Accept no new requests. With a `reason`, requests that the engine does not have yet end with it."""

    reason: object = None


class NotStarted(msgspec.Struct, frozen=True):
    """The engine did not accept the request of the last `Start`.

    With a `reason` the request is answered with it. Without one its assignment is refused, as if it had never been accepted.
    """

    key: Key
    reason: object = None


class Stepped(msgspec.Struct, frozen=True):
    """A report of the engine.

    `moved`: requests whose phase changed to waiting or running. `ended`: requests that left the engine. `device`: adapters that
    came to the device (True) or left it (False). `free`: KV blocks and adapter bytes, as a snapshot counts them. `progress`:
    requests with their output tokens so far. `merged`: digest of the adapter in the weights, "" for none. `prefixes`: short
    keys of KV blocks that can be reused from now on (True), and of those that cannot any longer. `mechanisms`: those of the
    engine that turn on by themselves. None: no news.
    """

    moved: Iterable[RequestBrief] = ()
    ended: Iterable[Key] = ()
    device: Iterable[tuple[str, bool]] = ()
    free: tuple[int, int] | None = None
    progress: Iterable[tuple[str, int]] = ()
    merged: str | None = None
    prefixes: Mapping[int, bool] | None = None
    mechanisms: Mapping[str, Mechanism] | None = None


class Loaded(msgspec.Struct, frozen=True):
    """A `Load` has succeeded: the copy takes `size_bytes`, its file `file_bytes`."""

    digest: str
    size_bytes: int
    file_bytes: int


class LoadFailed(msgspec.Struct, frozen=True):
    """A `Load` has failed."""

    digest: str
    reason: object


class Fetched(msgspec.Struct, frozen=True):
    """The fetch of the request's KV blocks is over, whether or not they came."""

    key: Key


class FileLost(msgspec.Struct, frozen=True):
    """An adapter's file is missing, or its content does not match its digest."""

    digest: str


class DiskFull(msgspec.Struct, frozen=True):
    """A download needs this much more disk space. `Evict`s follow if files that are not in use take as much."""

    missing_bytes: int


class Pinned(msgspec.Struct, frozen=True):
    """Exactly these adapters are pinned to this worker, the oldest pin first, and at home here, the most important first."""

    adapters: Sequence[AdapterRef]
    homes: Sequence[AdapterRef] = ()


class Tick(msgspec.Struct, frozen=True):
    """Some time has passed."""


class Registered(msgspec.Struct, frozen=True):
    """The registry has exactly these versions, by digest. The mapping may change until the next event of this kind."""

    versions: Mapping[str, Version]


class Version(Protocol):
    """Facts of an adapter version."""

    @property
    def rank(self) -> int:
        """The largest rank over its modules."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its blob."""


Event = (
    Assign[R]
    | CancelRequest
    | OwnerLost
    | Close
    | NotStarted
    | Stepped
    | Loaded
    | LoadFailed
    | Fetched
    | FileLost
    | DiskFull
    | Pinned
    | Tick
    | Registered
)

# ---- actions, beside those of `policies.memory.host_tier`


class Start(msgspec.Struct, Generic[R], frozen=True):
    """Give the request to the engine. The host copies of its adapters are held until the request ends."""

    entry: Entry[R]


class Fetch(msgspec.Struct, Generic[R], frozen=True):
    """Fetch the request's KV blocks from the worker that holds them."""

    entry: Entry[R]


class Stop(msgspec.Struct, frozen=True):
    """Tell the engine to stop a request."""

    request_id: str
    epoch: int


class Answer(msgspec.Struct, Generic[R], frozen=True):
    """Tell the owner that the request has ended. The engine does not have it."""

    entry: Entry[R]
    finish: FinishReason
    reason: object = None
    failed: str = ""
    """The adapter that could not be loaded."""


class Refuse(msgspec.Struct, frozen=True):
    """Refuse the assignment: a newer epoch is in the book (`newest`), or the worker accepts no new requests, or it is full."""

    why: Literal["older", "closed", "full"]
    newest: int = 0
    retry_after_s: float = 0.0


class CopyIn(msgspec.Struct, frozen=True):
    """Copy an adapter from host memory to the device if there is room without evicting. For a pinned adapter idle ones are
    evicted.

    With `over` no request has asked for the adapter yet: it is copied only if no other copy is under way and no request waits,
    and only idle adapters of `over` are evicted for it, in this order.
    """

    digest: str
    over: Collection[str] | None = None


class PinAdapters(msgspec.Struct, frozen=True):
    """Pin these adapters, and no others: they are evicted from the device after all others."""

    digests: Collection[str]


class CopyOut(msgspec.Struct, frozen=True):
    """Take an adapter off the device as soon as no sequence uses it."""

    digest: str


class TooLargeForHost(msgspec.Struct, frozen=True):
    """A reason of `Answer`: adapters of `size_bytes` never fit in the `room_bytes` of host memory."""

    size_bytes: int
    room_bytes: int


Action = Start[R] | Fetch[R] | Stop | Answer[R] | Refuse | CopyIn | PinAdapters | CopyOut | host_tier.TierAction
