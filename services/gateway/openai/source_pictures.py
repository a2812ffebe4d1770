"""Source pictures and masks of edits: checked by their headers, then decoded and scaled to the size that is drawn.

    file ── type, size, depth, animation: from its first bytes ──> decoded ──> upright RGB, scaled ──> PNG for the worker

Nothing is allocated for the pixels before the header's limits are checked. What a worker gets is always a file of ours: a PNG
(or a WebP, if that is too large for a message) of exactly the picture's size. A mask becomes gray: 255 where it is transparent
and the picture is drawn anew, else 0.
"""

from __future__ import annotations

import io
import struct
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from motet.services.gateway.config import SOURCE_PIXELS_MAX
from motet.shared.errors import BadRequest, TooLarge

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
SIDE_MAX = 16_384
"""The longest side of a source picture, in pixels."""
WEBP_QUALITY = 95
Image.MAX_IMAGE_PIXELS = SOURCE_PIXELS_MAX  # what a header of ours let pass, and another one in the same file says otherwise


class Header(NamedTuple):
    """What the first bytes of a file tell: its type, its size in pixels, and why it is not served; "" if it is."""

    kind: str
    width: int
    height: int
    unserved: str = ""


class Source:
    """A source picture or a mask whose header is within the limits."""

    def __init__(self, data: bytes, param: str, max_pixels: int) -> None:
        """Raises BadRequest naming `param`, or TooLarge. Allocates nothing for the pixels."""
        self._data, self._param = data, param
        header = _header(data)
        if header is None:
            raise self._refused("this is no PNG, JPEG or WebP picture")
        width, height = header.width, header.height
        if header.unserved:
            raise self._refused(header.unserved)
        if not (1 <= width <= SIDE_MAX and 1 <= height <= SIDE_MAX) or width * height > max_pixels:
            raise TooLarge(
                f"{param}: {width}x{height} pixels, at most {max_pixels} are read (--image-source-max-pixels), and sides of at"
                f" most {SIDE_MAX}",
                param=param,
            )
        self._header = header

    def upright(self) -> Image.Image:
        """The decoded picture, turned as its EXIF data say. Raises BadRequest."""
        try:
            with Image.open(io.BytesIO(self._data), formats=(self._header.kind,)) as opened:
                if opened.size != (self._header.width, self._header.height):
                    raise self._refused("it has two headers with different sizes")
                if opened.mode not in MODES:
                    raise self._refused(_mode(opened.mode))
                if getattr(opened, "n_frames", 1) > 1:
                    raise self._refused("it is animated")
                opened.load()
                turned = ImageOps.exif_transpose(opened)
        except BadRequest:
            raise
        except Exception as error:  # pillow raises many kinds for broken files
            raise self._refused(f"the picture cannot be decoded: {error}") from None
        return turned

    def _refused(self, why: str) -> BadRequest:
        return BadRequest(f"{self._param}: {why}", param=self._param)


def rgb_of(picture: Image.Image) -> Image.Image:
    """The picture without transparency: over white, where it has some."""
    if not has_alpha(picture):
        return picture.convert("RGB")
    layered = picture.convert("RGBA")
    white = Image.new("RGB", layered.size, "white")
    white.paste(layered, mask=layered.getchannel("A"))
    return white


def has_alpha(picture: Image.Image) -> bool:
    """Whether pixels of it may be transparent."""
    return picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info


def mask_of(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Gray of this size in pixels: 255 where the mask is transparent, else 0. Raises BadRequest naming `mask`."""
    if not has_alpha(picture):
        raise BadRequest("mask: it has no transparency, and its transparent pixels are what is drawn anew", param="mask")
    alpha = picture.convert("RGBA").getchannel("A").resize(size, Image.Resampling.LANCZOS)
    mask = alpha.point(lambda value: 255 if value < 128 else 0)
    if mask.getextrema()[1] == 0:
        raise BadRequest("mask: no pixel is transparent, so nothing would be drawn anew", param="mask")
    return mask


def scaled(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture at this size in pixels."""
    return picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)


def encoded(picture: Image.Image, param: str, max_bytes: int) -> bytes:
    """The picture's file for a worker, of at most `max_bytes`. Raises TooLarge naming `param`."""
    forms: list[tuple[str, dict[str, Any]]] = [("PNG", {"compress_level": 1}), ("WEBP", {"quality": WEBP_QUALITY, "method": 2})]
    size = 0
    for kind, how in forms:
        file = io.BytesIO()
        picture.save(file, kind, **how)
        if (size := file.tell()) <= max_bytes:
            return file.getvalue()
    raise TooLarge(
        f"{param}: at {picture.width}x{picture.height} pixels it has {size} bytes, and a message in the mesh can carry"
        f" {max_bytes}; ask for a smaller size, or raise NATS's max_payload",
        param=param,
    )


def _mode(mode: str) -> str:
    if mode == "CMYK":
        return "its colours are CMYK; RGB, gray and palettes are read"
    if mode.startswith(("I", "F")):
        return "it has more than 8 bits per channel"
    return f"its colours are {mode}; RGB, gray and palettes are read"


def _header(data: bytes) -> Header | None:
    """What a file's first bytes tell; None if it is of no type that is read."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 33:
        width, height, depth = struct.unpack(">IIB", data[16:25])
        animated = b"acTL" in data[33 : max(data.find(b"IDAT"), 33)]
        return Header("PNG", width, height, "it has 16 bits per channel" if depth > 8 else "it is animated" if animated else "")
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    return None


def _jpeg(data: bytes) -> Header | None:
    """From the first frame header (SOF)."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if at + 10 > len(data):
                return None
            depth, height, width, channels = struct.unpack(">BHHB", data[at + 4 : at + 10])
            wide = f"it has {depth} bits per channel" if depth != 8 else ""
            return Header("JPEG", width, height, _mode("CMYK") if channels == 4 else wide)
        at += 2 + length
    return None


def _webp(data: bytes) -> Header | None:
    """From the first chunk: pillow's decoder would allocate whole canvases before it tells the size."""
    chunk, body = data[12:16], data[20:30]
    if len(body) < 10:
        return None
    if chunk == b"VP8X":
        width, height = (1 + int.from_bytes(body[at : at + 3], "little") for at in (4, 7))
        return Header("WEBP", width, height, "it is animated" if body[0] & 2 else "")
    if chunk == b"VP8 ":
        width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
        return Header("WEBP", width, height)
    if chunk == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return Header("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    return None
