"""Promise: a base model's size follows its load, stands still where the load does, and never falls on missing data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from motet.policies.scale.base_sizer import LOOK_S, BaseSizer, Seen
from motet.policies.scale.fleet_demand import AdapterShare
from motet.policies.scale.need import Asked, Objective, Packed
from motet.policies.scale.sizing import SizingConfig
from motet.shared.wire.scale import Decision
from tests.support_worker import PERF, worker_limits

LEAD_S, TOKENS = 120.0, 150
CONFIG = SizingConfig(least_workers=2, most_workers=30, ttft_slo_ms=2000.0)
WORKER = worker_limits(max_running=32, kv_blocks_total=4096, adapter_bytes_total=256 << 20), PERF
ROWS = [AdapterShare(0.7, 8, 1 << 20), AdapterShare(0.3, 16, 2 << 20)]
DAY_S = 86_400.0


class Mesh:
    """Workers that follow the decisions, and Poisson arrivals."""

    def __init__(self, ready: int, seed: int = 0) -> None:
        self.sizer = BaseSizer(CONFIG, Packed(Objective(ttft_slo_ms=2000.0, tpot_slo_ms=200.0)))
        self.ready = {f"w{place}": 0.0 for place in range(ready)}
        self.starting: dict[str, float] = {}
        self.chance, self.counted, self.now_s = np.random.default_rng(seed), 0.0, 0.0

    def seen(self, rate: float) -> Seen:
        self.now_s += LOOK_S
        self.counted += float(self.chance.poisson(rate * LOOK_S))
        for name in [name for name, since_s in self.starting.items() if self.now_s - since_s >= LEAD_S]:
            del self.starting[name]
            self.ready[name] = 0.0
        asked = Asked(requests_s=rate, prompt_tokens_s=rate * TOKENS, output_tokens_s=rate * TOKENS, rows=ROWS)
        return Seen(
            now_s=self.now_s,
            counted=(self.counted, 2 * TOKENS * self.counted),
            asked=asked,
            worker=WORKER,
            ready=dict(self.ready),
            starting=dict(self.starting),
            lead_s=LEAD_S,
        )

    def look(self, rate: float, *missing: str) -> Decision:
        """A look, and what follows from it."""
        _, decision = self.sizer.look(replace(self.seen(rate), missing=list(missing)))
        assert decision is not None
        if decision.leaves:
            self.ready.pop(decision.leaves)
        for place in range(decision.desired - decision.current):
            self.starting[f"{self.now_s:.0f}-{place}"] = self.now_s
        return decision

    def run(self, until_s: float, rate: Callable[[float], float]) -> list[int]:
        return [self.look(rate(self.now_s)).desired for _ in range(int(until_s / LOOK_S))]


@pytest.mark.parametrize("rate", [31.0, 45.0])
def test_in_a_day_of_constant_load_with_noise_the_count_does_not_flap(rate: float) -> None:
    counts = Mesh(2, seed=5).run(DAY_S, lambda _: rate)[240:]
    assert np.count_nonzero(np.diff(counts)) <= 2
    assert min(counts) > CONFIG.least_workers


def test_twice_the_load_is_followed_up_at_once_and_down_when_it_was_low_for_long() -> None:
    mesh = Mesh(2)
    low = mesh.run(3600.0, lambda _: 30.0)[-1]
    high = mesh.run(600.0, lambda _: 60.0)
    assert high[8] > low < max(high)
    after = mesh.run(3600.0, lambda _: 30.0)
    assert min(after[: int(CONFIG.down_s / LOOK_S) - 10]) >= high[-1]
    assert after[-1] <= low + 1


def test_with_reports_missing_the_count_stays_at_whatever_load_and_never_below_the_minimum() -> None:
    mesh = Mesh(2)
    before = mesh.run(3600.0, lambda _: 60.0)[-1]
    found = [mesh.look(0.0, "the reports of s1") for _ in range(400)]
    assert {one.desired for one in found} == {before} and {one.reason for one in found} == {"doubt"}
    mesh.ready = {"w0": 0.0}
    assert mesh.look(0.0, "the reports of s1").desired == CONFIG.least_workers


def test_a_scheduler_that_does_not_decide_keeps_its_forecast_going() -> None:
    mesh, other = Mesh(2), Mesh(2)
    for _ in range(200):
        seen = mesh.seen(40.0)
        ahead, decision = other.sizer.look(replace(seen, decides=False))
        assert decision is None
        mesh.sizer.look(seen)
    assert ahead.now.requests_s == pytest.approx(40.0, rel=0.1)
    assert other.sizer.look(replace(seen, now_s=seen.now_s + LOOK_S))[1] is not None
