"""What is asked of the mesh: each scheduler -> all schedulers, every few seconds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
ADAPTERS_MAX = 4096
"""Adapters of a base model in a report."""


class AdapterDemand(msgspec.Struct, array_like=True):
    """Requests for one adapter, or for the base model, in the time of a report.

    A request counts once, whether it was assigned or refused; one that goes on after a loss or a move does not count again.
    """

    requests: Count  # the refused ones too
    refused: Count  # for want of room or of a worker
    prompt_tokens: Count
    output_tokens: Count  # predicted
    rank: Count = 0
    size_bytes: Count = 0


class BaseDemand(msgspec.Struct, kw_only=True):
    """Requests for one base model and its adapters in the time of a report."""

    adapters: Annotated[dict[str, AdapterDemand], Meta(max_length=ADAPTERS_MAX)] = {}  # by digest, "" for the base model alone
    rest: AdapterDemand = msgspec.field(default_factory=lambda: AdapterDemand(0, 0, 0, 0))
    """Of adapters that had no place in `adapters`, together."""


class DemandReport(msgspec.Struct, kw_only=True):
    """The requests that a scheduler has answered since its last report. `leaving`: it sends no more."""

    scheduler_id: str
    seconds: Annotated[float, Meta(ge=0, le=86400)]  # since its last report, or its start
    bases: dict[str, BaseDemand] = {}  # by name of the base model
    leaving: bool = False
