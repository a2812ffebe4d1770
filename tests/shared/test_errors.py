"""Promise: an error says what is wrong in a bounded text, and is the same error on the other side of the bus."""

from __future__ import annotations

from motet.shared.errors import MESSAGE_CHARS, PARAM_CHARS, BadRequest, Overloaded, from_info


def test_a_text_of_any_length_becomes_a_short_one_that_says_so():
    error = BadRequest("no such thing: " + "x" * 9_000_000, param="p" * 10_000)
    assert len(error.message) == MESSAGE_CHARS == len(str(error)) and error.message.startswith("no such thing: x")
    assert error.message.endswith("(cut, 9000015 characters)")
    assert error.param is not None and len(error.param) == PARAM_CHARS
    assert error.openai().error.message == error.info().message == error.message


def test_a_short_text_stays_as_it_is_and_crosses_the_bus():
    error = Overloaded("full", retry_after_s=2.5)
    there = from_info(error.info())
    assert isinstance(there, Overloaded) and (there.message, there.retry_after_s) == ("full", 2.5)
