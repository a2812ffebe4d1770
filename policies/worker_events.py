"""What a worker's core is told and what it answers: the vocabulary of `policies.worker_core`.

Events are facts, actions are orders; neither is changed once made. They are structs because some are made in every step.
Reasons are opaque to the core: who carries out an `Answer` knows what they mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, Literal, Protocol

import msgspec

from motet.policies import host_tier
from motet.policies.request_life import Entry, Key, R
from motet.shared.model import AdapterRef, FinishReason, RequestBrief

# ---- events


class Assign(msgspec.Struct, Generic[R], frozen=True):
    """A request for this worker that has been found valid. Answered by `Refuse`, or taken."""

    brief: RequestBrief
    owner: str
    adapter: AdapterRef | None
    payload: R


class Cancel(msgspec.Struct, frozen=True):
    """Stop a request of this epoch or an older one."""

    request_id: str
    epoch: int


class OwnerLost(msgspec.Struct, frozen=True):
    """A gateway is gone: nobody listens to its requests."""

    owner: str


class Close(msgspec.Struct, frozen=True):
    """Take nothing new. With a `reason`, what the engine does not have yet ends with it."""

    reason: object = None


class NotStarted(msgspec.Struct, frozen=True):
    """The engine did not take the request of the last `Start`. With a `reason` it is answered; without, its assignment is
    refused, and it was never here."""

    key: Key
    reason: object = None


class Stepped(msgspec.Struct, frozen=True):
    """What the engine did. `moved` are its requests that wait or run now and did not before, `ended` those that it let go of,
    `device` the adapters that came to the device (True) or left it."""

    moved: Iterable[RequestBrief] = ()
    ended: Iterable[Key] = ()
    device: Iterable[tuple[str, bool]] = ()


class Loaded(msgspec.Struct, frozen=True):
    """A `Load` is over: the copy takes `size_bytes`, its file `file_bytes`."""

    digest: str
    size_bytes: int
    file_bytes: int


class LoadFailed(msgspec.Struct, frozen=True):
    """A `Load` is over."""

    digest: str
    reason: object


class FileLost(msgspec.Struct, frozen=True):
    """An adapter's file is not on disk, or not what its name says."""

    digest: str


class DiskFull(msgspec.Struct, frozen=True):
    """A download needs room: an `Evict` follows if a file can be spared."""


class Prefetch(msgspec.Struct, frozen=True):
    """Bring an adapter to host memory, and to the device if there is room."""

    adapter: AdapterRef


class Pinned(msgspec.Struct, frozen=True):
    """These adapters are pinned to this worker, the oldest pin first, and no others."""

    adapters: Sequence[AdapterRef]


class Tick(msgspec.Struct, frozen=True):
    """Some time has passed."""


class Unload(msgspec.Struct, frozen=True):
    """Take an adapter out of every tier, each as soon as nothing uses it there."""

    digest: str


class Registered(msgspec.Struct, frozen=True):
    """The registry has these versions and no others, by digest; the mapping may go on changing until the next one."""

    versions: Mapping[str, Version]


class Version(Protocol):
    """What is known of an adapter version besides its digest."""

    @property
    def rank(self) -> int:
        """The largest over its modules."""

    @property
    def size_bytes(self) -> int:
        """Of its blob."""


Event = (
    Assign[R]
    | Cancel
    | OwnerLost
    | Close
    | NotStarted
    | Stepped
    | Loaded
    | LoadFailed
    | FileLost
    | DiskFull
    | Prefetch
    | Pinned
    | Tick
    | Unload
    | Registered
)

# ---- actions, beside those of `policies.host_tier`


class Start(msgspec.Struct, Generic[R], frozen=True):
    """Give the request to the engine; the host copy of its adapter is held until it ends."""

    entry: Entry[R]


class Stop(msgspec.Struct, frozen=True):
    """Tell the engine to let go of a request."""

    request_id: str
    epoch: int


class Answer(msgspec.Struct, Generic[R], frozen=True):
    """The request has ended without the engine; its owner has to hear of it."""

    entry: Entry[R]
    finish: FinishReason
    reason: object = None


class Refuse(msgspec.Struct, frozen=True):
    """The assignment is not taken: a newer epoch is here (`newest`), the worker takes nothing new, or it is full."""

    why: Literal["older", "closed", "full"]
    newest: int = 0
    retry_after_s: float = 0.0


class CopyIn(msgspec.Struct, frozen=True):
    """Copy an adapter from host memory to the device if there is room without evicting; for a pinned one, idle ones leave."""

    digest: str


class Pin(msgspec.Struct, frozen=True):
    """These adapters, and no others, leave the device after all others."""

    digests: Collection[str]


class CopyOut(msgspec.Struct, frozen=True):
    """Take an adapter off the device as soon as nothing uses it."""

    digest: str


class TooLargeForHost(msgspec.Struct, frozen=True):
    """The reason of an `Answer`: an adapter of so many bytes never fits in host memory."""

    size_bytes: int
    room_bytes: int


Action = Start[R] | Stop | Answer[R] | Refuse | CopyIn | Pin | CopyOut | host_tier.Action
