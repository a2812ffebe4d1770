"""Types of all answers, for the API's description and for tests that compare real answers with them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Answers hold exactly these fields."""


class Error(_Answer):
    """Why a request was refused or failed."""

    message: Annotated[str, Meta(description="The reason, for people; at most 2,000 characters.")]
    type: Annotated[
        str, Meta(description="invalid_request_error, rate_limit_error, server_error, or vLLM's names on its routes.")
    ]
    param: Annotated[str | None, Meta(description="The field or header that is wrong.")]
    code: Annotated[str | int, Meta(description="A stable name of the reason; on vLLM's routes the status.")]


class ErrorAnswer(_Answer):
    """Every answer with a status of 400 or more, as OpenAI clients expect it."""

    error: Error


Fingerprint = Annotated[
    str,
    Meta(description="Hash of base model, adapter, engine and its settings; changes where equal seeds may give other answers."),
]


class CachedTokens(_Answer):
    """Prompt tokens that needed no computation."""

    cached_tokens: int


class Usage(_Answer):
    """Token counts of the whole request; tokens that ended a text count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class NamedLogprob(_Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(NamedLogprob):
    """A drawn token, its log-probability and those of the most likely tokens."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]


class TextLogprobs(_Answer):
    """Log-probabilities of a completion choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
StopReason = Annotated[int | str | None, Meta(description="The stop token or stop string that ended the text.")]


class PromptLogprob(_Answer):
    """A possible token of the prompt; its rank is null below the most likely ones that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Meta(description="With prompt_logprobs: per token of the prompt a map from token ids; null for the first."),
]
TokenIds = Annotated[list[int], Meta(description="With return_token_ids.")]


class CalledFunction(_Answer):
    """The function that is called. The arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(_Answer):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="null beside tool calls.")]
    reasoning: Annotated[str, Meta(description="With --reasoning-parser.")] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Answer):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(_Answer):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChoice(_Answer):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Answer):
    """The answer to POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[TextChoice]
    usage: Usage


class Embedding(_Answer):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: Annotated[int, Meta(description="Position of the input, from 0.")]
    embedding: Annotated[
        list[float] | str, Meta(description="Numbers, or with `base64` the bytes of little-endian float32 numbers.")
    ]


class InputUsage(_Answer):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class Embeddings(_Answer):
    """The answer to POST /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: InputUsage


class Model(_Answer):
    """The base model or an adapter, with the fields that vLLM gives a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Meta(description="Source: a hub id, or the last part of a path.")]
    parent: Annotated[str | None, Meta(description="The base model of an adapter.")]
    max_model_len: int | None
    permission: list[dict[str, Any]]


class Models(_Answer):
    """All models, the base model first."""

    object: Literal["list"]
    data: list[Model]


class OlderVersion(_Answer):
    """A version that an adapter can go back to."""

    version: int
    digest: str
    updated: int


class AdapterChat(_Answer):
    """What an adapter brings for chats."""

    templates: Annotated[dict[str, str], Meta(description="Chat templates by name.")]
    special_tokens: Annotated[dict[str, str], Meta(description="Special tokens by name, such as eos_token.")]
    generation: Annotated[dict[str, Any], Meta(description="Defaults for requests that give no value.")]
    eos_token_ids: Annotated[list[int], Meta(description="Tokens that end an answer, beside eos_token and the base model's.")]


class Adapter(_Answer):
    """A name and the adapter version behind it."""

    name: str
    object: Literal["adapter"]
    digest: str
    version: Annotated[int, Meta(description="Number of this version of the name, from 1.")]
    alias_of: str | None
    follows: Annotated[bool | None, Meta(description="Of an alias: whether it goes on to the other name's next versions.")]
    older_versions: Annotated[list[OlderVersion], Meta(description="Kept earlier versions of the name, the newest first.")]
    base_model: str
    rank: int
    modules: list[str]
    layers: int
    dtype: str
    size_bytes: int
    tenant: Annotated[str | None, Meta(description="Tenant that the adapter belongs to; null: shared by all.")]
    source: str
    created: int
    updated: int
    resident: Annotated[
        dict[str, str], Meta(description="Map from worker id to the fastest tier that holds the adapter: device, host or disk.")
    ]
    left_out: Annotated[
        list[str],
        Meta(description="Modules of its file without effect: its configuration does not select them, as PEFT decides."),
    ]
    chat: Annotated[AdapterChat | None, Meta(description="What it brings for chats; null in lists, or when it brings nothing.")]
    pinned_to: Annotated[list[str], Meta(description="Ids of the workers that keep the adapter loaded; `*`: all.")]
    placed_on: Annotated[list[str], Meta(description="Ids of the workers on which a scheduler wants it loaded.")]


class RefusedAdapter(_Answer):
    """An adapter of `--adapters-dir` that is not served."""

    name: str
    reason: str


class Refused(_Answer):
    """The adapters of `--adapters-dir` that are not served."""

    total: int
    adapters: Annotated[list[RefusedAdapter], Meta(description="The first of them; the registry's log has all.")]


class Adapters(_Answer):
    """All adapters."""

    object: Literal["list"]
    data: list[Adapter]
    refused: Refused


class Deleted(_Answer):
    """An adapter that is gone."""

    name: str
    object: Literal["adapter"]
    deleted: Literal[True]
    returns_at_start: Annotated[bool, Meta(description="Whether it lies in `--adapters-dir` and comes back at the next start.")]


class Key(_Answer):
    """An API key, without its text."""

    id: str
    object: Literal["api_key"]
    tenant: str
    role: Literal["use", "adapters", "admin"]
    name: str
    created: int | None
    expires: int | None
    expired: bool


class NewKey(Key):
    """A key that was just made."""

    key: Annotated[str, Meta(description="Text of the key, shown only this once.")]


class Keys(_Answer):
    """All API keys."""

    object: Literal["list"]
    data: list[Key]


class KeyDeleted(_Answer):
    """A key that is revoked."""

    id: str
    object: Literal["api_key"]
    deleted: Literal[True]


class AuditEntry(_Answer):
    """A change of an adapter or a key."""

    at: int
    action: str
    actor: Annotated[str, Meta(description="Id of the key that was used.")]
    object: Annotated[str, Meta(description="The adapter's name or the key's id.")]
    tenant: Annotated[str, Meta(description="Tenant that the object belongs to; empty: shared.")]
    detail: str


class AuditLog(_Answer):
    """Changes, newest first."""

    object: Literal["list"]
    data: list[AuditEntry]


class Tokens(_Answer):
    """The answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(_Answer):
    """The answer to POST /detokenize."""

    prompt: str


class Status(_Answer):
    """This gateway, and the workers as a scheduler sees them."""

    gateway: dict[str, Any]
    base_model: str
    adapters: int
    refused_adapters: Refused
    scheduler_id: str | None
    workers: list[dict[str, Any]]
    plans: Annotated[list[dict[str, Any]], Meta(description="With `plan=true`: which requests would move, by base model.")]
    absent_workers: Annotated[list[dict[str, Any]], Meta(description="Workers that do not serve, and why.")]
    error: Annotated[str | None, Meta(description="Reason why no scheduler answered.")]


class Health(msgspec.Struct, kw_only=True):
    """The process is alive."""

    status: str
    service: str


class Ready(_Answer):
    """Whether the service can work now, and the reasons if not."""

    ready: bool
    reasons: list[str]


class Version(_Answer):
    """The version of Motet."""

    version: str
