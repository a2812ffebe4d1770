"""Prompts to tokens: the tokenizer, the chat template and the other small files of a model directory. Imports no torch.

Results equal those of `transformers`' `apply_chat_template` and tokenizer call for the same files. Nothing here waits: callers
put what may take long into a thread (`lanes`). A text that cannot fit the context is refused before it is tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from motet.services.gateway.openai import conversation
from motet.shared.chat_templates import ChatTemplate, ChatTemplates, served_templates
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, PromptTooLong
from motet.shared.generation_config import GenerationDefaults, generation_defaults, read_generation_config
from motet.shared.hf_config import LENGTH_MAX, UnsupportedModel, read_config, size_in
from motet.shared.tokenizer import UnusableFile, load_tokenizer, read_texts

OFFSETS_CHARS = 4096  # longer texts are tokenized without offsets
COUNTED_CHARS_MAX = 1 << 20  # of one /tokenize: some seconds
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
            vocab_size = size_in(config, "vocab_size", default=1)
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

    @classmethod
    def unread(cls, tokenizer: Tokenizer) -> Prompts:
        """Of an image base, of which no text is asked (`Preparer.check_kind`): a tokenizer, and no template."""
        prompts = cls.__new__(cls)
        prompts.tokenizer = tokenizer
        prompts.context_length = LENGTH_MAX
        prompts.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        prompts.defaults = GenerationDefaults()
        prompts.templates = ChatTemplates({}, {})
        prompts._bos_id, prompts._token_chars_max = None, 0
        return prompts

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: dict[str, Any] | None = None,
        template: ChatTemplate | None = None,
        whole: Mapping[str, int] | None = None,
        longest: int | None = None,
        counting: bool = False,
    ) -> list[int]:
        """Tokens of a conversation, with the model's placeholder where an image is.

        Raises BadRequest naming a message or part, or `messages` when the template refuses them or there is none.

        `variables`: what the template reads besides the messages, such as `tools`. `template`: used instead of the model's.
        `whole`: texts that are one token each, beside those that the tokenizer knows to be.
        `longest`: largest useful number of tokens; a text that must have more raises PromptTooLong before it is tokenized.
        `counting`: for /tokenize, which takes at most `COUNTED_CHARS_MAX` characters.
        """
        template = template or self.templates.chosen(tools=bool(variables and variables.get("tools")))
        text = template.render(
            conversation.read_by(messages, template),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.rendered(text, add_special_tokens=add_special_tokens, whole=whole, longest=longest, counting=counting)

    def rendered(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        whole: Mapping[str, int] | None = None,
        longest: int | None = None,
        counting: bool = False,
    ) -> list[int]:
        """Tokens of a conversation that a chat template made a text of; arguments and errors as of `chat`."""
        self._refuse_long(text, longest, counting, "messages")
        return self._plain(text, add_special_tokens, whole)

    def texts(
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
            self._refuse_long(text, longest, counting, param)
        return [self._plain(text, add_special_tokens, whole) for text in texts]

    def text(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        if len(tokens) <= OFFSETS_CHARS:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        # this call does not keep the interpreter's lock
        return self.tokenizer.decode_batch([tokens], skip_special_tokens=skip_special_tokens)[0]

    def names(self, tokens: list[int]) -> list[str | None]:
        """The vocabulary's names of tokens."""
        return [self.tokenizer.id_to_token(token) for token in tokens]

    def _refuse_long(self, text: str, longest: int | None, counting: bool, param: str) -> None:
        if counting and len(text) > COUNTED_CHARS_MAX:
            raise BadRequest(f"{param}: at most {COUNTED_CHARS_MAX} characters at once, not {len(text)}", param=param)
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
        if len(text) <= OFFSETS_CHARS:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # without offsets: a third less time, and much less memory to give back with the interpreter's lock held
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        doubled = add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids


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
