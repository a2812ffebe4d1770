"""What a scheduler knows, for `motet status`."""

from __future__ import annotations

import msgspec

from motet.shared.model import Mechanism
from motet.shared.wire.refusal import Refused
from motet.shared.wire.scale import Sized


class StatusRequest(msgspec.Struct, kw_only=True):
    """Asks a scheduler for its view of the workers; with `plan` also for the requests that it would move."""

    plan: bool = False
    scale: bool = False  # and for the last decisions about numbers of workers


class WorkerStatus(msgspec.Struct, kw_only=True):
    """A worker as a scheduler sees it. `age_ms` is the time since its last message; `stale`: too old to get requests.

    `waiting` counts requests that wait or load, including `in_flight`: assigned requests that the worker's state does not show
    yet. `merged`, `merged_share` and `mechanisms` are from its last snapshot.
    """

    worker_id: str
    incarnation: str
    base_model: str
    engine: str
    device: str
    running: int
    waiting: int
    in_flight: int
    max_running: int
    max_waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    adapter_bytes_free: int
    adapter_bytes_total: int
    adapters_on_device: int
    adapters_on_host: int
    draining: bool
    stale: bool
    age_ms: int
    capabilities: tuple[str, ...] = ()
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    merged: str = ""  # digest
    merged_share: float = 0.0  # of its requests
    mechanisms: dict[str, Mechanism] = {}
    kernels: str = ""  # and the note on them, as the worker's limits have them
    kernels_note: str = ""


class MoveStatus(msgspec.Struct, kw_only=True):
    """A request that would move, from and to worker ids. `adapter` is a digest, "" for the base model."""

    request_id: str
    adapter: str
    source: str
    to: str


class PlanStatus(msgspec.Struct, kw_only=True):
    """What a scheduler would move between the workers of a base model now. The waits are what a new request would wait on the
    worker with the longest queue and on the one with the shortest; `late_workers` have queued requests that miss an objective.
    `before_ms` and `after_ms`: the longest running time of a worker, without and with the moves."""

    base_model: str
    most_wait_ms: float
    least_wait_ms: float
    late_workers: int
    before_ms: float
    after_ms: float
    moves: list[MoveStatus]


class DemandStatus(msgspec.Struct, kw_only=True):
    """What all schedulers together are asked for, over the last half minute."""

    base_model: str
    requests_s: float  # the refused ones too
    refused_s: float  # for want of room or of a worker
    prompt_tokens_s: float
    output_tokens_s: float  # predicted
    adapters: int  # asked for of late
    missing: list[str] = []  # schedulers whose reports are missing, so that the rates may be too low


class ClusterStatus(msgspec.Struct, tag="cluster", kw_only=True):
    """All workers that a scheduler knows, by id, and the plans that were asked for."""

    scheduler_id: str
    workers: list[WorkerStatus]
    plans: list[PlanStatus] = []
    rebalance: Mechanism | None = None  # of this scheduler; None where requests do not move
    demand: list[DemandStatus] = []  # of the whole mesh
    scale: list[list[Sized]] = []  # by base model, the last decision last


StatusReply = ClusterStatus | Refused
