"""Scenarios of the paper on adapter caching (section 8.4): adapters with rates and ranks drawn from small sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from motet.policies.plan.demand import Demand

RATES = {
    "high": (2.4, 1.2, 0.6, 0.3, 0.15),
    "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
    "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
}
"""Requests/s of an adapter."""
RANKS = {"high": (32,), "low": (8,), "mixed": (8, 16, 32)}
ADAPTERS = (100, 400, 2000)
PROMPT_TOKENS, OUTPUT_TOKENS, OUTPUT_DEVIATION = 222.0, 196.0, 190.0  # of the cleaned ShareGPT
TTFT_SLO_MS, TPOT_SLO_MS = 500.0, 120.0
MIB_PER_RANK = 2.5  # a Llama-3.1-8B adapter on all linear layers


@dataclass(frozen=True, slots=True)
class Scenario:
    """A demand by the names of its sets."""

    rates: str
    ranks: str
    adapters: int

    @property
    def name(self) -> str:
        """As printed."""
        return f"{self.rates} rates, {self.ranks} ranks, {self.adapters}"

    def demand(self, seed: int = 0) -> Demand:
        """Adapters whose rates and ranks are drawn independently."""
        chance = np.random.default_rng([seed, self.adapters])
        rank = chance.choice(RANKS[self.ranks], self.adapters).astype(np.float64)
        return Demand.of(
            chance.choice(RATES[self.rates], self.adapters),
            rank=rank,
            size_bytes=rank * MIB_PER_RANK * 2**20,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            output_square=OUTPUT_TOKENS**2 + OUTPUT_DEVIATION**2,
            ttft_slo_ms=TTFT_SLO_MS,
            tpot_slo_ms=TPOT_SLO_MS,
        )


def scenarios() -> Iterator[Scenario]:
    """High, low and mixed rates with ranks of the same name, and high rates with mixed ranks, by number of adapters."""
    for adapters in ADAPTERS:
        for rates, ranks in (("high", "high"), ("low", "low"), ("mixed", "mixed"), ("high", "mixed")):
            yield Scenario(rates, ranks, adapters)
