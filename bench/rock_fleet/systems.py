"""The systems that are compared: a dispatch, a placement and an eviction each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.rivals import EVICTIONS
from bench.rivals.rock.layers import FULL
from bench.rock_fleet.dispatches import Dispatch, Motet, Pending, RoundRobin, Score
from bench.rock_fleet.jobs import Job
from bench.rock_fleet.machines import Loads
from bench.rock_fleet.placements import BurstTolerance, Placement, ThreeLayers
from bench.rock_fleet.queues import Queues
from bench.rock_fleet.watched import Watched
from motet.policies.memory.eviction import Eviction

if TYPE_CHECKING:
    from bench.rock_fleet.fleet import Fleet


@dataclass(kw_only=True)
class System:
    """One system. `watched`: the patterns of requests, where it uses them. `fullest`: share of the adapter memory above which
    idle adapters leave. `looks_ahead`: adapters that waiting requests need leave last. `free`: loads take no time."""

    dispatch: Dispatch
    placement: Placement = field(default_factory=Placement)
    watched: Watched | None = None
    memory: str = "lru"
    fullest: float = 1.0
    looks_ahead: bool = False
    free: bool = False
    base_load_s: float = 22.0

    def eviction(self, loads: Loads) -> Eviction:
        """The order in which a node evicts idle adapters."""
        return EVICTIONS.named(self.memory)(lambda adapter, size_bytes: loads.mean_s(adapter))

    def load_s(self, loads: Loads, adapter: str, node: int, nth: int) -> float:
        """The time of a load."""
        return 0.0 if self.free else loads.seconds(adapter, node, nth)

    def begin(self, fleet: Fleet) -> None:
        """A run begins."""
        if self.watched is not None:
            self.watched.begin(fleet)
        self.dispatch.begin(fleet)
        self.placement.begin(fleet)

    def arrived(self, job: Job) -> None:
        """A request came."""
        if self.watched is not None:
            self.watched.arrived(job)
        self.placement.arrived(job)


def rrod() -> System:
    """Round robin, loads on demand: nothing is kept."""
    return System(dispatch=RoundRobin(), memory="none")


def lrums(cached: float = 0.5) -> System:
    """The matching score, least recently used adapters leave."""
    return System(dispatch=Score(cached, 1.0 - cached))


def proactive(*, speeds: bool = False) -> System:
    """dLoRA's: preloaded by burst tolerance, the least pending time. `speeds`: it knows those of the GPUs."""
    return System(dispatch=Pending(speeds=speeds), placement=BurstTolerance(90.0))


def rock(*, clusters: bool = True, matched: bool = True, limit: bool = True, **placement: bool) -> System:
    """ROCK, or without some parts."""
    watched = Watched(clusters=clusters)
    return System(
        dispatch=Queues(watched, matched=matched),
        placement=ThreeLayers(watched, **placement),
        watched=watched,
        fullest=FULL if limit else 1.0,
    )


def motet() -> System:
    """Motet: `shared_cost`, burst tolerance, `next-use`."""
    return System(dispatch=Motet(), placement=BurstTolerance(), memory="next-use", looks_ahead=True)


def bound() -> System:
    """Every adapter everywhere: loads take no time."""
    return System(dispatch=Motet(), free=True)
