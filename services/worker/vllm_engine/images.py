"""Images of prompts: vLLM's own processor converts a prompt with placeholders, and its images, to the input of vLLM's core.

    [.., placeholder, ..] + image  ──>  [.., placeholder × as many as the image has embeddings, ..] + pixels by position

Only vLLM's environment imports this file.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import PIL.Image
from vllm.config import VllmConfig
from vllm.multimodal.media.image import ImageMediaIO
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from motet.shared.errors import BadRequest
from motet.shared.wire.request import Image

PIXELS_MAX = 1 << 25
"""Largest number of pixels of one image: 100 MB when it is decoded."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt in the form of vLLM's core: tokens with one placeholder for each embedding of an image, and the images."""

    tokens: list[int]
    features: list[Any]


class ImageReader:
    """The processor of one core. It runs in one thread of its own."""

    def __init__(self, config: VllmConfig) -> None:
        self._inputs = InputProcessor(config)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    @property
    def most(self) -> int:
        """The number of images that a prompt may have; 0 if the model takes none."""
        processor = self._inputs.renderer.mm_processor
        return processor.info.allowed_mm_limits.get("image", 0) if processor is not None else 0

    def read(self, prompt: list[int], images: list[Image]) -> ImagePrompt:
        """Call it in `thread`. Raises BadRequest naming an image that cannot be read or that the model does not take."""
        media = [_decoded(image) for image in images]
        try:
            rendered = self._inputs.renderer.process_for_engine(
                {"prompt_token_ids": prompt, "multi_modal_data": {"image": media}}, time.time()
            )
            made = self._inputs.process_inputs("images", rendered, SamplingParams(max_tokens=1), ("generate",))
        except Exception as error:  # anything that a model's processor rejects, such as a placeholder in the text of a message
            at = images[0].param
            raise BadRequest(f"{at}: the model does not take these images: {error}", param=at) from error
        return ImagePrompt(list(made.prompt_token_ids or ()), made.mm_features or [])


def _decoded(image: Image) -> Any:
    try:
        with PIL.Image.open(BytesIO(image.data), formats=FORMATS) as opened:
            width, height = opened.size
        if width * height <= PIXELS_MAX:
            return ImageMediaIO().load_bytes(image.data)
    except Exception as error:  # decoders raise any kind of error
        raise BadRequest(f"{image.param}: the image cannot be read: {error}", param=image.param) from None
    raise BadRequest(f"{image.param}: the image has {width} x {height} pixels, the limit is {PIXELS_MAX}", param=image.param)
