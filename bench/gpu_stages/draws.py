"""The rules of kernels/sampling.py in fp64, and random logits and rules for them."""

from __future__ import annotations

import numpy as np

from motet.kernels.types import DrawRules

CLOSE = 1e-6  # a probability this close to a threshold, of it, or a sum to its goal, of the whole sum, is decided by rounding


class Exact:
    """The probabilities of one row's tokens, computed by the definitions from sorted values."""

    def __init__(self, logits: np.ndarray, rules: DrawRules, row: int) -> None:
        self._temperature = float(rules.temperature[row])
        self._rules = tuple(values[row] for values in (rules.min_p, rules.top_k, rules.top_p))
        self.close = False  # whether rounding decides what stays
        self._best = int(logits.argmax())
        if self._temperature == 0:
            return
        x = logits.astype(np.float64)
        p = np.exp((x - x.max()) / self._temperature)
        min_p, top_k, top_p = self._rules
        p = self._cut(p, float(min_p))
        if top_k and top_k < len(p):
            p = self._cut(p, np.sort(p)[-top_k])
        if top_p < 1:
            values = np.sort(p)[::-1]
            sums, goal = values.cumsum(), top_p * p.sum()
            self.close |= bool((np.abs(sums - goal) < CLOSE * p.sum()).any())
            p = self._cut(p, values[min((sums < goal).sum(), len(p) - 1)])
        self._ends = p.cumsum()

    def _cut(self, p: np.ndarray, threshold: float) -> np.ndarray:
        near = np.abs(p - threshold) < CLOSE * threshold
        self.close |= bool((near & (p != threshold)).any())
        return np.where(p < threshold, 0.0, p)

    def token(self, noise: float) -> int:
        """The token that this noise draws."""
        return self._best if self._temperature == 0 else int((self._ends <= noise * self._ends[-1]).sum())

    def unclear(self, noise: float) -> bool:
        """Whether rounding decides which token it is."""
        if self._temperature == 0:
            return False
        return self.close or bool((np.abs(self._ends / self._ends[-1] - noise) < CLOSE).any())

    def __str__(self) -> str:
        return f"temperature {self._temperature}, min_p, top_k, top_p {self._rules}"


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
    """float32 [rows, vocab_size]: each row with a spread of its own, some with likely, equal or banned tokens."""
    logits = rng.normal(size=(rows, vocab_size)) * rng.uniform(0.05, 5, (rows, 1))
    for row in range(rows):
        some = rng.integers(0, vocab_size, 20)
        kind = rng.integers(5)
        if kind == 1:
            logits[row, some] += rng.uniform(5, 20, 20)
        elif kind == 2:
            logits[row, some] = logits[row, some[0]]
        elif kind == 3:
            logits[row, rng.random(vocab_size) < 0.9] = -np.inf
    return logits.astype(np.float32)


def random_rules(rng: np.random.Generator, rows: int, vocab_size: int) -> DrawRules:
    """Rules of every kind; an eighth of the rows takes the argmax."""
    return DrawRules(
        temperature=np.where(rng.random(rows) < 1 / 8, 0.0, rng.choice([0.3, 0.8, 1.0, 2.0, 20.0], rows)).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.001, 0.2, 1.0], rows).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 7, 50, vocab_size // 2], rows),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.5, 0.95, 0.999], rows),
    )
