"""Fields that constrain the output to a grammar: OpenAI's `response_format`, vLLM's `structured_outputs`, SGLang's `regex`,
`ebnf` and `json_schema`. One request may have one constraint.

Checked here are sizes, and that schemas are JSON. The engine compiles the grammar, and refuses one that it cannot compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet.services.gateway.openai.nesting import check_depth
from motet.shared.errors import BadRequest
from motet.shared.model import StructuredOutput

CONSTRAINT_CHARS_MAX = 65_536
CHOICES_MAX = 4096

Text = Annotated[str, Meta(min_length=1, max_length=CONSTRAINT_CHARS_MAX)]
Kind = Literal["json_object", "json", "regex", "choice", "grammar", "structural_tag"]


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's named JSON schema."""

    name: Annotated[str, Meta(description="Accepted without effect.")]
    schema: dict[str, Any]
    description: Annotated[str, Meta(description="Accepted without effect.")] | None = None
    strict: Annotated[bool, Meta(description="Accepted without effect: the output always follows the schema.")] | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the output: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, Meta(description="With the type json_schema.")] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's constraint: one of the first six, and options."""

    json: Annotated[str | dict[str, Any], Meta(description="A JSON schema, as an object or its text.")] | None = None
    regex: Annotated[Text, Meta(description="A regular expression for the whole output.")] | None = None
    choice: (
        Annotated[list[Text], Meta(min_length=1, max_length=CHOICES_MAX, description="The output is one of these.")] | None
    ) = None
    grammar: Annotated[Text, Meta(description="A context-free grammar in EBNF.")] | None = None
    json_object: Annotated[bool, Meta(description="Any JSON object.")] | None = None
    structural_tag: Annotated[Text, Meta(description="vLLM's structural tags, as the text of a JSON object.")] | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: bool | None = False
    whitespace_pattern: Annotated[str, Meta(max_length=256)] | None = None


def from_response_format(given: ResponseFormat) -> StructuredOutput | None:
    """The constraint that `response_format` sets; None for plain text. Raises BadRequest."""
    if (given.type == "json_schema") != (given.json_schema is not None):
        reason = "needs json_schema" if given.json_schema is None else f"has no json_schema with type {given.type!r}"
        raise BadRequest(f"response_format: it {reason}", param="response_format")
    if given.json_schema is not None:
        return schema(given.json_schema.schema, "response_format.json_schema.schema")
    return StructuredOutput(kind="json_object") if given.type == "json_object" else None


def from_structured_outputs(given: StructuredOutputs) -> StructuredOutput:
    """The constraint that vLLM's `structured_outputs` sets. Raises BadRequest unless there is exactly one."""
    name = "structured_outputs"
    kinds: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    asked = [kind for kind in kinds if getattr(given, kind) not in (None, False)]
    if len(asked) != 1:
        raise BadRequest(f"{name}: expected one of {', '.join(kinds)}, got {len(asked)}", param=name)
    kind, value = asked[0], getattr(given, asked[0])
    if kind == "json":
        text = schema(value, f"{name}.json").value
    elif kind == "choice":
        text = _json_text(value, f"{name}.choice")
    elif kind == "structural_tag":
        text = schema(value, f"{name}.structural_tag").value
    else:
        text = "" if kind == "json_object" else value
    return StructuredOutput(
        kind=kind,
        value=text,
        disable_any_whitespace=bool(given.disable_any_whitespace),
        disable_additional_properties=bool(given.disable_additional_properties),
        whitespace_pattern=given.whitespace_pattern or "",
    )


def schema(given: str | dict[str, Any], name: str) -> StructuredOutput:
    """A JSON schema, given as an object or its text. Raises BadRequest when it is no JSON object, too long or too deep."""
    if isinstance(given, str):
        if len(given) > CONSTRAINT_CHARS_MAX:
            raise _too_long(name, len(given))
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadRequest(f"{name}: it is not JSON: {error}", param=name) from None
    if not isinstance(given, dict):
        raise BadRequest(f"{name}: expected a JSON object", param=name)
    check_depth(given, name)
    return StructuredOutput(kind="json", value=_json_text(given, name))


def forced_call(tools: Sequence[Any], choice: Any, *, parallel: bool) -> StructuredOutput | None:
    """The calls that `tool_choice` demands: an array of calls for "required", the arguments for a named function.

    Raises BadRequest for a choice without its tool.
    """
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    arguments = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
    if choice != "required":
        if choice.function.name not in arguments:
            raise BadRequest(f"tool_choice: {choice.function.name!r} is none of the tools", param="tool_choice")
        return schema(arguments[choice.function.name], "tools")
    shapes = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
            "required": ["name", "parameters"],
        }
        for name, parameters in arguments.items()
    ]
    calls = {"type": "array", "minItems": 1, "items": {"anyOf": shapes}}
    return schema(calls if parallel else calls | {"maxItems": 1}, "tools")


def _json_text(value: Any, name: str) -> str:
    text = msgspec.json.encode(value).decode()
    if len(text) > CONSTRAINT_CHARS_MAX:
        raise _too_long(name, len(text))
    return text


def _too_long(name: str, chars: int) -> BadRequest:
    return BadRequest(f"{name}: at most {CONSTRAINT_CHARS_MAX} characters are taken, not {chars}", param=name)
