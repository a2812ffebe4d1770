"""The scheduler's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """Which policy chooses, and how long to wait for whom."""

    policy: Annotated[
        Literal["motet", "rank-aware", "random", "first-fit", "most-idle", "least-pending", "lora-affinity", "round-robin"],
        Meta(
            description="who decides: Motet's own policy; rank-aware, CaraServe's Algorithm 1; or one to compare with: random, "
            "first-fit, most-idle, least-pending, lora-affinity, round-robin"
        ),
    ] = "motet"
    admission: Annotated[
        Literal["objective", "room"],
        Meta(
            description="objective: refuse a request at once when no worker is expected to keep its time to first token and "
            "time per token; room: only when no worker has a place for it"
        ),
    ] = "objective"
    predict_ms: Annotated[
        float, Meta(gt=0, le=1000, description="milliseconds the predictor gets; later the scheduler goes on without it")
    ] = 5.0
    assign_s: Annotated[float, Meta(gt=0, le=60, description="seconds a worker gets to accept or refuse a request")] = 1.0
    attempts: Annotated[int, Meta(ge=1, le=16, description="workers tried per request before it is refused")] = 3
    stale_s: Annotated[float, Meta(gt=0, description="silence in seconds after which a worker gets no requests")] = 3.0
    drop_s: Annotated[float, Meta(gt=0, description="silence in seconds after which a worker is forgotten")] = 10.0
    in_flight_s: Annotated[
        float, Meta(gt=0, description="seconds an accepted request counts without the worker's state showing it")
    ] = 3.0
    decision_log: Annotated[
        str, Meta(description="file for all that decisions rest on, written anew, to replay them; empty for none")
    ] = ""
