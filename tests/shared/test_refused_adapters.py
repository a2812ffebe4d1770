"""Promise: a directory with any number of bad adapters, under any names, becomes one record that fits the bucket."""

from __future__ import annotations

import msgspec

from motet.shared.provision import RECORD_BYTES
from motet.shared.refused_adapters import NAME_CHARS, REASON_CHARS, RefusedAdapters, refused


def test_ten_thousand_bad_adapters_fit_one_record_and_are_all_counted():
    record = refused((f"team/{number}/" + "é" * 300, "\n".join(["bad tensor"] * 100)) for number in range(10_000))
    assert len(msgspec.json.encode(record)) < RECORD_BYTES
    assert record.total == 10_000
    assert 20 < len(record.adapters) < 10_000
    assert record.unlisted == 10_000 - len(record.adapters)
    assert all(len(one.name) <= NAME_CHARS and len(one.reason) <= REASON_CHARS for one in record.adapters)
    assert all("\n" not in one.reason for one in record.adapters)


def test_names_that_are_no_text_are_shown_without_control_characters():
    record = refused([("\x1b[31mred\udcff", "why\x00not")])
    assert record.adapters[0].name == "[31mred?"
    assert record.adapters[0].reason == "why not"
    assert msgspec.json.decode(msgspec.json.encode(record), type=RefusedAdapters) == record


def test_a_name_that_is_mended_is_counted_no_more():
    record = refused([("a", "x"), ("b", "y")])
    assert record.without("a") == refused([("b", "y")])
    assert record.without("other") == record
