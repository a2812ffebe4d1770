"""Runs as columns to learn from or to test on: features of each, what was served, and what the law says of it.

A run is starved by the paper's rule: tokens of completed requests are below 90% of the nominal tokens that came in. The twin's
throughput is scaled to the nominal load, which removes the chance in the number of its arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan import features
from motet.policies.plan.capacity import judge
from motet.policies.plan.demand import Demand, Floats
from motet.twin.metrics import STARVED_BELOW
from motet.twin.surrogate.samples import SEATS, Description, Labels
from motet.twin.vllm.law import settings
from motet.twin.vllm.published import MODELS, published
from motet.twin.vllm.runs import ANSWERED_SHARE, CLIENT_SEED, Measured, Run

SERVED_LEAST = 1e-3  # of very few requests none may have ended
PROFILES = {model: profile for profile, model in MODELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns [runs]; features [runs, features]."""

    profile: NDArray[np.str_]
    paper: NDArray[np.bool_]  # lengths and client as in the paper's runs
    paper_features: Floats
    law_features: Floats
    asked_tok_s: Floats  # nominal tokens that come in
    tok_s: Floats  # served
    starved: NDArray[np.bool_]
    law_tok_s: Floats  # served by the law: the load, or the capacity
    ttft_p99_ms: Floats
    law_ttft_ms: Floats
    attained_share: Floats
    law_attained: NDArray[np.bool_]  # within the objectives by the law
    flagged: NDArray[np.bool_]  # measured while the client was out of ports

    def __len__(self) -> int:
        return len(self.profile)

    @property
    def busy(self) -> Floats:
        """Load over capacity by the law."""
        return np.asarray(self.law_features[:, features.LAW.index("busy")])

    @property
    def law_starved(self) -> NDArray[np.bool_]:
        """Starved by the law."""
        return self.law_tok_s < STARVED_BELOW * self.asked_tok_s

    def where(self, chosen: NDArray[np.bool_]) -> Table:
        """Some of the runs."""
        return Table(**{field.name: getattr(self, field.name)[chosen] for field in fields(Table)})


def from_samples(samples: Iterable[tuple[Description, Labels]]) -> Table:
    """Simulated runs that had requests."""
    rows = []
    for run, labels in samples:
        if labels.arrived_tok_s == 0:
            continue
        asked_tok_s = sum(run.adapter_rates_req_s) * (run.prompt_tokens + run.output_tokens)
        answered = (run.prompt_tokens + run.answered_tokens) / (run.prompt_tokens + run.output_tokens)
        served = labels.tok_s / labels.arrived_tok_s if run.paper else labels.served_share
        share = answered * max(served, SERVED_LEAST)
        rows.append(
            {
                "profile": run.profile,
                "paper": run.paper,
                **_known(run.demand(), run.profile, run.a_max, run.s_max, SEATS),
                "asked_tok_s": asked_tok_s,
                "tok_s": share * asked_tok_s,
                "starved": share < STARVED_BELOW,
                "ttft_p99_ms": labels.ttft_p99_ms,
                "attained_share": labels.attained_share,
                "flagged": False,
            }
        )
    return _table(rows)


def from_measured(runs: Iterable[tuple[Run, Measured]]) -> Table:
    """Measured runs. Which adapter has which rank was not recorded, so ranks are dealt as `twin.vllm.runs` deals them."""
    rows = []
    for run, measured in runs:
        demand = Demand.of(
            run.rates_req_s,
            rank=np.random.default_rng(CLIENT_SEED).permutation(run.ranks),
            prompt_tokens=run.prompt_mean_tokens,
            output_tokens=run.output_mean_tokens * ANSWERED_SHARE[run.model],
        )
        profile = PROFILES[run.model]
        rows.append(
            {
                "profile": profile,
                "paper": True,
                **_known(demand, profile, run.a_max, run.s_max, run.max_num_seqs),
                "asked_tok_s": sum(run.rates_req_s) * (run.prompt_mean_tokens + run.output_mean_tokens),
                "tok_s": measured.total_tok_s,
                "starved": measured.starved,
                "ttft_p99_ms": measured.ttft_p99_ms,
                "attained_share": np.nan,
                "flagged": measured.ports_exhausted,
            }
        )
    return _table(rows)


def _known(demand: Demand, profile: str, a_max: int, s_max: int, seats: int) -> dict[str, object]:
    """What is known of a run before it is made."""
    setting = settings(published(profile), slots=[a_max], ranks=[s_max], seats=seats)
    verdict = judge(demand, setting)
    return {
        "paper_features": features.paper(demand, setting.slots)[0],
        "law_features": features.law(demand, setting, verdict)[0],
        "law_tok_s": demand.tokens_s * min(1.0, 1.0 / float(verdict.busy[0])),
        "law_attained": verdict.strain[0] <= 1.0,
        "law_ttft_ms": min(float(verdict.ttft_ms[0]), features.LONGEST_MS),
    }


def _table(rows: Sequence[dict[str, object]]) -> Table:
    return Table(**{field.name: np.array([row[field.name] for row in rows]) for field in fields(Table)})
