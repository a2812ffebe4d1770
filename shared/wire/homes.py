"""The homes of a plan: gateway -> schedulers. The one that plans matches them to live workers and writes the placements."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

WORKERS_MAX, ADAPTERS_MAX = 1000, 4096


class PlannedAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter of a plan."""

    digest: str
    rank: int
    size_bytes: int


class SetHomes(msgspec.Struct, kw_only=True):
    """The adapters of each worker of a plan, the most important first. Which live worker gets which is decided on arrival."""

    base_model: str
    workers: Annotated[list[list[PlannedAdapter]], Meta(max_length=WORKERS_MAX)]
