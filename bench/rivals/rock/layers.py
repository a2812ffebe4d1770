"""ROCK's three layers: groups of nodes, partitions of a group, replicas of an adapter and the nodes that get them.

Left open by the paper, and the resolution here:
- A "GPU node" is one GPU: the bipartite graph has GPUs for nodes, and among 16 machines of four kinds no six are alike.
- Features are scaled to 0 .. 1, since eps has no unit. What DBSCAN calls noise, such as a node with fewer than five like
  it, is a group of its own.
- A partition manages the adapters of one pattern of tasks (both count to M). `floor(share * nodes) + 1` adds up to more nodes
  than there are. Here each partition with heat has one node, while there are enough, and the others go by heat, those that are
  left over to the largest remainders.
- The frequency in formula 5 has no unit: requests within the window of 45 s. It may give 0 replicas: an adapter with requests
  in the window has one.
- The score "considers bandwidth, memory utilisation, and network distance": their mean, each from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.rivals.rock.mixture import Floats

EPS, MIN_SAMPLES = 0.25, 6
WINDOW_S = 45.0
FULL = 0.85
"""Share of a node's adapter memory above which the least recently used adapters leave."""
CANDIDATES = 3


def unit(features: Floats) -> Floats:
    """Each column from 0 to 1; 0 where it is constant."""
    low, span = features.min(axis=0), np.ptp(features, axis=0)
    return (features - low) / np.where(span > 0.0, span, 1.0)


def groups(features: Floats, eps: float = EPS, min_samples: int = MIN_SAMPLES) -> NDArray[np.intp]:
    """DBSCAN (N, D) -> the group of each node, by the first member; each node that is noise is a group of its own."""
    near = np.linalg.norm(features[:, None] - features[None], axis=2) <= eps
    core = near.sum(axis=1) >= min_samples
    label = np.full(len(features), -1, dtype=np.intp)
    found = 0
    for first in range(len(features)):
        if label[first] >= 0 or not core[first]:
            continue
        grows = [first]
        label[first] = found
        while grows:
            one = grows.pop()
            if core[one]:
                fresh = np.flatnonzero(near[one] & (label < 0))
                label[fresh] = found
                grows += fresh.tolist()
        found += 1
    noise = label < 0
    label[noise] = found + np.arange(int(noise.sum()))
    return label


def partition_sizes(heat: Sequence[float], nodes: int) -> list[int]:
    """Formula 4: the nodes of each partition of a group, which add up to `nodes`; all 0 without heat."""
    total = sum(heat)
    if total <= 0.0 or not nodes:
        return [0] * len(heat)
    order = sorted(range(len(heat)), key=lambda at: -heat[at])
    sizes = [0] * len(heat)
    for at in order[:nodes]:
        sizes[at] = 1 if heat[at] > 0.0 else 0
    left = nodes - sum(sizes)
    exact = [left * one / total for one in heat]
    for at, one in enumerate(exact):
        sizes[at] += int(one)
    rest = nodes - sum(sizes)
    for at in sorted(range(len(heat)), key=lambda at: (int(exact[at]) - exact[at], -heat[at]))[:rest]:
        sizes[at] += 1
    return sizes


def replicas(uses: float, mb: float, mean_mb: float) -> int:
    """Formula 5 for an adapter with so many requests in the window; 0 without any."""
    return max(1, int(1.5 * uses**0.6 * np.sqrt(mb / mean_mb))) if uses > 0 else 0


def scores(bandwidth: Floats, filled: Floats, hops: Floats) -> Floats:
    """How suitable each node is. `bandwidth` over the largest of all; `filled`: share of its adapter memory; `hops`: 1 or 2."""
    return (bandwidth + (1.0 - filled) + 1.0 / hops) / 3.0


def place(score: Floats, rng: np.random.Generator, *, squared: bool = True) -> int:
    """Formula 6: one of the three nodes of highest score, with a chance by its square; the best one if not `squared`."""
    best = np.argsort(-score, kind="stable")[:CANDIDATES]
    if not squared:
        return int(best[0])
    chance = score[best] ** 2
    return int(best[rng.choice(len(best), p=chance / chance.sum() if chance.sum() > 0.0 else None)])
