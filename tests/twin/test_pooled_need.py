"""Promise: the number of workers that the sizer's law says keeps the objectives in the twin, and is hardly more than enough."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from motet.policies.scale.fleet_demand import AdapterShare
from motet.policies.scale.need import Asked, Objective, Packed
from motet.policies.scale.rate_forecast import Rates
from motet.shared.model import Slo
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.profile import a10_llama2_7b
from motet.twin.scheduler import SchedulerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

TOKENS, ADAPTERS = 200, 100
RANKS = np.array([8, 16, 32, 64])[np.arange(ADAPTERS) % 4]
BYTES = RANKS * (5 << 17)
SLO = Slo(ttft_slo_ms=2000.0, tpot_slo_ms=100.0)
PROFILE = a10_llama2_7b()


def attained(requests_s: float, workers: int, seats: int, duration_s: float) -> float:
    """The share of requests within the objectives, in the twin."""
    rng = np.random.default_rng(0)
    at_s = arrivals(rng, Intensity.constant(requests_s, duration_s))
    pool = Lengths.lognormal(np.random.default_rng(0), prompt_mean=TOKENS, output_mean=TOKENS).capped(3000, 4000)
    prompts, outputs = pool.draw(rng, len(at_s))
    work = Workload(
        arrival_s=at_s,
        adapter=pick(rng, zipf(ADAPTERS), len(at_s)),
        prompt_tokens=prompts,
        output_tokens=outputs,
        ranks=RANKS,
        adapter_bytes=BYTES,
        slos=(SLO,),
    )
    spec = PROFILE.spec()
    spec = dataclasses.replace(spec, limits=replace(spec.limits, max_running=seats))
    cluster = Cluster(work, [spec] * workers, SchedulerSpec(), bus=BusDelays())
    cluster.run()
    return float(cluster.summary()["slo_attainment"])


@pytest.mark.parametrize(("seats", "requests_s", "duration_s"), [(64, 4.0, 300.0), (2, 1.0, 1200.0)])
def test_requests_find_room_on_any_worker_so_few_seats_need_not_many_workers(
    seats: int, requests_s: float, duration_s: float
) -> None:
    shares = zip(zipf(ADAPTERS).tolist(), RANKS.tolist(), BYTES.tolist(), strict=True)
    asked = Asked(
        requests_s=requests_s,
        prompt_tokens_s=TOKENS * requests_s,
        output_tokens_s=TOKENS * requests_s,
        rows=[AdapterShare(*one) for one in shares],
    )
    needs = Packed(Objective(ttft_slo_ms=SLO.ttft_slo_ms, tpot_slo_ms=SLO.tpot_slo_ms))
    needs.know(asked, (replace(PROFILE.limits, max_running=seats), PROFILE.perf), 0.0)
    workers = needs(Rates(requests_s, 2 * TOKENS * requests_s)).workers
    assert attained(requests_s, workers, seats, duration_s) >= 0.99
    assert attained(requests_s, round(0.7 * workers), seats, duration_s) < 0.99
