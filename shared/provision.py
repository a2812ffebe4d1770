"""The streams and buckets Motet needs, made once by the registry and left alone when they exist."""

from __future__ import annotations

from nats.js import errors as js_errors
from nats.js.api import DiscardPolicy, KeyValueConfig, ObjectStoreConfig, RetentionPolicy, StreamConfig

from shared import subjects
from shared.bus import Bus

DAY_S = 86_400.0
STREAM_BYTES = 1 << 30  # the server sets this much disk aside at once, so it must fit a small machine


async def provision(bus: Bus, *, replicas: int = 1) -> None:
    """Create what is missing. Bounded on purpose: a full stream refuses new messages instead of dropping old ones."""
    streams = [
        StreamConfig(
            name=subjects.STREAM_REQUESTS,
            subjects=[subjects.requests("*")],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_msgs=1_000_000,
            max_bytes=STREAM_BYTES,
            max_msg_size=8 << 20,
            duplicate_window=600.0,
            num_replicas=replicas,
        ),
        StreamConfig(
            name=subjects.STREAM_RESULTS,
            subjects=[f"{subjects.RESULTS}.>"],
            max_age=DAY_S,
            max_bytes=STREAM_BYTES,
            allow_direct=True,
            duplicate_window=600.0,
            num_replicas=replicas,
        ),
        StreamConfig(
            name=subjects.STREAM_DEAD,
            subjects=[f"{subjects.DEAD}.*"],
            max_age=7 * DAY_S,
            allow_direct=True,
            max_bytes=STREAM_BYTES // 4,
            num_replicas=replicas,
        ),
        StreamConfig(
            name=subjects.STREAM_AUDIT,
            subjects=[f"{subjects.AUDIT}.*"],
            max_age=400 * DAY_S,
            max_bytes=STREAM_BYTES // 16,
            allow_direct=True,
            deny_delete=True,
            deny_purge=True,
            num_replicas=replicas,
        ),
    ]
    for stream in streams:
        try:
            await bus.js.stream_info(stream.name or "")
        except js_errors.NotFoundError:
            await bus.js.add_stream(stream)
    buckets = [
        KeyValueConfig(bucket=subjects.KV_ADAPTERS, history=1, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_KEYS, history=1, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_LEASES, history=1, ttl=30.0, replicas=replicas),
    ]
    for bucket in buckets:
        try:
            await bus.js.key_value(bucket.bucket)
        except js_errors.NotFoundError:
            await bus.js.create_key_value(bucket)
    stores = [
        ObjectStoreConfig(bucket=subjects.BLOBS, replicas=replicas),
        ObjectStoreConfig(bucket=subjects.UPLOADS, ttl=3600.0, replicas=replicas),
    ]
    for store in stores:
        try:
            await bus.js.object_store(store.bucket or "")
        except js_errors.NotFoundError:
            await bus.js.create_object_store(store.bucket or "", store)
