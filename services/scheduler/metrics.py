"""The scheduler's metrics."""

from __future__ import annotations

from motet.shared.telemetry import counter, gauge, histogram

DECISIONS = counter(
    "motet_scheduler_decisions", "Submitted requests by outcome: assigned, or the error code of the refusal.", ["outcome"]
)
DECISION_S = histogram(
    "motet_scheduler_decision_seconds",
    "Time of the policy to choose a worker.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2),
)
SUBMIT_S = histogram(
    "motet_scheduler_submit_seconds",
    "Time from a submit to its answer: prediction, decision and the worker's acceptance.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0),
)
CANDIDATES = histogram(
    "motet_scheduler_candidates", "Candidate workers per decision.", buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
)
SLO_BREAKS = counter(
    "motet_scheduler_slo_breaks",
    "Requests assigned although an objective is expected to be missed, their own or one of a request already there.",
)
ASSIGN_FAILURES = counter(
    "motet_scheduler_assign_failures",
    "Assignments that a worker did not accept, by reason: silent, absent, or the error code of its refusal.",
    ["reason"],
)
PREDICTION_MISSES = counter(
    "motet_scheduler_prediction_misses",
    "Decisions without a prediction, by reason: late, absent, or a failed answer.",
    ["reason"],
)
PLANS = counter(
    "motet_scheduler_plans", "Plans to move requests by outcome: moves, or in_vain (the plan gained too little).", ["outcome"]
)
PLAN_S = histogram(
    "motet_scheduler_plan_seconds",
    "Time to make a plan, outside the event loop.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
MOVES = counter("motet_scheduler_moves", "Requests that plans asked to move.")
PLANNING = gauge("motet_scheduler_planning", "1 while this scheduler is the one that moves requests.")
MECHANISM = gauge(
    "motet_scheduler_mechanism",
    "1 for the state of each mechanism that turns on by itself (rebalance): on, waiting, off; else 0.",
    ["name", "state"],
)
SCALE = gauge(
    "motet_scale_workers",
    "Workers of a base model as last decided: desired, current (ready and starting), starting, needed (by the forecast).",
    ["base_model", "count"],
)
PLACEMENTS = counter("motet_scheduler_placements", "Changes of the adapters that a worker is to keep loaded.")
STATE_GAPS = counter(
    "motet_scheduler_state_gaps", "Gaps in the sequence numbers of workers' states; the next snapshot closes a gap."
)
WORKERS = gauge("motet_scheduler_workers", "Known workers by state: live, or stale (no recent report).", ["state"])
PREFIX_BLOCKS = gauge("motet_scheduler_prefix_blocks", "Cached KV blocks of workers that are known.")
PREFIX_FETCHES = counter("motet_scheduler_prefix_fetches", "Assignments whose worker should fetch cached KV blocks.")
IN_FLIGHT = gauge("motet_scheduler_in_flight", "Assignments that no worker's state shows yet.")
