"""The gateway's metrics that are counted as things happen. `owner.observe` counts ended streams by them; `owner.fleet_metrics`
has those that are computed at a scrape.
"""

from __future__ import annotations

from motet.shared.telemetry import counter, gauge, histogram, latency

_LABELS = ["adapter", "slo_class"]

TTFT_S = latency("motet_ttft_seconds", "Time from a request's arrival at the gateway to its first token.", _LABELS)
TPOT_S = histogram(
    "motet_tpot_seconds",
    "Mean time per output token of a request, after the first token.",
    _LABELS,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0),
)
E2E_S = latency("motet_e2e_seconds", "Time from a request's arrival at the gateway to its last token.", _LABELS)
QUEUE_S = latency("motet_queue_seconds", "Time from a request's arrival at a worker to its first prefill step.", _LABELS)
TOKENS = counter("motet_tokens", "Tokens of ended sequences by kind: prompt, cached, output.", [*_LABELS, "kind"])
REQUESTS = counter(
    "motet_requests", "Ended sequences by outcome: stop, length, cancelled or an error code.", [*_LABELS, "outcome"]
)
TENANT_TOKENS = counter(
    "motet_tenant_tokens", "Tokens of ended sequences by tenant and kind: prompt, cached, output.", ["tenant", "kind"]
)
TENANT_REQUESTS = counter("motet_tenant_requests", "Ended sequences by tenant and outcome.", ["tenant", "outcome"])
SLO_REQUESTS = counter(
    "motet_slo_requests",
    "Finished sequences by objective (ttft, tpot, e2e) and whether it was met.",
    ["slo_class", "objective", "met"],
)
PICTURES = counter(
    "motet_gateway_pictures",
    "Ended pictures by kind (text, image, inpaint) and outcome: stop, cancelled or an error code.",
    ["kind", "outcome"],
)
IMAGE_S = latency(
    "motet_gateway_image_seconds",
    "Time of a picture by part: queue (from its arrival to its first denoising step's end), denoise (from then to its last"
    " step), decode (from then to the picture).",
    ["part"],
)
RESUMED = counter("motet_requests_resumed", "Requests resumed on a worker in a new epoch, by reason.", ["reason"])
MOVED = counter("motet_requests_moved", "Requests handed to another worker because a scheduler asked for it.")
RESUME_S = latency("motet_request_resume_seconds", "Time from the loss of a request's worker to the request's next token.")
STRAYS = counter("motet_stray_items", "Token items of unknown or outdated requests that were answered with a Cancel.")
REFUSED = counter(
    "motet_gateway_refused",
    "Requests that this gateway refused by itself, by reason; repeated: a scheduler refused one like it just now.",
    ["reason"],
)
HTTP_ERRORS = counter("motet_http_errors", "HTTP error answers by error code.", ["code"])
HANDSHAKES = gauge("motet_gateway_tls_handshakes", "TLS connections whose handshake is not finished.")
HANDSHAKE_FAILURES = counter(
    "motet_gateway_tls_handshake_failures",
    "TLS connections closed before the end of their handshake: by the client's fault or silence (client), at the limit of"
    " connections (limit).",
    ["cause"],
)
INFLIGHT = gauge("motet_gateway_inflight", "Sequences in progress at this gateway.")
PARKED = gauge("motet_gateway_parked", "New requests that wait for the first worker of their base model to start.")
