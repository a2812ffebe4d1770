"""The worker's metrics. Labels are bounded: tiers, sources, kinds; never adapters or requests."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from motet.shared.telemetry import LATENCY_BUCKETS_S, REGISTRY

STEP_S = Histogram("motet_worker_step_seconds", "Duration of an engine step.", buckets=LATENCY_BUCKETS_S, registry=REGISTRY)
STEP_DRIFT = Gauge(
    "motet_worker_step_time_drift_ratio",
    "Recent step times relative to the worker's profile, minus 1, by kind: decode, or prefill for steps with any prefill.",
    ["kind"],
    registry=REGISTRY,
)
TOKENS = Counter("motet_worker_tokens", "Tokens computed by kind: prefill, decode.", ["kind"], registry=REGISTRY)
BATCH_ROWS = Histogram(
    "motet_worker_batch_rows",
    "Requests in an engine step.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    registry=REGISTRY,
)
STEP_FAILURES = Counter("motet_worker_step_failures", "Engine steps that raised an exception.", registry=REGISTRY)
REQUESTS = Gauge("motet_worker_requests", "Requests on this worker by phase.", ["phase"], registry=REGISTRY)
FINISHED = Counter("motet_worker_finished", "Requests that ended on this worker, by reason.", ["reason"], registry=REGISTRY)
REFUSED = Counter("motet_worker_refused", "Requests that this worker refused, by error code.", ["code"], registry=REGISTRY)
PREEMPTIONS = Counter("motet_worker_preemptions", "Requests preempted for lack of KV blocks.", registry=REGISTRY)
PREFIX_HIT_TOKENS = Counter("motet_worker_prefix_hit_tokens", "Prompt tokens served from the prefix cache.", registry=REGISTRY)
KV_USAGE = Gauge(
    "motet_worker_kv_usage_ratio",
    "Share of KV blocks that a new request cannot get: running ones hold it, or used adapters.",
    registry=REGISTRY,
)
ADAPTERS_RESIDENT = Gauge(
    "motet_worker_adapters", "Adapter versions resident on this worker, by tier.", ["tier"], registry=REGISTRY
)
ADAPTER_LOADS = Counter(
    "motet_worker_adapter_loads", "Adapters loaded into host memory, by source: disk or store.", ["source"], registry=REGISTRY
)
ADAPTER_LOAD_S = Histogram(
    "motet_worker_adapter_load_seconds",
    "Time to load an adapter into host memory, by source: disk or store.",
    ["source"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
LORA_LOAD_S = Histogram(
    "vllm:lora_adapter_load_seconds",
    "Time of a transition of an adapter: load (from disk or the object store to host memory), activate (to the device).",
    ["transition"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
ADAPTER_LOAD_FAILURES = Counter(
    "motet_worker_adapter_load_failures", "Adapter loads into host memory that failed.", registry=REGISTRY
)
ADAPTER_CORRUPT = Counter(
    "motet_worker_adapter_corrupt",
    "Adapter files whose content did not match their digest, by source.",
    ["source"],
    registry=REGISTRY,
)
ADAPTER_EVICTIONS = Counter("motet_worker_adapter_evictions", "Adapters evicted, by tier.", ["tier"], registry=REGISTRY)
COLD_STARTS = Counter(
    "motet_worker_cold_starts",
    "Requests whose adapter was being copied to the device, by the way they joined the batch and the reason for it.",
    ["mode", "reason"],
    registry=REGISTRY,
)
COLD_START_ERROR_S = Histogram(
    "motet_worker_cold_start_error_seconds",
    "Absolute error of the predicted time to first token of cold starts, by the way they joined the batch.",
    ["mode"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
LINK_BYTES = Counter("motet_worker_link_bytes", "Adapter bytes copied to the device while steps ran.", registry=REGISTRY)
LINK_BYTES_PER_S = Gauge(
    "motet_worker_link_bytes_per_second", "Measured rate of adapter copies to the device.", registry=REGISTRY
)
COPIES = Gauge("motet_worker_adapter_copies", "Adapters being copied to the device.", registry=REGISTRY)
ASSIST_PROCESSES = Gauge("motet_worker_assist_processes", "CPU LoRA processes in service.", registry=REGISTRY)
ASSIST_ROWS = Counter(
    "motet_worker_assist_rows",
    "Rows times layers of adapters being copied, by where their LoRA part was computed: processes, device, in_place.",
    ["where"],
    registry=REGISTRY,
)
ASSIST_FAILURES = Counter(
    "motet_worker_assist_failures",
    "CPU LoRA processes that were replaced after a failure, by reason.",
    ["reason"],
    registry=REGISTRY,
)
MERGED_STEPS = Counter("motet_worker_merged_steps", "Engine steps with an adapter merged into the weights.", registry=REGISTRY)
MERGE_SWITCHES = Counter(
    "motet_worker_merge_switches", "Changes of the adapter that is merged into the weights, none included.", registry=REGISTRY
)
MERGE_S = Counter(
    "motet_worker_merge_seconds",
    "Time between steps in which copies of the weights were merged with an adapter.",
    registry=REGISTRY,
)
MERGED_BYTES = Gauge("motet_worker_merged_copy_bytes", "KV memory lent to the merged copy of the weights.", registry=REGISTRY)
MERGED_SHARE = Gauge(
    "motet_worker_merged_share_ratio",
    "Share of the worker's requests that are for the adapter that is merged into the weights; 0 without one.",
    registry=REGISTRY,
)
RESTING = Gauge(
    "motet_worker_resting_requests", "Running requests that wait while another adapter is merged.", registry=REGISTRY
)
LORA_SHARE = Gauge(
    "motet_worker_lora_share_ratio",
    "What LoRA adds to a step, as a share of the step without it; learned from merged and unmerged steps.",
    registry=REGISTRY,
)
FRAMES = Counter("motet_worker_frames", "Token frames sent to gateways.", registry=REGISTRY)
FRAMES_LOST = Counter("motet_worker_frames_lost", "Token frames dropped because NATS did not accept them.", registry=REGISTRY)
LOOP_LAG_S = Counter(
    "motet_worker_engine_paused_seconds", "Time the engine waited for the event loop to accept its output.", registry=REGISTRY
)
KV_FETCHES = Counter(
    "motet_worker_kv_fetches",
    "Moved requests whose KV blocks could be fetched from their old worker, by outcome: whole, late, absent, refused,"
    " other_content, full, broken; busy: not tried.",
    ["outcome"],
    registry=REGISTRY,
)
KV_BLOCKS_MOVED = Counter("motet_worker_kv_moved_blocks", "KV blocks that came from other workers.", registry=REGISTRY)
KV_BYTES_MOVED = Counter("motet_worker_kv_moved_bytes", "Bytes of KV blocks that came from other workers.", registry=REGISTRY)
KV_BYTES_PER_S = Gauge("motet_worker_kv_bytes_per_second", "Measured rate of KV blocks from other workers.", registry=REGISTRY)
