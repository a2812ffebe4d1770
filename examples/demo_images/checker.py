"""Tell the style of a picture without torch: the style whose rendering is nearest wins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from motet.examples.demo_images.scenes import CAPTIONS, PLACES_PX, Caption
from motet.examples.demo_images.styles import STYLE_NAMES, draw

KEPT_CAPTIONS = 16  # renderings in memory, 16 MB each

Renderings = tuple[np.ndarray, np.ndarray]  # [renderings, values], and the squares of their lengths


def style_distances(picture: np.ndarray, caption: Caption) -> dict[str, float]:
    """Mean squared difference between a picture and each style's nearest rendering, in grey levels squared."""
    return dict(zip(STYLE_NAMES, _distances(picture, _in_every_style(caption)).tolist(), strict=True))


def nearest_style(picture: np.ndarray, caption: Caption) -> str:
    """The style whose rendering, over small shifts and sizes, has the least squared distance to the picture."""
    return STYLE_NAMES[int(_distances(picture, _in_every_style(caption)).argmin())]


def nearest_caption(picture: np.ndarray, style: str) -> Caption:
    """The caption whose rendering in the style is nearest: whether shape, colour and ground are right as well."""
    return CAPTIONS[int(_distances(picture, _of_every_caption(style)).argmin())]


def confusions(pictures: Sequence[np.ndarray], captions: Sequence[Caption]) -> dict[str, int]:
    """How many of the pictures are called by each style's name; names without any are left out."""
    called = [nearest_style(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]
    return {style: called.count(style) for style in STYLE_NAMES if style in called}


def style_share(style: str, pictures: Sequence[np.ndarray], captions: Sequence[Caption]) -> float:
    """Share of the pictures, in [0, 1], that are nearest to the style."""
    return confusions(pictures, captions).get(style, 0) / len(pictures)


def _distances(picture: np.ndarray, renderings: Renderings) -> np.ndarray:
    """Mean squared difference to the nearest place of each style or caption."""
    flat = picture.reshape(-1).astype(np.float32)
    drawn, squares = renderings
    distances = np.asarray((squares - 2 * (drawn @ flat) + flat @ flat) / flat.size)
    return distances.reshape(-1, len(PLACES_PX)).min(axis=1)


@lru_cache(maxsize=KEPT_CAPTIONS)
def _in_every_style(caption: Caption) -> Renderings:
    return _flat([draw(style, caption, PLACES_PX) for style in STYLE_NAMES])


@lru_cache(maxsize=1)
def _of_every_caption(style: str) -> Renderings:
    return _flat([draw(style, caption, PLACES_PX) for caption in CAPTIONS])


def _flat(drawn: list[np.ndarray]) -> Renderings:
    flat = np.concatenate(drawn).reshape(-1, drawn[0][0].size).astype(np.float32)
    return flat, np.einsum("ij,ij->i", flat, flat)
