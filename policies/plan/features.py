"""What learned models know of a worker and its load: the paper's features, and features without units from the law."""

from __future__ import annotations

import numpy as np

from motet.policies.plan.capacity import LIMITS, Settings, Verdict
from motet.policies.plan.demand import Demand, Floats

PAPER = ("adapters", "rate_sum_req_s", "rate_std_req_s", "rank_max", "rank_mean", "rank_std", "a_max")
"""Features of the adapter-caching paper (section 6). They know neither lengths nor the model nor the GPU."""

LAW = (
    "busy",
    "batch_share",
    "slots_share",
    "slots_strain",
    "adapters_per_slot",
    "hottest_share",
    "miss_share",
    "stall_share",
    "rank_share",
    "rank_spread",
    "length_spread",
    "prompt_share",
    "ttft_share",
    "tpot_share",
)
"""Features from the law: load, batch, slots, copies, ranks, lengths and latencies, each as a share of what there is."""

LONGEST_MS = 3.6e6
"""What counts as the time where the law waits for ever."""


def paper(demand: Demand, slots: Floats) -> Floats:
    """The paper's features for each number of slots: [slots, features]. Deviations are those of the population."""
    weights = demand.count / demand.adapters
    of_rates, of_ranks = (_moments(column, weights) for column in (demand.rate, demand.rank))
    row = (demand.adapters, demand.total_rate, of_rates[1], demand.rank.max(), *of_ranks)
    return np.column_stack([np.broadcast_to(row, (len(slots), len(row))), slots])


def law(demand: Demand, settings: Settings, verdict: Verdict) -> Floats:
    """Features without units for each setting: [settings, features]."""
    prompt, output = demand.mean(demand.prompt_tokens), demand.mean(demand.output_tokens)
    rank_mean, rank_std = _moments(demand.rank, demand.count * demand.rate / demand.total_rate)
    copy_ms = settings.steps.copy_ms(demand) @ (demand.count * demand.rate) / demand.total_rate
    copies_per_s = verdict.miss_share * demand.total_rate / np.maximum(1.0, verdict.busy)
    columns = (
        verdict.busy,
        verdict.batch / verdict.batch_most,
        verdict.adapters_in_use / settings.slots,
        verdict.strains[:, LIMITS.index("slots")],
        demand.adapters / settings.slots,
        _hottest(demand, settings.slots),
        verdict.miss_share,
        copies_per_s * copy_ms * 1e-3,
        rank_mean / settings.max_rank,
        rank_std / settings.max_rank,
        demand.mean(demand.output_square) / output**2 - 1.0,
        prompt / (prompt + output),
        np.minimum(verdict.ttft_ms, LONGEST_MS) / float(demand.ttft_slo_ms.min()),
        np.minimum(verdict.tpot_ms, LONGEST_MS) / float(demand.tpot_slo_ms.min()),
    )
    return np.column_stack(np.broadcast_arrays(*columns))


def _moments(column: Floats, weights: Floats) -> tuple[float, float]:
    """The weighted mean and standard deviation."""
    mean = float(column @ weights)
    return mean, float((column - mean) ** 2 @ weights) ** 0.5


def _hottest(demand: Demand, slots: Floats) -> Floats:
    """The share of the requests that the most asked adapters have, as many as there are slots."""
    order = np.argsort(-demand.rate, kind="stable")
    adapters = np.concatenate([[0.0], np.cumsum(demand.count[order])])
    requests = np.concatenate([[0.0], np.cumsum((demand.count * demand.rate)[order])])
    return np.asarray(np.interp(slots, adapters, requests)) / demand.total_rate
