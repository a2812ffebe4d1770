"""Promise: a blob is read as it was written, and one whose parts do not belong together is refused by the entry's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from motet.shared.adapter_blob import data_bytes, read_index, read_site_index, site_data_bytes, write_blob, write_site_blob
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


def of_sites() -> bytes:
    classes = {
        "unet.conv1 54x4": ({2: matrices(9, 54, 4)}, 3),
        "unet.attn1.to_q 6x4": ({0: matrices(3, 6, 4), 4: matrices(8, 6, 4)}, 5),
        "unet.conv_out 9x4": ({}, 1),
    }
    return write_site_blob(classes, dtype="F32")


def test_classes_of_sites_have_their_own_counts_and_the_same_rows():
    blob = of_sites()
    index = read_site_index(blob, len(blob))
    q, conv = index.parts
    assert (q.module, conv.module) == ("unet.attn1.to_q 6x4", "unet.conv1 54x4")
    assert (index.dtype, index.rank, index.sites) == ("F32", 9, 3)
    assert (q.ranks, q.scales, q.pages) == ((3, 0, 0, 0, 8), (1.5, 0.0, 0.0, 0.0, 4.0), 1)
    assert (conv.ranks, conv.fan_in, conv.fan_out, conv.pages) == ((0, 0, 9), 54, 4, 2)
    rows = np.frombuffer(blob, "<f4", 2 * 3 * 8 * 58, conv.start).reshape(2, 3, 8 * 58)
    _, a, b = matrices(9, 54, 4)
    np.testing.assert_array_equal(rows[0, 2, : 8 * 54].reshape(8, 54), a[:8])
    np.testing.assert_array_equal(rows[0, 2, 8 * 54 :].reshape(8, 4), b[:, :8].T)
    np.testing.assert_array_equal(rows[1, 2, :54], a[8])
    assert not rows[:, :2].any() and not rows[1, 2, 54 : 8 * 54].any()
    size = site_data_bytes({q.module: (8, 6, 4, 5), conv.module: (9, 54, 4, 3)}, dtype="F32")
    assert len(blob) - index.start == size == 4 * (5 * 80 + 2 * 3 * 8 * 58)


def test_equal_counts_have_the_data_of_a_text_adapter():
    text = written()
    layers = {"q_proj": ({0: matrices(3, 6, 4), 2: matrices(8, 6, 4)}, 3), "up_proj": ({1: matrices(9, 6, 10)}, 3)}
    sites = write_site_blob(layers, dtype="F32")
    assert sites[read_site_index(sites, len(sites)).start :] == text[read_index(text, len(text)).start :]


def test_a_blob_of_the_other_format_and_one_whose_counts_differ_are_refused():
    blob, text = of_sites(), written()
    with pytest.raises(InvalidAdapter, match="'motet-lora/3', not 'motet-lora/2'"):
        read_index(blob, len(blob))
    with pytest.raises(InvalidAdapter, match="'motet-lora/2', not 'motet-lora/3'"):
        read_site_index(text, len(text))
    for old, new, reason in (
        (b"[0,0,9]", b"[0,9]  ", "unet.conv1 54x4: 54 -> 4 with 2 ranks and 3 scales of 2"),
        (b"[0,0,9]", b"[0,0,7]", "unet.conv1 54x4: tensor .2, 3, 464. does not fit"),
        (b"[54,4]", b"[9, 4]", "does not fit 9 -> 4"),
        (b"unet.attn1", b"xnet.attn1", "do not lie in the order"),
    ):
        assert old in blob
        other = blob.replace(old, new)
        with pytest.raises(InvalidAdapter, match=reason):
            read_site_index(other, len(other))


def test_a_blob_without_tensors_is_refused():
    empty = write_site_blob({"unet.conv_out 9x4": ({}, 1)}, dtype="F32")
    with pytest.raises(InvalidAdapter, match="has no tensors"):
        read_site_index(empty, len(empty))
