"""The cost of `policies.cluster.shared_cost` for one worker, by the plain formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.shared_cost import EVICTED, LASTING, PENALTY_MS, STRANGER, YOUNG, YOUNG_EACH, YOUNG_STEPS
from motet.policies.cluster.worker_load import tokens_left, tokens_to_prefill
from motet.policies.memory.kv_travel import SURE
from motet.policies.times.perf_model import MIB, decode_ms, fetch_ms, load_ms, lora_load, prefill_ms
from motet.shared.model import PerfModel, RequestBrief, Tier, WorkerLimits


@dataclass(kw_only=True)
class Seen:
    """One worker as the formula sees it.

    `requests` are in order of arrival, each with the time since when it is in its phase; `tier`: where the requested adapter
    is.
    """

    limits: WorkerLimits
    perf: PerfModel
    kv_blocks_free: int
    tier: Tier | None
    cached_tokens: int = 0  # of the request's prompt
    lent_tokens: int = 0  # of it, that another worker has cached
    adapter_bytes_free: float = inf
    home: bool | None = None  # whether the requested adapter is at home here; None where it has no home anywhere
    requests: Sequence[tuple[RequestBrief, float]]


# in one piece: the formula, whose terms share the names of the first lines
def cost_on(worker: Seen, ask: Ask, now_s: float, avg_resp_len: float) -> tuple[float, float]:
    """The formula, term by term. Returns the cost, and the largest share by which an objective is missed (0 or less: none)."""
    perf, limits, kernel, rank = worker.perf, worker.limits, worker.perf.kernel, ask.rank
    requests, tokens = [brief for brief, _ in worker.requests], ask.tokens - worker.cached_tokens
    queue, running = ([r for r in requests if (r.phase == "running") == runs] for runs in (False, True))
    n, ranks, out = len(requests), [r.rank for r in requests], float(ask.out_tokens) or avg_resp_len
    left, queue_tokens = sum(map(tokens_left, running)), sum(map(tokens_to_prefill, queue))
    opened_s = next((since_s for r, since_s in worker.requests if r.phase != "running"), -inf)
    began_s = next((since_s for r, since_s in reversed(worker.requests) if r.phase == "running"), -inf)

    rows, loads = [r.rows for r in requests], [r.rows * r.rank for r in requests]
    if kernel == "mbgmv":
        before, after = sum(loads), sum(loads) + ask.rows * rank
    else:
        before, after = lora_load(kernel, ranks), lora_load(kernel, [*ranks, rank])
    step = decode_ms(perf, sum(rows) + ask.rows, after)
    d_step = step - decode_ms(perf, float(sum(rows)), before)
    queued_ms = prefill_ms(perf, float(queue_tokens), lora_load(kernel, [r.rank for r in queue]))
    joined = prefill_ms(perf, float(queue_tokens + tokens), lora_load(kernel, [*(r.rank for r in queue), rank]))
    alone = prefill_ms(perf, float(tokens), float(rank))
    joins = max(0.0, 1.0 - (now_s - opened_s) * 1000 / step)

    copy = fetch = 0.0
    for digest, size_bytes in [(ask.adapter, ask.adapter_bytes), *ask.more] if ask.adapter else []:
        used = any(digest in r.adapter_digests for r in requests)
        tier = worker.tier if digest == ask.adapter else None
        copy += 0.0 if used or tier == "device" else load_ms(perf, size_bytes)
        fetch += 0.0 if used or tier in ("device", "host") else fetch_ms(perf, size_bytes)
    stall = alone + joins * (joined - queued_ms - alone) + (copy if limits.copies == "stall" else 0.0)
    fading = YOUNG_STEPS * step / 1000
    missed = (1 - joins) * YOUNG_EACH * len(queue)
    young = max(YOUNG * exp((began_s - now_s) / fading), missed * exp((opened_s - now_s) / fading))

    slot_wait = 0.0
    room = max(0.0, n + 1 - limits.max_running) * step * avg_resp_len / max(1, len(running))
    total, free = limits.kv_blocks_most * limits.block_size, worker.kv_blocks_free * limits.block_size
    needed = tokens + out + queue_tokens + sum(map(tokens_left, queue)) + 0.5 * left
    room += step * max(0.0, needed - free) / max(1, total - free) * avg_resp_len
    others = n * ((stall + room) / avg_resp_len + LASTING * d_step) + young * stall
    if ask.adapter:
        used, slots = {digest for r in requests for digest in r.adapter_digests}, limits.adapter_slots or inf
        if ask.adapter not in used and slots < inf:
            others += n * step * max(0.0, len(used) + 1 - (slots - sqrt(slots))) / slots
            slot_wait = step * max(0.0, len(used) + 1 - slots) / slots * avg_resp_len
        loaded = used | ({ask.adapter} if worker.tier == "device" else set())
        full = len(loaded) >= slots or worker.adapter_bytes_free < ask.adapter_bytes
        others += (n + 1) * copy / avg_resp_len * (EVICTED * full + STRANGER * (worker.home is False)) * len(used) / slots

    lacks = max(0, worker.lent_tokens - worker.cached_tokens)
    travel = perf.kv_base_ms + lacks * perf.kv_ms_per_mib * limits.kv_token_bytes / MIB
    fetches = bool(limits.kv_format) and travel < SURE * perf.prefill_token_ms * lacks
    saved = perf.prefill_token_ms * lacks - max(0.0, travel - (queued_ms - perf.prefill_base_ms)) if fetches else 0.0
    wait = joined - saved + (copy if limits.copies != "bridged" else 0.0) + fetch + room + slot_wait
    tpot = step + n * perf.prefill_base_ms / avg_resp_len
    tightest = min((r.tpot_slo_ms for r in requests if r.tpot_slo_ms), default=inf)
    whole = wait + 0.5 * step + out * tpot
    excess = [(wait + 0.5 * step) / ask.ttft_slo_ms - 1, tpot / ask.tpot_slo_ms - 1, tpot / tightest - 1]
    excess.append(whole / ask.e2e_slo_ms - 1)
    return others + tpot + wait / out + PENALTY_MS * sum(max(0.0, share) for share in excess), max(excess)
