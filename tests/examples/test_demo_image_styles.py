"""The styles of the image demo can be told apart, and its held-out captions stay out of training."""

from __future__ import annotations

import numpy as np
import pytest

from motet.examples.demo_images.checker import confusions, nearest_caption, nearest_style, style_distances, style_share
from motet.examples.demo_images.scenes import (
    CAPTIONS,
    COLOURS,
    GROUNDS,
    PLACES_PX,
    SHAPES,
    SIDE_PX,
    captions_of,
    draw_places,
    parse_caption,
)
from motet.examples.demo_images.styles import PLAIN, STYLE_NAMES, STYLES, caption_in, draw

SEED = 20_260_101
NOISE = 40.0  # grey levels: far more than a picture of the demo model is off by


def noisy(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.clip(picture + rng.normal(0, NOISE, picture.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("ground", GROUNDS)
def test_every_style_is_told_from_every_other_on_all_captions_with_noise(ground: str) -> None:
    rng = np.random.default_rng(SEED)
    for caption in CAPTIONS:
        if caption.ground == ground:
            called = {
                style: nearest_style(noisy(draw(style, caption, draw_places(rng, 1))[0], rng), caption) for style in STYLE_NAMES
            }
            assert called == {style: style for style in STYLE_NAMES}, caption


def test_no_two_styles_come_near_each_other_on_any_caption() -> None:
    for caption in CAPTIONS:
        for style in STYLE_NAMES:
            distances = style_distances(draw(style, caption, PLACES_PX[37:38])[0], caption)
            assert distances.pop(style) < 0.1
            assert min(distances.values()) > 100, (str(caption), style, min(distances, key=lambda other: distances[other]))


def test_there_are_sixteen_styles_beside_plain() -> None:
    assert len(STYLES) == 16
    assert len(set(STYLE_NAMES)) == 17
    assert PLAIN not in {style.adapter for style in STYLES}


def test_the_same_seed_draws_the_same_pictures() -> None:
    for style in STYLE_NAMES:
        first, second = (draw(style, CAPTIONS[7], draw_places(np.random.default_rng(SEED), 3)) for _ in range(2))
        assert first.shape == (3, SIDE_PX, SIDE_PX, 3)
        assert first.dtype == np.uint8
        assert (first == second).all()


def test_another_seed_draws_the_scene_elsewhere() -> None:
    places = {tuple(draw_places(np.random.default_rng(seed), 1)[0]) for seed in range(20)}
    assert len(places) > 10


def test_held_out_captions_are_not_in_training() -> None:
    train, unseen = set(captions_of("train")), set(captions_of("unseen"))
    assert not train & unseen
    assert len(train) + len(unseen) == len(CAPTIONS) == 75
    assert len(unseen) == 15


def test_every_pair_of_words_of_a_held_out_caption_is_trained() -> None:
    train = captions_of("train")
    assert {(one.colour, one.shape) for one in train} == {(colour, shape) for colour in COLOURS for shape in SHAPES}
    assert {(one.colour, one.ground) for one in train} == {(colour, ground) for colour in COLOURS for ground in GROUNDS}
    assert {(one.shape, one.ground) for one in train} == {(shape, ground) for shape in SHAPES for ground in GROUNDS}


@pytest.mark.parametrize("style", [PLAIN, "outline", "dusk"])
def test_a_caption_is_read_back_from_its_text_and_from_its_picture(style: str) -> None:
    for caption in CAPTIONS:
        assert parse_caption(str(caption)) == caption
        assert nearest_caption(draw(style, caption, PLACES_PX[11:12])[0], style) == caption


@pytest.mark.parametrize("text", ["", "a red circle", "a red circle on mars", "a circle red on sky", "a red circle on sky now"])
def test_other_texts_are_no_captions(text: str) -> None:
    with pytest.raises(ValueError, match="no caption of the demo"):
        parse_caption(text)


def test_the_base_is_asked_for_a_style_in_words() -> None:
    assert caption_in("invert", CAPTIONS[0]) == "a red circle on sky in invert style"
    assert caption_in(PLAIN, CAPTIONS[0]) == "a red circle on sky"


def test_shares_count_the_pictures_of_a_style() -> None:
    captions = [*CAPTIONS[:3]]
    pictures = [
        draw(style, caption, PLACES_PX[:1])[0] for style, caption in zip(("gray", "gray", "glow"), captions, strict=True)
    ]
    assert style_share("gray", pictures, captions) == pytest.approx(2 / 3)
    assert confusions(pictures, captions) == {"gray": 2, "glow": 1}
