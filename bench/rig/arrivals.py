"""Arrival times of an open loop: requests that come whether or not earlier ones are answered.

Simulations draw theirs with `motet.twin.workload`, many at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """The times of a Poisson process with `rate` events per second, without an end, in seconds from its start."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def poisson_within(seconds: float, rate: float, *, seed: int) -> list[float]:
    """The times of a Poisson process in [0, seconds)."""
    return list(takewhile(lambda at_s: at_s < seconds, poisson(rate, random.Random(seed))))
