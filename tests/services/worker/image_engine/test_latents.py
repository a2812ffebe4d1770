"""Promise: latents of any mixed batch equal those of diffusers' own pipelines, one request at a time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image as Pillow

from motet.shared.wire.request import pack_tokens
from tests.services.worker.image_engine.conftest import Oracles
from tests.services.worker.image_engine.support_engine import MASK, SOURCE, Driven, relative
from tests.support_image_models import SAMPLERS, Oracle, make_image_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
MIXED: list[dict[str, Any]] = [
    {"adapters": {"small": 1.0}, "steps": 5, "sampler": "ddim"},
    {"adapters": {"mixed": 0.8}, "steps": 7, "sampler": "euler", "negative": "a red star"},
    {"adapters": {"convs": 1.0}, "steps": 4, "sampler": "dpmpp_2m", "guidance": 1.0},
    {"adapters": {"small": 0.5, "convs": -0.7, "words": 0.3}, "steps": 6, "sampler": "euler_a"},
    {"adapters": {"words": 1.0}, "steps": 3, "sampler": "dpmpp_2m", "guidance": 3.0},
    {"steps": 8, "sampler": "euler_a", "guidance": 0.0},
    {"adapters": {"words": 0.6, "mixed": 1.2}, "steps": 5, "sampler": "ddim", "negative": "in gray style"},
    {"steps": 5, "sampler": "dpmpp_2m"},
]
PROMPTS = ("a red circle on sky", "a blue star on sand in invert style", "something else entirely: 42!", "")


def expected(oracle: Oracle, prompt: str, seed: int, options: dict[str, Any]) -> Any:
    told = {"sampler": options["sampler"], "adapters": options.get("adapters", {}), "num_inference_steps": options["steps"]}
    more = {"guidance_scale": options.get("guidance", 7.5), "negative_prompt": options.get("negative")}
    return oracle.latents(prompt, seed=seed, height=32, width=32, **told, **more)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_batch_of_everything_equals_diffusers_one_at_a_time(family: str, oracles: Oracles) -> None:
    oracle = oracles(family)
    driven = Driven(oracle.model_dir, oracle)
    driven.run(*(driven.request(str(n), PROMPTS[n % 4], seed=n, **options) for n, options in enumerate(MIXED)))
    assert max(map(len, driven.passes.batches)) == len(MIXED)
    for number, options in enumerate(MIXED):
        wanted = expected(oracle, PROMPTS[number % 4], number, options)
        assert relative(driven.passes.latents[str(number)], wanted) < TOLERANCE, options


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("adapter", ["small", "mixed", "convs", "words"])
def test_a_single_row_equals_diffusers(family: str, adapter: str, oracles: Oracles) -> None:
    oracle = oracles(family)
    driven = Driven(oracle.model_dir, oracle)
    options: dict[str, Any] = {"sampler": "ddim", "steps": 2, "guidance": 1.0, "adapters": {adapter: 0.9}}
    driven.run(driven.request("alone", PROMPTS[0], **options))
    assert relative(driven.passes.latents["alone"], expected(oracle, PROMPTS[0], 0, options)) < TOLERANCE


def test_several_parts_of_a_prompt_are_longer_text_and_a_bucket_of_their_own(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle)
    long = driven.request("long", "a red circle on sky", steps=3)
    long = msgspec.structs.replace(long, prompt=long.prompt + pack_tokens(oracle.tokens("a blue star on sand")))
    driven.run(long, driven.request("short", "a red circle on sky", steps=3))
    assert set(map(tuple, driven.passes.batches)) == {("long",), ("short",)}
    pipeline = oracle.pipeline()
    pipeline.disable_lora()

    def encode(*texts: str) -> torch.Tensor:
        return torch.cat([pipeline.text_encoder(torch.tensor([oracle.tokens(text)]))[0] for text in texts], dim=1)

    with torch.no_grad():
        embeds = {
            "prompt_embeds": encode("a red circle on sky", "a blue star on sand"),
            "negative_prompt_embeds": encode("", ""),
        }
    wanted = oracle.latents(None, height=32, width=32, num_inference_steps=3, **embeds)
    assert relative(driven.passes.latents["long"], wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("sampler", ["ddim", "euler_a", "dpmpp_2m"])
def test_image_to_image_equals_diffusers(family: str, sampler: str, oracles: Oracles) -> None:
    oracle = oracles(family)
    driven = Driven(oracle.model_dir, oracle)
    options: dict[str, Any] = {"adapters": {"mixed": 0.7}, "seed": 11}
    for name, strength, steps in (("most", 0.8, 6), ("half", 0.5, 7), ("whole", 1.0, 3)):
        image = {"sampler": sampler, "kind": "image", "strength": strength, "steps": steps, "images": [SOURCE]}
        driven.run(driven.request(name, PROMPTS[0], **options, **image))
        assert driven.of(name)[-1].index == int(steps * strength)
        told = {"sampler": sampler, "image": Pillow.open(io.BytesIO(SOURCE.data)), "strength": strength}
        wanted = oracle.latents(PROMPTS[0], kind="image", num_inference_steps=steps, guidance_scale=7.5, **told, **options)
        assert relative(driven.passes.latents[name], wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_inpainting_equals_diffusers(family: str, strength: float, oracles: Oracles) -> None:
    oracle = oracles(family)
    driven = Driven(oracle.model_dir, oracle)
    for sampler in ("ddim", "euler_a", "dpmpp_2m"):
        image = {"sampler": sampler, "kind": "inpaint", "strength": strength, "steps": 5, "images": [SOURCE, MASK]}
        driven.run(driven.request(sampler, PROMPTS[1], adapters={"small": 1.0}, seed=3, **image))
        told = {"image": Pillow.open(io.BytesIO(SOURCE.data)), "mask_image": Pillow.open(io.BytesIO(MASK.data))}
        more = {"strength": strength, "num_inference_steps": 5, "guidance_scale": 7.5, "height": 32, "width": 32}
        wanted = oracle.latents(PROMPTS[1], kind="inpaint", sampler=sampler, seed=3, adapters={"small": 1.0}, **told, **more)
        assert relative(driven.passes.latents[sampler], wanted) < TOLERANCE


def test_a_velocity_model_with_another_spacing_equals_diffusers(tmp_path: Path) -> None:
    model_dir = make_image_checkpoint("sd15", tmp_path, prediction_type="v_prediction", timestep_spacing="trailing")
    oracle = Oracle(model_dir)
    driven = Driven(model_dir, oracle)
    driven.run(*(driven.request(sampler, PROMPTS[0], sampler=sampler, steps=5) for sampler in SAMPLERS))
    for sampler in SAMPLERS:
        wanted = oracle.latents(PROMPTS[0], sampler=sampler, num_inference_steps=5, height=32, width=32)
        assert relative(driven.passes.latents[sampler], wanted) < TOLERANCE
