"""The parts of a running gateway that the HTTP routes use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.edge import idempotency
from motet.services.gateway.openai.lanes import Lanes
from motet.services.gateway.openai.prepare import Preparer
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.tenants.auth import Keys
from motet.services.gateway.tenants.limits import Limits
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.placement import PlacementWatch


class Gateway(Protocol):
    """What the HTTP routes use of a running gateway."""

    config: GatewayConfig
    bus: Bus
    owner: Owner
    preparer: Preparer
    prompts: Prompts
    lanes: Lanes
    adapters: AdapterWatch
    placements: PlacementWatch
    fleet: Fleet
    keys: Keys
    limits: Limits
    once: idempotency.Once
    started_s: int  # Unix time

    def not_ready(self) -> list[str]:
        """Reasons why this gateway cannot serve now."""

    def failure(self) -> str:
        """Why this gateway can never serve again; "" if it can."""

    def admit(self) -> None:
        """Raises Unavailable or Overloaded when no new request is accepted."""

    async def settled(self, visible: Callable[[], bool], within_s: float) -> bool:
        """Wait until `visible()` holds for the adapters that this gateway sees; returns False if that takes longer."""
