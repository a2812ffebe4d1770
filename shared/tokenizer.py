"""A model's tokenizer as transformers builds it from the same files. Imports neither transformers nor torch.

tokenizer.json alone is not the tokenizer: other files declare tokens that it lacks, or that it has as plain vocabulary entries.

    tokenizer_config.json     added_tokens_decoder; bos_token, eos_token, ... and any other *_token; extra_special_tokens
                              (a list, or a mapping of names), formerly additional_special_tokens
    special_tokens_map.json   the same names, and
    added_tokens.json         further tokens: both only without an added_tokens_decoder, which is how transformers reads them

Each declared token is one token, with the vocabulary's id or the next free one; special ones are left out of texts. This is
transformers' `TokenizersBackend` (`PreTrainedTokenizerFast`), which vLLM uses as well. Like it, this module ignores
add_bos_token and add_eos_token: tokenizer.json's own post-processor decides. `clean_up_tokenization_spaces` is not applied: a
stream could not, and vLLM's do not.

One class of transformers leaves parts of tokenizer.json out: `LlamaTokenizer`, for Llamas whose configuration names it and that
have pieces of SentencePiece (Llama 2, TinyLlama). It marks a space before the first word only, not after every special token.
AutoTokenizer, which vLLM uses, and Motet do the same (`_as_llama`). `Qwen2Tokenizer` has what Qwen's tokenizer.json says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from motet.shared.text_files import ADDED_FILE, CONFIG_FILE, SPECIAL_MAP_FILE, TEMPLATES_DIR

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MODEL_FILE = "config.json"
FILES = (
    MODEL_FILE,
    CONFIG_FILE,
    SPECIAL_MAP_FILE,
    ADDED_FILE,
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class UnusableFile(ValueError):
    """A file whose content cannot be used; the message begins with the file's name."""


class ModelTokenizer(NamedTuple):
    """A tokenizer with every declared token. `special`: the special tokens by name, as chat templates read them."""

    backend: Tokenizer
    special: dict[str, str]

    def id_of(self, name: str) -> int | None:
        """The id of a named special token such as eos_token; None when no file names it."""
        token = self.special.get(name)
        return None if token is None else self.backend.token_to_id(token)


def read_texts(directory: Path) -> dict[str, str]:
    """The small text files beside tokenizer.json: {name: text}, templates as `additional_chat_templates/NAME.jinja`.

    Raises UnusableFile for one that cannot be read as UTF-8 text.
    """
    found = [directory / name for name in FILES] + sorted(directory.glob(f"{TEMPLATES_DIR}/*.jinja"))
    texts = {}
    for path in found:
        name = path.relative_to(directory).as_posix()
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableFile(f"{name} cannot be read: {error}") from None
    return texts


def json_object(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in a file; {} when there is no such file. Raises UnusableFile when it holds anything else."""
    if name not in texts:
        return {}
    try:
        value = json.loads(texts[name])
    except (ValueError, RecursionError) as error:
        raise UnusableFile(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnusableFile(f"{name} is not a JSON object")
    return value


def special_tokens(texts: Mapping[str, str]) -> dict[str, str]:
    """The special tokens that the files name, as chat templates read them. Raises UnusableFile."""
    return {name: str(token) for name, token in _declared(texts, {}).named.items()}


class DeclaredTokens(NamedTuple):
    """The tokens that a directory's files declare, without a tokenizer."""

    named: dict[str, str]  # special tokens by name
    ids: dict[str, int | None]  # of all of them by text; None where the files tell none
    special: frozenset[str]  # those that are left out of texts


def declared_tokens(texts: Mapping[str, str]) -> DeclaredTokens:
    """What the files declare. Raises UnusableFile."""
    declared = _declared(texts, {})
    tokens = declared.tokens(())
    ids: dict[str, int | None] = {str(token): None for token in tokens}
    for index, value in _items(json_object(texts, CONFIG_FILE).get("added_tokens_decoder"), CONFIG_FILE):
        ids[_token(value, CONFIG_FILE).content] = _index(index, CONFIG_FILE)
    ids |= {token: _index(index, ADDED_FILE) for token, index in json_object(texts, ADDED_FILE).items()}
    named = {name: str(token) for name, token in declared.named.items()}
    return DeclaredTokens(named, ids, frozenset(str(token) for token in tokens if token.special))


def load_tokenizer(model_dir: Path, texts: Mapping[str, str] | None = None) -> ModelTokenizer:
    """The tokenizer of a model directory. `texts`: what `read_texts` returned, if it was read already. Raises UnusableFile."""
    texts = read_texts(model_dir) if texts is None else texts
    path = model_dir / "tokenizer.json"
    try:
        backend: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise UnusableFile(f"tokenizer.json cannot be read: {error}") from None
    listed = backend.get_added_tokens_decoder()
    declared = _declared(texts, listed)
    if _is_llama(texts, backend):
        _as_llama(backend, json_object(texts, CONFIG_FILE), declared.named)
    if backend.padding is not None:
        declared.named.setdefault("pad_token", backend.padding["pad_token"])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = declared.splits_special
    backend.add_tokens(declared.tokens(listed.values()))
    return ModelTokenizer(backend, {name: str(token) for name, token in declared.named.items()})


def with_declared(
    backend: Tokenizer, texts: Mapping[str, str], names: Mapping[str, str], listed: Mapping[int, AddedToken]
) -> ModelTokenizer:
    """A tokenizer that its class makes of a vocabulary and merges, with every declared token.

    `names`: the special tokens that the class has by default; `listed`: the added tokens of tokenizer.json, if there is one.
    Raises UnusableFile.
    """
    declared = _declared(texts, listed)
    for name, token in names.items():
        declared.named.setdefault(name, token)
    backend.encode_special_tokens = declared.splits_special
    backend.add_tokens(declared.tokens(listed.values()))
    return ModelTokenizer(backend, {name: str(token) for name, token in declared.named.items()})


def end_token(model_dir: Path) -> int | None:
    """The id of the tokenizer's eos_token; None where no file names one or there is no tokenizer. Raises UnusableFile.

    vLLM ends an answer there, besides the end tokens of generation_config.json or config.json.
    """
    return load_tokenizer(model_dir).id_of("eos_token") if (model_dir / "tokenizer.json").is_file() else None


class _Declared(NamedTuple):
    """What the files declare, in transformers' order."""

    added: list[AddedToken]
    named: dict[str, str | AddedToken]
    extra: list[str | AddedToken]
    splits_special: bool

    def tokens(self, listed: Iterable[AddedToken]) -> list[AddedToken]:
        """The tokens to add to a tokenizer that has `listed`; new ones get free ids in this order."""
        names = {str(token) for token in self.named.values()}
        present = {token.content for token in (*listed, *self.added)}
        new = [token for token in (*self.named.values(), *self.extra) if str(token) not in present]
        tokens = self.added + [AddedToken(token, special=True) if isinstance(token, str) else token for token in new]
        for one in tokens:
            one.special = one.special or one.content in names
        return tokens


def _is_llama(texts: Mapping[str, str], backend: Tokenizer) -> bool:
    """Whether transformers' AutoTokenizer takes `LlamaTokenizer` for the model. That class makes no byte-level tokenizers."""
    model, settings = json_object(texts, MODEL_FILE), json_object(texts, CONFIG_FILE)
    named = str(settings.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    if model.get("model_type") != "llama" or named != "LlamaTokenizer" or not isinstance(backend.model, models.BPE):
        return False
    return not any("ByteLevel" in repr(part) for part in (backend.pre_tokenizer, backend.decoder))


def _as_llama(backend: Tokenizer, settings: Mapping[str, Any], named: dict[str, str | AddedToken]) -> None:
    """Replace the parts of a tokenizer that `LlamaTokenizer` does not take from tokenizer.json; name its special tokens."""
    for name, token in (("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")):
        if name not in settings:
            named.setdefault(name, token)
    spaced = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if spaced else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if spaced else []))
    backend.model.fuse_unk = backend.model.byte_fallback = True


def _declared(texts: Mapping[str, str], listed: Mapping[int, AddedToken]) -> _Declared:
    """The tokens that the files declare; `listed` are those that tokenizer.json lists as added."""
    settings, where = json_object(texts, CONFIG_FILE), CONFIG_FILE
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    if "added_tokens_decoder" in settings:
        numbered = _decoder_tokens(settings)
    else:
        _merge_special_map(settings, json_object(texts, SPECIAL_MAP_FILE))
        numbered = [*_added_file_tokens(settings, json_object(texts, ADDED_FILE)), *listed.items()]
    by_id, by_content = dict(numbered), {token.content: token for _, token in numbered}
    named: dict[str, str | AddedToken] = {}
    for name in NAMES:
        if (value := settings.get(name)) is not None:
            given = _given(value, f"{where}: {name}")
            named[name] = by_content.get(str(given), given)
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    if isinstance(extra, dict):
        own, extra = dict(extra), []
    else:
        own = {}
    own = {name: value for name, value in settings.items() if _is_own(name, value)} | own
    named |= {name: _given(value, f"{where}: {name}") for name, value in own.items()}
    return _Declared(
        added=[by_id[index] for index in sorted(by_id)],
        named=named,
        extra=[_given(value, f"{where}: extra_special_tokens") for value in _list(extra, f"{where}: extra_special_tokens")],
        splits_special=settings.get("split_special_tokens") is True,
    )


def _decoder_tokens(settings: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """The tokens of `added_tokens_decoder` with their ids."""
    where = f"{CONFIG_FILE}: added_tokens_decoder"
    return [
        (_index(index, where), _token(value, f"{where}.{index}"))
        for index, value in _items(settings["added_tokens_decoder"], where)
    ]


def _merge_special_map(settings: dict[str, Any], special_map: Mapping[str, Any]) -> None:
    """What special_tokens_map.json says replaces the settings of tokenizer_config.json."""
    for key, value in special_map.items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            value = _token({**value, "special": True}, f"{SPECIAL_MAP_FILE}: {key}")
        elif isinstance(value, list) and key == "extra_special_tokens":
            value = [*(settings.get(key) or ()), *value]
        settings[key] = value


def _added_file_tokens(settings: Mapping[str, Any], added: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """The tokens of added_tokens.json with their ids."""
    # transformers does not look into tokens that tokenizer_config.json writes as objects here
    special = {str(settings[key]) for key in NAMES if settings.get(key)}
    special.update(map(str, settings.get("extra_special_tokens") or ()))
    tokens = []
    for content, index in added.items():
        one = content in special
        token = AddedToken(content, normalized=not one, special=one)
        tokens.append((_index(index, f"{ADDED_FILE}: {content}"), token))
    return tokens


def _is_own(name: str, value: Any) -> bool:
    """Whether a setting is a special token with a name of the model's own, such as image_token."""
    told = isinstance(value, (str, AddedToken)) or (isinstance(value, dict) and isinstance(value.get("content"), str))
    return name.endswith("_token") and name not in NAMES and told


def _given(value: Any, where: str) -> str | AddedToken:
    return value if isinstance(value, (str, AddedToken)) else _token(value, where)


def _token(value: Any, where: str) -> AddedToken:
    """A token from its JSON object."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise UnusableFile(f"{where}: expected a token's text or an object with its content, not {value!r:.80}")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if wrong := next((flag for flag, told in flags.items() if not isinstance(told, bool)), None):
        raise UnusableFile(f"{where}: {wrong} must be true or false, not {flags[wrong]!r:.80}")
    return AddedToken(content, **flags)


def _index(value: Any, where: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UnusableFile(f"{where}: expected a token id, not {value!r:.80}") from None


def _items(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    if value is not None and not isinstance(value, dict):
        raise UnusableFile(f"{where}: expected an object, not {value!r:.80}")
    return (value or {}).items()


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnusableFile(f"{where}: expected a list or an object, not {value!r:.80}")
    return value
