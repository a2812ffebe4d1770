"""Promise: a gateway reads from a checkpoint's configurations what it draws, and names a file that it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.services.gateway.openai.image_base import SIDE_MAX, ImageBase
from motet.shared.clip_tokenizer import PART_TOKENS
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, PromptTooLong
from motet.shared.image_shapes import is_image_base
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.support_pictures import DIVISOR_PX, NATIVE_PX, write_image_base
from tests.support_images import REAL

MAX_PX = 1 << 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ImageBase:
    return ImageBase(write_image_base(tmp_path_factory.mktemp("base") / "sd"))


def test_sizes_sampler_and_guidance_come_from_the_files(tmp_path: Path, base: ImageBase) -> None:
    assert (base.family, base.divisor_px, base.native_px, base.sampler) == ("sd15", DIVISOR_PX, NATIVE_PX, "euler")
    assert (base.guidance, base.redraws_only) == (7.5, False)
    larger = ImageBase(write_image_base(tmp_path / "xl", "sdxl"))
    assert (larger.family, larger.guidance) == ("sdxl", 5.0)
    assert ImageBase(write_image_base(tmp_path / "inpainting", "sd2")).redraws_only
    assert is_image_base(tmp_path / "xl") and not is_image_base(tmp_path)


@pytest.mark.parametrize(("family", "divisor", "native"), [("sd15", 64, 512), ("sd2", 64, 512), ("sdxl", 32, 1024)])
def test_real_checkpoints_divide_by_what_their_blocks_halve(tmp_path: Path, family: str, divisor: int, native: int) -> None:
    model = write_image_base(tmp_path / family, family)
    sizes = {"vae": [128, 256, 512, 512], "unet": REAL[family][1]["unet"]["block_out_channels"]}
    for part, channels in sizes.items():
        path = model / part / "config.json"
        config = (REAL[family][1]["unet"] if part == "unet" else json.loads(path.read_text())) | {
            "block_out_channels": channels
        }
        path.write_text(json.dumps(config | {"sample_size": native // 8}))
    found = ImageBase(model)
    assert (found.divisor_px, found.native_px) == (divisor, native)


@given(st.integers(1, 9999), st.integers(1, 9999), st.sampled_from([1024, 65_536, 1 << 20, 1 << 22]))
def test_the_nearest_size_is_one_that_is_drawn(base: ImageBase, width: int, height: int, most: int) -> None:
    found = base.size("auto", most, (width, height))
    assert base.size(f"{found[0]}x{found[1]}", most) == found
    assert found[0] * found[1] <= most and max(found) <= SIDE_MAX
    try:
        assert base.size(f"{width}x{height}", most) == (width, height)
    except BadRequest as error:
        named = error.message.rsplit(" ", 1)[1]
        assert base.size(named, most) == tuple(map(int, named.split("x")))


def test_the_second_text_encoder_gets_tokens_of_its_own_where_its_padding_differs(tmp_path: Path) -> None:
    same = ImageBase(write_image_base(tmp_path / "same", "sdxl")).tokens("a red circle", "")
    assert (same.prompt_2, same.negative_2, same.own) == (b"", b"", 3)
    other = ImageBase(write_image_base(tmp_path / "other", "sdxl", pad="!")).tokens("a red circle", "")
    first, second = unpack_tokens(other.prompt), unpack_tokens(other.prompt_2)
    assert first[:5] == second[:5] and first[5:] != second[5:] and len(set(second[5:])) == 1
    assert len(first) == len(second) == PART_TOKENS


def test_a_prompt_of_more_than_three_parts_is_refused_with_its_count(base: ImageBase) -> None:
    assert len(unpack_tokens(base.tokens("circle " * 225, "").prompt)) == 3 * PART_TOKENS
    with pytest.raises(PromptTooLong, match="226 tokens, at most 225") as refused:
        base.tokens("x", "circle " * 226)
    assert refused.value.param == "negative_prompt"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer/vocab.json", None, "vocab.json"),
        ("tokenizer/vocab.json", "[]", "no CLIP tokenizer"),
        ("tokenizer/merges.txt", "a b c\nx", "no CLIP tokenizer"),
        ("tokenizer/special_tokens_map.json", '{"pad_token": 5}', "pad_token"),
        ("vae/config.json", None, "vae/config.json is missing"),
        ("vae/config.json", '{"block_out_channels": 3}', "block_out_channels"),
        ("unet/config.json", "{}", "unet/config.json"),
        ("model_index.json", '{"_class_name": "FluxPipeline"}', "FluxPipeline"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, file: str, text: str | None, words: str) -> None:
    model = write_image_base(tmp_path / "model")
    path = model / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        ImageBase(model)
