"""The names of all NATS subjects, streams and buckets. No other file spells them out."""

from __future__ import annotations

from motet.shared.tenancy import DEFAULT_TENANT

SUBMIT = "motet.v1.submit"  # request/reply, queue group: gateway -> scheduler
PREDICT = "motet.v1.predict"  # request/reply, queue group: scheduler -> predictor
SCHEDULER_STATUS = "motet.v1.scheduler.status"  # request/reply, queue group: any -> one scheduler's view of the workers
MOVE = "motet.v1.move"  # core: the scheduler that plans -> gateways, a request that should go on elsewhere
DEMAND = "motet.v1.demand"  # core: scheduler -> schedulers, what it was asked for
SCALE = "motet.v1.scale"  # core: the scheduler that plans -> schedulers and gateways, how many workers there should be
HOMES = "motet.v1.homes"  # core: gateway -> the scheduler that plans, the adapters of a plan's workers
WAKE = "motet.v1.wake"  # core: gateway -> schedulers, requests wait and no worker is there
OUTCOME = "motet.v1.outcome"  # core: gateway -> predictors, the true length of a finished request
REGISTRY = "motet.v1.registry"  # request/reply, queue group: one subject per verb below it
WORKER_STATES = "motet.v1.worker.*.state"
WORKER_NOTICES = "motet.v1.worker.*.notice"
STREAMS = "motet.v1.stream.*"
REQUESTS = "motet.v1.requests"  # JetStream work queue, one per tenant: .<tenant>
RESULTS = "motet.v1.results"  # JetStream, one stream per tenant: .<tenant>.<request id>
TOKENS = "motet.v1.tokens"  # core, optional live tokens of a durable request: .<tenant>.<request id>
DEAD = "motet.v1.dead"  # JetStream, one stream per tenant: .<tenant>, requests that can never succeed, with the reason
TENANT_API = "motet.v1.api"  # a tenant's way to JetStream in place of $JS.API, which is its own account's
AUDIT = "motet.v1.audit"  # JetStream: .<kind>, who changed which adapter or key

STREAM_REQUESTS = "MOTET_REQUESTS"  # the default tenant's; `requests_stream` names the others', and so on
STREAM_RESULTS = "MOTET_RESULTS"
STREAM_DEAD = "MOTET_DEAD"
STREAM_AUDIT = "MOTET_AUDIT"
KV_KEYS = "motet_keys"  # API keys by id, as digests
KV_ADAPTERS = "motet_adapters"
KV_LEASES = "motet_leases"
KV_INTAKE = "motet_intake"  # <request stream>.<sequence>: how often a request was handed back undone
KV_PLACEMENT = "motet_placement"  # <worker id>: the adapters that it is to keep loaded, by the scheduler that plans
KV_PROBES = "motet_probes"  # <digest>: what its answers to the probe were at its first load, by the worker that loaded it
CONSUMER_INTAKE = "intake"  # the durable consumer on each request stream
BLOBS = "motet_blobs"  # object store: validated adapter blobs by content digest
PREDICTOR = "motet_predictor"  # object store: what predictors have learned
UPLOADS = "motet_uploads"  # object store: archives on their way to validation, short-lived
PICTURES = "motet_pictures"  # object store: pictures that are too large for a frame, short-lived; of image meshes only
PICTURE_FILES = "motet_picture_files"  # object store: pictures behind URLs, for an hour; of image meshes only
RESULT_PICTURES = "motet_result_pictures"  # object store: pictures of durable requests, for seven days; of image meshes only


def assign(worker_id: str) -> str:
    """scheduler -> worker, request/reply: GenerateRequest in, Accepted or Refused out."""
    return f"motet.v1.worker.{worker_id}.assign"


def ping(worker_id: str) -> str:
    """gateway -> worker, request/reply: is it alive?"""
    return f"motet.v1.worker.{worker_id}.ping"


def kv(worker_id: str) -> str:
    """worker -> worker, request/reply: KV blocks of a request that has moved."""
    return f"motet.v1.worker.{worker_id}.kv"


def control(worker_id: str) -> str:
    """gateway, scheduler, registry -> worker: cancel, drain, load, unload."""
    return f"motet.v1.worker.{worker_id}.control"


def notice(worker_id: str) -> str:
    """worker -> gateways: it starts, has failed, or stops."""
    return f"motet.v1.worker.{worker_id}.notice"


def state(worker_id: str) -> str:
    """worker -> schedulers: WorkerSnapshot and WorkerDelta."""
    return f"motet.v1.worker.{worker_id}.state"


def stream(gateway_id: str) -> str:
    """worker -> gateway: one TokenFrame per engine step."""
    return f"motet.v1.stream.{gateway_id}"


def registry(verb: str) -> str:
    """any -> registry: register, delete, rollback, alias, pin, list, release; worker -> registry: quarantine."""
    return f"{REGISTRY}.{verb}"


def requests(tenant: str) -> str:
    """upstream -> gateway intake (JetStream)."""
    return f"{REQUESTS}.{tenant}"


def results(tenant: str, request_id: str) -> str:
    """gateway intake -> upstream (JetStream)."""
    return f"{RESULTS}.{tenant}.{request_id}"


def tokens(tenant: str, request_id: str) -> str:
    """gateway intake -> upstream, while the request runs (core)."""
    return f"{TOKENS}.{tenant}.{request_id}"


def dead(tenant: str) -> str:
    """gateway intake -> operators: a poison message and why (JetStream)."""
    return f"{DEAD}.{tenant}"


def requests_stream(tenant: str) -> str:
    """The stream that holds a tenant's durable requests."""
    return _stream_of(STREAM_REQUESTS, tenant)


def results_stream(tenant: str) -> str:
    """The stream that holds a tenant's results."""
    return _stream_of(STREAM_RESULTS, tenant)


def dead_stream(tenant: str) -> str:
    """The stream that holds a tenant's dead letters."""
    return _stream_of(STREAM_DEAD, tenant)


def _stream_of(stream: str, tenant: str) -> str:
    return stream if tenant == DEFAULT_TENANT else f"{stream}_{tenant}"


def audit(kind: str) -> str:
    """gateway, registry -> operators: a change of an adapter or a key (JetStream)."""
    return f"{AUDIT}.{kind}"
