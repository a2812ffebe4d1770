"""Algorithm 1: queues of tasks are matched with nodes every 90 s.

    w = .6 * affinity + .3 * (1 - |u - .7|) + .1 / delay        the three nodes of largest w are candidates
    the candidate for which the utilisation of all nodes deviates least gets the queue

Left open by the paper, and the resolution here:
- 1 / delay has a unit and vanishes beside the others: min-max over the nodes, per queue.
- u is the node's utilisation if it gets the queue, since the queues matched before are in it (line 21). With the utilisation
  without the queue a half-full node would always beat an empty one.
- There are at most 8 queues and 64 nodes, and a queue that is bound to one node for 90 s overloads it: a queue is split by its
  adapters into parts of at most a node's capacity at u = .7. An adapter with more load is in several parts.
- The order of the queues: the one with the most load first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.rivals.rock.mixture import Floats

AFFINITY, BALANCE, DELAY = 0.6, 0.3, 0.1
BEST_USE = 0.7
CANDIDATES = 3
EVERY_S = 90.0


@dataclass(slots=True)
class Part:
    """A part of a queue: the load of each of its adapters, in nodes of speed 1."""

    queue: int
    adapters: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """Of all its adapters."""
        return sum(self.adapters.values())


def split(queue: int, loads: Mapping[str, float], capacity: float) -> list[Part]:
    """The parts of a queue with these loads of adapters, none above `capacity`. Each adapter goes where it fits first."""
    parts: list[Part] = []
    for adapter, load in sorted(loads.items(), key=lambda one: (-one[1], one[0])):
        pieces = max(1, int(np.ceil(load / capacity - 1e-9)))
        if pieces > 1:
            parts += [Part(queue, {adapter: load / pieces}) for _ in range(pieces)]
            continue
        fits = next((part for part in parts if adapter not in part.adapters and part.load + load <= capacity + 1e-9), None)
        if fits is None:
            fits = Part(queue)
            parts.append(fits)
        fits.adapters[adapter] = load
    return parts


def affinity(adapters: Sequence[str], cached: Sequence[set[str] | frozenset[str]]) -> Floats:
    """The share of a queue's adapters that each node has cached."""
    wanted = set(adapters)
    return np.array([len(wanted & held) / max(1, len(wanted)) for held in cached])


def inverse_delay(delay_s: Floats) -> Floats:
    """1 / delay of a queue on each node, from 0 on the slowest to 1 on the fastest; 1 where all are alike."""
    inverse = 1.0 / np.maximum(delay_s, 1e-9)
    low, high = inverse.min(), inverse.max()
    return (inverse - low) / (high - low) if high > low else np.ones_like(inverse)


def weights(affinity: Floats, use: Floats, delay_s: Floats) -> Floats:
    """Formula 1 for one queue and each node."""
    return AFFINITY * affinity + BALANCE * (1.0 - np.abs(use - BEST_USE)) + DELAY * inverse_delay(delay_s)


def match(
    parts: Sequence[Part],
    cached: Sequence[set[str] | frozenset[str]],
    use: Floats,
    speed: Floats,
    delay_s: Floats,
) -> list[list[int]]:
    """The candidates of each part, the chosen node first.

    `cached`: adapters of each node; `use`: of each node before; `speed`: of each; `delay_s`: of each part on each node (parts,
    nodes).
    """
    use = use.copy()
    chosen: list[list[int]] = [[] for _ in parts]
    for at in sorted(range(len(parts)), key=lambda one: -parts[one].load):
        part = parts[at]
        with_it = use + part.load / speed
        weight = weights(affinity(list(part.adapters), cached), with_it, delay_s[at])
        best = np.argsort(-weight, kind="stable")[:CANDIDATES].tolist()
        chosen[at] = sorted(best, key=lambda node: deviation(use, node, float(with_it[node])))
        use[chosen[at][0]] = with_it[chosen[at][0]]
    return chosen


def deviation(use: Floats, node: int, then: float) -> float:
    """The standard deviation of the utilisation of all nodes if that of one becomes `then`."""
    after = use.copy()
    after[node] = then
    return float(after.std())
