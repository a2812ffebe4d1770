"""What a worker's core is told and what it answers: the vocabulary of `policies.worker_core`.

Events are facts, actions are orders; neither is changed once made (frozen dataclasses cost three times as much to make).
Reasons are opaque to the core: who carries out an `Answer` knows what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol

from motet.policies import host_tier
from motet.policies.request_life import Entry, Key, R
from motet.shared.model import AdapterRef, FinishReason, RequestBrief

# ---- events


@dataclass(slots=True)
class Assign(Generic[R]):
    """A request for this worker that has been found valid. Answered by `Refuse`, or taken."""

    brief: RequestBrief
    owner: str
    adapter: AdapterRef | None
    payload: R


@dataclass(slots=True)
class Cancel:
    """Stop a request of this epoch or an older one."""

    request_id: str
    epoch: int


@dataclass(slots=True)
class OwnerLost:
    """A gateway is gone: nobody listens to its requests."""

    owner: str


@dataclass(slots=True)
class Close:
    """Take nothing new. With a `reason`, what the engine does not have yet ends with it."""

    reason: object = None


@dataclass(slots=True)
class NotStarted:
    """The engine did not take the request of the last `Start`. With a `reason` it is answered; without, its assignment is
    refused, and it was never here."""

    key: Key
    reason: object = None


@dataclass(slots=True)
class Stepped:
    """What the engine did. `moved` are its requests that wait or run now and did not before, `ended` those that it let go of,
    `device` the adapters that came to the device (True) or left it."""

    moved: Iterable[RequestBrief] = ()
    ended: Iterable[Key] = ()
    device: Iterable[tuple[str, bool]] = ()


@dataclass(slots=True)
class Loaded:
    """A `Load` is over: the copy takes `size_bytes`, its file `file_bytes`."""

    digest: str
    size_bytes: int
    file_bytes: int


@dataclass(slots=True)
class LoadFailed:
    """A `Load` is over."""

    digest: str
    reason: object


@dataclass(slots=True)
class FileLost:
    """An adapter's file is not on disk, or not what its name says."""

    digest: str


@dataclass(slots=True)
class DiskFull:
    """A download needs room: an `Evict` follows if a file can be spared."""


@dataclass(slots=True)
class Prefetch:
    """Bring an adapter to host memory, and to the device if there is room."""

    adapter: AdapterRef


@dataclass(slots=True)
class Unload:
    """Take an adapter out of every tier, each as soon as nothing uses it there."""

    digest: str


@dataclass(slots=True)
class Registered:
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
    | Unload
    | Registered
)

# ---- actions, beside those of `policies.host_tier`


@dataclass(slots=True)
class Start(Generic[R]):
    """Give the request to the engine; the host copy of its adapter is held until it ends."""

    entry: Entry[R]


@dataclass(slots=True)
class Stop:
    """Tell the engine to let go of a request."""

    request_id: str
    epoch: int


@dataclass(slots=True)
class Answer(Generic[R]):
    """The request has ended without the engine; its owner has to hear of it."""

    entry: Entry[R]
    finish: FinishReason
    reason: object = None


@dataclass(slots=True)
class Refuse:
    """The assignment is not taken: a newer epoch is here (`newest`), the worker takes nothing new, or it is full."""

    why: Literal["older", "closed", "full"]
    newest: int = 0
    retry_after_s: float = 0.0


@dataclass(slots=True)
class CopyIn:
    """Copy an adapter from host memory to the device if there is room without evicting."""

    digest: str


@dataclass(slots=True)
class CopyOut:
    """Take an adapter off the device as soon as nothing uses it."""

    digest: str


@dataclass(slots=True)
class TooLargeForHost:
    """The reason of an `Answer`: an adapter of so many bytes never fits in host memory."""

    size_bytes: int
    room_bytes: int


Action = Start[R] | Stop | Answer[R] | Refuse | CopyIn | CopyOut | host_tier.Action
