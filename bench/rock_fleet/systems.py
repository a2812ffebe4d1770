"""The systems that are compared: a dispatch, a placement and an eviction each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.rivals.rock.layers import FULL
from bench.rivals.rock.matching import EVERY_S
from bench.rock_fleet.dispatches import Motet, Pending, RoundRobin, Score
from bench.rock_fleet.fleet import Dispatch, Placement, System
from bench.rock_fleet.placements import BurstTolerance, ThreeLayers
from bench.rock_fleet.queues import Queues
from bench.rock_fleet.watched import Watched


def rrod() -> System:
    """Round robin, loads on demand: nothing is kept."""
    return System(dispatch=RoundRobin(), memory="none")


def lrums(cached: float = 0.4) -> System:
    """The matching score, least recently used adapters leave."""
    return System(dispatch=Score(cached, 1.0 - cached))


def proactive(*, speeds: bool = False) -> System:
    """dLoRA's: preloaded by burst tolerance, the least pending time. `speeds`: it knows those of the GPUs."""
    return System(dispatch=Pending(speeds=speeds), placement=BurstTolerance(90.0))


def rock(
    *,
    clusters: bool = True,
    matched: bool = True,
    bound: bool = False,
    every_s: float = EVERY_S,
    limit: bool = True,
    **placement: Any,
) -> System:
    """ROCK, or without some parts."""
    watched = Watched(clusters=clusters)
    return System(
        dispatch=Queues(watched, matched=matched, bound=bound, every_s=every_s),
        placement=ThreeLayers(watched, **placement),
        watched=watched,
        fullest=FULL if limit else 1.0,
    )


def blind() -> System:
    """Round robin over all GPUs, which load the base model that a request needs."""
    return System(dispatch=RoundRobin(blind=True), memory="none")


def motet(*, load_weight: float = 1.0) -> System:
    """Motet: `shared_cost`, burst tolerance, `next-use`. `load_weight`: how often a load's time counts in its dispatch."""
    return System(dispatch=Motet(load_weight), placement=BurstTolerance(), memory="next-use", looks_ahead=True)


def bound() -> System:
    """Every adapter everywhere: loads take no time."""
    return System(dispatch=Motet(), free=True)


def without() -> dict[str, Callable[[], System]]:
    """ROCK without one of its parts each."""
    return {
        "no patterns: one queue": partial(rock, clusters=False),
        "no matching: the least used node": partial(rock, matched=False),
        "no partitions": partial(rock, partitions=False),
        "one replica each": partial(rock, formula=False),
        "the best node, not by score^2": partial(rock, squared=False),
        "LRU when full, not above 85%": partial(rock, limit=False),
        "replicas by requests per second": partial(rock, uses_in_s=1.0),
        "no placement": partial(_rock_with, placement=Placement),
        "Motet's dispatch": _rock_dispatched,
    }


def with_parts() -> dict[str, Callable[[], System]]:
    """Motet with one of ROCK's parts each in the place of its own."""
    return {
        "ROCK's queues and matching": partial(_motet_with, dispatch=Queues),
        "ROCK's three layers": partial(_motet_with, placement=ThreeLayers),
        "replicas and partitions, best node": partial(_motet_with, placement=partial(ThreeLayers, squared=False)),
        "replicas, no partitions": partial(_motet_with, placement=partial(ThreeLayers, partitions=False)),
        "one replica, partitions": partial(_motet_with, placement=partial(ThreeLayers, formula=False)),
        "LRU above 85%": partial(_motet_with, memory="lru", fullest=FULL),
        "LRU": partial(_motet_with, memory="lru"),
        "no placement": partial(_motet_with, placement=_nothing),
    }


def _nothing(watched: Watched) -> Placement:
    return Placement()


def _rock_with(placement: Callable[[], Placement]) -> System:
    one = rock()
    one.placement = placement()
    return one


def _rock_dispatched() -> System:
    one = rock()
    one.dispatch = Motet()
    return one


def _motet_with(
    *,
    dispatch: Callable[[Watched], Dispatch] | None = None,
    placement: Callable[[Watched], Placement] | None = None,
    memory: str = "next-use",
    fullest: float = 1.0,
) -> System:
    watched = Watched()
    return System(
        dispatch=dispatch(watched) if dispatch is not None else Motet(),
        placement=placement(watched) if placement is not None else BurstTolerance(),
        watched=watched,
        memory=memory,
        fullest=fullest,
        looks_ahead=True,
    )
