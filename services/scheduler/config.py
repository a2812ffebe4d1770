"""The scheduler's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from motet.policies.cluster.dispatch import POLICIES
from motet.policies.scale.need import Objective
from motet.policies.scale.sizing import SizingConfig
from motet.shared.config import EXPERT, ServiceConfig
from motet.shared.scheduler_options import AdmissionName, SchedulerOptions
from motet.shared.worker_options import Switch


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The scheduling policy, and how long the scheduler waits for predictors and workers."""

    policy: Annotated[
        str,
        POLICIES,
        Meta(description="scheduling policy: motet (its own), or one that --plugins adds", extra=EXPERT),
    ] = "motet"
    admission: Annotated[
        AdmissionName,
        Meta(
            description="when to refuse a request at once: objective (no worker is expected to meet its time to first token "
            "and time per token) or room (no worker has room)"
        ),
    ] = "objective"
    predict_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=1000,
            description="time limit of the predictor in milliseconds; then the scheduler uses its own estimate",
            extra=EXPERT,
        ),
    ] = 5.0
    assign_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="time limit in seconds for a worker to accept or refuse a request",
            extra=EXPERT,
        ),
    ] = 1.0
    attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="maximum workers tried per request",
            extra=EXPERT,
        ),
    ] = 3
    stale_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds without a report after which a worker gets no requests",
            extra=EXPERT,
        ),
    ] = 3.0
    drop_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds without a report after which a worker is removed from the scheduler's state",
            extra=EXPERT,
        ),
    ] = 10.0
    in_flight_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds for which an accepted request counts as load while the worker's state does not show it",
            extra=EXPERT,
        ),
    ] = 3.0
    prefix_aware: Annotated[
        bool,
        Meta(description="tokens of a prompt that a worker has in its prefix cache cost nothing there", extra=EXPERT),
    ] = True
    rebalance: Annotated[
        Switch,
        Meta(
            description="whether requests move from workers with long queues to others; one of the schedulers plans. auto:"
            " waiting requests, where they are predicted to run sooner, while that comes true; on: running requests as well"
        ),
    ] = "auto"
    kv_travel: Annotated[
        Literal["off", "on"],
        Meta(
            description="whether a worker fetches KV blocks from another one where that is predicted to be faster than"
            " computing them again: cached ones of a prompt, and with --rebalance on those of a request that moves",
            extra=EXPERT,
        ),
    ] = "on"
    placement: Annotated[
        Literal["off", "on"],
        Meta(
            description="whether adapters get homes by demand: workers that load them into free room, and that dispatch prefers"
            " for their requests where workers say their slots (vLLM); one of the schedulers decides"
        ),
    ] = "on"
    place_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds between decisions about the homes of adapters, besides those when a worker comes or leaves",
            extra=EXPERT,
        ),
    ] = 180.0
    scale: Annotated[
        Literal["off", "advise", "act"],
        Meta(
            description="whether one of the schedulers says how many workers each base model should have (GET /v1/scale);"
            " advise: nothing follows; act: `motet up --workers 1..4` starts and stops workers"
        ),
    ] = "advise"
    scale_min: Annotated[
        int, Meta(ge=0, description="with --scale: the fewest workers of a base model; 0: none while nobody asks", extra=EXPERT)
    ] = 1
    scale_max: Annotated[int, Meta(ge=1, description="with --scale: the most workers of a base model", extra=EXPERT)] = 64
    scale_down_s: Annotated[
        float,
        Meta(ge=0, description="with --scale: seconds for which fewer workers must have been enough", extra=EXPERT),
    ] = 600.0
    scale_idle_s: Annotated[
        float,
        Meta(gt=0, description="with --scale-min 0: seconds without a request after which no worker is needed", extra=EXPERT),
    ] = 900.0
    scale_ttft_ms: Annotated[
        float,
        Meta(gt=0, description="with --scale: time to the first token in milliseconds that 99% are to meet", extra=EXPERT),
    ] = 2000.0
    scale_tpot_ms: Annotated[
        float,
        Meta(gt=0, description="with --scale: time per further token in milliseconds that 99% are to meet", extra=EXPERT),
    ] = 200.0
    decision_log: Annotated[
        str,
        Meta(
            description="file that records everything decisions depend on, for replay; overwritten; empty: none", extra=EXPERT
        ),
    ] = ""

    @property
    def options(self) -> SchedulerOptions:
        """The options on which the scheduler's decisions depend."""
        return SchedulerOptions(
            policy=self.policy,
            prefix_aware=self.prefix_aware,
            admission=self.admission,
            attempts=self.attempts,
            stale_s=self.stale_s,
            in_flight_s=self.in_flight_s,
            rebalance=self.rebalance,
            kv_travel=self.kv_travel == "on",
            placement=self.placement == "on",
            place_s=self.place_s,
        )

    @property
    def sizing(self) -> tuple[SizingConfig, Objective] | None:
        """What decisions about numbers of workers depend on; None without them."""
        if self.scale == "off":
            return None
        config = SizingConfig(
            least_workers=self.scale_min,
            most_workers=self.scale_max,
            down_s=self.scale_down_s,
            idle_s=self.scale_idle_s,
            ttft_slo_ms=self.scale_ttft_ms,
        )
        return config, Objective(ttft_slo_ms=self.scale_ttft_ms, tpot_slo_ms=self.scale_tpot_ms)
