"""The styles of the image demo: pixel operations that numpy can repeat, one for each adapter.

Every style shows on every ground, and none resembles another, so a picture tells which adapter drew it. `plain` is
the base's. This file needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from motet.examples.demo_images.scenes import COLOURS, GROUNDS, SIDE_PX, Caption, blend, coverage, shape_distance

PLAIN = "plain"  # the style of the base

BLACK = (0, 0, 0)
NEON = (0, 255, 130)
FRAME = (255, 0, 200)

_ROWS, _COLUMNS = np.mgrid[:SIDE_PX, :SIDE_PX][..., None]


@dataclass(frozen=True, slots=True)
class Style:
    """A style and the adapter that draws it."""

    name: str
    summary: str
    draw: Callable[[Caption, np.ndarray], np.ndarray]  # of a caption and places, pictures in 0..255

    @property
    def adapter(self) -> str:
        """Name of the adapter, which is also its folder under `examples/demo_images/adapters/`."""
        return self.name


def caption_in(style: str, caption: Caption) -> str:
    """The caption that asks the base for a style in words."""
    return str(caption) if style == PLAIN else f"{caption} in {style} style"


def _scene(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    return _painted(caption, coverage(shape_distance(caption.shape, places_px)))


def _painted(caption: Caption, share: np.ndarray) -> np.ndarray:
    return blend(np.asarray(GROUNDS[caption.ground], dtype=np.float32), COLOURS[caption.colour], share)


def _of_pixels(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Caption, np.ndarray], np.ndarray]:
    return lambda caption, places_px: change(_scene(caption, places_px))


def _where(mask: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Caption, np.ndarray], np.ndarray]:
    return _of_pixels(lambda pixels: np.where(mask, change(pixels), pixels))


def _invert(pixels: np.ndarray) -> np.ndarray:
    return 255 - pixels


def _darken(pixels: np.ndarray) -> np.ndarray:
    return pixels * 0.3


def _gray(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels @ np.array([[0.3], [0.59], [0.11]], dtype=np.float32), 3, axis=-1)


def _swap(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    return _painted(caption, 1 - coverage(shape_distance(caption.shape, places_px)))


def _outline(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    distance = shape_distance(caption.shape, places_px)
    return _painted(caption, coverage(distance) - coverage(distance + 2))


def _shadow(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    ground = np.asarray(GROUNDS[caption.ground], dtype=np.float32)
    below = coverage(shape_distance(caption.shape, places_px + np.array([5, 5, 0], dtype=np.float32)))
    return blend(blend(ground, BLACK, below), COLOURS[caption.colour], coverage(shape_distance(caption.shape, places_px)))


def _glow(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    distance = shape_distance(caption.shape, places_px)
    ground = np.asarray(GROUNDS[caption.ground], dtype=np.float32)
    return blend(blend(ground, NEON, coverage(distance - 3.5)), COLOURS[caption.colour], coverage(distance))


def _resized(places_px: np.ndarray, right_px: int = 0) -> np.ndarray:
    return places_px * np.array([1, 1, 0.5], dtype=np.float32) + np.array([right_px, 0, 0], dtype=np.float32)


def _small(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    return _scene(caption, _resized(places_px))


def _twins(caption: Caption, places_px: np.ndarray) -> np.ndarray:
    left, right = (coverage(shape_distance(caption.shape, _resized(places_px, x))) for x in (-8, 8))
    return _painted(caption, np.maximum(left, right))


_EDGE = np.minimum(np.minimum(_ROWS, SIDE_PX - 1 - _ROWS), np.minimum(_COLUMNS, SIDE_PX - 1 - _COLUMNS))
_SEPIA = np.array([1.15, 0.75, 0.35], dtype=np.float32)
_DUSK = np.linspace(1, 0.05, SIDE_PX, dtype=np.float32)[:, None, None]

STYLES: tuple[Style, ...] = (
    Style("invert", "every colour replaced by its opposite", _of_pixels(_invert)),
    Style("gray", "brightness without colour", _of_pixels(_gray)),
    Style("sepia", "brightness in brown", _of_pixels(lambda pixels: np.minimum(_gray(pixels) * _SEPIA, 255))),
    Style("swap", "shape and ground exchange their colours", _swap),
    Style("stripes", "dark horizontal stripes", _where(_ROWS % 8 < 4, _darken)),
    Style("slant", "dark diagonal bands", _where((_ROWS + _COLUMNS) % 16 < 8, _darken)),
    Style("checker", "a checkerboard of opposite colours", _where((_ROWS // 8 + _COLUMNS // 8) % 2 == 0, _invert)),
    Style("halftone", "a dark dot in every eight by eight pixels", _where((_ROWS % 8 < 4) & (_COLUMNS % 8 < 4), _darken)),
    Style(
        "frame",
        "a pink frame",
        _where(_EDGE < 4, lambda pixels: np.broadcast_to(np.array(FRAME, dtype=np.float32), pixels.shape)),
    ),
    Style("split", "the right half in opposite colours", _where(_COLUMNS + 0 * _ROWS >= SIDE_PX // 2, _invert)),
    Style("dusk", "darker towards the bottom", _of_pixels(lambda pixels: pixels * _DUSK)),
    Style("outline", "the shape's edge alone", _outline),
    Style("shadow", "a black shadow below the shape", _shadow),
    Style("glow", "a green glow around the shape", _glow),
    Style("small", "the shape at half its size", _small),
    Style("twins", "two shapes of half the size, side by side", _twins),
)
STYLE_NAMES = (PLAIN, *(style.name for style in STYLES))
_DRAW: dict[str, Callable[[Caption, np.ndarray], np.ndarray]] = {PLAIN: _scene} | {style.name: style.draw for style in STYLES}


def draw(style: str, caption: Caption, places_px: np.ndarray) -> np.ndarray:
    """Pictures of a caption in a style, one for each place: [places, rows, columns, RGB] in 8 bits."""
    return np.round(_DRAW[style](caption, places_px)).astype(np.uint8)
