"""The patterns of a workload: tasks as vectors v = (steps, MB, type, sensitivity), their clusters, and when these have shifted.

Left open by the paper, and the resolution here:
- Features have different units: each is divided by its standard deviation (z-scores).
- The sensitivity `1 - e^(-lambda t)` grows with the delay that a task tolerates: `e^(-lambda t)`, lambda = 1 / mean t.
- The divergence of two densities and its threshold: the divergence of the components' shares, above what 99% of 500 bootstrap
  samples of as many tasks from the reference have. It needs no integral, and no constant besides the level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.rivals.rock.mixture import Floats, Mixture, choose

SAMPLES, LEVEL = 500, 0.99


def features(steps: Floats, mb: Floats, kind: Floats, tolerated_s: Floats, *, mean_s: float) -> Floats:
    """The vectors of N tasks, (N, 4). `tolerated_s`: the longest delay that each tolerates, `mean_s` on average."""
    return np.column_stack([steps, mb, kind, np.exp(-tolerated_s / mean_s)])


@dataclass(frozen=True, slots=True)
class Patterns:
    """Clusters of tasks. `centre`, `spread`: of each feature; `reference`: tasks in each component when they were made."""

    mixture: Mixture
    centre: Floats
    spread: Floats
    reference: NDArray[np.intp]

    @classmethod
    def of(cls, vectors: Floats, rng: np.random.Generator) -> Patterns:
        """The patterns of these tasks, (N, 4)."""
        centre, spread = vectors.mean(axis=0), vectors.std(axis=0)
        spread = np.where(spread > 0.0, spread, 1.0)
        rows = (vectors - centre) / spread
        mixture = choose(rows, rng)
        return cls(mixture, centre, spread, np.bincount(mixture.labels(rows), minlength=len(mixture.shares)))

    def labels(self, vectors: Floats) -> NDArray[np.intp]:
        """The pattern of each task."""
        return self.mixture.labels((vectors - self.centre) / self.spread)

    def shifted(self, vectors: Floats, rng: np.random.Generator) -> bool:
        """Whether these tasks' shares of the patterns differ from the reference by more than chance explains."""
        now = np.bincount(self.labels(vectors), minlength=len(self.reference))
        return float(divergence(now, self.reference)) > threshold(self.reference, len(vectors), rng)


def divergence(counts: NDArray, reference: NDArray) -> Floats:
    """Kullback-Leibler divergence of shares (..., M) from a reference (M,); half a task is added to each component of both."""
    p, q = (np.asarray(one, float) + 0.5 for one in (counts, reference))
    p, q = p / p.sum(axis=-1, keepdims=True), q / q.sum()
    return np.asarray((p * np.log(p / q)).sum(axis=-1))


def threshold(reference: NDArray, tasks: int, rng: np.random.Generator) -> float:
    """The divergence that `LEVEL` of the samples of so many tasks from the reference stay below."""
    samples = rng.multinomial(tasks, reference / reference.sum(), size=SAMPLES)
    return float(np.quantile(divergence(samples, reference), LEVEL))
