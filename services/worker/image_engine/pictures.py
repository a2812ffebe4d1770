"""Pictures as files and as pixels: source pictures and masks in, drawn pictures out.

A file is opened in two steps. Its header tells the size, which is checked; only then it is decoded, so memory is bounded.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import PngImagePlugin

from motet.shared.errors import BadRequest
from motet.shared.wire.request import Image

READS = ("PNG", "JPEG", "WEBP", "GIF")
SOURCE_PIXELS_MAX = 20_000_000
HALF = 128
"""The least grey of a mask that is redrawn, of 255."""


def read_source(image: Image, width: int, height: int) -> tuple[torch.Tensor, np.ndarray | None]:
    """A source picture as float32 [1, 3, height, width] from -1 to 1, and its opacity, uint8 [height, width], if it has one.

    A picture of another size is resized as diffusers does it. Raises BadRequest naming the field.
    """
    picture = _opened(image)
    alpha = _alpha(picture, width, height)
    pixels = np.asarray(_sized(picture.convert("RGB"), width, height), dtype=np.float32)
    return torch.from_numpy(pixels / 255.0 * 2.0 - 1.0).permute(2, 0, 1)[None].contiguous(), alpha


def read_mask(image: Image, width: int, height: int) -> torch.Tensor:
    """A mask as float32 [1, 1, height, width]: 1 is redrawn, where it is transparent, or white if it has no transparency.

    Raises BadRequest naming the field.
    """
    picture = _opened(image)
    alpha = _alpha(picture, width, height)
    if alpha is not None:
        return redrawn(alpha)
    return _binary(np.asarray(_sized(picture.convert("L"), width, height)))


def redrawn(alpha: np.ndarray) -> torch.Tensor:
    """The mask of a picture's opacity, as `read_mask` gives it."""
    return _binary(255 - alpha)


def write_picture(pixels: np.ndarray, kind: str, quality: int, told: Mapping[str, str] | None = None) -> bytes:
    """The file of a picture, uint8 [height, width, 3]. `told` is written into a PNG's text chunks."""
    picture, file = Pillow.fromarray(pixels), io.BytesIO()
    if kind == "png":
        text = PngImagePlugin.PngInfo()
        for name, value in (told or {}).items():
            text.add_itxt(name, value)
        picture.save(file, "PNG", pnginfo=text)
    else:
        picture.save(file, kind.upper(), quality=quality)
    return file.getvalue()


def as_pixels(decoded: torch.Tensor) -> np.ndarray:
    """uint8 [n, height, width, 3] of what a VAE decodes, float [n, 3, height, width] from -1 to 1."""
    scaled = (decoded / 2 + 0.5).clamp_(0, 1).permute(0, 2, 3, 1).float().numpy()
    return (scaled * 255).round().astype(np.uint8)


def _opened(image: Image) -> Pillow.Image:
    """The decoded picture, one frame of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            picture = Pillow.open(io.BytesIO(image.data), formats=READS)
        width, height = picture.size
        if width * height > SOURCE_PIXELS_MAX:
            raise BadRequest(
                f"{image.param} has {width} x {height} pixels, {SOURCE_PIXELS_MAX:,} at most are read", param=image.param
            )
        picture.load()
    except BadRequest:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise BadRequest(f"{image.param} is no readable picture: {error}", param=image.param) from None
    return picture


def _alpha(picture: Pillow.Image, width: int, height: int) -> np.ndarray | None:
    """The picture's opacity, None if it has none."""
    if not picture.has_transparency_data:
        return None
    return np.asarray(_sized(picture.convert("RGBA").getchannel("A"), width, height))


def _sized(picture: Pillow.Image, width: int, height: int) -> Pillow.Image:
    return picture if picture.size == (width, height) else picture.resize((width, height), Pillow.Resampling.LANCZOS)


def _binary(grey: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((grey >= HALF).astype(np.float32))[None, None]
