"""What an adapter brings for chats: templates, special tokens and sampling defaults, from the text files beside its weights.

The registry reads the files in a child process (`shared.chat_sandbox`), because a tenant's template may do anything while it is
compiled or rendered, and stores an `AdapterChat`. Gateways use it for requests on the adapter. A version's digest covers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from motet.shared.errors import InvalidAdapter
from motet.shared.generation_config import GenerationDefaults, eos_token_ids, generation_defaults
from motet.shared.hf_config import UnsupportedModel
from motet.shared.text_files import CONFIG_FILE, GENERATION_FILE, WITHOUT
from motet.shared.tokenizer import UnusableFile, declared_tokens, json_object

MAX_RECORD_BYTES = 60 * 1024  # of an AdapterChat as JSON: what a record may have
MAX_TOKENS = 65_536  # that the files of a tokenizer declare
MAX_NEW_SPECIAL = 16  # special tokens that are plain entries of the base: texts are searched for each of them


class Template(msgspec.Struct, frozen=True):
    """A chat template and what is known of it without running it again."""

    source: str
    reads: tuple[str, ...]  # the variables that it looks at
    takes_images: bool


class AdapterChat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an adapter brings for chats (KV `motet_adapters`, key `chat.<digest>`, JSON)."""

    templates: dict[str, Template] = {}  # by name: default, tool_use, ...
    special: dict[str, str] = {}  # by name: bos_token, eos_token, ...
    special_tokens: tuple[str, ...] = ()  # left out of texts, unless the base leaves them out anyway
    generation: GenerationDefaults = GenerationDefaults()
    eos_token_ids: tuple[int, ...] = ()  # of generation_config.json: they end an answer, beside the base's

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


def read_chat(
    texts: Mapping[str, str], vocabulary: Mapping[str, int] | None, special: Collection[str], vocab_size: int
) -> AdapterChat | None:
    """What the files of an adapter say; None if they say nothing. Runs its templates: call it in a confined process.

    `vocabulary`: the base's tokens, if they are known; `special`: those that are left out of texts anyway; `vocab_size`: the
    rows of its embeddings. Raises InvalidAdapter naming the file or the token.
    """
    from motet.shared.chat_templates import ChatTemplates  # Jinja: half of what a process that only unpacks would load

    try:
        tokens = declared_tokens(texts)
        named = tokens.named
        templates = ChatTemplates.of(texts, named)
        settings = json_object(texts, GENERATION_FILE)
        generation, ends = generation_defaults(settings), eos_token_ids({}, settings)
    except (UnusableFile, UnsupportedModel) as error:
        raise InvalidAdapter(f"{error}; {WITHOUT}") from None
    unused = {str(named.get("pad_token"))} - {text for name, text in named.items() if name != "pad_token"}
    _check_vocabulary({text: at for text, at in tokens.ids.items() if text not in unused}, vocabulary, vocab_size)
    if wrong := next((at for at in ends if at >= vocab_size), None):
        raise InvalidAdapter(f"{GENERATION_FILE}: eos_token_id {wrong} is outside the vocabulary of {vocab_size}; {WITHOUT}")
    new = tokens.special - unused - set(special)
    if vocabulary is not None and len(new) > MAX_NEW_SPECIAL:
        raise InvalidAdapter(
            f"{CONFIG_FILE}: {len(new)} special tokens are plain entries of the base model's vocabulary, at most "
            f"{MAX_NEW_SPECIAL} are served; {WITHOUT}"
        )
    chat = AdapterChat(
        templates={
            name: Template(template.source, tuple(sorted(template.reads)), template.takes_images)
            for name, template in sorted(templates.named.items())
        },
        special=dict(sorted(named.items())),
        special_tokens=tuple(sorted(new)),
        generation=generation,
        eos_token_ids=ends,
    )
    if (size := len(msgspec.json.encode(chat))) > MAX_RECORD_BYTES:
        raise InvalidAdapter(f"templates and special tokens have {size} bytes, the limit is {MAX_RECORD_BYTES}; {WITHOUT}")
    return chat if chat != AdapterChat() else None


def _check_vocabulary(tokens: Mapping[str, int | None], vocabulary: Mapping[str, int] | None, vocab_size: int) -> None:
    """Raises InvalidAdapter for a token that the base does not have: there is no row for it in the embeddings."""
    if len(tokens) > MAX_TOKENS:
        raise InvalidAdapter(f"{CONFIG_FILE}: {len(tokens)} tokens are too many; {WITHOUT}")
    for text, index in tokens.items():
        known = index if vocabulary is None else vocabulary.get(text)
        if vocabulary is not None and known is None:
            raise InvalidAdapter(
                f"{CONFIG_FILE}: the token {text!r:.80} is not in the base model's vocabulary, to which an adapter cannot add "
                f"tokens; {WITHOUT}"
            )
        if known is not None and index is not None and (known != index or index >= vocab_size):
            raise InvalidAdapter(
                f"{CONFIG_FILE}: the token {text!r:.80} has the id {index}, which is not its id in the base model's vocabulary "
                f"of {vocab_size}; {WITHOUT}"
            )
