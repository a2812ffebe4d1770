"""How other planners place adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Kind, Packing

RIVALS: dict[str, Callable[[Demand, Sequence[Kind]], Packing]] = {}
