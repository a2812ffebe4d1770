"""Request bodies as typed structs: OpenAI's, with the extra fields of vLLM, SGLang and LoRAX.

Every served field is declared here with its meaning and limits. `fields` lists the fields of those APIs that are not served.
Any other field is refused by name. Durable requests over NATS carry the same bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet.services.gateway.openai import conversation, fields, structured
from motet.services.gateway.openai.decoding import KEYS, decode, known
from motet.services.gateway.openai.nesting import check_depth
from motet.services.gateway.openai.structured import ResponseFormat, StructuredOutputs, Text
from motet.shared.errors import BadRequest
from motet.shared.generation_config import MaxTokens, MinP, RepetitionPenalty, Temperature, TopK, TopP
from motet.shared.model import StructuredOutput
from motet.shared.wire.request import Image

CHOICES_MAX = 64  # n
SEQUENCES_MAX = 128  # prompts times n
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
BIASES_MAX = 1024
LOGPROBS_MAX = 20
STOP_TOKENS_MAX = 1024
ALLOWED_TOKENS_MAX = 16_384
BAD_WORDS_MAX = 128
BAD_WORD_CHARS_MAX = 256
MESSAGES_MAX = 4096
TOOLS_MAX = 256

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
RequestId = Annotated[
    str,
    Meta(
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="The id of the answer, after a prefix; the header X-Request-Id takes precedence.",
    ),
]
ModelName = Annotated[str, Meta(description="The base model, an adapter, or `base:adapter`; by default the base model.")]
Priority = Annotated[int, Meta(ge=0, le=1 << 31, description="Requests with a smaller number run first on their worker.")]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=1024, description="Share cached prefixes only with requests of the same salt.")
]
Message = Annotated[dict[str, Any], Meta(extra_json_schema=conversation.SCHEMA)]
Adapter = Annotated[str, Meta(description="Name of the adapter; `model` may then be missing or the base model's name.")]
_CONSTRAINED = "needs an engine that serves structured outputs"


def prompt_schema(most: int) -> dict[str, Any]:
    """The JSON schema of one or several prompts, at most `most`."""
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [{"type": "string"}, several | {"items": {"type": "string"}}, tokens, several | {"items": tokens}]}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which extras a stream carries."""

    include_usage: Annotated[bool, Meta(description="Send the token counts in a last event.")] | None = False
    continuous_usage_stats: (
        Annotated[bool, Meta(description="Send the token counts so far in every event (with include_usage).")] | None
    ) = False
    include_obfuscation: Annotated[bool, Meta(description="Accepted without effect: events are not padded.")] | None = None


class Function(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the model."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which function."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both kinds of requests."""

    model: ModelName | None = None
    stream: Annotated[bool, Meta(description="Send tokens as server-sent events.")] | None = False
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX, description="Choices per prompt.")] | None = None
    max_tokens: (
        Annotated[
            MaxTokens,
            Meta(description="Maximum tokens to generate; prompt and output together must fit the context length."),
        ]
        | None
    ) = None
    temperature: Annotated[Temperature, Meta(description="Sampling temperature; 0: greedy.")] | None = None
    top_p: Annotated[TopP, Meta(description="Nucleus sampling: total probability of the tokens to draw from.")] | None = None
    presence_penalty: (
        Annotated[Penalty, Meta(description="Subtracted from the logit of each token that is in the output.")] | None
    ) = None
    frequency_penalty: (
        Annotated[Penalty, Meta(description="Subtracted from a token's logit for each of its occurrences in the output.")]
        | None
    ) = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=BIASES_MAX, description="Map from token id to a number that is added to its logit."),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int,
            Meta(ge=-(2**63), le=2**63 - 1, description="Seed of sampling: the same seed and request give the same tokens."),
        ]
        | None
    ) = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None,
        Meta(description="Strings that end the text."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description=f"Text, any JSON object, or JSON by a schema ({_CONSTRAINED}).")
    ] = None
    best_of: Annotated[int, Meta(description="Must equal `n`.")] | None = None
    # vLLM
    top_k: Annotated[TopK, Meta(description="Draw from the k most likely tokens; 0 or -1: from all.")] | None = None
    min_p: Annotated[MinP, Meta(description="Minimum probability of a token, relative to the most likely one.")] | None = None
    repetition_penalty: (
        Annotated[RepetitionPenalty, Meta(description="Penalty factor for tokens in the prompt or output, as in vLLM.")] | None
    ) = None
    min_tokens: (
        Annotated[int, Meta(ge=0, le=1 << 31, description="Minimum tokens before an ending token or stop token may be drawn.")]
        | None
    ) = None
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's ending token.")] | None = False
    stop_token_ids: (
        Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX, description="Further tokens that end the text.")] | None
    ) = None
    include_stop_str_in_output: Annotated[bool, Meta(description="Include the stop string or token in the text.")] | None = (
        False
    )
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] | None = True
    add_special_tokens: (
        Annotated[bool, Meta(description="Let the tokenizer add its special tokens (default: completions yes, chat no).")]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=ALLOWED_TOKENS_MAX, description="Draw only these tokens.")]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=BAD_WORD_CHARS_MAX)]],
            Meta(max_length=BAD_WORDS_MAX, description="Words whose token sequences the output must not contain."),
        ]
        | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(ge=-1, le=1 << 31, description="Truncate the prompt to this many tokens; -1: to what fits beside max_tokens."),
        ]
        | None
    ) = None
    truncation_side: (
        Annotated[
            Literal["left", "right"],
            Meta(description="Side on which truncate_prompt_tokens cuts; left (default) keeps the end of the prompt."),
        ]
        | None
    ) = None
    return_token_ids: Annotated[bool, Meta(description="Add `token_ids` to choices and `prompt_token_ids`.")] | None = None
    priority: Priority | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=LOGPROBS_MAX,
                description="Return log-probabilities of the prompt's tokens and of this many most likely ones"
                " (not with stream; needs an engine that serves them).",
            ),
        ]
        | None
    ) = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description=f"One of json, regex, choice, grammar, json_object and structural_tag, and options ({_CONSTRAINED})."),
    ] = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    # SGLang
    regex: Annotated[Text, Meta(description=f"Regular expression for the whole output ({_CONSTRAINED}).")] | None = None
    ebnf: Annotated[Text, Meta(description=f"Grammar of the output in EBNF ({_CONSTRAINED}).")] | None = None
    json_schema: Annotated[Text, Meta(description=f"Text of a JSON schema of the output ({_CONSTRAINED}).")] | None = None
    rid: RequestId | None = None
    lora_path: Adapter | None = None
    no_stop_trim: Annotated[bool, Meta(description="The same as include_stop_str_in_output.")] | None = False
    # LoRAX
    adapter_id: Adapter | None = None
    ignore_eos_token: Annotated[bool, Meta(description="The same as ignore_eos.")] | None = False

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def constraint(self) -> tuple[str, StructuredOutput] | None:
        """The constraint on the output, with the field that sets it. Raises BadRequest, also for two such fields."""
        found: list[tuple[str, StructuredOutput]] = []
        if self.response_format is not None and (wanted := structured.from_response_format(self.response_format)):
            found.append(("response_format", wanted))
        if self.structured_outputs is not None:
            found.append(("structured_outputs", structured.from_structured_outputs(self.structured_outputs)))
        if self.regex is not None:
            found.append(("regex", StructuredOutput(kind="regex", value=self.regex)))
        if self.ebnf is not None:
            found.append(("ebnf", StructuredOutput(kind="grammar", value=self.ebnf)))
        if self.json_schema is not None:
            found.append(("json_schema", structured.schema(self.json_schema, "json_schema")))
        if len(found) > 1:
            raise BadRequest(f"{found[1][0]} and {found[0][0]} cannot both constrain the output", param=found[1][0])
        return found[0] if found else None

    def prompt_logprobs_wanted(self) -> tuple[str, int] | None:
        """The field that asks for log-probabilities of the prompt, and how many alternatives it asks for; None without one."""
        return None if self.prompt_logprobs is None else ("prompt_logprobs", self.prompt_logprobs)

    def forget_content(self) -> None:
        """Drop what only a prompt is made of: a request is kept as long as it runs, and its prompt is tokens by then."""

    def check(self) -> None:
        """Raises BadRequest naming the first field that asks for what is not served."""
        self.constraint()
        if self.prompt_logprobs is not None and self.stream:
            raise _unsupported("prompt_logprobs", "with stream: true")
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of", "other than n")
        if self.truncate_prompt_tokens == 0:
            raise BadRequest("truncate_prompt_tokens leaves no token of the prompt", param="truncate_prompt_tokens")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true", param="stream_options")


class ChatRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            max_length=MESSAGES_MAX,
            description="The conversation: text, and images where the model takes them.",
        ),
    ]
    max_completion_tokens: (
        Annotated[Count, Meta(description="OpenAI's newer name of max_tokens; takes precedence over it.")] | None
    ) = None
    logprobs: Annotated[bool, Meta(description="Return log-probabilities of the drawn tokens.")] | None = False
    top_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=LOGPROBS_MAX,
                description="Also return log-probabilities of this many most likely tokens (needs logprobs).",
            ),
        ]
        | None
    ) = None
    reasoning_effort: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description='Passed to the chat template; refused if the template does not use it (except "none").',
            ),
        ]
        | None
    ) = None
    tools: (
        Annotated[
            list[Tool],
            Meta(max_length=TOOLS_MAX, description="Functions that the model may call (needs --tool-call-parser)."),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Meta(description="Whether the model calls tools; required, and a named function, need structured outputs."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call is returned.")] | None = True
    # vLLM
    include_reasoning: Annotated[bool, Meta(description="Return the reasoning (with --reasoning-parser).")] | None = True
    add_generation_prompt: (
        Annotated[bool, Meta(description="End the prompt with the template's start of an answer.")] | None
    ) = True
    continue_final_message: Annotated[bool, Meta(description="Continue the last message instead of answering it.")] | None = (
        False
    )
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template.")] | None = None
    documents: (
        Annotated[
            list[dict[str, Any]], Meta(description="Passed to the chat template; refused if the template does not use them.")
        ]
        | None
    ) = None
    # SGLang
    separate_reasoning: (
        Annotated[bool, Meta(description="Separate the reasoning from the content (with --reasoning-parser).")] | None
    ) = True

    def constraint(self) -> tuple[str, StructuredOutput] | None:
        found = super().constraint()
        forced = structured.forced_call(self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls is not False)
        if found and forced:
            raise BadRequest(f"tool_choice and {found[0]} cannot both constrain the output", param="tool_choice")
        return ("tool_choice", forced) if forced else found

    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        for i, tool in enumerate(self.tools or ()):
            check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
        check_depth(self.documents, "documents")
        check_depth(self.chat_template_kwargs, "chat_template_kwargs")
        if self.add_generation_prompt and self.continue_final_message:
            # vLLM asks the client to switch one off; the default of the other is no reason to refuse
            self.add_generation_prompt = False

    def logprobs_wanted(self) -> int | None:
        """How many alternatives to each token are asked for; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages with text content joined to one string. Raises BadRequest naming the message."""
        return conversation.texts(self.messages)

    def forget_content(self) -> None:
        self.messages, self.tools, self.documents, self.chat_template_kwargs = [], None, None, None

    def take_images(self) -> list[Image]:
        """The images of the messages, in order; they are taken out. Raises BadRequest naming the part."""
        return conversation.take_images(self.messages)


class CompletionRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[
        Any, Meta(description="One or several prompts, as text or token ids.", extra_json_schema=prompt_schema(SEQUENCES_MAX))
    ]
    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=1 << 31,
                description="Maximum tokens to generate; prompt and output together must fit the context length. With echo"
                " also 0: the prompt alone is returned.",
            ),
        ]
        | None
    ) = None
    echo: Annotated[bool, Meta(description="Return the prompt before the new text; with logprobs, not streamed.")] | None = (
        False
    )
    logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=LOGPROBS_MAX,
                description="Return log-probabilities of the drawn token and of this many most likely tokens.",
            ),
        ]
        | None
    ) = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None and self.stream:
            raise _unsupported("echo", "together with logprobs and stream: true")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens is 0, which needs echo: true", param="max_tokens")

    def prompt_logprobs_wanted(self) -> tuple[str, int] | None:
        if self.echo and self.logprobs is not None:
            return "echo", max(self.logprobs, self.prompt_logprobs or 0)
        return super().prompt_logprobs_wanted()

    def logprobs_wanted(self) -> int | None:
        """How many alternatives to each token are asked for; None without log-probabilities."""
        return self.logprobs

    def forget_content(self) -> None:
        self.prompt = None

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, as text or token ids. Raises BadRequest."""
        return prompts_of(self.prompt, "prompt", most=SEQUENCES_MAX)


def prompts_of(given: Any, param: str, *, most: int) -> list[str | list[int]]:
    """One or several prompts, as text or token ids. Raises BadRequest naming `param`, also for more than `most`."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise BadRequest("expected a string, a list of strings, a list of token ids or a list of those", param=param)
    if not given:
        raise BadRequest("the list is empty", param=param)
    if _is_token_list(given):
        return [given]
    if len(given) > most:
        raise BadRequest(f"at most {most} {param}s are taken, not {len(given)}", param=param)
    if all(isinstance(p, str) for p in given) or all(isinstance(p, list) and _is_token_list(p) for p in given):
        return given
    raise BadRequest("expected a string, a list of strings, a list of token ids or a list of those", param=param)


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """A chat request. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: ChatRequest = known(body, _chat, fields.CHAT)
    request.check()
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """A completion request. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: CompletionRequest = known(body, _completion, fields.COMPLETION)
    request.check()
    return request


def parse(body: bytes) -> ChatRequest | CompletionRequest:
    """A chat request if the body has `messages`, a completion request if it has `prompt`."""
    keys = decode(body, KEYS)
    if "messages" in keys:
        return parse_chat(body)
    if "prompt" in keys:
        return parse_completion(body)
    raise BadRequest("the request has neither `messages` nor `prompt`", param="messages")


def _unsupported(name: str, detail: str = "") -> BadRequest:
    return BadRequest(f"{name}{' ' + detail if detail else ''} is not supported", param=name)


def _is_token_list(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int}  # not bool
