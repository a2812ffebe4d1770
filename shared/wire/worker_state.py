"""The state of a worker: worker -> schedulers, registry and the gateways' metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

from motet.shared.model import Mechanism, PerfModel, RequestBrief, Residency, WorkerLimits


class WorkerSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """The complete state of a worker, sent at start and with heartbeats. It replaces everything known before.

    `incarnation` changes with every process start; `seq` counts snapshots and deltas together from 1. Without `lists_disk` the
    adapters that are on disk only are left out, and the receiver keeps what it knew of them. `kv_blocks_free` counts the blocks
    that a new request could get if all cached entries were evicted; `adapter_bytes_free` counts empty bytes. If KV blocks and
    adapters share their memory (`WorkerLimits.kv_block_bytes`), the same bytes count in both. `merged` is the digest of the
    adapter that is merged into the weights, "" for none; `merged_share` is its share of `requests`. `prefixes` are the keys of
    the KV blocks that can be reused (8 bytes each: `policies.memory.kv_blocks.short_key`). None leaves them as they were known,
    but for the changes since the last message, `cached` and `uncached`.
    """

    worker_id: str
    incarnation: str
    seq: int
    limits: WorkerLimits
    perf: PerfModel
    kv_blocks_free: int
    adapter_bytes_free: int
    draining: bool
    requests: list[RequestBrief]
    adapters: list[Residency]
    lists_disk: bool = True
    merged: str = ""
    merged_share: float = 0.0
    mechanisms: dict[str, Mechanism] = {}  # by name; without those that are not to turn on by themselves
    prefixes: bytes | None = None
    cached: bytes = b""
    uncached: bytes = b""


class WorkerDelta(msgspec.Struct, tag="delta", kw_only=True):
    """The changes since `seq - 1`; a heartbeat may contain none. A receiver that missed one waits for the next snapshot.

    `running_left`: output tokens that all running requests together are still expected to produce. `cached`, `uncached`: keys
    of KV blocks that can be reused from now on, or no longer, as in a snapshot's `prefixes`.
    """

    worker_id: str
    incarnation: str
    seq: int
    kv_blocks_free: int
    adapter_bytes_free: int
    draining: bool
    changed: list[RequestBrief] = []  # new, or in a new phase
    removed: list[str] = []
    resident: list[Residency] = []  # now in this tier
    evicted: list[str] = []  # removed from every tier
    running_left: int | None = None
    cached: bytes = b""
    uncached: bytes = b""


WorkerState = WorkerSnapshot | WorkerDelta


class WorkerNotice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Published by a worker that does not serve: when it starts, fails or stops.

    `reason`: why it failed, in one line; else empty. A killed worker sends no notice: its lease expires.
    """

    worker_id: str
    incarnation: str
    base_model: str
    event: Literal["starting", "failed", "stopped"]
    reason: str = ""


class Lease(msgspec.Struct, kw_only=True):
    """A value of KV `motet_leases`, keys `worker.<id>` and `gateway.<id>` (msgpack), renewed twice a second."""

    incarnation: str
    renewed_unix_ms: int


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    """Asks a worker whether it is alive."""


class Pong(msgspec.Struct, tag="pong", kw_only=True):
    """The worker's event loop runs."""
