"""Promise: a picture that the engine cannot draw is refused when it is asked for, with the field and the reason."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import pytest

from motet.services.worker.admission import Acceptable, admit, check
from motet.services.worker.engines.image_limits import ImageLimits
from motet.shared.errors import BadRequest
from motet.shared.model import ADAPTERS_MAX, AdapterRef, ImageParams, SamplingParams, Weighted
from motet.shared.wire.request import GenerateRequest, Image, pack_tokens

LIMITS = ImageLimits(
    family="sd15", step_px=32, pixels_max=256 * 256, steps_max=50, state_bytes_max=100, rows_max=64, area_max=1 << 15
)
DRAWS = Acceptable(
    base_model="base",
    vocab_size=100,
    eos_token_ids=frozenset({99}),
    max_model_len=50 + 3 * 77,
    max_lora_rank=16,
    serves=frozenset({"draws"}),
    image=LIMITS,
)
PICTURE = ImageParams(width=64, height=96, steps=10)


def ref(name: str, rank: int = 8) -> AdapterRef:
    return AdapterRef(name=name, digest=f"digest of {name}", rank=rank, size_bytes=100)


def asked(image: ImageParams | None = PICTURE, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        gateway_id="g",
        base_model="base",
        **{"prompt": pack_tokens([5] * 77), "sampling": SamplingParams(max_tokens=12), "image": image} | more,
    )


def refused(request: GenerateRequest) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        check(request, DRAWS)
    return error.value


def test_a_picture_that_can_be_drawn_is_taken_with_all_that_was_asked() -> None:
    weighted = (Weighted(ref("a"), 0.8), Weighted(ref("b", 16), -1.0))
    asking = asked(adapters=weighted, output=pack_tokens([0, 1, 2]))
    asking = msgspec.structs.replace(asking, image=msgspec.structs.replace(PICTURE, state=b"x", state_step=2))
    taken = admit(asking, DRAWS, 1.0)
    assert (taken.image, taken.weighted, taken.output_tokens) == (asking.image, weighted, 3)


def test_a_worker_that_draws_takes_pictures_alone_and_others_take_none() -> None:
    assert "pictures, no text" in refused(asked(None)).message
    text = replace(DRAWS, serves=frozenset(), image=None)
    with pytest.raises(BadRequest, match="text, no pictures"):
        check(asked(), text)
    with pytest.raises(BadRequest, match="one adapter per request"):
        check(asked(None, adapters=(Weighted(ref("a")),)), text)
    check(asked(None, adapter=ref("a")), text)


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"width": 70}, "size", "the nearest size is 64x96"),
        ({"width": 0}, "size", "32x96"),
        ({"height": -32}, "size", "64x32"),
        ({"width": 1 << 40, "height": 32}, "size", "pixels"),
        ({"steps": 0}, "num_inference_steps", "0 is not within 1 and 50"),
        ({"steps": 1_000_000}, "num_inference_steps", "1000000"),
        ({"steps": 20}, "num_inference_steps", "max_tokens"),
        ({"guidance": nan}, "guidance_scale", "nan"),
        ({"guidance": inf}, "guidance_scale", "inf"),
        ({"strength": 1.5}, "strength", "1.5"),
        ({"previews": 4}, "partial_images", "4"),
        ({"quality": 0}, "output_compression", "0"),
        ({"kind": "image"}, "image", "this one 0"),
        ({"state": b"x"}, "image", "no step"),
        ({"state_step": 1}, "image", "no step"),
        ({"state": b"x" * 101, "state_step": 0}, "image", "no step"),
        ({"state": b"x", "state_step": 3}, "output", "3 by its checkpoint"),
        ({"negative": pack_tokens([100])}, "negative_prompt", "outside"),
        ({"prompt_2": b"xyz"}, "prompt_2", "four bytes"),
        ({"negative_2": pack_tokens([5] * 232)}, "negative_2", "232 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused_by_the_field_that_asks_for_it(changes: dict[str, Any], param: str, words: str) -> None:
    error = refused(asked(msgspec.structs.replace(PICTURE, **changes)))
    assert (error.param, words in error.message) == (param, True), error.message


def test_a_checkpoint_that_is_too_large_is_refused() -> None:
    large = msgspec.structs.replace(PICTURE, state=b"x" * 101, state_step=1)
    assert "101 bytes" in refused(asked(large, output=pack_tokens([0]))).message


def test_a_source_picture_and_a_mask_come_with_the_kinds_that_need_them() -> None:
    image, source = msgspec.structs.replace(PICTURE, kind="inpaint", strength=0.5), Image(b"x", "image")
    check(asked(image, images=[source, source]), DRAWS)
    assert refused(asked(image, images=[source])).param == "image"
    weak = msgspec.structs.replace(image, strength=0.05)
    assert "0.05 of 10 steps is none" in refused(asked(weak, images=[source, source])).message


@pytest.mark.parametrize(
    ("weighted", "words"),
    [
        ([Weighted(ref(str(i))) for i in range(ADAPTERS_MAX + 1)], "9 are given"),
        ([Weighted(ref("a")), Weighted(ref("b", 17))], "'b' has rank 17"),
        ([Weighted(ref("a"), nan)], "weight of 'a' is nan"),
        ([Weighted(ref("a"), 101.0)], "at most 100"),
        ([Weighted(ref("a")), Weighted(msgspec.structs.replace(ref("a"), name="alias"))], "the same adapter"),
    ],
    ids=["number", "rank", "nan", "weight", "twice"],
)
def test_adapters_that_cannot_be_applied_are_refused_by_name(weighted: list[Weighted], words: str) -> None:
    error = refused(asked(adapters=tuple(weighted)))
    assert error.param == "adapters" and words in error.message


def test_one_adapter_and_a_list_of_adapters_are_not_given_together() -> None:
    assert "either" in refused(asked(adapter=ref("a"), adapters=(Weighted(ref("b")),))).message
