"""Prompts to tokens: the tokenizer, the chat template and the other small files of a model directory. Imports no torch.

Results equal those of `transformers`' `apply_chat_template` and tokenizer call for the same files. Short texts are tokenized
in the event loop, long ones in threads, so that no prompt stalls the token streams:

    requests        `THREADS` threads; a text that cannot fit the context is refused before it is tokenized
    /tokenize       a thread of its own, so that it delays no request; at most `COUNTED_CHARS_MAX` characters

The queue for threads is bounded in number and characters; beyond that clients get 429.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from motet.services.gateway import conversation
from motet.shared.chat_templates import ChatTemplate, served_templates
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, Overloaded, PromptTooLong
from motet.shared.generation_config import generation_defaults, read_generation_config
from motet.shared.hf_config import LENGTH_MAX, UnsupportedModel, read_config, size_in
from motet.shared.tokenizer import UnusableFile, load_tokenizer, read_texts

T = TypeVar("T")
INLINE_CHARS = 4096  # about 1.5 ms of tokenization
MESSAGE_CHARS = 32  # rendering a message costs about as much as tokenizing so many characters
THREADS = 2
WAITING_MAX = 256  # long prompts in the threads or waiting for one
WAITING_CHARS_MAX = 32 << 20
COUNTED_CHARS_MAX = 1 << 20  # of one /tokenize: some seconds
COUNTED_WAITING_MAX = 16
NFC_CHARS_MAX = 4  # characters that NFC composes to one, at most


class ForeignTemplate(Protocol):
    """A chat template that is rendered elsewhere (`profiles.ForeignTemplate`)."""

    reads: frozenset[str]
    takes_images: bool

    async def render(self, messages: list[dict[str, Any]], **how: Any) -> str: ...


class Prompts:
    """One model's tokenizer and chat templates. `context_length` is what config.json says the model can attend to."""

    def __init__(self, model_dir: Path, chat_template: str = "") -> None:
        """`chat_template`: the option `--chat-template`. Raises ConfigError for a file that cannot be used."""
        try:
            config = read_config(model_dir)
            self.context_length = size_in(config, "max_position_embeddings", most=LENGTH_MAX)
            vocab_size = size_in(config, "vocab_size", default=0)
            self.defaults = generation_defaults(read_generation_config(model_dir))
        except UnsupportedModel as error:
            raise ConfigError(f"--model: {error}") from None
        if not (model_dir / "tokenizer.json").is_file():
            raise ConfigError(f"--model: {model_dir} has no tokenizer.json (convert the tokenizer to the fast format first)")
        try:
            texts = read_texts(model_dir)
            loaded = load_tokenizer(model_dir, texts)
        except UnusableFile as error:
            raise ConfigError(f"--model: {model_dir}: {error}") from None
        self.tokenizer: Tokenizer = loaded.backend
        self.vocab_size = max(vocab_size, self.tokenizer.get_vocab_size(with_added_tokens=True))
        self._bos_id = loaded.id_of("bos_token")
        self.templates = served_templates(model_dir, chat_template, texts, loaded.special)
        """The chat templates of the base model, or the one of `--chat-template`."""
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
        template: ChatTemplate | ForeignTemplate | None = None,
        whole: Mapping[str, int] | None = None,
        longest: int | None = None,
        counting: bool = False,
    ) -> list[int]:
        """Tokens of a conversation, with the model's placeholder where an image is.

        Raises BadRequest naming a message or part, or `messages` when the template refuses them or there is none.

        `variables`: what the template reads besides the messages, such as `tools`. `template`: used instead of the model's.
        `whole`: texts that are one token each, beside those that the tokenizer knows to be.
        `longest`: largest useful number of tokens; a text that must have more raises PromptTooLong before it is tokenized.
        `counting`: for /tokenize, which has its own thread and limit.
        """
        template = template or self.templates.chosen(tools=bool(variables and variables.get("tools")))
        messages = conversation.parts(messages) if template.takes_images else conversation.texts(messages)
        size = sum(MESSAGE_CHARS + _chars(message) for message in messages) + (_chars(variables) if variables else 0)

        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
        }

        def tokens(text: str) -> list[int]:
            self._refuse_hopeless(text, longest, "messages")
            return self._plain(text, add_special_tokens, whole)

        if isinstance(template, ChatTemplate):
            here = template
            return await self._run(lambda: tokens(here.render(messages, **how)), size, counting=counting, param="messages")
        if counting and size > COUNTED_CHARS_MAX:  # before it is rendered
            raise BadRequest(f"messages: at most {COUNTED_CHARS_MAX} characters at once, not {size}", param="messages")
        text = await template.render(messages, **how)
        return await self._run(lambda: tokens(text), len(text), counting=counting, param="messages")

    async def texts(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool = True,
        whole: Mapping[str, int] | None = None,
        longest: int | None = None,
        counting: bool = False,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Tokens of plain texts, with the special tokens the tokenizer adds; a BOS already in a text is not doubled.

        `whole`, `longest` and `counting` as in `chat`.
        """
        for text in texts:
            self._refuse_hopeless(text, longest, param)

        def work() -> list[list[int]]:
            return [self._plain(text, add_special_tokens, whole) for text in texts]

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

    def _plain(self, text: str, add_special_tokens: bool, whole: Mapping[str, int] | None = None) -> list[int]:
        for one in sorted(whole or (), key=len, reverse=True):  # split first, as the tokenizer splits at added tokens
            if one in text:
                rest = {other: token for other, token in (whole or {}).items() if other != one}
                first, *parts = text.split(one)
                ids = self._plain(first, add_special_tokens, rest)
                for part in parts:
                    ids += [(whole or {})[one], *self._plain(part, False, rest)]
                return ids
        if len(text) <= INLINE_CHARS:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # without offsets: a third less time, and much less memory to give back with the interpreter's lock held
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        doubled = add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids

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
