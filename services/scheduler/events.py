"""Everything that changes what a scheduler knows of the workers, as tagged structs for `WatchedCluster.on`.

Live messages and replayed ones take the same path: the service makes an event of each message, the decision log writes it, and
a replay feeds it to another `WatchedCluster`. Times are seconds on the scheduler's own clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from motet.shared.model import RequestBrief
from motet.shared.wire.prefixes import PrefixKeys
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot

Mark = Literal["full", "leaving", "silent"]


class Heard(msgspec.Struct, tag="heard", gc=False):
    """A worker's snapshot or delta. `lease_held`: whether that worker holds a lease now."""

    message: WorkerSnapshot | WorkerDelta
    now_s: float
    lease_held: bool = False


class LeaseLost(msgspec.Struct, tag="lease_lost", gc=False):
    """The worker is dead or has stopped."""

    worker_id: str


class Tick(msgspec.Struct, tag="tick", gc=False):
    """A fraction of a second has passed. `connected`: NATS was connected, so that workers could report."""

    now_s: float
    connected: bool = True


class Assigning(msgspec.Struct, tag="assigning", gc=False):
    """The scheduler is assigning a request to a worker, where it counts as waiting from now on."""

    worker_id: str
    brief: RequestBrief
    now_s: float
    prefix_keys: tuple[PrefixKeys, ...] = ()


class Taken(msgspec.Struct, tag="taken", gc=False):
    """The worker accepted the request: its state will show it soon."""

    worker_id: str
    request_id: str
    now_s: float


class NotTaken(msgspec.Struct, tag="not_taken", gc=False):
    """The worker did not accept the request."""

    worker_id: str
    request_id: str


class Marked(msgspec.Struct, tag="marked", gc=False):
    """The worker gets no requests until its next message.

    It said that it has no room ("full") or takes nothing new ("leaving"), or did not answer ("silent").
    """

    worker_id: str
    mark: Mark
    now_s: float


class AtHome(msgspec.Struct, tag="at_home", gc=False):
    """These adapters are at home on the worker, and no others."""

    worker_id: str
    digests: tuple[str, ...]


ClusterEvent = AtHome | Heard | LeaseLost | Tick | Assigning | Taken | NotTaken | Marked
