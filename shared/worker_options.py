"""How a worker decides: one group of facts for a worker's configuration, its profile and a simulated worker.

What a worker can hold is in `model.WorkerLimits`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ColdStartName = Literal["auto", "blocking", "layerwise", "assist"]
Switch = Literal["off", "auto", "on"]
"""A mechanism's option. `auto`: on while it is predicted to pay."""
_Count = Annotated[int, Meta(ge=1)]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a worker on which its decisions depend, by the names that profiles and `motet simulate --set` use."""

    max_step_tokens: _Count = 512
    """Rows in one step: decodes first, prefill chunks take the rest."""
    max_loras: _Count = 64
    """Adapters on the device at once."""
    prefix_cache: bool = False
    queues: str = "auto"
    """A name of `policies.step.request_queues.QUEUES`."""
    eviction: str = "next-use"
    """Of adapters on the device and in host memory: a name of `policies.memory.eviction.EVICTIONS`."""
    prefetch: Annotated[int, Meta(ge=0)] = 0
    """Waiting requests whose adapters are copied before their turn."""
    foresight: Switch = "auto"
    """Adapters are brought before a request asks for them."""
    cold_start: ColdStartName = "auto"
    """How requests start while their adapter is being copied, where copies run beside the steps."""
    merge: Switch = "off"
    """The adapter of most requests is merged into a copy of the weights."""


DEFAULTS = WorkerOptions()
