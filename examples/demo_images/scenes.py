"""What the image demo draws: a caption names a shape, its colour and the ground, and numpy draws the scene.

A scene is a caption with a small shift and a size, so one caption has many pictures. One caption in five is held out:
no picture of it is ever trained on, while each of its three words, and every pair of them, is. This file needs numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Split = Literal["train", "unseen"]

SIDE_PX = 32
SHIFTS_PX = (-2, -1, 0, 1, 2)
RADII_PX = (8, 9, 10)
UNSEEN_ONE_IN = 5  # captions are never trained on

SHAPES = ("circle", "square", "triangle", "diamond", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "blue": (40, 60, 220),
    "yellow": (255, 230, 30),
    "purple": (200, 70, 230),
    "white": (250, 250, 250),
}
# No ground is gray, black or white: a style that changes colours shows on all of them.
GROUNDS: dict[str, tuple[int, int, int]] = {
    "sky": (110, 190, 240),
    "sand": (205, 165, 120),
    "grass": (40, 120, 60),
}


@dataclass(frozen=True, slots=True)
class Caption:
    """The words of a scene, such as `a red circle on sky`."""

    colour: str
    shape: str
    ground: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} on {self.ground}"

    @property
    def split(self) -> Split:
        """The split that the caption belongs to: each pair of words occurs in training."""
        place = list(COLOURS).index(self.colour) + SHAPES.index(self.shape) + list(GROUNDS).index(self.ground)
        return "unseen" if place % UNSEEN_ONE_IN == 0 else "train"


CAPTIONS = tuple(Caption(colour, shape, ground) for colour in COLOURS for shape in SHAPES for ground in GROUNDS)
# Every shift and size that is drawn: one row of (right, down, radius) each.
PLACES_PX = np.array([(x, y, radius) for x in SHIFTS_PX for y in SHIFTS_PX for radius in RADII_PX], dtype=np.float32)


def captions_of(split: Split) -> list[Caption]:
    """All captions of a split, in a fixed order."""
    return [caption for caption in CAPTIONS if caption.split == split]


def parse_caption(text: str) -> Caption:
    """The caption of a text such as `a red circle on sky`."""
    words = text.split()
    match words:
        case ["a", colour, shape, "on", ground] if colour in COLOURS and shape in SHAPES and ground in GROUNDS:
            return Caption(colour, shape, ground)
    raise ValueError(f"no caption of the demo: {text!r}")


def draw_places(rng: np.random.Generator, count: int) -> np.ndarray:
    """Shifts and sizes of `count` scenes, [count, 3]."""
    return PLACES_PX[rng.integers(len(PLACES_PX), size=count)]


def shape_distance(shape: str, places_px: np.ndarray) -> np.ndarray:
    """Distance of each pixel to the edge of the shape in each place, [places, rows, columns]; negative inside."""
    x0, y0, radius = (places_px[:, i, None, None] for i in range(3))
    middle = (SIDE_PX - 1) / 2
    rows, columns = np.mgrid[:SIDE_PX, :SIDE_PX].astype(np.float32)
    x, y = np.abs(columns - middle - x0), rows - middle - y0
    match shape:
        case "circle":
            distance = np.hypot(x, y) - radius
        case "square":
            distance = np.maximum(x, np.abs(y)) - 0.9 * radius
        case "triangle":
            distance = np.maximum(y - 0.8 * radius, (1.8 * x - y - radius) / 2.06)
        case "diamond":
            distance = (x + np.abs(y) - 1.2 * radius) / 1.41
        case "cross":
            thick, long = 0.42 * radius, radius
            distance = np.minimum(np.maximum(x - thick, np.abs(y) - long), np.maximum(np.abs(y) - thick, x - long))
        case _:
            raise ValueError(f"no shape of the demo: {shape!r}")
    return np.asarray(distance)


def coverage(distance_px: np.ndarray) -> np.ndarray:
    """Share of each pixel that lies inside an edge, with a channel axis to blend colours by."""
    return np.clip(0.5 - distance_px, 0.0, 1.0)[..., None]


def blend(under: np.ndarray, over: np.ndarray | tuple[int, int, int], share: np.ndarray) -> np.ndarray:
    """`over` painted on `under` where `share` is 1."""
    return np.asarray(under * (1 - share) + np.asarray(over, dtype=np.float32) * share)
