"""Promise: a blob is read as it was written, and one whose parts do not belong together is refused by the entry's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from motet.shared.adapter_blob import data_bytes, read_index, write_blob
from motet.shared.errors import InvalidAdapter

Header = dict[str, Any]


def matrices(rank: int, fan_in: int, fan_out: int) -> tuple[float, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(rank)
    return rank / 2, draw.standard_normal((rank, fan_in), np.float32), draw.standard_normal((fan_out, rank), np.float32)


def written() -> bytes:
    pairs = {(1, "up_proj"): matrices(9, 6, 10), (0, "q_proj"): matrices(3, 6, 4), (2, "q_proj"): matrices(8, 6, 4)}
    return write_blob(pairs, dtype="F32", layers=3)


def test_what_is_written_is_found_in_rows_of_a_layer_and_a_page():
    blob = written()
    index = read_index(blob, len(blob))
    q, up = index.parts
    assert (index.dtype, index.layers, index.rank, index.adapted_layers) == ("F32", 3, 9, 3)
    assert index.modules == ("q_proj", "up_proj")
    assert (q.ranks, q.scales, q.pages, up.ranks, up.pages) == ((3, 0, 8), (1.5, 0.0, 4.0), 1, (0, 9, 0), 2)
    assert q.start == index.start and index.start % 64 == 0
    rows = np.frombuffer(blob, "<f4", 2 * 3 * 8 * 16, up.start).reshape(2, 3, 8 * 16)
    _, a, b = matrices(9, 6, 10)
    np.testing.assert_array_equal(rows[0, 1, : 8 * 6].reshape(8, 6), a[:8])
    np.testing.assert_array_equal(rows[0, 1, 8 * 6 :].reshape(8, 10), b[:, :8].T)
    np.testing.assert_array_equal(rows[1, 1, :6], a[8])
    assert not rows[:, [0, 2]].any() and not rows[1, 1, 6 : 8 * 6].any() and not rows[1, 1, 8 * 6 + 10 :].any()
    size = data_bytes({"q_proj": (8, 6, 4), "up_proj": (9, 6, 10)}, dtype="F32", layers=3)
    assert len(blob) - index.start == size


def changed(change: Callable[[Header], None], data: bytes | None = None) -> bytes:
    blob = written()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + (blob[8 + length :] if data is None else data)


def told(name: str, value: Any) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        metadata = header["__metadata__"]
        metadata[name] = json.dumps(json.loads(metadata[name]) | value) if isinstance(value, dict) else value

    return change


def renamed(header: Header) -> None:
    for name in ("shapes", "ranks", "scales"):
        metadata = json.loads(header["__metadata__"][name])
        metadata["lm_head"] = metadata.pop("q_proj")
        header["__metadata__"][name] = json.dumps(metadata)
    header["lm_head"] = header.pop("q_proj")


def swapped(header: Header) -> None:
    q, up = header["q_proj"], header["up_proj"]
    size = up["data_offsets"][1] - up["data_offsets"][0]
    up["data_offsets"], q["data_offsets"] = [0, size], [size, q["data_offsets"][1] + size]


BAD: list[tuple[str, Callable[[Header], None], str]] = [
    ("another format", told("format", "motet-lora/1"), "'motet-lora/1', not 'motet-lora/2'"),
    ("no ranks", lambda header: header["__metadata__"].pop("ranks"), "blob ranks"),
    ("ranks that are no numbers", told("ranks", {"q_proj": ["3", 0, 8]}), "blob ranks"),
    ("scales not of its tensors", told("scales", {"k_proj": [1, 1, 1]}), "blob scales are of"),
    ("an unknown module", renamed, "'lm_head'"),
    ("a rank that needs more pages", told("ranks", {"q_proj": [3, 0, 9]}), "q_proj: tensor"),
    ("a rank that needs fewer pages", told("ranks", {"up_proj": [0, 8, 0]}), "up_proj: tensor"),
    ("no rank at all", told("ranks", {"q_proj": [0, 0, 0]}), "q_proj: tensor"),
    ("a negative rank", told("ranks", {"q_proj": [-3, 0, 8]}), r"layers\.0\.q_proj: rank -3"),
    ("more layers", told("ranks", {"q_proj": [3, 0, 8, 0]}), "q_proj: 6 -> 4 with 4 ranks and 3 scales"),
    ("another shape", told("shapes", {"q_proj": [7, 4]}), "q_proj: tensor"),
    ("no inputs", told("shapes", {"q_proj": [0, 10]}), "q_proj: 0 -> 10"),
    ("a scale without rank", told("scales", {"q_proj": [1.5, 1.0, 4.0]}), r"layers\.1\.q_proj: rank 0 with scale 1"),
    ("a scale over float32", told("scales", {"q_proj": [1e39, 0, 4.0]}), r"layers\.0\.q_proj: rank 3 with scale 1e\+39"),
    ("mixed types", lambda header: header["q_proj"].update(dtype="F64"), "dtypes"),
    ("another order", swapped, "do not lie in the order"),
]


@pytest.mark.parametrize(("change", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_parts_that_do_not_belong_together_are_refused(change: Callable[[Header], None], reason: str):
    blob = changed(change)
    with pytest.raises(InvalidAdapter, match=reason):
        read_index(blob, len(blob))


def test_an_unchanged_header_is_still_good_and_a_shorter_file_is_not():
    blob = changed(lambda header: None)
    assert read_index(blob, len(blob)).rank == 9
    with pytest.raises(InvalidAdapter, match="pass the end"):
        read_index(blob[:-4], len(blob) - 4)


def test_data_that_begins_inside_a_cache_line_is_refused():
    blob = written()
    length = int.from_bytes(blob[:8], "little")
    moved = (length + 8).to_bytes(8, "little") + blob[8 : 8 + length] + b" " * 8 + blob[8 + length :]
    with pytest.raises(InvalidAdapter, match="multiple of 64"):
        read_index(moved, len(moved))
