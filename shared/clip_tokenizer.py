"""CLIP's tokenizer, as transformers' `CLIPTokenizer` builds it from the same files. Imports neither transformers nor torch.

    vocab.json, merges.txt                          lower-case byte-level BPE in which the last piece of a word ends in </w>
    tokenizer.json                                  the same two, as transformers 5 writes them
    tokenizer_config.json, special_tokens_map.json  the tokens that begin, end and pad a prompt

A text encoder reads `PART_TOKENS` tokens at once. A longer prompt is several *parts*, each encoded by itself:

    | start | up to 75 tokens of the prompt | end | pad ... |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from motet.shared.tokenizer import UnusableFile, read_texts, with_declared

PART_TOKENS = 77
"""Of every text encoder of the Stable Diffusion family."""
CONTENT_TOKENS = PART_TOKENS - 2
"""Of a part, without the tokens that begin and end it."""
PARTS_MAX = 3
"""The most parts of a prompt that are served."""
FILE_BYTES_MAX = 32 << 20
_START, _END = "<|startoftext|>", "<|endoftext|>"
_NAMES = {"unk_token": _END, "bos_token": _START, "eos_token": _END, "pad_token": _END}
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class ClipTokenizer:
    """The tokenizer in one folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises UnusableFile naming the file."""
        texts = read_texts(folder)
        model, listed = _model(folder)
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        loaded = with_declared(backend, texts, _NAMES, listed)
        self.backend: Tokenizer = loaded.backend
        named = {name: loaded.id_of(name) for name in ("bos_token", "eos_token", "pad_token")}
        start, end, pad = named.values()
        if start is None or end is None or pad is None:
            missing = next(name for name, token in named.items() if token is None)
            raise UnusableFile(f"{folder.name}: the {missing} is not in the vocabulary")
        self._start, self._end, self._pad = start, end, pad

    def content(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin, end and pad it."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def parts(self, content: list[int], count: int) -> list[int]:
        """`count` parts of `PART_TOKENS` that hold these tokens; parts at the end may be empty.

        Raises ValueError when they do not fit.
        """
        if len(content) > count * CONTENT_TOKENS:
            raise ValueError(f"{len(content)} tokens do not fit {count} parts of {CONTENT_TOKENS}")
        tokens: list[int] = []
        for begin in range(0, count * CONTENT_TOKENS, CONTENT_TOKENS):
            part = [self._start, *content[begin : begin + CONTENT_TOKENS], self._end]
            tokens += part + [self._pad] * (PART_TOKENS - len(part))
        return tokens


def parts_of(content: list[int]) -> int:
    """The number of parts that these tokens need; an empty prompt has one."""
    return max(1, -(-len(content) // CONTENT_TOKENS))


def _model(folder: Path) -> tuple[models.BPE, Mapping[int, AddedToken]]:
    """The vocabulary with its merges, and the added tokens that tokenizer.json lists. Raises UnusableFile."""
    listed: Mapping[int, AddedToken] = {}
    try:
        if not (folder / "tokenizer.json").exists():
            vocabulary = json.loads(_text(folder / "vocab.json"))
            lines = _text(folder / "merges.txt").split("\n")
            told: list[Any] = [line for line in lines if line and not line.startswith("#version")]
        else:
            whole = _text(folder / "tokenizer.json")
            model = json.loads(whole)["model"]
            vocabulary, told = model["vocab"], model["merges"]
            listed = Tokenizer.from_str(whole).get_added_tokens_decoder()
        pairs = (one.split(" ") if isinstance(one, str) else one for one in told)
        merges = [(left, right) for left, right in pairs]
        suffixes = {"continuing_subword_prefix": "", "end_of_word_suffix": "</w>"}
        return models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, unk_token=_END, **suffixes), listed
    except UnusableFile:
        raise
    except OSError as error:
        raise UnusableFile(f"{folder.name}: {error.strerror}: {Path(error.filename or folder).name}") from None
    except Exception as error:  # the library raises bare exceptions
        raise UnusableFile(f"{folder.name}: vocab.json and merges.txt are no CLIP tokenizer: {error}") from None


def _text(path: Path) -> str:
    if path.stat().st_size > FILE_BYTES_MAX:
        raise UnusableFile(f"{path.parent.name}/{path.name} is larger than {FILE_BYTES_MAX >> 20} MiB")
    return path.read_text(encoding="utf-8")
