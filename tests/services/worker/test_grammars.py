"""Promise: an output follows its grammar to the last token, and a grammar that cannot be followed is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from motet.examples.demo import DEMO
from motet.services.worker.native import grammars as module
from motet.services.worker.native.grammars import Grammars, grammars_for
from motet.shared.errors import BadRequest
from motet.shared.model import StructuredOutput

END = 2


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(DEMO / "model" / "tokenizer.json", 288, {END})
    yield made
    made.close()


def schema(value: Any, **options: Any) -> StructuredOutput:
    return StructuredOutput(kind="json", value=json.dumps(value), **options)


def drawn(grammars: Grammars, wanted: StructuredOutput, seed: int, most: int = 2000) -> str:
    """Tokens by chance among the allowed ones until the end, as text."""
    matcher, draw, tokens = grammars.matcher(wanted, (), "f").result(), np.random.default_rng(seed), list[int]()
    while len(tokens) < most:
        matcher.fill()
        token = int(draw.choice(np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))))
        assert matcher.take((token,)), matcher.error
        if token == END:
            return grammars.text(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}, "required": ["a", "b"]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("wanted", "right"),
    [
        (StructuredOutput(kind="choice", value='["a|b", "(c)", "d.e"]'), lambda text: text in ("a|b", "(c)", "d.e")),
        (schema(OBJECT | {"additionalProperties": False}), lambda text: json.loads(text).keys() == {"a", "b"}),
        (schema(OBJECT, disable_additional_properties=True), lambda text: json.loads(text).keys() == {"a", "b"}),
        (schema(OBJECT, disable_any_whitespace=True, disable_additional_properties=True), lambda text: "\n" not in text),
        (schema({"oneOf": [{"const": 1}, {"enum": [1, 2]}]}), lambda text: json.loads(text) in (1, 2)),
        (schema({"type": "string", "format": "no-such", "maxLength": 3}), lambda text: len(json.loads(text)) <= 3),
        (schema({"type": "string", "format": "date"}), lambda text: len(json.loads(text)) == 10),
    ],
)
def test_tokens_by_chance_make_what_was_asked_for(grammars: Grammars, wanted: StructuredOutput, right: Any, seed: int) -> None:
    assert right(drawn(grammars, wanted, seed))


def test_white_space_between_the_parts_of_a_json_text_is_bounded(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutput(kind="json_object"), (), "f").result()
    (brace,), (space,) = (grammars_tokens(grammars, text) for text in ("{", " "))
    assert matcher.take((brace,))

    def allowed() -> bool:
        matcher.fill()
        return bool(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[space])

    taken = 0
    while allowed():
        assert matcher.take((space,))
        taken += 1
    assert taken == module.BLANKS_MAX
    assert matcher.take(grammars_tokens(grammars, '"')) and allowed(), "a string may begin with white space"


def grammars_tokens(grammars: Grammars, text: str) -> list[int]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")).get_vocab()
    return [vocabulary["\u0120" if one == " " else one] for one in text]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (StructuredOutput(kind="regex", value="("), "the regular expression cannot be used"),
        (StructuredOutput(kind="grammar", value="root := ::"), "the grammar cannot be used"),
        (StructuredOutput(kind="choice", value="[]"), "nothing to choose from"),
        (schema({"type": "nothing"}), "Invalid type: nothing"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), '"not"'),
        (schema({"$ref": "#/$defs/none"}), "does not exist"),
        (StructuredOutput(kind="structural_tag", value="{}"), "structures and triggers"),
        (
            StructuredOutput(
                kind="structural_tag",
                value=json.dumps({"triggers": ["<f"], "structures": [{"begin": "<g>", "schema": {}, "end": ""}]}),
            ),
            "starts with none of the triggers",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_field_and_the_reason(
    grammars: Grammars, wanted: StructuredOutput, reason: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        grammars.matcher(wanted, (), "response_format").result()
    assert refused.value.param == "response_format" and reason in refused.value.message


def test_a_keyword_that_is_not_served_is_never_ignored(grammars: Grammars) -> None:
    """An output that only looks right is worse than none."""
    for keyword, value in (
        ("uniqueItems", True),
        ("contains", {"type": "integer"}),
        ("not", {"type": "null"}),
        ("dependentRequired", {"a": ["b"]}),
        ("propertyNames", {"maxLength": 2}),
        ("if", {"type": "null"}),
        ("unevaluatedProperties", False),
    ):
        with pytest.raises(BadRequest, match=keyword):
            grammars.matcher(schema({keyword: value}), (), "f").result()


def test_a_matcher_after_an_output_allows_what_the_one_that_saw_it_does(grammars: Grammars) -> None:
    wanted = schema(OBJECT, disable_any_whitespace=True, disable_additional_properties=True)
    tokens = grammars_tokens(grammars, '{"a":12')
    seen, later = grammars.matcher(wanted, (), "f").result(), grammars.matcher(wanted, tokens, "f").result()
    for token in tokens:
        seen.take((token,))
    for one in (seen, later):
        one.fill()
    assert (seen.mask == later.mask).all() and seen.mask.any()
    with pytest.raises(BadRequest, match="does not follow"):
        grammars.matcher(wanted, grammars_tokens(grammars, "[]"), "f").result()


def test_compiled_grammars_are_remembered_and_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    made, compiled, own = Grammars(DEMO / "model" / "tokenizer.json", 288, {END}), list[str](), module.grammar_of
    monkeypatch.setattr(module, "grammar_of", lambda wanted: (compiled.append(wanted.value), own(wanted))[1])
    for word in ("a", "b", "a", "c", "a", "b"):
        made.matcher(StructuredOutput(kind="regex", value=word), (), "f").result()
    assert compiled == ["a", "b", "c", "b"], "b was forgotten when c came"
    made.close()


def test_too_many_grammars_at_once_are_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 0)
    with pytest.raises(BadRequest, match="wait to be compiled"):
        grammars.matcher(StructuredOutput(kind="json_object"), (), "f").result()


def test_a_model_without_a_tokenizer_or_with_another_kind_of_file_has_no_grammars(tmp_path: Any) -> None:
    assert grammars_for(tmp_path / "tokenizer.json", 288, {END}) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert grammars_for(tmp_path / "tokenizer.json", 288, {END}) is None
