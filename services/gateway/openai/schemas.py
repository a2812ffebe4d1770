"""OpenAI's answers as structs: complete ones, and the chunks of streams.

They are encoded as they are, and /openapi.json describes them (`edge.openapi`). A field that is `UNSET` is not sent; one that
is None is sent as null.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from motet.shared.model import PictureFormat

Fingerprint = Annotated[
    str,
    Meta(description="Hash of base model, adapter, engine and its settings; changes where equal seeds may give other answers."),
]


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that needed no computation."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the whole request; tokens that ended a text count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class NamedLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(NamedLogprob, frozen=True, kw_only=True):
    """A drawn token, its log-probability and those of the most likely tokens."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat choice."""

    content: Collection[TokenLogprob]


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion choice."""

    text_offset: Collection[int]
    token_logprobs: Collection[float | None]
    tokens: Collection[str]
    top_logprobs: Collection[dict[str, float] | None] | None


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
StopReason = Annotated[int | str | None, Meta(description="The stop token or stop string that ended the text.")]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A possible token of the prompt; its rank is null below the most likely ones that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Annotated[
    Collection[dict[str, PromptLogprob] | None],
    Meta(description="With prompt_logprobs: per token of the prompt a map from token ids; null for the first."),
]
TokenIds = Annotated[list[int], Meta(description="With return_token_ids.")]
Reasoning = Annotated[str, Meta(description="With --reasoning-parser.")]


class Call(msgspec.Struct, frozen=True):
    """The function that is called. The arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: Literal["function"] = "function"
    function: Call


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Meta(description="null beside tool calls.")]
    reasoning: Reasoning | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[TextChoice]
    usage: Usage


# ---- streams

StreamUsage = Annotated[
    Usage | None,
    Meta(description="With include_usage: null but in the last chunk, which has no choices, or with continuous_usage_stats."),
]


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asks for, whole. `index`: which of the choice's calls it is."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: Call


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a message grows by."""

    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: Reasoning | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer to a conversation grows by."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds | UnsetType = UNSET
    finish_reason: ChatFinish | None = None
    stop_reason: StopReason | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: Fingerprint | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    prompt_token_ids: TokenIds | UnsetType = UNSET
    usage: StreamUsage | UnsetType = UNSET


class TextChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one continuation grows by."""

    index: int
    text: str
    prompt_token_ids: TokenIds | UnsetType = UNSET
    logprobs: TextLogprobs | None = None
    token_ids: TokenIds | UnsetType = UNSET
    finish_reason: Finish | None = None
    stop_reason: StopReason | UnsetType = UNSET


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: Fingerprint | UnsetType = UNSET
    choices: list[TextChunkChoice]
    usage: StreamUsage | UnsetType = UNSET


# ---- embeddings


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: Annotated[int, Meta(description="Position of the input, from 0.")]
    embedding: Annotated[
        list[float] | str, Meta(description="Numbers, or with `base64` the bytes of little-endian float32 numbers.")
    ]


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str
    data: Collection[Embedding]
    usage: InputUsage


# ---- pictures


class ImageTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What tokens stand for."""

    text_tokens: int
    image_tokens: int


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a request for pictures. Output tokens are denoising steps times pixels / 4096."""

    input_tokens: Annotated[int, Meta(description="Of the prompts, and one for every 4096 pixels of a source picture.")]
    input_tokens_details: ImageTokens
    output_tokens: int
    total_tokens: int


class DrawnImage(msgspec.Struct, frozen=True, kw_only=True):
    """One picture: its file or a URL of it, and the seed that draws it again."""

    b64_json: Annotated[str, Meta(description="The file in base64.")] | UnsetType = UNSET
    url: Annotated[str, Meta(description="Serves the file to this tenant, for --picture-ttl-s.")] | UnsetType = UNSET
    seed: int


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of a durable result, kept for seven days in an object store of NATS, and where it is fetched over HTTP."""

    bucket: str
    object: str
    path: Annotated[str, Meta(description="For a GET at any gateway, with a key of the tenant.")]
    type: Annotated[str, Meta(description="Media type.")]
    bytes: int
    sha256: Annotated[str, Meta(description="Of the file, in hex.")]
    seed: int


class DrawnImages(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /v1/images/generations and /v1/images/edits."""

    created: int
    model: str
    background: Literal["opaque"] = "opaque"
    output_format: PictureFormat
    size: Annotated[str, Meta(description="`WIDTHxHEIGHT` in pixels.")]
    data: Collection[DrawnImage]
    usage: ImageUsage


class StoredImages(msgspec.Struct, frozen=True, kw_only=True):
    """The response in a durable result of `"kind": "image"`."""

    created: int
    model: str
    output_format: PictureFormat
    size: str
    data: Collection[StoredImage]
    usage: ImageUsage


class ImageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed answer: a preview of a picture, or the picture."""

    type: Literal[
        "image_generation.partial_image",
        "image_generation.completed",
        "image_edit.partial_image",
        "image_edit.completed",
    ]
    created_at: int
    index: Annotated[int, Meta(description="Which of the request's pictures.")]
    b64_json: Annotated[str, Meta(description="The file in base64.")]
    partial_image_index: Annotated[int, Meta(description="Which preview of the picture.")] | UnsetType = UNSET
    output_format: PictureFormat
    size: Annotated[str, Meta(description="`WIDTHxHEIGHT` in pixels; that of a preview is its own.")]
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"
    seed: int | UnsetType = UNSET
    usage: Annotated[ImageUsage, Meta(description="Of this picture.")] | UnsetType = UNSET
