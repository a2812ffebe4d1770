"""Gaussian mixtures: maximum likelihood by expectation and maximisation, and the number of components by BIC.

Left open by the paper: the number M of patterns (here the least BIC among 1 to 8), the covariances (full), and how EM starts
(k-means++ seeds, one component's covariance for all). Features such as the type of a task take few values, so a component can
collapse onto one; `RIDGE` is added to each variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST = 8
RIDGE = 1e-3
"""Added to variances of features in standard deviations."""
TOLERANCE, ROUNDS = 1e-3, 100
"""EM ends when the mean log-likelihood of a row grows by less, or after so many rounds."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """`shares` (M,), `means` (M, D), `covariances` (M, D, D)."""

    shares: Floats
    means: Floats
    covariances: Floats

    def log_densities(self, rows: Floats) -> Floats:
        """log(share * density) of each row in each component: (N, M)."""
        roots = np.linalg.cholesky(self.covariances)
        apart = (rows - self.means[:, None]) @ np.linalg.inv(roots).transpose(0, 2, 1)  # (M, N, D)
        log_det = 2.0 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
        constant = np.log(self.shares) - 0.5 * (rows.shape[1] * np.log(2.0 * np.pi) + log_det)
        return constant - 0.5 * (apart**2).sum(axis=2).T

    def log_likelihood(self, rows: Floats) -> float:
        """Of all rows together."""
        return float(np.logaddexp.reduce(self.log_densities(rows), axis=1).sum())

    def labels(self, rows: Floats) -> NDArray[np.intp]:
        """The likeliest component of each row."""
        return np.argmax(self.log_densities(rows), axis=1)

    def bic(self, rows: Floats) -> float:
        """Bayesian information criterion: parameters * log(N) - 2 * log-likelihood; the least is best."""
        count, dims = self.means.shape
        parameters = count - 1 + count * dims + count * dims * (dims + 1) // 2
        return parameters * float(np.log(len(rows))) - 2.0 * self.log_likelihood(rows)


def start(rows: Floats, components: int, rng: np.random.Generator, ridge: float = RIDGE) -> Mixture:
    """Where EM begins: means by k-means++ (each next one with a chance by its squared distance from those before)."""
    means = [rows[rng.integers(len(rows))]]
    while len(means) < components:
        apart = np.min([((rows - mean) ** 2).sum(axis=1) for mean in means], axis=0)
        total = apart.sum()
        means.append(rows[rng.choice(len(rows), p=apart / total if total > 0.0 else None)])
    whole = np.cov(rows, rowvar=False, bias=True).reshape(rows.shape[1], -1) + ridge * np.eye(rows.shape[1])
    return Mixture(np.full(components, 1.0 / components), np.array(means), np.repeat(whole[None], components, axis=0))


def fit(rows: Floats, begun: Mixture, ridge: float = RIDGE) -> Mixture:
    """EM from `begun` on (N, D) rows."""
    mixture, before = begun, -np.inf
    for _ in range(ROUNDS):
        dense = mixture.log_densities(rows)
        whole = np.logaddexp.reduce(dense, axis=1)
        mixture = _maximised(rows, np.exp(dense - whole[:, None]), ridge)
        if abs(whole.mean() - before) < TOLERANCE:
            break
        before = whole.mean()
    return mixture


def _maximised(rows: Floats, belongs: Floats, ridge: float) -> Mixture:
    """The likeliest mixture, given how much each row belongs to each component (N, M)."""
    weight = belongs.sum(axis=0) + 10.0 * np.finfo(float).eps
    means = belongs.T @ rows / weight[:, None]
    apart = rows - means[:, None]  # (M, N, D)
    covariances = (belongs.T[:, :, None] * apart).transpose(0, 2, 1) @ apart / weight[:, None, None]
    covariances += ridge * np.eye(rows.shape[1])
    return Mixture(weight / weight.sum(), means, covariances)


def choose(rows: Floats, rng: np.random.Generator, most: int = MOST) -> Mixture:
    """The mixture of 1 to `most` components with the least BIC."""
    most = min(most, len(np.unique(rows, axis=0)))
    return min((fit(rows, start(rows, count, rng)) for count in range(1, most + 1)), key=lambda one: one.bic(rows))
