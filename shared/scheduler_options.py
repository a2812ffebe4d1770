"""How a scheduler decides: one group of facts for a scheduler's configuration and a simulated one.

The names are those of the live options and of `motet simulate --set`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from motet.shared.worker_options import Switch

AdmissionName = Literal["objective", "room"]
_Seconds = Annotated[float, Meta(gt=0)]


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a scheduler on which its decisions depend."""

    policy: str = "motet"
    """A name of `policies.cluster.dispatch.POLICIES`."""
    prefix_aware: bool = True
    """Tokens that a worker has in its prefix cache cost nothing there."""
    admission: AdmissionName = "objective"
    attempts: Annotated[int, Meta(ge=1, le=16)] = 3
    """Workers tried per request."""
    stale_s: _Seconds = 3.0
    """Without a report for so long, a worker gets no requests."""
    in_flight_s: _Seconds = 3.0
    """For so long an accepted request counts as load while the worker's state does not show it."""
    rebalance: Switch = "auto"
    """auto: waiting requests move to workers where they run sooner. on: running ones move as well."""
    kv_travel: bool = True
    """A worker fetches the KV blocks of a request that moves, and cached ones of prompts, where that is faster than computing
    them again."""
    placement: bool = True
    """Adapters get homes by demand: workers that load them into free room, and that dispatch prefers where slots are known."""
    place_s: _Seconds = 180.0
    """Time between decisions about homes, while no worker comes or leaves."""
