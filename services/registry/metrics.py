"""The registry's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from motet.shared.telemetry import LATENCY_BUCKETS_S, REGISTRY

REGISTRATIONS = Counter(
    "motet_registry_registrations",
    "Registrations by outcome: registered, replaced, unchanged, refused (bad input), failed (server side).",
    ["outcome"],
    registry=REGISTRY,
)
ADAPTERS = Gauge("motet_registry_adapters", "Adapter names, aliases included.", registry=REGISTRY)
VERSIONS = Gauge("motet_registry_versions", "Stored adapter versions.", registry=REGISTRY)
BLOB_BYTES = Gauge("motet_registry_blob_bytes", "Size of all stored adapter versions in bytes.", registry=REGISTRY)
VALIDATION_S = Histogram(
    "motet_registry_validation_seconds",
    "Time to read, check and convert one adapter.",
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
