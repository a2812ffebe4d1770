"""The worker's metrics. Labels are bounded: tiers, sources, kinds; never adapters or requests."""

from __future__ import annotations

from motet.shared.telemetry import counter, gauge, histogram, latency

STEP_S = latency("motet_worker_step_seconds", "Duration of an engine step.")
STEP_DRIFT = gauge(
    "motet_worker_step_time_drift_ratio",
    "Recent step times relative to the worker's profile, minus 1, by kind: decode, or prefill for steps with any prefill.",
    ["kind"],
)
TOKENS = counter("motet_worker_tokens", "Tokens computed by kind: prefill, decode.", ["kind"])
BATCH_ROWS = histogram(
    "motet_worker_batch_rows", "Requests in an engine step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
STEP_FAILURES = counter("motet_worker_step_failures", "Engine steps that raised an exception.")
REQUESTS = gauge("motet_worker_requests", "Requests on this worker by phase.", ["phase"])
FINISHED = counter("motet_worker_finished", "Requests that ended on this worker, by reason.", ["reason"])
REFUSED = counter("motet_worker_refused", "Requests that this worker refused, by error code.", ["code"])
PREEMPTIONS = counter("motet_worker_preemptions", "Requests preempted for lack of KV blocks.")
PREFIX_HIT_TOKENS = counter("motet_worker_prefix_hit_tokens", "Prompt tokens served from the prefix cache.")
KV_USAGE = gauge(
    "motet_worker_kv_usage_ratio", "Share of KV blocks that a new request cannot get: running ones hold it, or used adapters."
)
ADAPTERS_RESIDENT = gauge("motet_worker_adapters", "Adapter versions resident on this worker, by tier.", ["tier"])
ADAPTER_LOADS = counter("motet_worker_adapter_loads", "Adapters loaded into host memory, by source: disk or store.", ["source"])
ADAPTER_LOAD_S = latency(
    "motet_worker_adapter_load_seconds", "Time to load an adapter into host memory, by source: disk or store.", ["source"]
)
LORA_LOAD_S = latency(
    "vllm:lora_adapter_load_seconds",
    "Time of a transition of an adapter: load (from disk or the object store to host memory), activate (to the device).",
    ["transition"],
)
ADAPTER_LOAD_FAILURES = counter("motet_worker_adapter_load_failures", "Adapter loads into host memory that failed.")
ADAPTER_CORRUPT = counter(
    "motet_worker_adapter_corrupt", "Adapter files whose content did not match their digest, by source.", ["source"]
)
ADAPTER_EVICTIONS = counter("motet_worker_adapter_evictions", "Adapters evicted, by tier.", ["tier"])
COLD_STARTS = counter(
    "motet_worker_cold_starts",
    "Requests whose adapter was being copied to the device, by the way they joined the batch and the reason for it.",
    ["mode", "reason"],
)
COLD_START_ERROR_S = latency(
    "motet_worker_cold_start_error_seconds",
    "Absolute error of the predicted time to first token of cold starts, by the way they joined the batch.",
    ["mode"],
)
PROBES = counter(
    "motet_worker_adapter_probes",
    "Adapters compared with their files and first answers after a copy to the device, by verdict: good; small (too close to the"
    " base model to tell); partial, ignored, other (quarantined); base (this worker's base model differs); unread.",
    ["verdict"],
)
PROBE_S = latency("motet_worker_adapter_probe_seconds", "Time that the engine took to probe an adapter.")
LINK_BYTES = counter("motet_worker_link_bytes", "Adapter bytes copied to the device while steps ran.")
LINK_BYTES_PER_S = gauge("motet_worker_link_bytes_per_second", "Measured rate of adapter copies to the device.")
COPIES = gauge("motet_worker_adapter_copies", "Adapters being copied to the device.")
ASSIST_PROCESSES = gauge("motet_worker_assist_processes", "CPU LoRA processes in service.")
ASSIST_ROWS = counter(
    "motet_worker_assist_rows",
    "Rows times layers of adapters being copied, by where their LoRA part was computed: processes, device, in_place.",
    ["where"],
)
ASSIST_FAILURES = counter(
    "motet_worker_assist_failures", "CPU LoRA processes that were replaced after a failure, by reason.", ["reason"]
)
MERGED_STEPS = counter("motet_worker_merged_steps", "Engine steps with an adapter merged into the weights.")
MERGE_SWITCHES = counter(
    "motet_worker_merge_switches", "Changes of the adapter that is merged into the weights, none included."
)
MERGE_S = counter(
    "motet_worker_merge_seconds", "Time between steps in which copies of the weights were merged with an adapter."
)
MERGED_BYTES = gauge("motet_worker_merged_copy_bytes", "KV memory lent to the merged copy of the weights.")
MERGED_SHARE = gauge(
    "motet_worker_merged_share_ratio",
    "Share of the worker's requests that are for the adapter that is merged into the weights; 0 without one.",
)
RESTING = gauge("motet_worker_resting_requests", "Running requests that wait while another adapter is merged.")
LORA_SHARE = gauge(
    "motet_worker_lora_share_ratio",
    "What LoRA adds to a step, as a share of the step without it; learned from merged and unmerged steps.",
)
MECHANISM = gauge(
    "motet_worker_mechanism",
    "1 for the state of each mechanism that turns on by itself (merge, queues, foresight, assist): on, waiting, off; else 0.",
    ["name", "state"],
)
IMAGE_STEPS = counter(
    "motet_worker_image_steps",
    "Denoising steps by size of the pictures: the side of the smallest square of as many pixels (64 to 2048).",
    ["bucket"],
)
IMAGE_ROWS = histogram(
    "motet_worker_image_rows",
    "Rows of a denoising step: two for a picture with guidance, else one.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
)
IMAGE_ADAPTERS = histogram(
    "motet_worker_image_adapters_per_step", "Different adapters in a denoising step.", buckets=(0, 1, 2, 4, 8, 16, 32, 64)
)
IMAGE_KNEE_ROWS = gauge(
    "motet_worker_image_knee_rows",
    "Rows that a denoising step should have: more would delay its pictures and draw hardly more of them per second. By size of"
    " the pictures, as for motet_worker_image_steps_total.",
    ["bucket"],
)
IMAGE_PASS_S = latency(
    "motet_worker_image_pass_seconds",
    "Duration of an image engine's steps by stage: encode (prompts and source pictures), denoise (one step), decode.",
    ["stage"],
)
IMAGE_PICTURES = counter(
    "motet_worker_image_pictures", "Pictures that an image engine encoded or decoded, by stage: encode, decode.", ["stage"]
)
IMAGE_CHECKPOINT_BYTES = counter(
    "motet_worker_image_checkpoint_bytes", "Bytes of checkpoints of pictures that were sent to gateways."
)
IMAGE_PREVIEWS = counter("motet_worker_image_previews", "Previews of pictures that were sent to gateways.")
FRAMES = counter("motet_worker_frames", "Token frames sent to gateways.")
FRAMES_LOST = counter("motet_worker_frames_lost", "Token frames dropped because NATS did not accept them.")
LOOP_LAG_S = counter("motet_worker_engine_paused_seconds", "Time the engine waited for the event loop to accept its output.")
KV_FETCHES = counter(
    "motet_worker_kv_fetches",
    "Requests whose KV blocks could be fetched from their old worker or one that has their prompt cached, by outcome: whole,"
    " late, absent, refused, other_content, full, broken, cancelled; shared: they waited for another one's; busy: not tried.",
    ["outcome"],
)
KV_BLOCKS_MOVED = counter("motet_worker_kv_moved_blocks", "KV blocks that came from other workers.")
KV_BYTES_MOVED = counter("motet_worker_kv_moved_bytes", "Bytes of KV blocks that came from other workers.")
KV_BYTES_PER_S = gauge("motet_worker_kv_bytes_per_second", "Measured rate of KV blocks from other workers.")
