"""Promise: what merging can reach lies between no merging and no LoRA, nearer to the latter the more one adapter dominates."""

from __future__ import annotations

import numpy as np
import pytest

from bench.dlora_limit import Grouping
from bench.dlora_parts import CONTEXT_TOKEN_PS, EINSUM, KV_TOKENS, PERF, SLO_MS

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def worker() -> Grouping:
    prompt, output = np.random.default_rng(3).integers(1, 1000, (2, 1000)).astype(np.float64)
    return Grouping(prompt, output, PERF, kv_tokens=KV_TOKENS, context_token_ms=CONTEXT_TOKEN_PS / 1e9, lora=EINSUM)


def test_more_is_reached_the_more_one_adapter_dominates(worker: Grouping) -> None:
    even, most, nearly_all = (worker.part(shares, HOUR_S, SLO_MS) for shares in ([1.0] * 8, [0.8] + [0.03] * 7, [0.99, 0.01]))
    assert 0.0 <= even < most < nearly_all <= 1.0


def test_one_adapter_alone_needs_no_changes(worker: Grouping) -> None:
    assert worker.saved(np.array([4.0]), 100.0, 1.0) == pytest.approx(4.0 * worker.saved_ms / 1000.0, rel=0.2)


def test_many_waiting_requests_pay_for_changes_and_few_do_not(worker: Grouping) -> None:
    rates = np.full(8, 0.5)
    few, many = worker.saved(rates, 20.0, 1.0), worker.saved(rates, 5000.0, 1.0)
    assert few == 0.0 < many < worker.saved(rates, 5000.0, 0.0)


def test_a_run_too_short_to_be_overloaded_has_nothing_to_reach(worker: Grouping) -> None:
    assert worker.part([1.0] * 8, 8.0, SLO_MS) == 0.0
