"""A request on its way: gateway -> scheduler (submit) -> worker (assign), and what stops or moves it.

    Work                   what is asked for: the same from the client's request to the engine
     ├─ Job                in the gateway: and how the answer is shown (services.gateway.owner.stream)
     └─ GenerateRequest    the message: and where it is in its life
         └─ EngineRequest  in a worker: and when it came (services.worker.engines.request)

Token ids are little-endian int32 bytes (`pack_tokens`, `unpack_tokens`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from sys import byteorder
from typing import Any, Self

import msgspec

from motet.shared.model import TOKEN_BYTES, AdapterRef, EmbeddingParams, ImageParams, KvOffer, SamplingParams, Slo, Weighted
from motet.shared.wire.prefixes import PrefixKeys
from motet.shared.wire.refusal import Refused


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    packed = array("i", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_array(*data: bytes) -> array[int]:
    """The token ids in packed texts, one text after another."""
    unpacked = array("i")
    for packed in data:
        unpacked.frombytes(packed)
    if byteorder == "big":
        unpacked.byteswap()
    return unpacked


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    return token_array(data).tolist()


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt: the bytes of its file, PNG, JPEG, WebP or GIF. `param`: the client's field, for errors."""

    data: bytes
    param: str


class Work(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one sequence asks for, fully resolved: tokens, adapter version, sampling with its seed.

    A request for `n` choices becomes n of these. With `embedding` the prompt's embedding is wanted, and no tokens; with `image`
    a picture, whose steps are the output positions: step i has index i, and the picture has index `image.steps_run`.
    """

    request_id: str
    prompt: bytes  # pack_tokens
    sampling: SamplingParams
    slo: Slo = Slo()
    adapter: AdapterRef | None = None
    tenant: str = "default"
    tenant_weight: float = 1.0  # its share relative to other tenants' while workers are saturated
    features: bytes = b""  # policies.lengths.features: for the predictor; not passed on to workers
    prompt_text: str = ""  # an excerpt, for a predictor that reads text; only with --send-prompts, not passed on to workers
    cache_salt: str = ""  # prompts share KV blocks only with prompts of the same tenant and the same salt
    priority: int = 0  # 0 or more; waiting requests with a smaller one go first
    needs: dict[str, str] = {}  # capabilities (`model.Capability`) that its worker must have, and the client's field for each
    embedding: EmbeddingParams | None = None  # needs "embeddings"
    prefix_keys: tuple[PrefixKeys, ...] = ()  # for schedulers, for each block size of workers; not passed on to workers
    images: list[Image] = []  # needs "images"; the prompt has the model's placeholder for each, in this order
    image: ImageParams | None = None  # needs "draws"; `images` are then the source picture and the mask
    adapters: tuple[Weighted, ...] = ()  # at most ADAPTERS_MAX; when given, `adapter` is None

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def weighted(self) -> tuple[Weighted, ...]:
        """All its adapters, whichever way they were given."""
        if self.adapter is not None:
            return (Weighted(self.adapter), *self.adapters)
        return self.adapters


class GenerateRequest(Work, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. A resumed request carries its tokens so far.

    (request_id, epoch) is unique: every resubmission by the owning gateway raises `epoch` by one, and items of a worker's
    frames count only with the latest epoch. Output token i has index i, counted from 0 across epochs.
    """

    gateway_id: str
    base_model: str = ""
    epoch: int = 0
    output: bytes = b""  # pack_tokens: tokens already produced in earlier epochs
    exclude_workers: tuple[str, ...] = ()  # lost or refused in earlier epochs
    predicted_tokens: int = 0  # set by the scheduler: expected output length
    cached_tokens: int = 0  # set by the scheduler: of the prompt, expected in the worker's prefix cache or fetched to it
    repeated: int = 0  # refusals that the gateway repeated to this tenant by itself since its last submission
    move_to: str = ""  # the worker that a Move named: it is tried first; not passed on to workers
    kv: KvOffer | None = None  # its worker may fetch KV blocks instead of computing them
    losses: int = 0  # workers lost with it in a row, without a new token

    @classmethod
    def of(cls, work: Work, **more: Any) -> Self:
        """The work, and `more` of this class's own fields. Fields that only `work` has are left out."""
        known = work.__struct_fields__
        return cls(**{name: getattr(work, name) for name in cls.__struct_fields__ if name in known} | more)

    @property
    def output_tokens(self) -> int:
        """How many tokens earlier epochs have produced."""
        return len(self.output) // TOKEN_BYTES

    @property
    def tokens(self) -> array[int]:
        """The prompt and the output so far."""
        return token_array(self.prompt, self.output)


class Assigned(msgspec.Struct, tag="assigned", kw_only=True):
    """Answer to submit: `worker_id` has accepted the request and will send its tokens."""

    worker_id: str
    predicted_tokens: int


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """Answer to assign: the request is queued or running; frames will follow on the gateway's stream."""

    worker_id: str


SubmitReply = Assigned | Refused


AssignReply = Accepted | Refused


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """Stop a request of this epoch or an older one. Unknown ids are ignored. With `kv_token`, its KV blocks are held for a
    moment for the worker that knows the token."""

    request_id: str
    epoch: int
    kv_token: str = ""


class Drain(msgspec.Struct, tag="drain", kw_only=True):
    """Refuse new work, finish running requests, then stop."""


class ListPrefixes(msgspec.Struct, tag="list_prefixes", kw_only=True):
    """List all cached KV blocks in the next heartbeat: a scheduler has started, or missed a message."""


Control = Cancel | Drain | ListPrefixes


class Move(msgspec.Struct, kw_only=True):
    """Hand a request of this epoch to the worker `to`, with its tokens so far, in the next epoch.

    Only the owner of the request acts, and only if the request is in this epoch and on another worker than `to`. `kv`: fetching
    its KV blocks is predicted to be faster than computing them again.
    """

    request_id: str
    epoch: int
    to: str
    kv: bool = False
