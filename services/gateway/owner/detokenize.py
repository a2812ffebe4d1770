"""Incremental detokenization: the pieces of text always add up to `tokenizer.decode` of all tokens.

Rules of this file:
- No incomplete character is returned. Bytes are held back until their character is complete or known to be invalid (U+FFFD).
- Text that could be the beginning of a stop string is held back until this is decided.
- A token costs one table look-up. Tables are made once per tokenizer, from the decoder that tokenizer.json names:

    ByteLevel (Llama 3, Qwen, GPT)             token -> bytes, joined, then UTF-8
    Replace, ByteFallback, Fuse[, Strip]       token -> piece with its spaces; <0xE2> tokens are bytes
    Metaspace                                  token -> piece with its spaces
    anything else                              the library's own stream decoder
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "�"
_utf8 = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """The growing text of one sequence."""

    def push(self, tokens: list[int]) -> str:
        """Add `tokens`; returns the new text that is complete."""

    def finish(self) -> str:
        """The text that was held back. Nothing may be pushed afterwards."""


class Detokenizer:
    """Makes TextStreams for one tokenizer, and names single tokens for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._names: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for name, token in vocabulary.items():
            self._names[token] = name
        added = tokenizer.get_added_tokens_decoder()
        for token in added:  # whose name `decode` takes first, in the normalizer's form
            self._names[token] = tokenizer.id_to_token(token)
        self._special = {token for token in added if _is_skipped(tokenizer, token)}
        self._tables: dict[bool, list[bytes | None] | list[str | int | None]] = {}
        self._texts: dict[bool, list[str | None]] = {}
        self._kind, self._strip = self._recognise()

    def _recognise(self) -> tuple[str, int]:
        """("bytes" | "pieces" | "metaspace" | "other", leading spaces that `decode` strips)."""
        kind = self._decoder.get("type")
        if kind == "ByteLevel":
            return "bytes", 0
        if kind == "Metaspace" and self._decoder.get("replacement") == "▁":
            return "metaspace", 0 if self._decoder.get("prepend_scheme") == "never" else 1
        if kind == "Sequence":
            steps = self._decoder["decoders"]
            strip = 0
            if steps and steps[-1]["type"] == "Strip" and steps[-1]["content"] == " " and steps[-1]["stop"] == 0:
                strip = steps[-1]["start"]
                steps = steps[:-1]
            spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
            if steps == [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]:
                return "pieces", strip
        return "other", 0

    def stream(
        self, *, skip_special_tokens: bool = True, continues_text: bool = False, left_out: frozenset[int] = frozenset()
    ) -> TextStream:
        """A new sequence.

        `continues_text` keeps the leading space that `decode` strips, because the text follows a prompt's. `left_out`: more
        tokens that the text does not show.
        """
        if left_out:
            rest = self.stream(skip_special_tokens=skip_special_tokens, continues_text=continues_text)
            return _Without(rest, left_out)
        if self._kind == "bytes":
            table = self._table(skip_special_tokens)
            return _ByteStream(table, self._texts[skip_special_tokens])
        if self._kind in ("pieces", "metaspace"):
            table = self._table(skip_special_tokens)
            return _PieceStream(table, 0 if continues_text else self._strip, self._kind == "metaspace")
        return _LibraryStream(self._tokenizer, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one token, as log-probabilities show it: with spaces, U+FFFD for broken bytes, special tokens by name."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """One token's UTF-8 bytes; b"" for an unknown id."""
        if self._kind == "other":
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        table = self._table(False)
        piece = table[token] if 0 <= token < len(table) else None
        if isinstance(piece, str):
            return piece.encode()
        return bytes([piece]) if isinstance(piece, int) else piece or b""

    def _table(self, skip_special: bool) -> Any:
        """Token -> bytes ("bytes"), or token -> piece or single byte value ("pieces", "metaspace"). None shows nothing."""
        table = self._tables.get(skip_special)
        if table is None:
            shown = [None if skip_special and i in self._special else name for i, name in enumerate(self._names)]
            if self._kind == "bytes":
                table = [None if name is None else _byte_level(name) for name in shown]
                self._texts[skip_special] = ["" if raw is None else _whole(raw) for raw in table]
            else:
                fallback = self._kind == "pieces"
                table = [None if name is None else _piece(name, fallback) for name in shown]
            self._tables[skip_special] = table
        return table


class _Without:
    """A stream without some tokens."""

    __slots__ = ("_left_out", "_rest")

    def __init__(self, rest: TextStream, left_out: frozenset[int]) -> None:
        self._rest, self._left_out = rest, left_out

    def push(self, tokens: list[int]) -> str:
        return self._rest.push([token for token in tokens if token not in self._left_out])

    def finish(self) -> str:
        return self._rest.finish()


class _ByteStream:
    """Byte-level BPE. `texts[token]` is the token's text when its bytes are whole characters: the fast path."""

    __slots__ = ("_bytes", "_texts", "_utf8")

    def __init__(self, table: list[bytes | None], texts: list[str | None]) -> None:
        self._bytes, self._texts = table, texts
        self._utf8: codecs.IncrementalDecoder | None = None  # set while a character is incomplete

    def push(self, tokens: list[int]) -> str:
        if len(tokens) == 1 and self._utf8 is None:
            try:
                text = self._texts[tokens[0]]
            except IndexError:
                return ""
            if text is not None:
                return text
        out = []
        for token in tokens:
            raw = self._bytes[token] if token < len(self._bytes) else None
            if raw:
                if self._utf8 is None:
                    self._utf8 = _utf8("replace")
                out.append(self._utf8.decode(raw))
                if not self._utf8.getstate()[0]:
                    self._utf8 = None
        return "".join(out)

    def finish(self) -> str:
        return "" if self._utf8 is None else self._utf8.decode(b"", True)


class _PieceStream:
    """SentencePiece-like vocabularies: pieces with spaces, single bytes for characters outside the vocabulary.

    A run of byte tokens that is not UTF-8 shows one U+FFFD per byte, as the library does it; a run is shown as soon as it
    reads as whole characters.
    """

    __slots__ = ("_first_piece_only", "_run", "_strip", "_table")

    def __init__(self, table: list[str | int | None], strip: int, first_piece_only: bool) -> None:
        self._table, self._strip, self._first_piece_only = table, strip, first_piece_only
        self._run = bytearray()

    def push(self, tokens: list[int]) -> str:
        out = ""
        for token in tokens:
            piece = self._table[token] if token < len(self._table) else None
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                try:
                    text = self._run.decode()
                except UnicodeDecodeError:
                    continue
                self._run.clear()
            elif self._run:
                text = REPLACEMENT * len(self._run) + piece
                self._run.clear()
            else:
                text = piece
            out += self._stripped(text) if self._strip else text
        return out

    def _stripped(self, text: str) -> str:
        """Without the leading spaces of the sequence that `decode` drops."""
        if self._first_piece_only:  # Metaspace drops every marker of the first piece
            self._strip = 0
            return text.replace(" ", "")
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text

    def finish(self) -> str:
        text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text


class _LibraryStream:
    """Any other decoder, by the library's own incremental decoder."""

    __slots__ = ("_shown", "_skip_special", "_stream", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._tokens: list[int] = []
        self._shown = 0

    def push(self, tokens: list[int]) -> str:
        self._tokens += tokens
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self._shown += len(text)
        return text

    def finish(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip_special)[self._shown :]


class StopFilter:
    """Ends a text at the first complete stop string, also when the string arrives in several pieces."""

    __slots__ = ("_firsts", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops, self._include = stops, include
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add `text`; returns (text to show, the stop string that ended the text or None)."""
        text = self._held + text
        best: tuple[int, int, str] | None = None  # (end, start, stop): the first to end; of those the longest
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            return text[: best[0] if self._include else best[1]], best[2]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    self._held = tail
                    return text[:start], None
        self._held = ""
        return text, None

    def finish(self) -> str:
        """The text that was held back because it could have become a stop string."""
        held, self._held = self._held, ""
        return held


def _is_skipped(tokenizer: Tokenizer, token: int) -> bool:
    """Whether `decode` leaves out an added token. Its `special` flag does not tell: of a token that was declared twice, the
    library keeps the last flag but skips it if either declaration was special."""
    return not tokenizer.decode([token], skip_special_tokens=True) and bool(
        tokenizer.decode([token], skip_special_tokens=False)
    )


def _whole(raw: bytes) -> str | None:
    """The text of `raw` when it is whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where printable, else the next free one from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return alphabet | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    """A token's bytes; an added token outside the byte alphabet is its own text."""
    try:
        return bytes([_ALPHABET[c] for c in name])
    except KeyError:
        return name.encode()


def _piece(name: str, byte_fallback: bool) -> str | int:
    if byte_fallback and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            pass
    return name.replace("▁", " ")
