"""POST /v1/embeddings: the request's fields, the request made ready to run, and OpenAI's answer. No HTTP here.

Each input is an ordinary request: it is assigned, watched and, after a loss, given to another worker. At most `AT_ONCE` inputs
of a request are submitted at a time. If the first one is refused for lack of room, so is the whole request. Later inputs that
find no room are tried again, because other inputs of the same request may take that room.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta

from motet.policies.tenant_shares import Part
from motet.services.gateway.openai import fields, protocol
from motet.services.gateway.openai.decoding import known
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.openai.schemas import CachedTokens, Embedding, Embeddings, InputUsage
from motet.services.gateway.owner.encoding import Rows, hold
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Job, Stream
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, MotetError, Overloaded
from motet.shared.model import AdapterRef, EmbeddingParams, SamplingParams
from motet.shared.wire.request import pack_tokens

INPUTS_MAX = 2048  # as OpenAI
DIMENSIONS_MAX = 1 << 16
AT_ONCE = 32
PREFIX = "embd-"
AGAIN_S = (0.05, 1.0)  # pauses before an input without room is tried again


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: Annotated[
        Any,
        Meta(
            description=f"One or several texts, as text or token ids; at most {INPUTS_MAX} of them.",
            extra_json_schema=protocol.prompt_schema(INPUTS_MAX),
        ),
    ]
    model: protocol.ModelName | None = None
    encoding_format: (
        Annotated[
            Literal["float", "base64"],
            Meta(description="`float`: a list of numbers; `base64`: the bytes of little-endian float32 numbers."),
        ]
        | None
    ) = "float"
    dimensions: (
        Annotated[
            int,
            Meta(ge=1, le=DIMENSIONS_MAX, description="Length of the embeddings, where the model can shorten them."),
        ]
        | None
    ) = None
    # vLLM
    add_special_tokens: Annotated[bool, Meta(description="Let the tokenizer add its special tokens (default: yes).")] | None = (
        True
    )
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=1 << 31, description="Truncate inputs to this many tokens; -1: to what the model takes.")]
        | None
    ) = None
    truncation_side: (
        Annotated[
            Literal["left", "right"],
            Meta(description="Side on which truncate_prompt_tokens cuts; right (default) keeps the beginning of the input."),
        ]
        | None
    ) = None
    priority: protocol.Priority | None = None
    cache_salt: protocol.CacheSalt | None = None
    request_id: protocol.RequestId | None = None

    stream: ClassVar[bool] = False

    def inputs(self) -> list[str | list[int]]:
        """One or several inputs, as text or token ids. Raises BadRequest."""
        return protocol.prompts_of(self.input, "input", most=INPUTS_MAX)


class PreparedEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to run: one job per input."""

    request: EmbeddingRequest
    model: str  # as the client named it
    jobs: list[Job]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(job.prompt_tokens for job in self.jobs)


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def parse(body: bytes) -> EmbeddingRequest:
    """An embedding request. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: EmbeddingRequest = known(body, _decoder, fields.EMBEDDING)
    if request.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens leaves no token of the input", param="truncate_prompt_tokens")
    return request


async def prepare(preparer: Preparer, request: EmbeddingRequest, origin: Origin) -> PreparedEmbeddings:
    """The request, with every input resolved and tokenized. Raises BadRequest, PromptTooLong, ModelNotFound or Overloaded."""
    adapter, present = preparer.adapter(request.model, origin.tenant), preparer.now()
    return await origin.run(lambda: _prepared(present, request, origin, adapter))


def _prepared(preparer: Preparer, request: EmbeddingRequest, origin: Origin, adapter: AdapterRef | None) -> PreparedEmbeddings:
    given = request.inputs()
    keep, longest = request.truncate_prompt_tokens, preparer.max_model_len
    texts = [text for text in given if isinstance(text, str)]
    special = request.add_special_tokens is not False
    within = longest if keep is None else None
    tokenized = iter(preparer.prompts.texts(texts, add_special_tokens=special, longest=within, param="input"))
    model, jobs = request.model or preparer.base_model, list[Job]()
    for one in given:
        tokens = next(tokenized) if isinstance(one, str) else preparer.known(one, "input")
        if keep is not None:
            kept = keep if keep > 0 else longest
            tokens = tokens[-kept:] if request.truncation_side == "left" else tokens[:kept]
        jobs.append(
            Job(
                request_id=f"{PREFIX}{origin.drawn}-{len(jobs)}",
                model=model,
                prompt=pack_tokens(preparer.checked(tokens, "input", room=0)),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                slo=preparer.objective(origin, 1),
                adapter=adapter,
                tenant=origin.tenant,
                tenant_weight=preparer.weight(origin.tenant),
                cache_salt=request.cache_salt or "",
                priority=request.priority or 0,
                needs={"embeddings": "model"},
                embedding=EmbeddingParams(dimensions=request.dimensions),
                timeout_s=origin.timeout_s or preparer.config.requests.request_timeout_s,
                arrived_s=origin.arrived_s,
            )
        )
    origin.tell(PREFIX, origin.named or request.request_id)
    request.input = None  # the request is kept while it runs, and its inputs are in the jobs
    return PreparedEmbeddings(request=request, model=model, jobs=jobs)


async def collect(owner: Owner, prepared: PreparedEmbeddings, held: Part) -> Answer:
    """Run a request to its end and return OpenAI's answer, the body for `owner.encoding.encoded`.

    Raises the MotetError of the first input that fails; the others are cancelled then.
    """
    first, *others = prepared.jobs
    room, opened = asyncio.Semaphore(AT_ONCE), await owner.open(first)

    async def run(job: Job) -> Stream:
        async with room:
            return await _ended(opened if job is first else await _open(owner, job, now_s() + job.timeout_s))

    running = [asyncio.ensure_future(run(job)) for job in (first, *others)]
    try:
        streams: Sequence[Stream] = await asyncio.gather(*running)
    except BaseException:
        opened.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    encode = _base64 if prepared.request.encoding_format == "base64" else _numbers

    def made(begin: int, end: int) -> list[Embedding]:
        return [Embedding(index=i, embedding=encode(stream.embedding)) for i, stream in enumerate(streams[begin:end], begin)]

    hold(held, sum(len(stream.embedding) for stream in streams))
    cached = sum(stream.cached_tokens for stream in streams)
    used = InputUsage(
        prompt_tokens=prepared.prompt_tokens,
        total_tokens=prepared.prompt_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens=cached) if cached else UNSET,
    )
    return Answer(Embeddings(model=prepared.model, data=Rows(len(streams), made), usage=used), owner.made_by(streams[0]))


async def _open(owner: Owner, job: Job, deadline_s: float) -> Stream:
    """The stream of a later input: if it finds no room, it is tried again until `deadline_s`."""
    while True:
        try:
            return await owner.open(job)
        except Overloaded as error:
            pause_s = min(max(error.retry_after_s or 0.0, AGAIN_S[0]), AGAIN_S[1])
            if now_s() + pause_s > deadline_s:
                raise
            await asyncio.sleep(pause_s)


async def _ended(stream: Stream) -> Stream:
    async for _ in stream:
        pass
    if not stream.embedding:
        raise MotetError("the worker answered without an embedding")
    return stream


def _base64(embedding: bytes) -> str:
    return base64.b64encode(embedding).decode()


def _numbers(embedding: bytes) -> Any:
    return msgspec.Raw(orjson.dumps(np.frombuffer(embedding, "<f4"), option=orjson.OPT_SERIALIZE_NUMPY))
