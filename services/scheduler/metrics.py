"""What the scheduler measures."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry import REGISTRY

DECISIONS = Counter(
    "motet_scheduler_decisions",
    "Submitted requests by what became of them: assigned, or the error code they were refused with.",
    ["outcome"],
    registry=REGISTRY,
)
DECISION_S = Histogram(
    "motet_scheduler_decision_seconds",
    "Time the policy takes to choose a worker.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2),
    registry=REGISTRY,
)
SUBMIT_S = Histogram(
    "motet_scheduler_submit_seconds",
    "Time from a submitted request to its answer: prediction, decision and the worker's acceptance.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0),
    registry=REGISTRY,
)
CANDIDATES = Histogram(
    "motet_scheduler_candidates",
    "Workers that could have taken a request, per decision.",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    registry=REGISTRY,
)
SLO_BREAKS = Counter(
    "motet_scheduler_slo_breaks",
    "Requests assigned to a worker on which an objective is expected to break: theirs, or one of those that are there.",
    registry=REGISTRY,
)
ASSIGN_FAILURES = Counter(
    "motet_scheduler_assign_failures",
    "Assignments a worker did not take: silent, absent, or the error code it refused with.",
    ["reason"],
    registry=REGISTRY,
)
PREDICTION_MISSES = Counter(
    "motet_scheduler_prediction_misses",
    "Decisions made without the predictor: late, absent, or a failed answer.",
    ["reason"],
    registry=REGISTRY,
)
STATE_GAPS = Counter(
    "motet_scheduler_state_gaps", "Holes in the sequence of a worker's states; its next snapshot heals one.", registry=REGISTRY
)
WORKERS = Gauge(
    "motet_scheduler_workers", "Known workers, by whether they are heard: live, stale.", ["state"], registry=REGISTRY
)
IN_FLIGHT = Gauge("motet_scheduler_in_flight", "Assignments no worker's state shows yet.", registry=REGISTRY)
