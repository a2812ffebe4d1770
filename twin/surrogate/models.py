"""The models of one training set: the paper's for each profile, the refined trees, and ours for all profiles.

A model of throughput answers in tokens/s, one of starvation with the probability that a run is starved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan import features
from motet.policies.plan.demand import Floats
from motet.policies.plan.surrogate import Trees
from motet.twin.metrics import STARVED_BELOW
from motet.twin.surrogate import train
from motet.twin.surrogate.samples import SEED, draw
from motet.twin.surrogate.table import Table

LOAD = [name for name in features.LAW if name not in ("ttft_share", "tpot_share")]
"""The features from the law that do not depend on objectives."""


@dataclass(frozen=True, slots=True)
class PaperModels:
    """The paper's models of one profile, by family, and its refined trees. They know the paper's features only."""

    throughput: dict[str, Any]
    starvation: dict[str, Any]
    small_throughput: Trees
    small_starvation: Trees

    def tok_s(self, family: str, x: Floats) -> Floats:
        """Throughput of runs [runs, features] by a family of scikit-learn's models, or by the small tree."""
        if family == "small_tree":
            return self.small_throughput.predict(x)
        return np.asarray(self.throughput[family].predict(x))

    def starved(self, family: str, x: Floats) -> NDArray[np.bool_]:
        """Whether runs starve, by the same."""
        if family == "small_tree":
            return self.small_starvation.predict(x) > 0.5
        return np.asarray(self.starvation[family].predict(x), dtype=bool)


def paper_models(table: Table, free: Floats, chosen: dict[str, dict[str, train.Point]]) -> PaperModels:
    """Train on paper runs of one profile. `chosen`: the point of each grid, by task and family.

    The small trees are trained on what happened in the runs and on what the forests say of others, that nobody simulated:
    `free`, [others, features]. The paper also starts from its best forest, and does not say how it gets to a tree.
    """
    x = table.paper_features
    throughput, starvation = (
        {name: train.fit(family, chosen[task][name], x, y, trees=name == "rf") for name, family in families.items()}
        for task, families, y in (
            ("throughput", train.THROUGHPUT, table.tok_s),
            ("starvation", train.STARVATION, table.starved),
        )
    )
    both = np.concatenate([x, free])
    log_tok_s = np.log(np.concatenate([table.tok_s, throughput["rf"].predict(free)]))
    starved = np.concatenate([table.starved, train.probability(starvation["rf"], free)])
    return PaperModels(
        throughput,
        starvation,
        _of_exponent(train.trees(train.small_tree(both, log_tok_s), "tokens/s", features.PAPER)),
        train.trees(train.small_tree(both, starved), "probability of starvation", features.PAPER),
    )


def not_simulated(profile: str, count: int) -> Floats:
    """The paper's features of the paper runs of a profile among `count` draws with another seed, [runs, features]."""
    runs = [run for run in draw(count, SEED + 1) if run.paper and run.profile == profile]
    return np.concatenate([features.paper(run.demand(), np.array([float(run.a_max)])) for run in runs])


def _of_exponent(tree: Trees) -> Trees:
    """A tree whose leaves have the exponential of those of another one."""
    return Trees(
        **{name: getattr(tree, name) for name in tree.__struct_fields__} | {"value": tuple(np.exp(tree.value).tolist())}
    )


@dataclass(frozen=True, slots=True)
class OurModels:
    """What the law gets wrong, in logarithms, and whether objectives are met, from features without units.

    Each model is one for all profiles. What is served is learned from paper runs, since its definition is the paper's: over an
    hour, with a client that has a limited number of ports. Latencies are learned from open runs.
    """

    served: Trees  # log of tokens/s over the law's
    ttft: Trees  # log of the P99 of TTFT over the law's TTFT
    attained: Trees  # probability that 99% of the requests are within their objectives

    def tok_s(self, table: Table) -> Floats:
        """Throughput of runs."""
        return table.law_tok_s * np.exp(self.served.predict(load(table)))

    def starved(self, table: Table) -> NDArray[np.bool_]:
        """Whether runs starve: by the paper's rule, from the throughput."""
        return self.tok_s(table) < STARVED_BELOW * table.asked_tok_s

    def ttft_p99_ms(self, table: Table) -> Floats:
        """The P99 of TTFT of runs."""
        return table.law_ttft_ms * np.exp(self.ttft.predict(load(table)))

    def attains(self, table: Table) -> NDArray[np.bool_]:
        """Whether 99% of the requests of runs are within their objectives."""
        return self.attained.predict(table.law_features) > 0.5


ATTAINED = 0.99


def our_models(table: Table) -> OurModels:
    """Train on runs of both kinds."""
    paper, free = table.where(table.paper), table.where(~table.paper)
    served = train.boosted(load(paper), np.log(paper.tok_s / paper.law_tok_s))
    ttft = train.boosted(load(free), np.log(free.ttft_p99_ms / free.law_ttft_ms))
    attained = train.boosted(free.law_features, free.attained_share >= ATTAINED)
    return OurModels(
        train.trees(served, "log(tokens/s / law)", LOAD),
        train.trees(ttft, "log(P99 of TTFT / law)", LOAD),
        train.trees(attained, "probability of objectives met", features.LAW),
    )


def load(table: Table) -> Floats:
    """The columns of `LOAD`, [runs, features]."""
    return table.law_features[:, [features.LAW.index(name) for name in LOAD]]
