"""What clients may send: OpenAI's request bodies with vLLM's extra sampling fields, as typed structs.

Unknown fields are ignored. Fields that would change the answer and are not served are refused by name, never silently dropped.
Durable requests over NATS carry the same bodies.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import BadRequest

CHOICES_MAX = 64  # n
SEQUENCES_MAX = 128  # prompts times n
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
BIASES_MAX = 1024
LOGPROBS_MAX = 20

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
CountOrNone = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Request(msgspec.Struct, kw_only=True):
    """What both request kinds share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # vLLM's extra fields
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: CountOrNone | None = None
    ignore_eos: bool | None = False
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    add_special_tokens: bool | None = None
    # known, and refused when they ask for something
    response_format: Any = None
    best_of: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises BadRequest when there are too many, or one is empty or too long."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS_MAX:
            raise BadRequest(f"at most {STOPS_MAX} stop strings are taken, not {len(stops)}", param="stop")
        for stop in stops:
            if not 1 <= len(stop) <= STOP_CHARS_MAX:
                raise BadRequest(f"a stop string has 1 to {STOP_CHARS_MAX} characters, not {len(stop)}", param="stop")
        return tuple(stops)

    def refuse_unsupported(self) -> None:
        """Raises BadRequest naming the first field that asks for what is not served."""
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind not in (None, "text"):
            raise _unsupported("response_format", f"type {kind!r}")
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of", "other than n")
        names = ("prompt_logprobs", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        for name in (*names, "use_beam_search"):
            if getattr(self, name):
                raise _unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true", param="stream_options")


class ChatRequest(_Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    chat_template: Any = None
    # vLLM's extra fields
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("tools", "functions", "audio", "chat_template"):
            if getattr(self, name):
                raise _unsupported(name)
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise _unsupported(name)
        if self.modalities not in (None, [], ["text"]):
            raise _unsupported("modalities", "other than text")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            # vLLM asks the client to switch one off; the default of the other is no reason to refuse
            self.add_generation_prompt = False

    def logprobs_wanted(self) -> int | None:
        """None for none, else how many rivals."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages with text content joined to one string. Raises BadRequest naming the message."""
        return [_message(message, i) for i, message in enumerate(self.messages)]


class CompletionRequest(_Request, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise _unsupported("suffix")
        if self.prompt_embeds:
            raise _unsupported("prompt_embeds")
        if self.echo and self.logprobs is not None:
            raise _unsupported("echo", "together with logprobs")

    def logprobs_wanted(self) -> int | None:
        """None for none, else how many rivals."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, as text or token ids. Raises BadRequest."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise BadRequest("expected a string, a list of strings, a list of token ids or a list of those", param="prompt")
        if not prompt:
            raise BadRequest("the list is empty", param="prompt")
        if _is_token_list(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) and _is_token_list(p) for p in prompt):
            return prompt
        raise BadRequest("expected a string, a list of strings, a list of token ids or a list of those", param="prompt")


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """A chat request. Raises BadRequest naming the field, or saying that it is not JSON."""
    request = decode(body, _chat)
    request.refuse_unsupported()
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """A completion request. Raises BadRequest naming the field, or saying that it is not JSON."""
    request = decode(body, _completion)
    request.refuse_unsupported()
    return request


def parse(body: bytes) -> ChatRequest | CompletionRequest:
    """Whichever it is: a body with `messages` is a chat request, one with `prompt` a completion request."""
    keys = decode(body, _keys)
    if "messages" in keys:
        return parse_chat(body)
    if "prompt" in keys:
        return parse_completion(body)
    raise BadRequest("the request has neither `messages` nor `prompt`", param="messages")


_keys: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r"^(.*?) - at `(?:key in )?\$\.?(.*?)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode(body: bytes, decoder: Any) -> Any:
    """`body` by a msgspec JSON decoder. Raises BadRequest with the field in `param`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.match(text)
        reason, param = (found[1], found[2].replace("[...]", "")) if found else (text, "")
        if missing := _MISSING.search(reason):
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise BadRequest(f"{param}: {reason}" if param else reason, param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None


def _unsupported(name: str, detail: str = "") -> BadRequest:
    return BadRequest(f"{name}{' ' + detail if detail else ''} is not supported", param=name)


def _is_token_list(value: list[Any]) -> bool:
    return all(type(token) is int for token in value)


def _message(message: dict[str, Any], i: int) -> dict[str, Any]:
    where = f"messages[{i}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role: expected a string", param=f"{where}.role")
    if isinstance(content, list):
        texts = []
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                at = f"{where}.content[{j}]"
                raise BadRequest(f"{at}: only parts of type text with a text string are supported, not {kind!r}", param=at)
            texts.append(part["text"])
        return message | {"content": "\n".join(texts)}
    if content is None:
        if role != "assistant":
            raise BadRequest(f"{where}.content: expected a string or text parts", param=f"{where}.content")
    elif not isinstance(content, str):
        raise BadRequest(f"{where}.content: expected a string or text parts", param=f"{where}.content")
    return message
