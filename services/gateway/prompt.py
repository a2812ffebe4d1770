"""Prompts to tokens: the tokenizer, the chat template and the other small files of a model directory. Imports no torch.

Results equal those of `transformers`' `apply_chat_template` and tokenizer call for the same files. Short texts are tokenized
in the event loop, long ones in threads, so that no prompt stalls the token streams:

    requests        `THREADS` threads; a text that cannot fit the context is refused before it is tokenized
    /tokenize       a thread of its own, so that it delays no request; at most `COUNTED_CHARS_MAX` characters

The queue for threads is bounded in number and characters; beyond that clients get 429.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
import msgspec
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from motet.services.gateway import conversation
from motet.shared.base_shapes import text_config
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, Overloaded, PromptTooLong

T = TypeVar("T")
INLINE_CHARS = 4096  # about 1.5 ms of tokenization
MESSAGE_CHARS = 32  # rendering a message costs about as much as tokenizing so many characters
THREADS = 2
WAITING_MAX = 256  # long prompts in the threads or waiting for one
WAITING_CHARS_MAX = 32 << 20
COUNTED_CHARS_MAX = 1 << 20  # of one /tokenize: some seconds
COUNTED_WAITING_MAX = 16
NFC_CHARS_MAX = 4  # characters that NFC composes to one, at most
PROBE = "motet-probe"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults from generation_config.json, used where a request has no value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class Prompts:
    """One model's tokenizer and chat template. `context_length` is what config.json says the model can attend to."""

    def __init__(self, model_dir: Path) -> None:
        config = _read_json(model_dir / "config.json")
        if not config:
            raise ConfigError(f"--model: {model_dir} has no config.json, so it is not a model in Hugging Face format")
        text = text_config(config)
        self.context_length = int(text.get("max_position_embeddings") or 0)
        if self.context_length < 1:
            raise ConfigError(f"--model: {model_dir}/config.json has no max_position_embeddings")
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model: {model_dir} has no tokenizer.json (convert the tokenizer to the fast format first)")
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = max(int(text.get("vocab_size") or 0), self.tokenizer.get_vocab_size(with_added_tokens=True))
        settings = _read_json(model_dir / "tokenizer_config.json")
        self._specials = _special_tokens(settings, _read_json(model_dir / "special_tokens_map.json"))
        bos = self._specials.get("bos_token")
        self._bos_id = self.tokenizer.token_to_id(bos) if bos else None
        source = _template_source(model_dir, settings)
        self._template = _compile(source) if source else None
        self.template_reads = _variables(source) if source else frozenset()
        """The variables that the chat template looks at."""
        self.takes_images = self._template is not None and self._reads_parts()
        """Whether the chat template has a place for images. Then it reads contents as lists of parts."""
        self.defaults = _generation_defaults(model_dir)
        self._token_chars_max = _token_chars_max(self.tokenizer)
        self._requests = _Lane("tokenize", THREADS, WAITING_MAX, WAITING_CHARS_MAX)
        self._counting = _Lane("count-tokens", 1, COUNTED_WAITING_MAX, WAITING_CHARS_MAX)

    def close(self) -> None:
        """Stop the threads."""
        self._requests.close()
        self._counting.close()

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: dict[str, Any] | None = None,
        longest: int | None = None,
        counting: bool = False,
    ) -> list[int]:
        """Tokens of a conversation, with the model's placeholder where an image is.

        Raises BadRequest naming a message or part, or `messages` when the template refuses them.

        `longest`: largest useful number of tokens; a text that must have more raises PromptTooLong before it is tokenized.
        `counting`: for /tokenize, which has its own thread and limit.
        """
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        messages = conversation.parts(messages) if self.takes_images else conversation.texts(messages)
        size = sum(MESSAGE_CHARS + _chars(message) for message in messages) + (_chars(variables) if variables else 0)

        def work() -> list[int]:
            text = self.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
            self._refuse_hopeless(text, longest, "messages")
            return self._plain(text, add_special_tokens)

        return await self._run(work, size, counting=counting, param="messages")

    async def texts(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool = True,
        longest: int | None = None,
        counting: bool = False,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Tokens of plain texts, with the special tokens the tokenizer adds; a BOS already in a text is not doubled.

        `longest` and `counting` as in `chat`.
        """
        for text in texts:
            self._refuse_hopeless(text, longest, param)

        def work() -> list[list[int]]:
            return [self._plain(text, add_special_tokens) for text in texts]

        return await self._run(work, sum(map(len, texts)), counting=counting, param=param)

    async def text(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""

        def work() -> str:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        return await self._run(work, len(tokens), counting=True, param="tokens")

    async def names(self, tokens: list[int]) -> list[str | None]:
        """The vocabulary's names of tokens."""

        def work() -> list[str | None]:
            return [self.tokenizer.id_to_token(token) for token in tokens]

        return await self._run(work, len(tokens), counting=True, param="tokens")

    def _refuse_hopeless(self, text: str, longest: int | None, param: str) -> None:
        if longest is not None and self._token_chars_max and len(text) > longest * self._token_chars_max:
            raise PromptTooLong.of(
                longest,
                f"your {param} resulted in {len(text)} characters, too many for so few tokens. Please reduce their length.",
                param=param,
            )

    def _plain(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # without offsets: a third less time, and much less memory to give back with the interpreter's lock held
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        doubled = add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The chat template's text."""
        assert self._template is not None
        try:
            text = self._template.render(
                **{**self._specials, "tools": None, "documents": None, **(variables or {})},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        if continue_final_message:
            final = conversation.text_of(messages[-1]).strip()
            if not final or final not in text:
                raise BadRequest("the final message has no text to continue", param="continue_final_message")
            text = text[: text.rindex(final) + len(final)]
        return text

    def _reads_parts(self) -> bool:
        text = {"type": "text", "text": PROBE}

        def rendered(parts: list[dict[str, Any]]) -> str:
            try:
                return self.render([{"role": "user", "content": parts}])
            except BadRequest:
                return ""

        without, with_image = rendered([text]), rendered([{"type": "image"}, text])
        listed = any(quoted in without + with_image for quoted in ("'type'", '"type"'))  # as one value, not part by part
        return PROBE in without and PROBE in with_image and with_image != without and not listed

    async def _run(self, work: Callable[[], T], size: int, *, counting: bool, param: str) -> T:
        if counting and size > COUNTED_CHARS_MAX:
            raise BadRequest(f"{param}: at most {COUNTED_CHARS_MAX} characters at once, not {size}", param=param)
        if size <= INLINE_CHARS:
            return work()
        return await (self._counting if counting else self._requests).run(work, size)


class _Lane:
    """Threads for long work and the bounded queue before them."""

    def __init__(self, name: str, threads: int, waiting_max: int, chars_max: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting_max, self._chars_max = waiting_max, chars_max
        self._waiting = self._chars = 0

    async def run(self, work: Callable[[], T], size: int) -> T:
        """The result of `work` on `size` characters. Raises Overloaded when the queue is full."""
        if self._waiting >= self._waiting_max or (self._waiting and self._chars + size > self._chars_max):
            raise Overloaded(f"{self._waiting} long texts are already being tokenized", retry_after_s=1.0)
        running = self._threads.submit(work)
        self._waiting += 1
        self._chars += size
        loop = asyncio.get_running_loop()
        # counted until the thread is done with it, also when its client has gone
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done, size))
        return await asyncio.wrap_future(running)

    def _done(self, size: int) -> None:
        self._waiting -= 1
        self._chars -= size

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _chars(values: dict[str, Any]) -> int:
    """The approximate number of characters that a template makes of a message."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in values.values())


def _token_chars_max(tokenizer: Tokenizer) -> int:
    """The largest number of characters that one token can represent; 0 if unlimited.

    Known for byte-level BPE with every byte in its vocabulary: nothing of the text is dropped or merged into an unknown token.
    """
    described = json.loads(tokenizer.to_str())
    model, vocabulary = described["model"], tokenizer.get_vocab(with_added_tokens=True)
    normalizer = described.get("normalizer")
    factor = {None: 1, "NFC": NFC_CHARS_MAX}.get(normalizer and normalizer["type"], 0)
    splitters = described.get("pre_tokenizer") or {}
    splitters = splitters.get("pretokenizers", [splitters])
    whole = (
        model["type"] == "BPE"
        and all(vocabulary_byte in vocabulary for vocabulary_byte in ByteLevel.alphabet())
        and any(one.get("type") == "ByteLevel" for one in splitters)
        and all(one.get("type") in ("ByteLevel", "Split", "Digits") and one.get("behavior") != "Removed" for one in splitters)
        and not any(added["lstrip"] or added["rstrip"] for added in described.get("added_tokens", ()))
    )
    return factor * max(map(len, vocabulary)) if whole else 0


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object file; {} when there is none. Raises ConfigError when it is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--model: {path} is not a JSON object")
    return value


def _special_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name) or special_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(model_dir: Path, settings: dict[str, Any]) -> str:
    """chat_template.jinja, else a processor's chat_template.json, else tokenizer_config.json's template (of several the one
    named "default"); "" for none."""
    own_file = model_dir / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = _read_json(model_dir / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), "")
    return str(template)


def _generation_defaults(model_dir: Path) -> GenerationDefaults:
    raw = _read_json(model_dir / "generation_config.json")
    try:
        return msgspec.convert(raw, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--model: {model_dir}/generation_config.json: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; when serving its body is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"--model: the chat template does not compile: {error}") from None


def _variables(source: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


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
