"""The gateway's metrics that are counted as things happen. `owner.observe` counts ended streams by them; `owner.fleet_metrics`
has those that are computed at a scrape.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from motet.shared.telemetry import LATENCY_BUCKETS_S, REGISTRY

_LABELS = ["adapter", "slo_class"]

TTFT_S = Histogram(
    "motet_ttft_seconds",
    "Time from a request's arrival at the gateway to its first token.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TPOT_S = Histogram(
    "motet_tpot_seconds",
    "Mean time per output token of a request, after the first token.",
    _LABELS,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0),
    registry=REGISTRY,
)
E2E_S = Histogram(
    "motet_e2e_seconds",
    "Time from a request's arrival at the gateway to its last token.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
QUEUE_S = Histogram(
    "motet_queue_seconds",
    "Time from a request's arrival at a worker to its first prefill step.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TOKENS = Counter(
    "motet_tokens", "Tokens of ended sequences by kind: prompt, cached, output.", [*_LABELS, "kind"], registry=REGISTRY
)
REQUESTS = Counter(
    "motet_requests",
    "Ended sequences by outcome: stop, length, cancelled or an error code.",
    [*_LABELS, "outcome"],
    registry=REGISTRY,
)
TENANT_TOKENS = Counter(
    "motet_tenant_tokens",
    "Tokens of ended sequences by tenant and kind: prompt, cached, output.",
    ["tenant", "kind"],
    registry=REGISTRY,
)
TENANT_REQUESTS = Counter(
    "motet_tenant_requests", "Ended sequences by tenant and outcome.", ["tenant", "outcome"], registry=REGISTRY
)
SLO_REQUESTS = Counter(
    "motet_slo_requests",
    "Finished sequences by objective (ttft, tpot) and whether it was met.",
    ["slo_class", "objective", "met"],
    registry=REGISTRY,
)
RESUMED = Counter(
    "motet_requests_resumed", "Requests resumed on a worker in a new epoch, by reason.", ["reason"], registry=REGISTRY
)
MOVED = Counter(
    "motet_requests_moved", "Requests handed to another worker because a scheduler asked for it.", registry=REGISTRY
)
RESUME_S = Histogram(
    "motet_request_resume_seconds",
    "Time from the loss of a request's worker to the request's next token.",
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
STRAYS = Counter(
    "motet_stray_items", "Token items of unknown or outdated requests that were answered with a Cancel.", registry=REGISTRY
)
REFUSED = Counter(
    "motet_gateway_refused",
    "Requests that this gateway refused by itself, by reason; repeated: a scheduler refused one like it just now.",
    ["reason"],
    registry=REGISTRY,
)
HTTP_ERRORS = Counter("motet_http_errors", "HTTP error answers by error code.", ["code"], registry=REGISTRY)
HANDSHAKES = Gauge("motet_gateway_tls_handshakes", "TLS connections whose handshake is not finished.", registry=REGISTRY)
HANDSHAKE_FAILURES = Counter(
    "motet_gateway_tls_handshake_failures",
    "TLS connections closed before the end of their handshake: by the client's fault or silence (client), at the limit of"
    " connections (limit).",
    ["cause"],
    registry=REGISTRY,
)
INFLIGHT = Gauge("motet_gateway_inflight", "Sequences in progress at this gateway.", registry=REGISTRY)
