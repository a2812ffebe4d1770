"""The kinds of requests that generate something: one table, from which routes and their description are made.

    path ──parse──> request ──prepare──> prepared ──collect──> the whole answer
                                             └─────stream───> a response that sends it piece by piece

Another kind is a file that makes a `Kind` and adds it to `KINDS` (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.responses import Response

from motet.policies.tenant_shares import Part
from motet.services.gateway.config import MAX_BODY_BYTES, GatewayConfig
from motet.services.gateway.edge import image_sse, sse
from motet.services.gateway.openai import answers, embeddings, fields, image_requests, images, protocol, schemas, texts
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Stream


class Streamed(NamedTuple):
    """A response that sends an answer, how many tokens have been generated for it so far, and whether a worker ever had it."""

    response: Response
    output_tokens: Callable[[], int]
    served: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of request. Its parsed requests have `stream`; what `prepare` returns has `prompt_tokens`.

    `request`, `answer` and `chunk` are the structs of its bodies; `chunk` that of a streamed answer's events.

    `parse` raises BadRequest naming the field. `collect` gets the part of what all answers may have, for what it holds.
    `stream` None: there is nothing to stream. `parse_form`: as `parse`, of a body that is a form, with its Content-Type; `form`
    is the form's JSON schema. `draws`: for an image base, others are for texts.
    """

    path: str
    summary: str
    request: type
    answer: type
    chunk: type | None = None
    unserved: Mapping[str, fields.Unserved]
    parse: Callable[[bytes], Any]
    prepare: Callable[[Preparer, Any, Origin], Awaitable[Any]]
    collect: Callable[[Owner, Any, Part], Awaitable[Answer]]
    stream: Callable[[Owner, Any], Coroutine[Any, Any, Streamed]] | None = None
    parse_form: Callable[[bytes, str], Any] | None = None
    form: dict[str, Any] | None = None
    body_bytes_max: Callable[[GatewayConfig], int] = lambda _: MAX_BODY_BYTES
    draws: bool = False


async def _stream(owner: Owner, prepared: texts.Prepared) -> Streamed:
    streams, signal = await answers.open_all(owner, prepared.jobs, early=True)
    events = sse.SseResponse(prepared, streams, signal, owner.detokenizer, owner.made_by(streams[0]))
    return Streamed(events, lambda: sum(len(stream.answered) for stream in streams), lambda: _served(streams))


async def _stream_images(owner: Owner, prepared: images.PreparedImages) -> Streamed:
    streams, signal = await answers.open_all(owner, prepared.jobs, early=True)
    events = image_sse.ImageEvents(prepared, streams, signal, owner.made_by(streams[0]))
    return Streamed(events, lambda: prepared.tokens_of([len(stream.tokens) for stream in streams]), lambda: _served(streams))


def _served(streams: list[Stream]) -> bool:
    return any(stream.opened for stream in streams)


CHAT = Kind(
    path="/v1/chat/completions",
    summary="Answer a conversation.",
    request=protocol.ChatRequest,
    answer=schemas.ChatCompletion,
    chunk=schemas.ChatChunk,
    unserved=fields.CHAT,
    parse=protocol.parse_chat,
    prepare=texts.prepare,
    collect=answers.collect,
    stream=_stream,
)
COMPLETION = Kind(
    path="/v1/completions",
    summary="Continue texts.",
    request=protocol.CompletionRequest,
    answer=schemas.Completion,
    chunk=schemas.TextChunk,
    unserved=fields.COMPLETION,
    parse=protocol.parse_completion,
    prepare=texts.prepare,
    collect=answers.collect,
    stream=_stream,
)
EMBEDDING = Kind(
    path="/v1/embeddings",
    summary="Embeddings of texts, by workers with a pooling model.",
    request=embeddings.EmbeddingRequest,
    answer=schemas.Embeddings,
    unserved=fields.EMBEDDING,
    parse=embeddings.parse,
    prepare=embeddings.prepare,
    collect=embeddings.collect,
)
IMAGE = Kind(
    path="/v1/images/generations",
    summary="Draw pictures from a text.",
    request=image_requests.ImageRequest,
    answer=schemas.DrawnImages,
    chunk=schemas.ImageEvent,
    unserved=fields.IMAGE,
    parse=image_requests.parse,
    prepare=images.prepare,
    collect=images.collect,
    stream=_stream_images,
    draws=True,
)
IMAGE_EDIT = Kind(
    path="/v1/images/edits",
    summary="Draw pictures from a picture, or a part of it anew.",
    request=image_requests.ImageEditRequest,
    answer=schemas.DrawnImages,
    chunk=schemas.ImageEvent,
    unserved=fields.IMAGE_EDIT,
    parse=image_requests.parse_edit,
    prepare=images.prepare,
    collect=images.collect,
    stream=_stream_images,
    parse_form=image_requests.parse_edit_form,
    form=image_requests.FORM,
    body_bytes_max=lambda config: config.images.edit_bytes_max,
    draws=True,
)
KINDS: list[Kind] = [CHAT, COMPLETION, EMBEDDING, IMAGE, IMAGE_EDIT]
