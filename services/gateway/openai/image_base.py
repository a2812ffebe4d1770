"""What a gateway knows of an image base: its tokenizers, the sizes and the sampler that suit it. Imports no torch.

model_index.json, unet/config.json, vae/config.json    sizes: what the model divides by, and what it was trained with
scheduler/scheduler_config.json                        the sampler of a request that does not name one
tokenizer/, tokenizer_2/                               prompts to tokens (`shared.clip_tokenizer`)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from motet.services.gateway.openai.lanes import Lane
from motet.services.gateway.owner.picture_files import PictureFiles
from motet.shared.clip_tokenizer import CONTENT_TOKENS, PARTS_MAX, ClipTokenizer, parts_of
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, PromptTooLong
from motet.shared.hf_config import UnsupportedModel, read_json, size_in
from motet.shared.image_shapes import INDEX, read_image_shapes, shrinks
from motet.shared.model import Sampler
from motet.shared.tokenizer import UnusableFile
from motet.shared.wire.request import pack_tokens

PROMPT_CHARS_MAX = 32_000
SIDE_MAX = 8192
"""The longest side of a picture, in pixels."""
_SAMPLERS: dict[str, Sampler] = {
    "DDIMScheduler": "ddim",
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_a",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
}
_OTHERWISE: Sampler = "dpmpp_2m"
"""The sampler of a checkpoint whose own scheduler is none of these, such as PNDM."""
TOKENIZERS = ("tokenizer", "tokenizer_2")


class PromptTokens(NamedTuple):
    """Packed token ids as `Work.prompt` and `ImageParams` carry them, and how many of them are the texts' own."""

    prompt: bytes
    negative: bytes
    prompt_2: bytes  # empty: the same as the first
    negative_2: bytes
    own: int  # tokens of both texts, without those that begin, end and pad a part


class ImageBase:
    """One checkpoint of the Stable Diffusion family, as far as requests need it."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError for a file that cannot be used."""
        try:
            shapes = read_image_shapes(model_dir)
            unet, vae = (_config(model_dir, f"{part}/config.json") for part in ("unet", "vae"))
            self.family = shapes.family
            self.redraws_only = shapes.inpaints  # it needs a source picture and a mask
            shrink = shrinks(vae)  # pixels per latent, each way
            self.divisor_px = shrink * shrinks(unet)
            self.native_px = size_in({"sample_size": _largest(unet.get("sample_size"))}, "sample_size", default=64) * shrink
            scheduler = read_json(model_dir / "scheduler" / "scheduler_config.json") or {}
            self.sampler = _SAMPLERS.get(str(scheduler.get("_class_name")), _OTHERWISE)
            index = _config(model_dir, INDEX)
            named = [name for name in TOKENIZERS if index.get(name) not in (None, [None, None])]
            self._tokenizers = [ClipTokenizer(model_dir / name) for name in named]
        except (UnsupportedModel, UnusableFile) as error:
            raise ConfigError(f"--model: {model_dir}: {error}") from None
        if not self._tokenizers:
            raise ConfigError(f"--model: {model_dir / INDEX} names no tokenizer")

    @property
    def tokenizer(self) -> ClipTokenizer:
        """The first tokenizer."""
        return self._tokenizers[0]

    @property
    def guidance(self) -> float:
        """The usual guidance scale."""
        return 5.0 if self.family.startswith("sdxl") else 7.5

    def tokens(self, prompt: str, negative: str) -> PromptTokens:
        """Both texts in parts, as many for the one as for the other. Raises PromptTooLong naming the field."""
        found = [
            [self._content(tokenizer, *text) for text in (("prompt", prompt), ("negative_prompt", negative))]
            for tokenizer in self._tokenizers
        ]
        count = max(parts_of(content) for contents in found for content in contents)
        packed = [
            [pack_tokens(tokenizer.parts(content, count)) for content in contents]
            for tokenizer, contents in zip(self._tokenizers, found, strict=True)
        ]
        first, second = packed[0], packed[-1]
        others = [b"" if two == one else two for one, two in zip(first, second, strict=True)]
        return PromptTokens(first[0], first[1], others[0], others[1], sum(map(len, found[0])))

    def size(self, given: str | None, max_pixels: int, source: tuple[int, int] | None = None) -> tuple[int, int]:
        """Width and height in pixels of `size`: "auto", None or "WxH". `source`: those of the picture to edit.

        Raises BadRequest, which names the nearest size that the model draws.
        """
        if given is None or given == "auto":
            width, height = source or (self.native_px, self.native_px)
            return self._nearest(width, height, max_pixels)
        width, height = _sides(given)
        nearest = self._nearest(width, height, max_pixels)
        if width * height > max_pixels:
            reason = f"{given} has {width * height} pixels, at most {max_pixels} are drawn (--image-max-pixels)"
            raise BadRequest(f"size: {reason}; the nearest size is {_shown(nearest)}", param="size")
        if (width, height) != nearest:
            reason = f"sides of {self.divisor_px} to {SIDE_MAX} pixels that {self.divisor_px} divides are drawn"
            raise BadRequest(f"size: {given}: {reason}; the nearest size is {_shown(nearest)}", param="size")
        return width, height

    def _nearest(self, width: int, height: int, max_pixels: int) -> tuple[int, int]:
        """The size with about this shape that the model draws within `max_pixels`."""
        by = self.divisor_px
        shrink = min(1.0, (max_pixels / (width * height)) ** 0.5)
        sides = [min(max(by, round(side * shrink / by) * by), SIDE_MAX // by * by) for side in (width, height)]
        while sides[0] * sides[1] > max_pixels and max(sides) > by:
            sides[sides.index(max(sides))] -= by
        return sides[0], sides[1]

    def _content(self, tokenizer: ClipTokenizer, param: str, text: str) -> list[int]:
        content = tokenizer.content(text)
        longest = PARTS_MAX * CONTENT_TOKENS
        if len(content) > longest:
            raise PromptTooLong(
                f"{param}: {len(content)} tokens, at most {longest} are read ({PARTS_MAX} parts of {CONTENT_TOKENS})",
                param=param,
            )
        return content


class ImageParts(NamedTuple):
    """The parts of a gateway that requests for pictures use beside those of texts."""

    base: ImageBase
    lane: Lane  # one thread: source pictures are decoded one at a time, so that their memory is bounded
    files: PictureFiles


def _config(model_dir: Path, name: str) -> dict[str, Any]:
    value = read_json(model_dir / name)
    if value is None:
        raise UnsupportedModel(f"{name} is missing")
    return value


def _largest(sizes: Any) -> Any:
    return max(sizes) if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes) else sizes


def _sides(given: str) -> tuple[int, int]:
    """Width and height in "WxH"."""
    parts = given.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and 1 <= len(part) <= 6 and int(part) for part in parts):
        raise BadRequest(f'size: expected "auto" or WIDTHxHEIGHT in pixels, such as 512x512, got {given[:40]!r}', param="size")
    return int(parts[0]), int(parts[1])


def _shown(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
