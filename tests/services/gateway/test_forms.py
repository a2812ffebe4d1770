"""Promise: a form's fields come back as they were sent, and one that cannot be read is a 400."""

from __future__ import annotations

from collections.abc import Mapping

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.services.gateway.openai.forms import PARTS_MAX, TEXT_BYTES_MAX, FormFile, FormText, read_form
from motet.services.gateway.openai.image_requests import parse_edit_form
from motet.shared.errors import BadRequest

Sent = tuple[bytes, str]


def form(texts: Mapping[str, str | list[str]], files: dict[str, bytes]) -> Sent:
    """The body and the content type of a form as clients send it."""
    parts = {name: (f"{name}.bin", data) for name, data in files.items()}
    request = httpx2.Request("POST", "http://gateway/", data=texts, files=parts)
    return request.read(), request.headers["content-type"]


@given(st.binary(max_size=300), st.text(max_size=50).filter(str.isprintable))
@settings(max_examples=100)
def test_what_was_sent_is_what_is_read(data: bytes, text: str) -> None:
    assert read_form(*form({"prompt": text}, {"image": data})) == [FormText("prompt", text), FormFile("image", data)]


def test_a_form_that_is_cut_off_is_refused_wherever_it_ends() -> None:
    body, kind = form({"prompt": "x"}, {"image": b"abc"})
    for end in range(len(body) - 4):  # what follows the last boundary is not needed
        with pytest.raises(BadRequest, match="cannot be read"):
            read_form(body[:end], kind)


@given(st.data())
@settings(max_examples=100)
def test_a_damaged_form_is_read_or_refused(data: st.DataObject) -> None:
    sent, kind = form({"prompt": "x"}, {"image": b"abc\r\n--"})
    body = bytearray(sent)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_form(bytes(body), kind)
    except BadRequest as error:
        assert error.message


def test_a_form_has_few_fields_and_short_texts() -> None:
    with pytest.raises(BadRequest, match=f"more than {PARTS_MAX}"):
        read_form(*form({f"f{i}": "x" for i in range(PARTS_MAX)}, {"image": b"", "mask": b""}))
    with pytest.raises(BadRequest) as refused:
        read_form(*form({"prompt": "x" * (TEXT_BYTES_MAX + 1)}, {"image": b""}))
    assert refused.value.param == "prompt"


def test_a_form_without_a_boundary_is_refused() -> None:
    with pytest.raises(BadRequest, match="boundary"):
        read_form(b"x", "multipart/form-data")


def test_texts_of_an_edit_become_what_its_fields_are() -> None:
    texts = {
        "prompt": "12",
        "n": "2",
        "stream": "true",
        "strength": "0.25",
        "seed": "9",
        "adapters": '[{"name": "a", "weight": 0.5}]',
        "quality": "high",
        "enable_teacache": "false",
    }
    asked = parse_edit_form(*form(texts, {"image": b"abc", "mask": b"def"}))
    request = asked.request
    assert (request.prompt, request.n, request.stream, request.strength, request.seed) == ("12", 2, True, 0.25, 9)
    assert request.adapters is not None and (request.adapters[0].name, request.adapters[0].weight) == ("a", 0.5)
    assert asked.files == {"image": b"abc", "mask": b"def"} and asked.stream


def test_adapters_of_an_edit_may_be_a_list_of_fields_as_openais_clients_write_it() -> None:
    def adapters(**texts: str | list[str]) -> list[tuple[str, float]]:
        fields = {f"adapters[][{part}]" if part != "adapters" else part: text for part, text in texts.items()}
        request = parse_edit_form(*form({"prompt": "x"} | fields, {"image": b"abc"})).request
        return [(one.name, one.weight) for one in request.adapters or ()]

    assert adapters(name=["a", "b"], weight=["0.5", "-2"]) == [("a", 0.5), ("b", -2.0)]
    assert adapters(name=["a", "b"]) == [("a", 1.0), ("b", 1.0)]
    for wrong, told in (
        ({"name": ["a", "b"], "weight": "1"}, "2 names and 1 weights"),
        ({"weight": "1"}, "0 names and 1 weights"),
        ({"name": "a", "adapters": "[]"}, "given twice"),
        ({"name": "a", "weight": "much"}, r"adapters\[0\].weight: Expected `float`"),
        ({"name": ["a"] * 9}, "length <= 8"),
    ):
        with pytest.raises(BadRequest, match=told) as refused:
            adapters(**wrong)  # type: ignore[arg-type]
        assert (refused.value.param or "").startswith("adapters")
