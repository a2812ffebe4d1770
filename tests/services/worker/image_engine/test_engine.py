"""Promise: every picture ends once, continues where its checkpoint was, and never suffers from another request."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from motet.services.worker.image_engine import device_adapters, engine
from motet.shared.errors import BadRequest, InvalidAdapter, MotetError
from motet.shared.wire.request import Image, pack_tokens
from tests.services.worker.image_engine.conftest import Oracles
from tests.services.worker.image_engine.support_engine import MASK, SOURCE, Driven, png, relative

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = "a red circle on sky"


@pytest.fixture
def driven(oracles: Oracles) -> Driven:
    oracle = oracles("sd15")
    return Driven(oracle.model_dir, oracle, keep_s=0.0)


def pixels(driven: Driven, request_id: str, epoch: int = 0) -> np.ndarray:
    last = driven.of(request_id, epoch)[-1]
    assert last.finish == "stop" and last.picture is not None and not last.picture.preview
    return np.asarray(Pillow.open(io.BytesIO(last.picture.data)), dtype=int)


def test_every_step_is_a_position_and_the_picture_is_the_last(driven: Driven) -> None:
    driven.run(driven.request("a", PROMPT, steps=3, seed=5))
    items = driven.of("a")
    assert [(item.index, item.tokens, item.finish) for item in items] == [
        (0, [0], None),
        (1, [1], None),
        (2, [2], None),
        (3, [3], "stop"),
    ]
    picture = items[-1].picture
    assert picture is not None and (picture.format, picture.width, picture.height, picture.seed) == ("png", 32, 32, 5)
    assert items[0].queue_ms >= 0 and [item.picture for item in items[:-1]] == [None] * 3


def test_the_picture_is_the_decoded_latents(driven: Driven) -> None:
    driven.run(driven.request("a", PROMPT))
    vae = driven.oracle.pipeline().vae
    with torch.no_grad():
        decoded = vae.decode(driven.passes.latents["a"][None] / vae.config.scaling_factor).sample[0]
    wanted = ((decoded / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy() * 255).round()
    assert np.abs(pixels(driven, "a") - wanted).max() <= 1


@pytest.mark.parametrize("sampler", ["ddim", "euler", "euler_a", "dpmpp_2m"])
@pytest.mark.parametrize("kind", ["text", "image", "inpaint"])
def test_a_picture_that_continues_from_a_checkpoint_is_the_same(sampler: str, kind: str, driven: Driven) -> None:
    images = {"text": [], "image": [SOURCE], "inpaint": [SOURCE, MASK]}[kind]
    options: dict[str, Any] = {"steps": 14, "sampler": sampler, "adapters": {"mixed": 1.0}, "kind": kind, "images": images}
    options |= {"seed": 9, "strength": 0.9}
    driven.run(driven.request("whole", PROMPT, **options), driven.request("other", PROMPT, steps=6))
    kept = [item for item in driven.of("whole") if item.state]
    assert len(kept) == driven.of("whole")[-1].index, "a step that takes longer than the time between two has one"
    item = kept[len(kept) // 2]
    done = item.index + len(item.tokens)
    assert 5 <= done < driven.of("whole")[-1].index - 2
    resumed = driven.request("whole", PROMPT, epoch=1, output=range(done + 2), state=item.state, state_step=done, **options)
    driven.run(resumed)
    assert driven.of("whole", 1)[0].index == done + 2
    assert np.abs(pixels(driven, "whole", 1) - pixels(driven, "whole")).max() <= 2


def test_without_a_checkpoint_the_steps_are_repeated_from_the_seed(driven: Driven) -> None:
    options: dict[str, Any] = {"steps": 6, "sampler": "euler_a", "seed": 2}
    driven.run(driven.request("a", PROMPT, **options))
    driven.run(driven.request("a", PROMPT, epoch=1, output=range(4), **options))
    assert [item.index for item in driven.of("a", 1)] == [4, 5, 6]
    assert np.array_equal(pixels(driven, "a", 1), pixels(driven, "a"))


def test_a_picture_of_which_only_the_last_item_was_lost_is_decoded_from_its_checkpoint(driven: Driven) -> None:
    options: dict[str, Any] = {"steps": 12, "seed": 1}
    driven.run(driven.request("a", PROMPT, **options))
    state = driven.passes.latents["a"].numpy().astype("<f4").tobytes()
    steps = len(driven.passes.batches)
    driven.run(driven.request("a", PROMPT, epoch=1, output=range(12), state=state, state_step=12, **options))
    assert len(driven.passes.batches) == steps and [item.index for item in driven.of("a", 1)] == [12]
    assert np.array_equal(pixels(driven, "a", 1), pixels(driven, "a"))


def test_requests_shorter_than_the_time_between_checkpoints_send_none(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle, keep_s=60.0)
    driven.run(driven.request("a", PROMPT, steps=20))
    assert not any(item.state for item in driven.of("a"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": b"1234", "state_step": 2}, "has 4 bytes"),
        ({"state": np.full(1024, np.nan, "<f4").tobytes(), "state_step": 2}, "not finite"),
        ({"state": bytes(4096), "state_step": 9}, "state_step is 9: 1 to 4"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused_and_touches_no_other(change: dict[str, Any], why: str, driven: Driven) -> None:
    driven.run(driven.request("bad", PROMPT, **change), driven.request("good", PROMPT))
    (item,) = driven.of("bad")
    assert item.finish == "error" and item.error is not None and why in item.error.message and item.error.param == "image"
    assert pixels(driven, "good").shape == (32, 32, 3)


def test_a_cancelled_request_ends_between_two_steps(driven: Driven) -> None:
    for request_id in ("a", "b"):
        driven.engine.add(driven.request(request_id, PROMPT, steps=8, adapters={"small": 1.0}), 0.0)
    while len(driven.of("a")) < 3:
        driven.step()
    assert not driven.engine.cancel("a", -1), "an older epoch's cancel is too late"
    assert driven.engine.cancel("a", 0) and not driven.engine.cancel("unknown", 0)
    driven.run()
    assert [item.finish for item in driven.of("a")] == [None, None, None, "cancelled"]
    assert driven.of("a")[-1].index == 3 and pixels(driven, "b").shape == (32, 32, 3)


def test_latents_that_are_not_finite_end_their_request_only(driven: Driven) -> None:
    denoise = driven.passes.denoise

    def spoiled(drawings: Any) -> list[bool]:
        for drawing in drawings:
            if drawing.request.request_id == "bad" and drawing.step == 2:
                drawing.latents = drawing.latents * float("nan")
        return denoise(drawings)

    driven.passes.denoise = spoiled  # type: ignore[method-assign]
    driven.run(driven.request("bad", PROMPT, adapters={"small": 1.0}), driven.request("good", PROMPT, seed=3))
    last = driven.of("bad")[-1]
    assert last.finish == "error" and last.error is not None and "not finite after step 3 of 4" in last.error.message
    alone = Driven(driven.oracle.model_dir, driven.oracle)
    alone.run(alone.request("good", PROMPT, seed=3))
    assert relative(driven.passes.latents["good"], alone.passes.latents["good"]) < 1e-4


def test_a_pass_that_fails_ends_its_requests_and_the_engine_goes_on(driven: Driven) -> None:
    predict = driven.passes.model.predict
    driven.passes.model.predict = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    driven.engine.add(driven.request("bad", PROMPT, adapters={"small": 1.0}), 0.0)
    while not driven.of("bad"):
        driven.step()
    assert isinstance(driven.outputs[-1].failure, ZeroDivisionError)
    assert driven.of("bad")[-1].finish == "error"
    driven.passes.model.predict = predict  # type: ignore[method-assign]
    driven.run(driven.request("good", PROMPT))
    assert driven.of("good")[-1].finish == "stop"


def test_all_requests_can_be_aborted(driven: Driven) -> None:
    for request_id in ("a", "b"):
        driven.engine.add(driven.request(request_id, PROMPT, adapters={"small": 1.0}), 0.0)
    for _ in range(3):
        driven.step()
    output = driven.engine.abort_all(MotetError("leaving"))
    assert [item.finish for item in output.items["gateway"]] == ["error", "error"]
    driven.run()


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_pictures_come_in_the_format_asked_for(format: str, driven: Driven) -> None:
    driven.run(driven.request("a", PROMPT, format=format))
    picture = driven.of("a")[-1].picture
    assert picture is not None and Pillow.open(io.BytesIO(picture.data)).format == format.upper()


def test_previews_come_with_their_steps_and_approach_the_picture(driven: Driven) -> None:
    driven.run(driven.request("a", PROMPT, steps=8, previews=3, sampler="dpmpp_2m"))
    shown = {item.index: item.picture for item in driven.of("a")[:-1] if item.picture is not None}
    assert list(shown) == [1, 3, 5] and all(picture.preview for picture in shown.values())
    final = pixels(driven, "a")
    far = [np.abs(np.asarray(Pillow.open(io.BytesIO(picture.data)), dtype=int) - final).mean() for picture in shown.values()]
    assert far[0] > far[-1]


def test_pictures_of_one_prompt_share_its_encoding(driven: Driven) -> None:
    calls: list[int] = []
    encode = driven.passes.model.encode
    driven.passes.model.encode = lambda prompts: calls.append(len(prompts)) or encode(prompts)  # type: ignore[method-assign, func-returns-value]
    driven.run(*(driven.request(str(n), PROMPT, seed=n, adapters={"words": 1.0}) for n in range(4)))
    driven.run(driven.request("later", PROMPT, seed=7, adapters={"words": 1.0}))
    driven.run(driven.request("weighted", PROMPT, seed=7, adapters={"words": 0.5}))
    assert calls == [2, 2]


def test_sizes_have_buckets_of_their_own(driven: Driven) -> None:
    driven.run(driven.request("a", PROMPT), driven.request("wide", PROMPT, width=64), driven.request("b", PROMPT, seed=1))
    assert {tuple(batch) for batch in driven.passes.batches} == {("a", "b"), ("wide",)}
    assert pixels(driven, "wide").shape == (32, 64, 3)


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"width": 33}, "size", "width is 33: multiples of 8 are possible, such as 32"),
        ({"height": 0}, "size", "height is 0"),
        ({"steps": 1000}, "steps", "steps is 1000"),
        ({"kind": "image"}, "image", "0 pictures"),
        ({"images": [SOURCE]}, "image", "1 pictures"),
        ({"kind": "image", "images": [SOURCE], "strength": 0.1}, "strength", "leaves none of the 4 steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(change: dict[str, Any], param: str, why: str, driven: Driven) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        driven.engine.add(driven.request("a", PROMPT, **change), 0.0)
    assert refused.value.param == param


def test_a_prompt_of_too_many_parts_is_refused(driven: Driven) -> None:
    request = driven.request("a", PROMPT)
    for prompt, why in ((request.prompt * 4, "4 parts, 3 at most"), (pack_tokens([1, 2]), "whole parts of 77")):
        with pytest.raises(BadRequest, match=why) as refused:
            driven.engine.add(msgspec.structs.replace(request, prompt=prompt), 0.0)
        assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("images", "param", "why"),
    [
        ([Image(b"GIF89a nonsense", "image")], "image", "no readable picture"),
        ([SOURCE, Image(SOURCE.data[:100], "mask")], "mask", "no readable picture"),
        ([SOURCE], "image", "no transparency"),
        ([png(np.zeros((1, 1), np.uint8)), Image(b"", "mask")], "mask", "no readable picture"),
    ],
)
def test_a_source_picture_that_cannot_be_read_ends_its_request_only(
    images: list[Image], param: str, why: str, driven: Driven
) -> None:
    driven.run(driven.request("bad", PROMPT, kind="inpaint", images=images), driven.request("good", PROMPT))
    (item,) = driven.of("bad")
    assert item.error is not None and item.error.param == param and why in item.error.message
    assert driven.of("good")[-1].finish == "stop"


def test_transparency_is_redrawn_whether_it_is_the_mask_or_the_source(driven: Driven) -> None:
    grey = np.asarray(Pillow.open(io.BytesIO(MASK.data)))
    seen = np.asarray(Pillow.open(io.BytesIO(SOURCE.data)))
    clear = png(np.dstack([seen, 255 - grey]))
    options: dict[str, Any] = {"kind": "inpaint", "strength": 0.8, "seed": 4}
    driven.run(driven.request("mask", PROMPT, images=[SOURCE, MASK], **options))
    driven.run(driven.request("alpha mask", PROMPT, images=[SOURCE, clear], **options))
    driven.run(driven.request("alpha", PROMPT, images=[clear], **options))
    assert np.array_equal(pixels(driven, "mask"), pixels(driven, "alpha mask"))
    assert np.array_equal(pixels(driven, "mask"), pixels(driven, "alpha"))


def test_a_base_for_inpainting_draws_nothing_else(oracles: Oracles) -> None:
    oracle = oracles("sd2")
    driven = Driven(oracle.model_dir, oracle)
    with pytest.raises(BadRequest, match="redraws parts of pictures"):
        driven.engine.add(driven.request("a", PROMPT), 0.0)


# ---- adapters on the device


def test_requests_whose_adapters_find_no_slot_wait_and_block_nobody(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle, slots=2)
    names = ("small", "mixed", "convs", "words", "small")
    driven.run(*(driven.request(f"{n} {name}", PROMPT, adapters={name: 1.0}, seed=n) for n, name in enumerate(names)))
    assert all(driven.of(f"{n} {name}")[-1].finish == "stop" for n, name in enumerate(names))
    alone = Driven(oracle.model_dir, oracle)
    alone.run(alone.request("3 words", PROMPT, adapters={"words": 1.0}, seed=3))
    assert relative(driven.passes.latents["3 words"], alone.passes.latents["3 words"]) < 1e-4


def test_copies_are_spread_between_the_steps_of_others(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_adapters, "PIECE_BYTES", 16 << 10)
    monkeypatch.setattr(engine, "COPY_BYTES", 32 << 10)
    driven.engine.add(driven.request("warm", PROMPT, steps=40), 0.0)
    while not driven.of("warm"):
        driven.step()
    driven.run(driven.request("cold", PROMPT, steps=3, adapters={"mixed": 1.0}, seed=6))
    alone = [batch for batch in driven.passes.batches if batch == ["warm"]]
    assert len(alone) > 3 and ["warm", "cold"] in driven.passes.batches
    at_once = Driven(driven.oracle.model_dir, driven.oracle)
    at_once.run(at_once.request("cold", PROMPT, steps=3, adapters={"mixed": 1.0}, seed=6))
    assert relative(driven.passes.latents["cold"], at_once.passes.latents["cold"]) < 1e-4


def test_adapters_that_never_fit_together_are_refused(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle, slots=2)
    with pytest.raises(InvalidAdapter, match=r"^adapters: 3 with \d+ bytes; the device has room for 2 \(--max-loras\)"):
        driven.engine.add(driven.request("a", PROMPT, adapters={"small": 1.0, "mixed": 1.0, "convs": 1.0}), 0.0)


def test_reports_tell_which_adapters_came_and_left(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle, slots=1)
    small, mixed = oracle.adapters[0].host, oracle.adapters[1].host
    assert driven.engine.load_adapter(small) and not driven.engine.load_adapter(mixed)
    driven.run()
    driven.run(driven.request("a", PROMPT, adapters={"mixed": 1.0}))
    assert not driven.engine.load_adapter(small), "there is no empty slot"
    assert driven.engine.unload_adapter(mixed.digest)
    driven.run()
    told = [(change.digest, change.tier) for output in driven.outputs for change in output.residency]
    assert told == [(small.digest, "device"), (small.digest, None), (mixed.digest, "device"), (mixed.digest, None)]
    assert driven.engine.adapter_bytes_free == driven.adapters.slots.bytes_total


def test_an_adapter_in_use_leaves_after_its_last_request(driven: Driven) -> None:
    digest = driven.oracle.adapters[0].host.digest
    driven.engine.add(driven.request("a", PROMPT, adapters={"small": 1.0}), 0.0)
    for _ in range(3):
        driven.step()
    assert not driven.engine.unload_adapter(digest)
    driven.run()
    assert driven.of("a")[-1].finish == "stop" and digest not in driven.adapters.slots


def test_metadata_is_written_only_when_asked_for(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle, describe=lambda request: {"seed": str(request.sampling.seed)})
    driven.run(driven.request("told", PROMPT, seed=77, metadata=True), driven.request("silent", PROMPT, seed=77))
    texts = {}
    for request_id in ("told", "silent"):
        picture = driven.of(request_id)[-1].picture
        assert picture is not None
        texts[request_id] = Pillow.open(io.BytesIO(picture.data)).text  # type: ignore[attr-defined]
    assert texts == {"told": {"seed": "77"}, "silent": {}}
