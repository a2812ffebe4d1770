"""Chat templates of a base model or of an adapter, as values: built from the texts of files, rendered in Jinja's sandbox.

    templates = ChatTemplates.of(read_texts(directory))     one or several, by name
    templates.chosen(tools=True).render(messages, ...)      `tool_use` for requests with tools if there is one, else `default`

Choice and text are those of transformers' `apply_chat_template` for the same files. A directory's templates are in

    chat_template.jinja, additional_chat_templates/NAME.jinja    the default one and others; they win over
    chat_template.json, processor_config.json                    a processor's `chat_template`, which wins over
    tokenizer_config.json                                        the tokenizer's `chat_template`

where `chat_template` is a text, a list of {name, template} or a mapping of names to templates. Two additions: a `default` that
is missing among the .jinja files is taken from the JSON files (transformers finds no template then), and the role `developer`
is shown as `system` to a template that does not name it (as vLLM does).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest
from motet.shared.text_files import CONFIG_FILE, TEMPLATES_DIR
from motet.shared.tokenizer import UnusableFile, json_object, read_texts, special_tokens

DEFAULT, TOOL_USE = "default", "tool_use"
CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
    {%- if (loop.last and add_generation_prompt) or not loop.last -%}
        {{- '<|im_end|>' + '\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1]['role'] != 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
LLAMA3 = """\
{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>

' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}\
{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>

' }}{% endif %}"""
SHIPPED = {"chatml": CHATML, "llama3": LLAMA3}
"""Templates for models that bring none: vLLM's own fallback, and the one of Llama 3."""
PROBE = "motet-probe"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One compiled template with the special tokens that it reads."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        """`where` names the file in the UnusableFile that a template raises which does not compile."""
        try:
            self._compiled = _ENVIRONMENT.from_string(source)
            self.reads = frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
            """The variables that the template looks at."""
        except jinja2.TemplateSyntaxError as error:
            raise UnusableFile(f"{where} does not compile: line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnusableFile(f"{where} does not compile: {error}") from None
        self.source = source
        self._special = dict(special)
        self._names_developer = any(quoted in source for quoted in ("'developer'", '"developer"'))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `variables`: `tools`, `documents` and what else the template reads.

        Raises BadRequest naming `messages`, or `continue_final_message` when there is nothing to continue.
        """
        messages = [_readable(message) for message in messages]
        if not self._names_developer and any(message.get("role") == "developer" for message in messages):
            messages = _one_system(messages)
        final = _mark_final(messages) if continue_final_message else ""
        given = {**self._special, "tools": None, "documents": None, **(variables or {})}
        try:
            text = self._compiled.render(given, messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # whatever a template does with what the request says
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        return _cut(text, final) if continue_final_message else text

    @cached_property
    def takes_images(self) -> bool:
        """Whether the template has a place for images. Then it reads contents as lists of parts."""
        text = {"type": "text", "text": PROBE}

        def rendered(parts: list[dict[str, Any]]) -> str:
            try:
                return self.render([{"role": "user", "content": parts}])
            except BadRequest:
                return ""

        without, with_image = rendered([text]), rendered([{"type": "image"}, text])
        listed = any(quoted in without + with_image for quoted in ("'type'", '"type"'))  # as one value, not part by part
        return PROBE in without and PROBE in with_image and with_image != without and not listed


class ChatTemplates:
    """The templates of one model or adapter, by name."""

    def __init__(self, named: Mapping[str, ChatTemplate], special: Mapping[str, str]) -> None:
        self.named, self.special = dict(named), dict(special)

    @classmethod
    def of(cls, texts: Mapping[str, str], special: Mapping[str, str] | None = None) -> ChatTemplates:
        """The templates in the texts of a directory's files (`shared.tokenizer.read_texts`).

        `special`: the special tokens by name, if they are known; else those that the files name. Raises UnusableFile.
        """
        special = special_tokens(texts) if special is None else special
        named = {name: ChatTemplate(source, special, where) for name, (source, where) in _sources(texts).items()}
        return cls(named, special)

    def only(self, source: str, where: str) -> ChatTemplates:
        """This template for every request, with these special tokens. Raises UnusableFile."""
        return ChatTemplates({DEFAULT: ChatTemplate(source, self.special, where)}, self.special)

    def chosen(self, *, tools: bool = False) -> ChatTemplate:
        """The template for a request with or without tools. Raises BadRequest saying why there is none."""
        name = TOOL_USE if tools and TOOL_USE in self.named else DEFAULT
        if name not in self.named:
            raise BadRequest(f"{self.missing}; /v1/completions needs no template", param="messages")
        return self.named[name]

    @property
    def missing(self) -> str:
        """Why chats cannot be served, and with what they could be; "" if they can."""
        if DEFAULT in self.named:
            return ""
        shipped = f"one that Motet ships ({', '.join(SHIPPED)})"
        if not self.named:
            return f"this model has no chat template: give a file or {shipped} with --chat-template"
        names = ", ".join(sorted(self.named))
        return (
            f"none of this model's chat templates ({names}) is named {DEFAULT}: give one of them, a file or {shipped} with"
            " --chat-template"
        )


def served_templates(
    model_dir: Path, given: str = "", texts: Mapping[str, str] | None = None, special: Mapping[str, str] | None = None
) -> ChatTemplates:
    """The templates of a model directory, or the one that `given`, the option `--chat-template`, asks for.

    That is one of the model's or of the shipped ones by its name, a file, or the text itself. `texts` and `special` are read
    from the directory if they are not given. Raises ConfigError.
    """
    try:
        templates = ChatTemplates.of(read_texts(model_dir) if texts is None else texts, special)
    except UnusableFile as error:
        raise ConfigError(f"--model: {model_dir}: {error}") from None
    if not given:
        return templates
    if given in templates.named:
        return ChatTemplates({DEFAULT: templates.named[given]}, templates.special)
    try:
        if given in SHIPPED:
            return templates.only(SHIPPED[given], given)
        if any(sign in given for sign in "{}\n"):
            return templates.only(given, "the given text")
        return templates.only(Path(given).expanduser().read_text(encoding="utf-8"), given)
    except UnusableFile as error:
        raise ConfigError(f"--chat-template: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(sorted({*templates.named, *SHIPPED}))
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--chat-template: {given}: neither one of {names} nor a file that can be read: {reason}") from None


def _sources(texts: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """{name: (template, where it stands)}; without those that are empty."""
    files = {DEFAULT: "chat_template.jinja"} if "chat_template.jinja" in texts else {}
    own = [name for name in texts if name.startswith(f"{TEMPLATES_DIR}/")]
    files |= {name.removeprefix(f"{TEMPLATES_DIR}/").removesuffix(".jinja"): name for name in own}
    found = {name: (texts[where], where) for name, where in files.items()}
    if DEFAULT not in found:
        for where in ("chat_template.json", "processor_config.json", CONFIG_FILE):
            if value := json_object(texts, where).get("chat_template"):
                at = f"{where}: chat_template"
                at_name = at if isinstance(value, str) else at + " {}"
                configured = {name: (source, at_name.format(name)) for name, source in _forms(value, at).items()}
                wanted = configured.keys() & {DEFAULT} if found else configured.keys()
                found |= {name: configured[name] for name in wanted}
                break
    return {name: (source, where) for name, (source, where) in found.items() if source}


def _forms(value: Any, where: str) -> dict[str, str]:
    """{name: template} of any form of the setting `chat_template`."""
    if isinstance(value, str):
        return {DEFAULT: value}
    pairs = list(value.items()) if isinstance(value, dict) else []
    for i, one in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(one, dict) or not {"name", "template"} <= one.keys():
            raise UnusableFile(f"{where}[{i}]: expected an object with name and template, not {one!r:.80}")
        pairs.append((one["name"], one["template"]))
    if not pairs:
        forms = "a text, a list of objects with name and template, or an object of names and templates"
        raise UnusableFile(f"{where}: expected {forms}, not {value!r:.80}")
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise UnusableFile(f"{where}: {name!r:.80} must be a name and have a text, not {template!r:.80}")
    return dict(pairs)


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that are null, its reasoning under each name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of developer and system as one system message in front: many templates allow just that."""
    told = [message for message in messages if message.get("role") in ("developer", "system")]
    rest = [message for message in messages if message.get("role") not in ("developer", "system")]
    contents = [_text(message.get("content")) for message in told]
    text: Any = "\n\n".join(filter(None, contents))
    if any(isinstance(message.get("content"), list) for message in told):
        text = [{"type": "text", "text": text}]
    return [{"role": "system", "content": text}, *rest]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the final message's text in `messages`; returns that text. Raises BadRequest if there is none."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1] = messages[-1] | {"content": content + _CUT}
        return content
    parts = content if isinstance(content, list) else []
    last = max((i for i, part in enumerate(parts) if "text" in part), default=None)
    if last is None:
        raise BadRequest("the final message has no text to continue", param="continue_final_message")
    marked = parts[last] | {"text": parts[last]["text"] + _CUT}
    messages[-1] = messages[-1] | {"content": [*parts[:last], marked, *parts[last + 1 :]]}
    return str(parts[last]["text"])


def _cut(text: str, final: str) -> str:
    """The text up to the mark; spaces before it go where the template has trimmed those after it."""
    if final.strip() not in text or _CUT.strip() not in text:
        raise BadRequest("the chat template does not show the final message's text", param="continue_final_message")
    end = text.rindex(_CUT.strip())
    return text[:end] if text.startswith(_CUT, end) else text[:end].rstrip()


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; when serving its body is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML characters; templates for models expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
