"""The scheduler's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from motet.shared.telemetry import REGISTRY

DECISIONS = Counter(
    "motet_scheduler_decisions",
    "Submitted requests by outcome: assigned, or the error code of the refusal.",
    ["outcome"],
    registry=REGISTRY,
)
DECISION_S = Histogram(
    "motet_scheduler_decision_seconds",
    "Time of the policy to choose a worker.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2),
    registry=REGISTRY,
)
SUBMIT_S = Histogram(
    "motet_scheduler_submit_seconds",
    "Time from a submit to its answer: prediction, decision and the worker's acceptance.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0),
    registry=REGISTRY,
)
CANDIDATES = Histogram(
    "motet_scheduler_candidates",
    "Candidate workers per decision.",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    registry=REGISTRY,
)
SLO_BREAKS = Counter(
    "motet_scheduler_slo_breaks",
    "Requests assigned although an objective is expected to be missed, their own or one of a request already there.",
    registry=REGISTRY,
)
ASSIGN_FAILURES = Counter(
    "motet_scheduler_assign_failures",
    "Assignments that a worker did not accept, by reason: silent, absent, or the error code of its refusal.",
    ["reason"],
    registry=REGISTRY,
)
PREDICTION_MISSES = Counter(
    "motet_scheduler_prediction_misses",
    "Decisions without a prediction, by reason: late, absent, or a failed answer.",
    ["reason"],
    registry=REGISTRY,
)
PLANS = Counter(
    "motet_scheduler_plans",
    "Plans to move requests by outcome: moves, or in_vain (the plan gained too little).",
    ["outcome"],
    registry=REGISTRY,
)
PLAN_S = Histogram(
    "motet_scheduler_plan_seconds",
    "Time to make a plan, outside the event loop.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    registry=REGISTRY,
)
MOVES = Counter("motet_scheduler_moves", "Requests that plans asked to move.", registry=REGISTRY)
PLANNING = Gauge("motet_scheduler_planning", "1 while this scheduler is the one that moves requests.", registry=REGISTRY)
PLACEMENTS = Counter(
    "motet_scheduler_placements", "Changes of the adapters that a worker is to keep loaded.", registry=REGISTRY
)
STATE_GAPS = Counter(
    "motet_scheduler_state_gaps",
    "Gaps in the sequence numbers of workers' states; the next snapshot closes a gap.",
    registry=REGISTRY,
)
WORKERS = Gauge(
    "motet_scheduler_workers", "Known workers by state: live, or stale (no recent report).", ["state"], registry=REGISTRY
)
PREFIX_BLOCKS = Gauge("motet_scheduler_prefix_blocks", "Cached KV blocks of workers that are known.", registry=REGISTRY)
IN_FLIGHT = Gauge("motet_scheduler_in_flight", "Assignments that no worker's state shows yet.", registry=REGISTRY)
