"""POST /tokenize and /detokenize: their bodies, and the tokens that are counted. No HTTP here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet.services.gateway.openai import conversation, fields
from motet.services.gateway.openai.decoding import decode, known
from motet.services.gateway.openai.nesting import check_depth
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.openai.protocol import MESSAGES_MAX, Message, TokenId
from motet.shared.errors import BadRequest

DETOKENIZE_MAX = 1 << 18


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's POST /tokenize: a prompt or messages."""

    model: Annotated[str, Meta(description="All models here share one tokenizer; a name must exist.")] | None = None
    prompt: Annotated[str, Meta(description="Text to tokenize; or use `messages`.")] | None = None
    messages: (
        Annotated[
            list[Message],
            Meta(min_length=1, max_length=MESSAGES_MAX, description="Conversation to tokenize; or use `prompt`."),
        ]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Let the tokenizer add its special tokens (default: prompt yes, messages no).")] | None
    ) = None
    add_generation_prompt: Annotated[bool, Meta(description="End the prompt with the template's start of an answer.")] = True
    continue_final_message: Annotated[bool, Meta(description="Do not close the last message.")] = False
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template.")] | None = None
    return_token_strs: Annotated[bool, Meta(description="Also return the tokens as text.")] | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's POST /detokenize."""

    model: Annotated[str, Meta(description="All models here share one tokenizer; a name must exist.")] | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=DETOKENIZE_MAX, description="Token ids.")]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /detokenize."""

    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """What to tokenize. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: TokenizeRequest = known(body, _tokenize, fields.TOKENIZE)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("expected one of `prompt` and `messages`", param="prompt")
    check_depth(request.chat_template_kwargs, "chat_template_kwargs")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """What to detokenize. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: DetokenizeRequest = decode(body, _detokenize)
    return request


def how(asked: TokenizeRequest) -> dict[str, Any]:
    """How the messages of a /tokenize request are rendered."""
    continued = asked.continue_final_message
    return {
        "add_generation_prompt": asked.add_generation_prompt and not continued,
        "continue_final_message": continued,
        "variables": asked.chat_template_kwargs,
    }


def countable(messages: list[dict[str, Any]], template: Any) -> list[dict[str, Any]]:
    """The messages as the template reads them. Only an engine knows how many tokens images are, so they are refused."""
    if images := conversation.take_images(messages):
        raise BadRequest(f"{images[0].param}: images are not counted", param=images[0].param)
    return conversation.read_by(messages, template)


def counted(
    prompts: Prompts, asked: TokenizeRequest, template: Any, rendered: str | None, whole: Mapping[str, int]
) -> list[int]:
    """The tokens of a /tokenize request."""
    special = asked.add_special_tokens
    if asked.messages is None:
        return prompts.texts([asked.prompt or ""], add_special_tokens=special is not False, counting=True)[0]
    if rendered is None:
        rendered = template.render(countable(asked.messages, template), **how(asked))
    return prompts.rendered(rendered, add_special_tokens=bool(special), whole=whole, counting=True)
