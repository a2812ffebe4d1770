"""Promise: a hostile picture is refused by its header, within bounded memory, before a pixel is decoded."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from motet.services.gateway.openai import source_pictures
from motet.services.gateway.openai.source_pictures import Source
from motet.shared.errors import BadRequest, MotetError, TooLarge
from tests.services.gateway.support_pictures import file_of

PIXELS = 20_000_000
MIB = 1 << 20


def png(width: int, height: int, rows: int = 0) -> bytes:
    """A PNG of this size in its header, with so many rows of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """A WebP whose header has this canvas."""
    body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 4 + 8 + len(body)) + b"WEBPVP8X" + struct.pack("<I", len(body)) + body


def jpeg(width: int, height: int) -> bytes:
    return b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)


@pytest.mark.parametrize(
    "data",
    [png(50_000, 50_000), png(50_000, 1), png(4473, 4473), webp(16_384, 16_384), jpeg(65_535, 65_535), png(0, 5)],
    ids=["png", "wide", "pixels", "webp", "jpeg", "empty"],
)
def test_a_picture_that_is_too_large_is_refused_by_its_header(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(TooLarge, match="image-source-max-pixels") as refused:
        Source(data, "image", PIXELS)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    assert refused.value.param == "image"


def test_a_file_with_two_headers_is_refused() -> None:
    """pillow takes the last one, which may be much larger than the one that was checked."""
    first = file_of("JPEG", size=(8, 8))
    at = first.index(b"\xff\xc0")
    length = 2 + int.from_bytes(first[at + 2 : at + 4], "big")
    second = bytearray(first[at : at + length])
    second[5:9] = struct.pack(">HH", 6000, 6000)
    with pytest.raises(BadRequest, match=r"two headers|cannot be decoded"):
        Source(first[: at + length] + bytes(second) + first[at + length :], "image", PIXELS).upright()


def test_a_decompression_bomb_costs_no_more_than_its_pixels() -> None:
    """Zeros compress a thousandfold; what a file has beyond its pixels is not unpacked."""
    bomb = png(64, 64, rows=200_000)
    assert len(bomb) < MIB
    picture = Source(bomb, "image", PIXELS).upright()
    assert picture.size == (64, 64)


def test_texts_in_a_file_that_unpack_to_more_than_a_megabyte_are_refused() -> None:
    text = b"x\0\0" + zlib.compress(bytes(64 * MIB), 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    plain = file_of()
    with pytest.raises(BadRequest, match="image: the picture cannot be decoded"):
        Source(plain[:33] + chunk + plain[33:], "image", PIXELS).upright()


def test_a_source_that_no_message_can_carry_as_png_is_sent_as_webp() -> None:
    noisy = Image.merge("RGB", [Image.effect_noise((256, 256), 90) for _ in range(3)])
    whole = source_pictures.encoded(noisy, "image", MIB)
    assert whole.startswith(b"\x89PNG")
    small = source_pictures.encoded(noisy, "image", len(whole) - 1)
    assert small[8:12] == b"WEBP" and Image.open(io.BytesIO(small)).size == (256, 256)
    with pytest.raises(TooLarge, match="max_payload") as refused:
        source_pictures.encoded(noisy, "mask", 1000)
    assert refused.value.param == "mask"


@given(st.sampled_from(["PNG", "JPEG", "WEBP"]), st.data())
@settings(max_examples=150)
def test_a_damaged_file_is_read_or_refused_by_name(kind: str, data: st.DataObject) -> None:
    file = bytearray(file_of(kind, size=(24, 16), colour=(9, 99, 199)))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    del file[data.draw(st.integers(0, len(file))) :]
    try:
        picture = Source(bytes(file), "image", 10_000).upright()
    except MotetError as error:
        assert error.param == "image" and error.status in (400, 413)
    else:
        assert picture.width * picture.height <= 10_000
        assert source_pictures.rgb_of(picture).mode == "RGB"
