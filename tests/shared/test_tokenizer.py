"""A model directory's tokenizer equals the one transformers builds from it, token for token and text for text."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from motet.services.gateway.owner.detokenize import Detokenizer
from motet.shared.tokenizer import load_tokenizer
from tests.services.gateway import support_tokenizers as kinds

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

KINDS = [kinds.byte_level, kinds.sentence_piece, kinds.metaspace, kinds.word_piece]
WORDS = ["<tool>", "</s>", "<s>", "hello", "<x>", "<unk>", "日本 added", "ld"]
TEXTS = [
    "a<tool>b",
    "hello <tool> world</s>",
    "<s>hello<x><x> ld</s>",
    "日本 added <unk><tool>",
    " <tool>  <x>\n</s> x",
    "ü<s>",
]


def reference(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PreTrainedTokenizerFast.from_pretrained(str(directory))


def automatic(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(str(directory))


def write(directory: Path, tokenizer: Tokenizer, files: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def is_byte(name: str | None) -> bool:
    """Whether a token is a byte of a character; a stream shows as soon as it can what `decode` looks at as a whole."""
    return bool(name) and re.fullmatch("<0x[0-9A-F]{2}>", name or "") is not None


def assert_same(directory: Path, texts: list[str], oracle: Callable[[Path], Any] = reference) -> None:
    """Encoding, decoding with and without special tokens, and any text that is shown piece by piece."""
    expected, ours = oracle(directory), load_tokenizer(directory)
    assert ours.backend.get_vocab() == expected.get_vocab()
    assert ours.special == {name: token for name, token in expected.special_tokens_map.items() if isinstance(token, str)}
    assert ours.id_of("eos_token") == expected.eos_token_id
    detokenizer = Detokenizer(ours.backend)
    whole = [token for token in range(len(expected)) if not is_byte(expected.convert_ids_to_tokens(token))]
    shown, sequences = set(whole), [whole]
    for text in texts:
        for special in (True, False):
            tokens = expected(text, add_special_tokens=special)["input_ids"]
            assert ours.backend.encode(text, add_special_tokens=special).ids == tokens, text
        sequences += [tokens, [token for token in tokens[::-1] if token in shown]]
    for skip in (True, False):
        for sequence in sequences:
            decoded = expected.decode(sequence, skip_special_tokens=skip)
            assert ours.backend.decode(sequence, skip_special_tokens=skip) == decoded
            stream = detokenizer.stream(skip_special_tokens=skip)
            assert "".join([stream.push([token]) for token in sequence] + [stream.finish()]) == decoded


def entry(content: str = "<tool>", *, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | {
        "special": special,
        **flags,
    }


FORMS: dict[str, dict[str, Any]] = {
    "nothing but tokenizer.json": {},
    "added_tokens_decoder, special": {"tokenizer_config.json": {"added_tokens_decoder": {"700": entry()}}},
    "added_tokens_decoder, not special": {"tokenizer_config.json": {"added_tokens_decoder": {"700": entry(special=False)}}},
    "added_tokens_decoder out of order": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"901": entry("<x>"), "900": entry("<tool>", lstrip=True, rstrip=True)}
        }
    },
    "added_tokens_decoder keeps the older files unread": {
        "tokenizer_config.json": {"added_tokens_decoder": {"700": entry("<x>")}},
        "special_tokens_map.json": {"eos_token": "<tool>"},
        "added_tokens.json": {"<tool>": 701},
    },
    "added_tokens.json": {"added_tokens.json": {"<tool>": 700, "<x>": 701}},
    "added_tokens.json, one of them special": {
        "added_tokens.json": {"<x>": 700, "<tool>": 701},
        "special_tokens_map.json": {"additional_special_tokens": ["<tool>"]},
        "tokenizer_config.json": {"additional_special_tokens": ["<tool>"]},
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<tool>", "ld"]}},
    "additional_special_tokens as objects": {
        "tokenizer_config.json": {"additional_special_tokens": [{"__type": "AddedToken", **entry(rstrip=True)}]}
    },
    "extra_special_tokens, a list": {"tokenizer_config.json": {"extra_special_tokens": ["<x>", "<tool>"]}},
    "extra_special_tokens by name": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<tool>", "boi": "<x>"}}
    },
    "both spellings of the list": {
        "tokenizer_config.json": {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<tool>"]}
    },
    "eos_token, a plain vocabulary entry": {"tokenizer_config.json": {"eos_token": "ld"}},
    "eos_token, unknown so far": {"tokenizer_config.json": {"eos_token": "<tool>"}},
    "eos_token as an object": {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **entry("ld")}}},
    "all names": {
        "tokenizer_config.json": {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    },
    "a name of the model's own": {"tokenizer_config.json": {"image_token": "<tool>", "eos_token": "</s>"}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": entry("<tool>"), "pad_token": "ld"}},
    "special_tokens_map.json wins": {
        "tokenizer_config.json": {"eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": "<tool>", "additional_special_tokens": ["<x>"]},
    },
    "special_tokens_map.json adds to the list": {
        "tokenizer_config.json": {"extra_special_tokens": ["<x>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<tool>", "<x>"]},
    },
    "special tokens are text": {"tokenizer_config.json": {"eos_token": "<tool>", "split_special_tokens": True}},
    "add_bos_token is the post-processor's affair": {
        "tokenizer_config.json": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    },
    "one token is special here and ordinary there": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"700": entry(special=False)},
            "additional_special_tokens": ["<tool>"],
            "eos_token": "<x>",
        }
    },
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_declaring_a_token_gives_the_tokenizer_of_transformers(
    tmp_path: Path, make: Callable[[], Tokenizer], form: str
) -> None:
    assert_same(write(tmp_path, make(), FORMS[form]), TEXTS)


def test_the_padding_of_tokenizer_json_names_the_padding_token(tmp_path: Path) -> None:
    tokenizer = kinds.byte_level()
    tokenizer.enable_padding(pad_token="<s>")
    tokenizer.enable_truncation(4)
    directory = write(tmp_path, tokenizer, {})
    ours = load_tokenizer(directory)
    assert ours.special == reference(directory).special_tokens_map == {"pad_token": "<s>"}
    assert len(ours.backend.encode("hello hello hello hello hello")) > 4, "neither padded nor cut"


names = st.sampled_from(["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "image_token"])
words = st.sampled_from(WORDS)
entries = st.builds(
    lambda word, **flags: entry(word, **flags),
    words,
    **dict.fromkeys(("lstrip", "rstrip", "normalized", "special"), st.booleans()),
)
values = words | entries.map(lambda one: {"__type": "AddedToken", **one})
configs = st.fixed_dictionaries(
    {},
    optional={
        "added_tokens_decoder": st.dictionaries(st.integers(0, 900).map(str), entries, max_size=4),
        "additional_special_tokens": st.lists(values, max_size=3),
        "extra_special_tokens": st.lists(values, max_size=3) | st.dictionaries(names, words, max_size=2),
    },
)
file_sets = st.fixed_dictionaries(
    {
        "tokenizer_config.json": st.builds(
            lambda config, named: config | named, configs, st.dictionaries(names, values, max_size=3)
        )
    },
    optional={
        "special_tokens_map.json": st.dictionaries(names, words | entries, max_size=3),
        "added_tokens.json": st.dictionaries(words, st.integers(0, 900), max_size=4),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(files=file_sets, make=st.sampled_from(KINDS[:2]))
def test_any_mixture_of_forms_gives_the_tokenizer_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any], make: Callable[[], Tokenizer]
) -> None:
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("<x>", normalized=False)])
    assert_same(write(tmp_path_factory.mktemp("m"), tokenizer, files), TEXTS)


@pytest.mark.parametrize("make", [kinds.sentence_piece, kinds.byte_level])
@pytest.mark.parametrize("named", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "", "config.json"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    "more", [{}, {"legacy": True}, {"add_prefix_space": False}, {"eos_token": None, "legacy": False}], ids=str
)
def test_a_llama_s_tokenizer_is_the_one_of_its_class_in_transformers(
    tmp_path: Path, make: Callable[[], Tokenizer], named: str, model_type: str, more: dict[str, Any]
) -> None:
    own = {"tokenizer_class": "LlamaTokenizer"} if named == "config.json" else {}
    settings = {"additional_special_tokens": ["<tool>"], "unk_token": "<unk>", **more}
    settings |= {"tokenizer_class": named} if named and not own else {}
    files = {"config.json": {"model_type": model_type} | own, "tokenizer_config.json": settings}
    assert_same(write(tmp_path, make(), files), [*TEXTS, "</s> hello<s>hello"], automatic)


def shipped() -> list[Path]:
    """The tokenizers that installed packages ship, also in the environment with vLLM: many or none."""
    roots = {Path(sysconfig.get_path("purelib")), *Path(".venv-vllm").glob("lib/*/site-packages")}
    return sorted(path for root in roots for path in root.rglob("*tokenizer.json"))


@pytest.mark.parametrize("path", shipped(), ids=str)
def test_tokenizers_of_installed_packages_are_those_of_transformers(tmp_path: Path, path: Path) -> None:
    for beside in path.parent.glob("*.json"):
        shutil.copy(beside, tmp_path)
    shutil.copy(path, tmp_path / "tokenizer.json")
    special = list(reference(tmp_path).added_tokens_encoder)[:200]
    assert_same(tmp_path, [*TEXTS, "naïve 日本語 🎉 def f(x):\n\treturn  x", "a" + "b".join(special)])
