"""The registry's metrics."""

from __future__ import annotations

from motet.shared.telemetry import counter, gauge, latency

REGISTRATIONS = counter(
    "motet_registry_registrations",
    "Registrations by outcome: registered, replaced, unchanged, refused (bad input), failed (server side).",
    ["outcome"],
)
ADAPTERS = gauge("motet_registry_adapters", "Adapter names, aliases included.")
VERSIONS = gauge("motet_registry_versions", "Stored adapter versions.")
QUARANTINED = gauge("motet_registry_adapters_quarantined", "Stored adapter versions that do not answer: their probe failed.")
BLOB_BYTES = gauge("motet_registry_blob_bytes", "Size of all stored adapter versions in bytes.")
VALIDATION_S = latency("motet_registry_validation_seconds", "Time to read, check and convert one adapter.")
