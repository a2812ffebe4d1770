"""Messages between Motet's services: msgspec structs in msgpack.

Rules: every top-level message carries `v`. Fields are only ever added, with defaults. Token ids are little-endian int32 bytes
(`pack_tokens`, `unpack_tokens`). Frequent messages are array-like. Messages of other systems are JSON; their schemas are in
docs/nats.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from sys import byteorder
from typing import Literal

import msgspec

from motet.shared.errors import ErrorInfo
from motet.shared.model import (
    AdapterEntry,
    AdapterRef,
    AdapterVersion,
    EmbeddingParams,
    FinishReason,
    PerfModel,
    RequestBrief,
    Residency,
    SamplingParams,
    Slo,
    WorkerLimits,
)

VERSION = 1


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    packed = array("i", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    unpacked = array("i")
    unpacked.frombytes(data)
    if byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


# ---- submit (gateway -> scheduler) and assign (scheduler -> worker): the same request, the scheduler adds its estimate


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Names the worker that holds a moved request's KV blocks for the next worker.

    A worker with the token may read them once.
    """

    worker_id: str
    token: str


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt: the bytes of its file, PNG, JPEG, WebP or GIF. `param`: the client's field, for errors."""

    data: bytes
    param: str


class GenerateRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate. A request for `n` choices becomes n of these. A resumed request carries its tokens so far.

    With `embedding` the prompt's embedding is wanted instead: the only item contains it, and no tokens.

    (request_id, epoch) is unique: every resubmission by the owning gateway raises `epoch` by one, and items of a worker's
    frames count only with the latest epoch. Output token i has index i, counted from 0 across epochs.
    """

    request_id: str
    gateway_id: str
    base_model: str
    prompt: bytes  # pack_tokens
    sampling: SamplingParams
    slo: Slo
    epoch: int = 0
    output: bytes = b""  # pack_tokens: tokens already produced in earlier epochs
    adapter: AdapterRef | None = None
    tenant: str = "default"
    tenant_weight: float = 1.0  # its share relative to other tenants' while workers are saturated
    exclude_workers: tuple[str, ...] = ()  # lost or refused in earlier epochs
    predicted_tokens: int = 0  # set by the scheduler: expected output length
    features: bytes = b""  # policies.lengths.features: for the predictor; not passed on to workers
    prompt_text: str = ""  # an excerpt, for a predictor that reads text; only with --send-prompts, not passed on to workers
    cache_salt: str = ""  # prompts share KV blocks only with prompts of the same tenant and the same salt
    priority: int = 0  # 0 or more; waiting requests with a smaller one go first
    repeated: int = 0  # refusals that the gateway repeated to this tenant by itself since its last submission
    needs: dict[str, str] = {}  # capabilities (`model.Capability`) that its worker must have, and the client's field for each
    move_to: str = ""  # the worker that a Move named: it is tried first; not passed on to workers
    kv: KvOffer | None = None  # of a moved request: its worker may fetch KV blocks instead of computing them again
    losses: int = 0  # workers lost with it in a row, without a new token
    embedding: EmbeddingParams | None = None  # needs "embeddings"
    images: list[Image] = []  # needs "images"; the prompt has the model's placeholder for each, in this order
    v: int = VERSION


class Assigned(msgspec.Struct, tag="assigned", kw_only=True):
    """Answer to submit: `worker_id` has accepted the request and will send its tokens."""

    worker_id: str
    predicted_tokens: int
    v: int = VERSION


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """Answer to assign: the request is queued or running; frames will follow on the gateway's stream."""

    worker_id: str
    v: int = VERSION


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The request was refused, and why. `shared.errors.from_info` turns it into an exception."""

    error: ErrorInfo
    v: int = VERSION


SubmitReply = Assigned | Refused
AssignReply = Accepted | Refused


# ---- token frames (worker -> gateway): one message per gateway per engine step


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a drawn token and of the most likely tokens, most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StreamItem(msgspec.Struct, array_like=True):
    """New tokens of one request. `tokens[0]` has output index `index`.

    `finish` is set on the last item. With finish "stop" the last token is the EOS or stop token that ended it
    (`stop_token` repeats its id); it counts as usage and is not shown. With finish "error", `error` says why.
    """

    request_id: str
    epoch: int
    index: int
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0  # on the first item: prompt tokens served from the prefix cache
    queue_ms: float = 0.0  # on the first item: from arrival at the worker to its first prefill chunk
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first item: one per prompt token, None for the first
    embedding: bytes = b""  # little-endian float32; the item has finish "stop" and no tokens
    prompt_tokens: int = 0  # on the first item of a prompt with images: its tokens with theirs


class TokenFrame(msgspec.Struct, array_like=True):
    """All new tokens of one gateway's requests after one engine step."""

    worker_id: str
    step: int
    items: list[StreamItem]
    v: int = VERSION


# ---- control (gateway, scheduler -> worker)


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """Stop a request of this epoch or an older one. Unknown ids are ignored. With `kv_token`, its KV blocks are held for a
    moment for the worker that knows the token."""

    request_id: str
    epoch: int
    kv_token: str = ""


class Drain(msgspec.Struct, tag="drain", kw_only=True):
    """Refuse new work, finish running requests, then stop."""


Control = Cancel | Drain


# ---- move (scheduler -> gateways): only the owner of the request acts


class Move(msgspec.Struct, kw_only=True):
    """Hand a request of this epoch to the worker `to`, with its tokens so far, in the next epoch.

    Only the owner of the request acts, and only if the request is in this epoch and on another worker than `to`. `kv`: fetching
    its KV blocks is predicted to be faster than computing them again.
    """

    request_id: str
    epoch: int
    to: str
    kv: bool = False
    v: int = VERSION


# ---- KV blocks of a moved request (its new worker -> its old worker)


class OpenKv(msgspec.Struct, tag="open", kw_only=True):
    """Asks for the KV blocks that are held under a token. `kv_format` is `WorkerLimits.kv_format`; `keys` name the content of
    the request's full blocks in order (`policies.memory.kv_blocks`). The blocks are held for `within_s` longer."""

    token: str
    kv_format: str
    keys: list[bytes]
    within_s: float
    v: int = VERSION


class ReadKv(msgspec.Struct, tag="read", kw_only=True):
    """Asks for `size` bytes of the opened blocks from byte `offset` on. The range must lie within one piece (`KvOpened`)."""

    token: str
    offset: int
    size: int
    v: int = VERSION


class ProbeKv(msgspec.Struct, tag="probe", kw_only=True):
    """Asks for `size` zero bytes, to measure how long a transfer takes."""

    size: int
    v: int = VERSION


KvRequest = OpenKv | ReadKv | ProbeKv


class KvOpened(msgspec.Struct, tag="opened", kw_only=True):
    """The blocks of the first `blocks` keys can be read: `block_bytes` each, one after another, in pieces of `piece_blocks`."""

    blocks: int
    block_bytes: int
    piece_blocks: int
    v: int = VERSION


class KvPart(msgspec.Struct, tag="part", kw_only=True):
    """The bytes that were asked for."""

    data: bytes
    v: int = VERSION


KvReply = KvOpened | KvPart | Refused


# ---- ping (gateway -> worker): asked of workers that hold requests and are quiet


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    """Asks a worker whether it is alive."""

    v: int = VERSION


class Pong(msgspec.Struct, tag="pong", kw_only=True):
    """The worker's event loop runs."""

    v: int = VERSION


# ---- worker state (worker -> schedulers, registry, gateways' metrics)


class WorkerSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """The complete state of a worker, sent at start and with heartbeats. It replaces everything known before.

    `incarnation` changes with every process start; `seq` counts snapshots and deltas together from 1. Without `lists_disk` the
    adapters that are on disk only are left out, and the receiver keeps what it knew of them. `kv_blocks_free` counts the blocks
    that a new request could get if all cached entries were evicted; `adapter_bytes_free` counts empty bytes. If KV blocks and
    adapters share their memory (`WorkerLimits.kv_block_bytes`), the same bytes count in both. `merged` is the digest of the
    adapter that is merged into the weights, "" for none; `merged_share` is its share of `requests`.
    """

    worker_id: str
    incarnation: str
    seq: int
    sent_unix_ms: int
    limits: WorkerLimits
    perf: PerfModel
    kv_blocks_free: int
    adapter_bytes_free: int
    draining: bool
    requests: list[RequestBrief]
    adapters: list[Residency]
    lists_disk: bool = True
    prefill_tokens_waiting: int = 0
    merged: str = ""
    merged_share: float = 0.0
    v: int = VERSION


class WorkerDelta(msgspec.Struct, tag="delta", kw_only=True):
    """The changes since `seq - 1`; a heartbeat may contain none. A receiver that missed one waits for the next snapshot.

    `running_left`: output tokens that all running requests together are still expected to produce.
    """

    worker_id: str
    incarnation: str
    seq: int
    sent_unix_ms: int
    kv_blocks_free: int
    adapter_bytes_free: int
    draining: bool
    changed: list[RequestBrief] = []  # new, or in a new phase
    removed: list[str] = []
    resident: list[Residency] = []  # now in this tier
    evicted: list[str] = []  # removed from every tier
    running_left: int | None = None
    v: int = VERSION


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
    v: int = VERSION


class Lease(msgspec.Struct, kw_only=True):
    """A value of KV `motet_leases`, keys `worker.<id>` and `gateway.<id>` (msgpack), renewed twice a second."""

    incarnation: str
    renewed_unix_ms: int


# ---- scheduler status (for `motet status`)


class StatusRequest(msgspec.Struct, kw_only=True):
    """Asks a scheduler for its view of the workers; with `plan` also for the requests that it would move."""

    plan: bool = False
    v: int = VERSION


class WorkerStatus(msgspec.Struct, kw_only=True):
    """A worker as a scheduler sees it. `age_ms` is the time since its last message; `stale`: too old to get requests.

    `waiting` counts requests that wait or load, including `in_flight`: assigned requests that the worker's state does not show
    yet. `merged` and `merged_share` are from its last snapshot.
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


class ClusterStatus(msgspec.Struct, tag="cluster", kw_only=True):
    """All workers that a scheduler knows, by id, and the plans that were asked for."""

    scheduler_id: str
    workers: list[WorkerStatus]
    plans: list[PlanStatus] = []
    v: int = VERSION


# ---- predictor


class PredictRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Asks for the output length of a request. An answer that takes longer than some milliseconds is not used."""

    adapter_digest: str  # "" for the base
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0  # as many as max_tokens when the end-of-sequence token is ignored
    features: bytes = b""  # policies.lengths.features, packed
    prompt_text: str = ""
    v: int = VERSION


class Prediction(msgspec.Struct, tag="prediction", kw_only=True):
    """Quantiles of the output length in tokens, clipped to max_tokens, from `samples` samples."""

    p50_tokens: int
    p90_tokens: int
    samples: int
    v: int = VERSION


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The true output length of a finished request, from its owner. Cancelled requests are not reported."""

    adapter_digest: str
    prompt_tokens: int
    output_tokens: int
    features: bytes = b""  # policies.lengths.features, packed
    v: int = VERSION


# ---- registry


class RegisterAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Validate and publish an adapter under `name`.

    `kind` "path": a directory or archive below one of the registry's allowed roots; "hub": a Hugging Face id;
    "upload": an object in the uploads bucket (zip or tar, optionally gzipped); "any": a path if it exists, else a hub id.
    Without `replace` an existing name is refused (AdapterExists).
    """

    name: str
    kind: str
    location: str
    replace: bool = False
    tenant: str = ""  # the only tenant that may see and use it; "" is shared by all
    actor: str = ""  # who asked, for the audit log: an API key's id
    chat: bool = True  # also take what it brings for chats
    v: int = VERSION


class AliasAdapter(msgspec.Struct, kw_only=True):
    """Make `tenant`'s `name` an alias of the adapter that `target` refers to: its own, else a shared one.

    The alias keeps the version that `target` points at now, or `follows` it to later ones.
    """

    name: str
    target: str
    tenant: str = ""
    actor: str = ""
    follows: bool = False
    v: int = VERSION


class RollbackAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Let `tenant`'s `name` point at a version again that it pointed at before; 0: the one before the present version."""

    name: str
    version: int = 0
    tenant: str = ""
    actor: str = ""
    v: int = VERSION


class DeleteAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Remove a name, and its version when no other name uses it. Refused while requests run on it unless forced.

    `forget`: do not register it again from --adapters-dir at the next start.
    """

    name: str
    force: bool = False
    forget: bool = False
    tenant: str = ""
    actor: str = ""
    v: int = VERSION


class PinAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Keep the adapter that `tenant`'s `name` points at loaded on these workers; `model.EVERY_WORKER` means all of them.

    Without workers the name is unpinned. Refused when a worker is unknown (BadRequest) or has no room for another pin
    (Conflict).
    """

    name: str
    workers: tuple[str, ...] = ()
    tenant: str = ""
    actor: str = ""
    v: int = VERSION


class ListAdapters(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The names that `tenant` may see ("": the shared ones) after `after`, in order, at most `limit` of them; the next page
    starts after the last name received."""

    after: str = ""
    limit: int = 1000
    tenant: str = ""
    v: int = VERSION


class AdapterInfo(msgspec.Struct, kw_only=True):
    """One name with its version, as the registry and every watcher see it."""

    entry: AdapterEntry
    version: AdapterVersion


class RegistryOk(msgspec.Struct, tag="ok", kw_only=True):
    """A registry request succeeded. `adapters` contains the affected names or, for `list`, the page.

    `returns`: a deleted adapter lies in --adapters-dir and is registered again at the next start.
    """

    adapters: list[AdapterInfo]
    returns: bool = False
    v: int = VERSION


RegistryReply = RegistryOk | Refused
StatusReply = ClusterStatus | Refused
PredictReply = Prediction | Refused
