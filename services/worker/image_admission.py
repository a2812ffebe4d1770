"""Checks a request for a picture when it arrives at the worker; an error names the field and the reason.

Text requests and pictures never share a worker: the capability "draws" is exclusive (`shared.model.EXCLUSIVE_CAPABILITIES`).
"""

from __future__ import annotations

from math import isfinite

from motet.services.worker.engines.image_limits import ImageLimits
from motet.shared.errors import BadRequest
from motet.shared.model import ADAPTERS_MAX, PREVIEWS_MAX, ImageParams
from motet.shared.wire.request import GenerateRequest

WEIGHT_MAX, GUIDANCE_MAX = 100.0, 1000.0
SOURCES = {"text": 0, "image": 1, "inpaint": 2}
"""How many pictures each kind of request brings: the source, and the mask."""


def check_image(request: GenerateRequest, image: ImageParams, limits: ImageLimits) -> None:
    """Raises BadRequest."""
    _check_size(image, limits)
    _within("num_inference_steps", image.steps, 1, limits.steps_max)
    _within("guidance_scale", image.guidance, 0.0, GUIDANCE_MAX)
    _within("strength", image.strength, 0.0, 1.0)
    _within("partial_images", image.previews, 0, PREVIEWS_MAX)
    _within("output_compression", image.quality, 1, 100)
    _within("n", image.index, 0, 1 << 16)
    _within("n", image.pictures, 1, 1 << 16)
    if len(request.images) != SOURCES[image.kind]:
        what = f"{SOURCES[image.kind]} pictures (source, mask)"
        raise BadRequest(f"image: a request of kind {image.kind!r} has {what}, this one {len(request.images)}", param="image")
    if not image.steps_run:
        raise BadRequest(f"strength: {image.strength} of {image.steps} steps is none", param="strength")
    if not 0 <= image.state_step <= image.steps_run or bool(image.state) != bool(image.state_step):
        raise BadRequest(f"image.state_step: {image.state_step} is no step of this checkpoint", param="image")
    if len(image.state) > limits.state_bytes_max:
        most = limits.state_bytes_max
        raise BadRequest(f"image.state: a checkpoint of {len(image.state)} bytes; at most {most} are taken", param="image")
    _check_end(request, image)


def check_adapters(request: GenerateRequest, max_lora_rank: int) -> None:
    """Raises BadRequest. Each adapter's rank is checked, as for text, and the weights, their number, and that none is twice."""
    weighted = request.weighted
    if request.adapter is not None and request.adapters:
        raise BadRequest("adapters: give either one adapter or a list", param="adapters")
    if len(weighted) > ADAPTERS_MAX:
        raise BadRequest(f"adapters: {len(weighted)} are given; at most {ADAPTERS_MAX} are taken", param="adapters")
    seen: dict[str, str] = {}
    for one in weighted:
        name, rank = one.ref.name, one.ref.rank
        if not 1 <= rank <= max_lora_rank:
            raise BadRequest(
                f"adapter {name!r} has rank {rank}; this worker takes ranks 1 to {max_lora_rank}", param="adapters"
            )
        if not isfinite(one.weight) or abs(one.weight) > WEIGHT_MAX:
            raise BadRequest(f"adapters: the weight of {name!r} is {one.weight}; at most {WEIGHT_MAX:g}", param="adapters")
        if (other := seen.get(one.ref.digest)) is not None:
            raise BadRequest(f"adapters: {other!r} and {name!r} are the same adapter", param="adapters")
        seen[one.ref.digest] = name


def _check_size(image: ImageParams, limits: ImageLimits) -> None:
    width, height, step = image.width, image.height, limits.step_px
    if width < step or height < step or width % step or height % step:
        near = "x".join(str(max(step, round(side / step) * step)) for side in (width, height))
        raise BadRequest(f"size: {width}x{height}; both must be multiples of {step}, the nearest size is {near}", param="size")
    if width * height > limits.pixels_max:
        pixels = width * height
        raise BadRequest(f"size: {width}x{height} has {pixels} pixels; at most {limits.pixels_max} are drawn", param="size")


def _check_end(request: GenerateRequest, image: ImageParams) -> None:
    """The output positions: one per step, and one for the picture."""
    steps, done = image.steps_run, request.output_tokens
    if request.sampling.max_tokens < steps + 1:
        raise BadRequest(f"max_tokens: {steps} steps and the picture need more positions", param="num_inference_steps")
    if done > steps or image.state_step > done:
        raise BadRequest(f"output: {done} of {steps} steps are done, {image.state_step} by its checkpoint", param="output")


def _within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{field}: {value} is not within {least:g} and {most:g}", param=field)
