"""Bodies of /v1/images/generations and /v1/images/edits: the fields of OpenAI, of vLLM-Omni and SGLang, and our own.

A body of an edit is a form with files, as OpenAI's clients send it, or JSON with `data:` URLs. No HTTP here.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from motet.services.gateway.openai import fields, protocol
from motet.services.gateway.openai.decoding import known
from motet.services.gateway.openai.forms import FormFile, read_form
from motet.services.gateway.openai.image_base import PROMPT_CHARS_MAX
from motet.shared.errors import BadRequest
from motet.shared.model import ADAPTERS_MAX, PICTURE_STEPS_MAX, PREVIEWS_MAX, PictureFormat, Sampler

PICTURES_MAX = 10  # n, as OpenAI
WEIGHT_MAX = 4.0
"""The largest weight of an adapter, and minus the smallest. Trained ones work from about -1 to 2; far beyond is noise."""
GUIDANCE_MAX = 50.0
SEED_MAX = (1 << 63) - 1
_TAG = re.compile(r"<lora:[^<>]*>", re.IGNORECASE)
_ADAPTER_PART = re.compile(r"adapters\[\d{0,2}\]\[(name|weight)\]")
_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")

PromptText = Annotated[str, Meta(min_length=1, max_length=PROMPT_CHARS_MAX)]


class WeightedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of a picture."""

    name: Annotated[str, Meta(min_length=1, description="Name of the adapter, or `base:adapter`.")]
    weight: Annotated[
        float, Meta(ge=-WEIGHT_MAX, le=WEIGHT_MAX, description="Factor of the adapter's change to the base; 1: as trained.")
    ] = 1.0


class _PictureRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both kinds of requests."""

    prompt: Annotated[PromptText, Meta(description="What the picture shows; at most 3 parts of 75 tokens.")]
    model: protocol.ModelName | None = None
    n: (
        Annotated[int, Meta(ge=1, le=PICTURES_MAX, description="Number of pictures; picture i has the seed `seed` + i.")] | None
    ) = 1
    size: (
        Annotated[
            str,
            Meta(
                max_length=40,
                description="`WIDTHxHEIGHT` in pixels, or `auto` (default): what the base was trained with, in edits the source"
                " picture's. Both sides must be multiples of what the base divides by.",
            ),
        ]
        | None
    ) = None
    response_format: (
        Annotated[
            Literal["b64_json", "url"],
            Meta(description="The picture in the answer (default), or a URL that serves it for --picture-ttl-s."),
        ]
        | None
    ) = None
    output_format: Annotated[PictureFormat, Meta(description="Type of the picture's file; default png.")] | None = None
    output_compression: (
        Annotated[int, Meta(ge=0, le=100, description="Quality of jpeg and webp in percent, 100 the best; default 90.")] | None
    ) = None
    stream: Annotated[bool, Meta(description="Send previews and pictures as server-sent events.")] | None = False
    partial_images: (
        Annotated[int, Meta(ge=0, le=PREVIEWS_MAX, description="Previews of each picture on the way; with stream.")] | None
    ) = None
    # vLLM-Omni, SGLang
    negative_prompt: (
        Annotated[str, Meta(max_length=PROMPT_CHARS_MAX, description="What the picture shall not show; needs guidance.")] | None
    ) = None
    num_inference_steps: (
        Annotated[int, Meta(ge=1, le=PICTURE_STEPS_MAX, description="Denoising steps (default: --image-steps).")] | None
    ) = None
    guidance_scale: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=GUIDANCE_MAX,
                description="How closely the prompt is followed (default: --image-guidance). 1 or less: no guidance, half the"
                " work per step.",
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int, Meta(ge=0, le=SEED_MAX, description="Seed of the noise: the same seed and request give the same picture.")
        ]
        | None
    ) = None
    sampler: Annotated[Sampler, Meta(description="Sampler (default: the one that the base names).")] | None = None
    # Motet
    adapters: (
        Annotated[
            list[WeightedAdapter],
            Meta(
                max_length=ADAPTERS_MAX,
                description="Adapters with their weights, all at once. An adapter in `model` is one more, with weight 1.",
            ),
        ]
        | None
    ) = None
    priority: protocol.Priority | None = None
    request_id: protocol.RequestId | None = None


class ImageRequest(_PictureRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/images/generations."""

    event: ClassVar[str] = "image_generation"


class ImageEditRequest(_PictureRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/images/edits."""

    image: Annotated[
        str,
        Meta(
            description="The source picture, PNG, JPEG or WebP: a file of the form, or in JSON a data: URL.",
            extra_json_schema={"pattern": "^data:image/[^,]*;base64,"},
        ),
    ]
    mask: (
        Annotated[
            str,
            Meta(
                description="A picture of the same size, in the same form, whose transparent pixels are drawn anew; without one"
                " all of the source picture is.",
                extra_json_schema={"pattern": "^data:image/[^,]*;base64,"},
            ),
        ]
        | None
    ) = None
    strength: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=1,
                description="Share of the steps that change the source picture (default 0.8, with a mask 1); 1: nothing is"
                " kept.",
            ),
        ]
        | None
    ) = None
    event: ClassVar[str] = "image_edit"


class ImageEdit(msgspec.Struct, kw_only=True):
    """A request for an edit, and the files of its pictures by field."""

    request: ImageEditRequest
    files: dict[str, bytes]

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""
        return self.request.stream


FORM: dict[str, Any] = {
    "type": "object",
    "required": ["image", "prompt"],
    "properties": {
        "image": {"type": "string", "format": "binary", "description": "The source picture: PNG, JPEG or WebP"},
        "mask": {"type": "string", "format": "binary", "description": "Transparent pixels are drawn anew"},
        "prompt": {"type": "string"},
        "adapters": {"type": "string", "description": "JSON, as in a JSON body"},
    },
    "additionalProperties": {"type": "string", "description": "The other fields of a JSON body, as texts"},
}
"""The JSON schema of the form."""
_FILES = ("image", "mask")
_request = msgspec.json.Decoder(ImageRequest)
_edit = msgspec.json.Decoder(ImageEditRequest)
_edit_of_texts = msgspec.json.Decoder(ImageEditRequest, strict=False)  # "3" is 3, and "true" is true


def parse(body: bytes) -> ImageRequest:
    """A request for pictures. Raises BadRequest naming the field, or saying that it is not JSON."""
    request: ImageRequest = known(body, _request, fields.IMAGE)
    _check(request)
    return request


def parse_edit(body: bytes) -> ImageEdit:
    """A request for an edit in JSON. Raises as `parse`."""
    request: ImageEditRequest = known(body, _edit, fields.IMAGE_EDIT)
    _check(request)
    files = {name: _from_url(given, name) for name in _FILES if (given := getattr(request, name)) is not None}
    request.image, request.mask = "", None  # the texts are four thirds of the files
    return ImageEdit(request=request, files=files)


def parse_edit_form(body: bytes, content_type: str) -> ImageEdit:
    """A request for an edit in a form with files. Raises as `parse`."""
    given: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    adapters: dict[str, list[str]] = {"name": [], "weight": []}
    for field in read_form(body, content_type):
        if (part := _ADAPTER_PART.fullmatch(field.name)) is not None and not isinstance(field, FormFile):
            adapters[part[1]].append(field.text)
            continue
        name = field.name.removesuffix("[]")
        if name in given:
            raise BadRequest(
                f"{name} is given twice" + (": one source picture is served" if name == "image" else ""), param=name
            )
        if isinstance(field, FormFile) != (name in _FILES):
            raise BadRequest(f"{name}: {'expected a file' if name in _FILES else 'there is no such file'}", param=name)
        if isinstance(field, FormFile):
            files[name], given[name] = field.data, ""
        else:
            given[name] = _value(name, field.text)
    if adapters["name"] or adapters["weight"]:
        given["adapters"] = _listed(adapters["name"], adapters["weight"], "adapters" in given)
    request: ImageEditRequest = known(msgspec.json.encode(given), _edit_of_texts, fields.IMAGE_EDIT)
    _check(request)
    return ImageEdit(request=request, files=files)


def _listed(names: list[str], weights: list[str], twice: bool) -> list[dict[str, str]]:
    """`adapters` as OpenAI's clients write a list into a form: all names, then all weights. Raises BadRequest."""
    if twice:
        raise BadRequest("adapters is given twice", param="adapters")
    if not weights:
        return [{"name": name} for name in names]
    if len(weights) != len(names):
        reason = f"{len(names)} names and {len(weights)} weights; in a form all have a weight, or it is JSON in one text"
        raise BadRequest(f"adapters: {reason}", param="adapters")
    return [{"name": name, "weight": weight} for name, weight in zip(names, weights, strict=True)]


def _value(name: str, text: str) -> Any:
    """A text of a form as the value that a JSON body would have."""
    if name == "adapters" or name in fields.IMAGE_EDIT:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            pass
    return text


def _from_url(given: str, param: str) -> bytes:
    """The file in a data: URL."""
    found = _DATA_URL.match(given)
    if found is None:
        reason = "pictures are not fetched from elsewhere; expected data:image/...;base64,... with the picture itself"
        raise BadRequest(f"{param}: {reason}", param=param)
    try:
        return base64.b64decode(memoryview(given.encode("ascii"))[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{param}: what follows the comma is not base64", param=param) from None


def _check(request: _PictureRequest) -> None:
    for name in ("prompt", "negative_prompt"):
        if tag := _TAG.search(getattr(request, name) or ""):
            told = 'adapters are asked for as adapters: [{"name": ..., "weight": ...}]'
            raise BadRequest(f"{name}: {tag[0][:80]} is not read: {told}", param=name)
    if request.partial_images and not request.stream:
        raise BadRequest("partial_images: only with stream", param="partial_images")
    if request.stream and request.response_format == "url":
        raise BadRequest("response_format: a stream has b64_json only", param="response_format")
    if request.output_compression not in (None, 100) and request.output_format not in ("jpeg", "webp"):
        raise BadRequest("output_compression: only with the output_format jpeg or webp", param="output_compression")
