"""The pieces of text always add up to what the tokenizer decodes at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from motet.services.gateway.owner.detokenize import Detokenizer, StopFilter
from tests.services.gateway import support_tokenizers as kinds

TEXTS = [
    "hello world",
    " hello  world ",
    "日本語 and 🎉🎊 emoji 👩‍👩‍👧 done",
    "naïve café größere Äpfel",
    "\n\ttabs\u00a0and\r\nlines",
    "<s>not special</s> 日本 added",
    "",
    "é",
    "mixed хорошо ✓ ∑ 𝒳𝒴",
]
KINDS = [kinds.byte_level, kinds.sentence_piece, kinds.metaspace, kinds.word_piece]


def split(tokens: list[int], rng: random.Random) -> list[list[int]]:
    """`tokens` in random steps of 0 to 4."""
    steps, at = [], 0
    while at < len(tokens):
        size = rng.choice([0, 1, 1, 1, 2, 3, 4])
        steps.append(tokens[at : at + size])
        at += size
    return steps


def streamed(detokenizer: Detokenizer, tokens: list[int], rng: random.Random, **options: bool) -> str:
    stream = detokenizer.stream(**options)
    return "".join([stream.push(step) for step in split(tokens, rng)] + [stream.finish()])


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_any_split_of_encoded_text_streams_to_exactly_what_decode_gives(make: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(7)
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        expected = tokenizer.decode(tokens, skip_special_tokens=skip)
        for _ in range(20):
            assert streamed(detokenizer, tokens, rng, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_of_a_byte_level_vocabulary_stream_to_exactly_what_decode_gives(skip: bool) -> None:
    tokenizer = kinds.byte_level()
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(11)
    size = tokenizer.get_vocab_size()
    for _ in range(500):
        tokens = [rng.randrange(size + 3) for _ in range(rng.randrange(40))]  # also ids that do not exist
        expected = tokenizer.decode(tokens, skip_special_tokens=skip)
        assert streamed(detokenizer, tokens, rng, skip_special_tokens=skip) == expected


def test_broken_bytes_in_a_piece_vocabulary_become_one_replacement_each() -> None:
    tokenizer = kinds.sentence_piece()
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(3)
    e, hello = tokenizer.token_to_id("<0xE4>"), tokenizer.token_to_id("▁hello")
    for tokens in ([e, e, hello], [hello, e], [hello, e, hello, e]):
        assert streamed(detokenizer, tokens, rng) == tokenizer.decode(tokens)


def test_no_step_ever_shows_half_a_character() -> None:
    tokenizer = kinds.byte_level()
    text = "🎉日本語é👩‍👩‍👧"
    stream = Detokenizer(tokenizer).stream()
    steps = [stream.push([token]) for token in tokenizer.encode(text).ids]
    assert "".join(steps) == text
    assert not any("�" in step for step in steps)


def test_a_text_that_continues_its_prompt_keeps_the_leading_space() -> None:
    tokenizer = kinds.sentence_piece()
    detokenizer = Detokenizer(tokenizer)
    world = [tokenizer.token_to_id("▁world")]
    assert detokenizer.stream().push(world) == "world"
    assert detokenizer.stream(continues_text=True).push(world) == " world"


def test_single_tokens_are_named_with_their_text_and_bytes() -> None:
    tokenizer = kinds.byte_level()
    detokenizer = Detokenizer(tokenizer)
    part = tokenizer.encode("🎉").ids[0]
    assert detokenizer.token_text(tokenizer.token_to_id("</s>")) == "</s>"
    assert detokenizer.token_bytes(part) == "🎉".encode()[: len(detokenizer.token_bytes(part))]
    assert detokenizer.token_bytes(10**6) == b""
    pieces = Detokenizer(kinds.sentence_piece())
    assert pieces.token_bytes(kinds.sentence_piece().token_to_id("<0xE4>")) == b"\xe4"


def run_filter(stops: tuple[str, ...], include: bool, pieces: list[str]) -> tuple[str, str | None]:
    stop_filter = StopFilter(stops, include)
    out = ""
    for piece in pieces:
        text, matched = stop_filter.push(piece)
        out += text
        if matched is not None:
            return out, matched
    return out + stop_filter.finish(), None


def test_the_same_text_stops_at_the_same_place_however_it_is_split() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 14)))
        stops = tuple("".join(rng.choice("abc") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4)))
        include = rng.random() < 0.5
        one_by_one = run_filter(stops, include, list(text))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run_filter(stops, include, pieces) == one_by_one
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert (one_by_one[1] is None) == (not ends)
        if ends and include:
            assert one_by_one[0] == text[: min(ends)]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_clear() -> None:
    stop_filter = StopFilter(("<END>",), False)
    assert stop_filter.push("text <E") == ("text ", None)
    assert stop_filter.push("N") == ("", None)
    assert stop_filter.push("X <EN") == ("<ENX ", None)
    assert stop_filter.push("D> more") == ("", "<END>")
