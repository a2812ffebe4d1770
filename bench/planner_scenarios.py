"""Scenarios of the paper on adapter caching (section 8.4): adapters with rates and ranks drawn from small sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from motet.policies.plan.demand import Demand
from motet.shared.model import Slo
from motet.twin.planning.loads import Loads, Objective
from motet.twin.workload import Lengths

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

    def loads(self, *, rate: float = 1.0, ttft_slo_ms: float = TTFT_SLO_MS, seed: int = 0) -> Loads:
        """Adapters whose rates and ranks are drawn independently. `rate`: a factor on all rates."""
        chance = np.random.default_rng([seed, self.adapters])
        rank = chance.choice(RANKS[self.ranks], self.adapters)
        pool = Lengths.lognormal(
            np.random.default_rng(0),
            prompt_mean=PROMPT_TOKENS,
            output_mean=OUTPUT_TOKENS,
            output_cv=OUTPUT_DEVIATION / OUTPUT_TOKENS,
        )
        return Loads(
            names=tuple(f"adapter-{place:05d}" for place in range(self.adapters)),
            rate=chance.choice(RATES[self.rates], self.adapters) * rate,
            rank=rank,
            size_bytes=np.rint(rank * MIB_PER_RANK * 2**20).astype(np.int64),
            pool=np.zeros(self.adapters, np.int64),
            objective=np.zeros(self.adapters, np.int64),
            lengths=(pool,),
            objectives=(Objective(slo=Slo(ttft_slo_ms=ttft_slo_ms, tpot_slo_ms=TPOT_SLO_MS)),),
        )

    def demand(self, seed: int = 0) -> Demand:
        """The same for the law."""
        return self.loads(seed=seed).demand


def scenarios() -> Iterator[Scenario]:
    """High, low and mixed rates with ranks of the same name, and high rates with mixed ranks, by number of adapters."""
    for adapters in ADAPTERS:
        for rates, ranks in (("high", "high"), ("low", "low"), ("mixed", "mixed"), ("high", "mixed")):
            yield Scenario(rates, ranks, adapters)
