"""What a worker measures, all in one place. Labels are bounded: tiers, sources, kinds; never adapters or requests."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry import LATENCY_BUCKETS_S, REGISTRY

STEP_S = Histogram("motet_worker_step_seconds", "Engine step time.", buckets=LATENCY_BUCKETS_S, registry=REGISTRY)
STEP_DRIFT = Gauge(
    "motet_worker_step_time_drift_ratio",
    "How much longer steps take of late than the worker's profile says, by kind (decode, prefill: with any); 0 is as measured.",
    ["kind"],
    registry=REGISTRY,
)
TOKENS = Counter("motet_worker_tokens", "Tokens computed, by kind (prefill, decode).", ["kind"], registry=REGISTRY)
BATCH_ROWS = Histogram(
    "motet_worker_batch_rows",
    "Requests that took part in an engine step.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    registry=REGISTRY,
)
STEP_FAILURES = Counter("motet_worker_step_failures", "Engine steps that raised an exception.", registry=REGISTRY)
REQUESTS = Gauge("motet_worker_requests", "Requests here, by phase.", ["phase"], registry=REGISTRY)
FINISHED = Counter("motet_worker_finished", "Requests that ended here, by reason.", ["reason"], registry=REGISTRY)
REFUSED = Counter("motet_worker_refused", "Requests not taken, by error code.", ["code"], registry=REGISTRY)
PREEMPTIONS = Counter("motet_worker_preemptions", "Requests put back to waiting for lack of KV blocks.", registry=REGISTRY)
PREFIX_HIT_TOKENS = Counter("motet_worker_prefix_hit_tokens", "Prompt tokens served from the prefix cache.", registry=REGISTRY)
KV_USAGE = Gauge("motet_worker_kv_usage_ratio", "Share of KV blocks that hold running requests.", registry=REGISTRY)
ADAPTERS_RESIDENT = Gauge("motet_worker_adapters", "Adapter versions held, by tier.", ["tier"], registry=REGISTRY)
ADAPTER_LOADS = Counter(
    "motet_worker_adapter_loads", "Adapters brought to host memory, by source (disk, store).", ["source"], registry=REGISTRY
)
ADAPTER_LOAD_S = Histogram(
    "motet_worker_adapter_load_seconds",
    "Time to bring an adapter to host memory, by source (disk, store).",
    ["source"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
ADAPTER_LOAD_FAILURES = Counter("motet_worker_adapter_load_failures", "Adapter loads that failed.", registry=REGISTRY)
ADAPTER_CORRUPT = Counter(
    "motet_worker_adapter_corrupt", "Adapter files whose content had another digest, by source.", ["source"], registry=REGISTRY
)
ADAPTER_EVICTIONS = Counter("motet_worker_adapter_evictions", "Adapters pushed out of a tier.", ["tier"], registry=REGISTRY)
COLD_STARTS = Counter(
    "motet_worker_cold_starts",
    "Requests that found their adapter on its way to the device, by how they got in and why.",
    ["mode", "reason"],
    registry=REGISTRY,
)
COLD_START_ERROR_S = Histogram(
    "motet_worker_cold_start_error_seconds",
    "How far the time to first token of such requests was from what was predicted for them, by mode.",
    ["mode"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
LINK_BYTES = Counter("motet_worker_link_bytes", "Adapter bytes copied to the device beside the steps.", registry=REGISTRY)
LINK_BYTES_PER_S = Gauge("motet_worker_link_bytes_per_second", "Speed of those copies.", registry=REGISTRY)
COPIES = Gauge("motet_worker_adapter_copies", "Adapters on their way to the device.", registry=REGISTRY)
ASSIST_PROCESSES = Gauge("motet_worker_assist_processes", "CPU LoRA processes that serve.", registry=REGISTRY)
ASSIST_ROWS = Counter(
    "motet_worker_assist_rows",
    "Rows times layers of adapters on their way, by where the low-rank part was computed (processes, device, in_place).",
    ["where"],
    registry=REGISTRY,
)
ASSIST_FAILURES = Counter(
    "motet_worker_assist_failures", "CPU LoRA processes that were given up, by reason.", ["reason"], registry=REGISTRY
)
FRAMES = Counter("motet_worker_frames", "Token frames sent to gateways.", registry=REGISTRY)
FRAMES_LOST = Counter(
    "motet_worker_frames_lost", "Token frames given up because the bus could not take them.", registry=REGISTRY
)
LOOP_LAG_S = Counter(
    "motet_worker_engine_paused_seconds", "Time the engine waited for the event loop to take its output.", registry=REGISTRY
)
