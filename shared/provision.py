"""Creates Motet's streams and buckets, and updates those of an older version. The registry runs it.

Each tenant has its own streams, so that message ids, backlog, unread results and dead letters of one tenant do not affect
another (docs/decisions/0013). All are bounded:

    requests   a full one refuses new messages at the publisher; a message id seen within ten minutes is stored once
    results    one per request id; a full one refuses new results until some are purged or a day old, and the tenant waits
    dead       the newest dead letters of seven days
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from nats import errors as nats_errors
from nats.js import errors as js_errors
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StreamConfig,
)

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import Unavailable
from motet.shared.tenancy import DEFAULT_TENANT, TENANT

N = TypeVar("N", int, float)
DAY_S = 86_400.0
TENANT_BYTES = 512 << 20  # the server sets this much disk aside at once, so it must fit a small machine
AUDIT_BYTES = 64 << 20
REQUEST_BYTES_MAX = 4 << 20
ACK_WAIT_S = 30.0  # after so long without an answer the server repeats a delivery
RECORD_BYTES = 64 << 10  # of an adapter, a key, a lease; how many of them there may be is their writers' limit
INTAKE_BYTES = 16 << 20
PREDICTOR_BYTES = 128 << 20  # a state and its successor
UPLOADS_BYTES = 2 << 30  # archives on their way to the registry, for minutes
PICTURE_FILES_BYTES = 512 << 20  # pictures behind URLs
RESULT_PICTURES_BYTES = 512 << 20  # pictures of durable requests
RESULT_PICTURES_S = 7 * DAY_S
PICTURES_BYTES = 512 << 20  # large pictures on their way to the gateway, for seconds


def disk_bytes(tenants: int, tenant_bytes: int = TENANT_BYTES, *, draws: bool = False) -> int:
    """The disk that the server sets aside for everything that `provision` creates, before anything is stored.

    `draws`: of an image base.
    """
    each = 2 * tenant_bytes + tenant_bytes // 4  # requests, results, dead letters
    drawn = PICTURES_BYTES + PICTURE_FILES_BYTES + RESULT_PICTURES_BYTES if draws else 0
    return tenants * each + AUDIT_BYTES + INTAKE_BYTES + PREDICTOR_BYTES + UPLOADS_BYTES + drawn


def request_bytes_max(bus: Bus) -> int:
    """The largest durable request in bytes, headers included; well below the server's message limit."""
    return min(REQUEST_BYTES_MAX, bus.max_payload // 2)


async def provision(
    bus: Bus,
    *,
    replicas: int = 1,
    tenants: Iterable[str] = (DEFAULT_TENANT,),
    tenant_bytes: int = TENANT_BYTES,
    picture_ttl_s: float = 0.0,
) -> None:
    """Create missing streams and buckets and update existing ones. Sizes that an operator raised are kept.

    `picture_ttl_s`: how long pictures behind URLs are kept; 0 for a base that draws none.

    Raises Unavailable naming the tenant, or JetStream's error for a bucket.
    """
    older = await _tenants_waiting(bus)
    # the default tenant first: an older version's streams carry its names and all tenants' subjects
    named = dict.fromkeys((DEFAULT_TENANT, *tenants))
    for tenant in named | dict.fromkeys(older):
        try:
            await provision_tenant(bus, tenant, replicas=replicas, tenant_bytes=tenant_bytes)
        except (js_errors.Error, nats_errors.Error, TimeoutError) as error:
            more = "" if tenant in named else "; requests of it wait, add it to --tenants and to the server's users"
            raise Unavailable(f"streams of tenant {tenant}: {str(error) or repr(error)}{more}") from error
    await _keep_stream(
        bus,
        StreamConfig(
            name=subjects.STREAM_AUDIT,
            subjects=[f"{subjects.AUDIT}.*"],
            max_age=400 * DAY_S,
            max_bytes=AUDIT_BYTES,
            allow_direct=True,
            deny_delete=True,
            deny_purge=True,
            num_replicas=replicas,
        ),
    )
    buckets = [
        KeyValueConfig(bucket=subjects.KV_ADAPTERS, history=1, max_value_size=RECORD_BYTES, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_KEYS, history=1, max_value_size=RECORD_BYTES, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_LEASES, history=1, ttl=30.0, max_value_size=RECORD_BYTES, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_PLACEMENT, history=1, max_value_size=RECORD_BYTES, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_PROBES, history=1, max_value_size=RECORD_BYTES, replicas=replicas),
        KeyValueConfig(bucket=subjects.KV_INTAKE, history=1, ttl=30 * DAY_S, max_bytes=INTAKE_BYTES, replicas=replicas),
    ]
    for bucket in buckets:
        try:
            await bus.js.key_value(bucket.bucket)
        except js_errors.NotFoundError:
            await bus.js.create_key_value(bucket)
    stores = [
        ObjectStoreConfig(bucket=subjects.BLOBS, replicas=replicas),
        ObjectStoreConfig(bucket=subjects.PREDICTOR, max_bytes=PREDICTOR_BYTES, replicas=replicas),
        ObjectStoreConfig(bucket=subjects.UPLOADS, ttl=3600.0, max_bytes=UPLOADS_BYTES, replicas=replicas),
    ]
    await _make_stores(bus, stores)
    if picture_ttl_s:
        await _provision_pictures(bus, picture_ttl_s, replicas)


async def _provision_pictures(bus: Bus, picture_ttl_s: float, replicas: int) -> None:
    """Create the buckets of an image base; pictures behind URLs are kept for as long as the option says now."""
    files, results = subjects.PICTURE_FILES, subjects.RESULT_PICTURES
    stores = [
        ObjectStoreConfig(bucket=subjects.PICTURES, ttl=3600.0, max_bytes=PICTURES_BYTES, replicas=replicas),
        ObjectStoreConfig(bucket=files, ttl=picture_ttl_s, max_bytes=PICTURE_FILES_BYTES, replicas=replicas),
        ObjectStoreConfig(bucket=results, ttl=RESULT_PICTURES_S, max_bytes=RESULT_PICTURES_BYTES, replicas=replicas),
    ]
    await _make_stores(bus, stores)
    have = (await bus.js.stream_info(f"OBJ_{files}")).config
    if have.max_age != picture_ttl_s:
        await bus.js.update_stream(have.evolve(max_age=picture_ttl_s))


async def _make_stores(bus: Bus, stores: Iterable[ObjectStoreConfig]) -> None:
    """Create the object stores that are missing."""
    for store in stores:
        try:
            await bus.js.object_store(store.bucket or "")
        except js_errors.NotFoundError:
            await bus.js.create_object_store(store.bucket or "", store)


async def provision_tenant(bus: Bus, tenant: str, *, replicas: int = 1, tenant_bytes: int = TENANT_BYTES) -> None:
    """Create or update the streams of one tenant; gateways find them by their subjects."""
    requests = subjects.requests_stream(tenant)
    await _keep_stream(
        bus,
        StreamConfig(
            name=requests,
            subjects=[subjects.requests(tenant)],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_msgs=1_000_000,
            max_bytes=tenant_bytes,
            max_msg_size=request_bytes_max(bus),
            duplicate_window=600.0,
            num_replicas=replicas,
        ),
    )
    await _keep_stream(
        bus,
        StreamConfig(
            name=subjects.results_stream(tenant),
            subjects=[subjects.results(tenant, "*")],
            discard=DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_age=DAY_S,
            max_bytes=tenant_bytes,
            allow_direct=True,
            duplicate_window=600.0,
            num_replicas=replicas,
        ),
    )
    await _keep_stream(
        bus,
        StreamConfig(
            name=subjects.dead_stream(tenant),
            subjects=[subjects.dead(tenant)],
            max_age=7 * DAY_S,
            allow_direct=True,
            max_bytes=tenant_bytes // 4,
            duplicate_window=120.0,
            num_replicas=replicas,
        ),
    )
    intake = ConsumerConfig(
        durable_name=subjects.CONSUMER_INTAKE,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=-1,
        max_ack_pending=10_000,
    )
    await bus.js.add_consumer(requests, intake)


async def _keep_stream(bus: Bus, want: StreamConfig) -> None:
    """Create a stream, or update an existing one. Sizes, ages and replicas are only ever raised."""
    try:
        have = (await bus.js.stream_info(want.name or "")).config
    except js_errors.NotFoundError:
        await bus.js.add_stream(want)
        return
    fresh = have.evolve(
        subjects=want.subjects,
        discard=want.discard,
        discard_new_per_subject=want.discard_new_per_subject,
        max_msgs_per_subject=want.max_msgs_per_subject,
        max_msg_size=want.max_msg_size,
        duplicate_window=want.duplicate_window or have.duplicate_window,
        allow_direct=bool(want.allow_direct),
        max_bytes=_larger(have.max_bytes, want.max_bytes),
        max_msgs=_larger(have.max_msgs, want.max_msgs),
        max_age=_larger(have.max_age, want.max_age),
        num_replicas=max(have.num_replicas or 1, want.num_replicas or 1),
    )
    if fresh != have:
        await bus.js.update_stream(fresh)


def _larger(have: N | None, want: N | None) -> N | None:
    """The larger of two limits; an unlimited one of ours keeps the existing value."""
    return have if want is None else max(have or want, want)


async def _tenants_waiting(bus: Bus) -> list[str]:
    """Tenants with requests in the stream of that name, which an older version let all tenants publish to."""
    try:
        info = await bus.js.stream_info(subjects.STREAM_REQUESTS, subjects_filter=">")
    except js_errors.NotFoundError:
        return []
    words = [subject.rsplit(".", 1)[-1] for subject in info.state.subjects or {}]
    return [word for word in words if TENANT.fullmatch(word)]
