"""Pictures: a request made ready to run, and OpenAI's answers. No HTTP here; `image_requests` has the fields.

Each of the `n` pictures is a request of its own, which is assigned, watched and resumed as a text is: a denoising step is an
output position, and the last position is the picture. Picture i has the seed `seed` + i.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

import msgspec

from motet.policies.tenant_shares import Part
from motet.services.gateway.openai import source_pictures
from motet.services.gateway.openai.answers import open_all
from motet.services.gateway.openai.image_base import ImageParts, PromptTokens
from motet.services.gateway.openai.image_requests import SEED_MAX, ImageEdit, ImageEditRequest, ImageRequest
from motet.services.gateway.openai.lanes import INLINE_BYTES
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.openai.schemas import DrawnImage, DrawnImages, ImageTokens, ImageUsage, StoredImage, StoredImages
from motet.services.gateway.owner.encoding import Breath, hold
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.picture_files import TYPES, Use
from motet.services.gateway.owner.stream import Job, Stream
from motet.shared.clock import unix_ms
from motet.shared.errors import BadRequest, MotetError, TooLarge
from motet.shared.model import ADAPTERS_MAX, ImageKind, ImageParams, SamplingParams, Slo, Weighted
from motet.shared.wire.request import Image
from motet.shared.wire.stream import Picture

PREFIX = "img-"
FILES_PATH = "/v1/images/files/"
SEED_BITS = 32  # of a seed that is drawn here, so that people can type it
PIXELS_PER_TOKEN = 4096  # of usage
QUALITY = 90
STRENGTH: dict[ImageKind, float] = {"image": 0.8, "inpaint": 1.0}
REQUEST_BYTES = 1 << 18  # of a message: for what a request has beside its pictures
PIXELS_PER_STATE_BYTE = 2  # two sets of float32 latents, of 4 channels on an eighth of each side


class PreparedImages(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to run: one job per picture."""

    request: ImageRequest | ImageEditRequest
    model: str  # as the client named it
    created_s: int  # Unix time
    jobs: list[Job]
    text_tokens: int
    drawing: ImageParts
    use: Use | None = None  # where the pictures are kept; None: in the answer
    files_url: str = ""  # what a picture's id is appended to
    progress: bool = False  # the stream tells of every step

    @property
    def image(self) -> ImageParams:
        """The parameters of the first picture; the others have another `index`."""
        return _image(self.jobs[0])

    @property
    def size(self) -> str:
        """Width and height, as answers tell them."""
        return f"{self.image.width}x{self.image.height}"

    @property
    def prompt_tokens(self) -> int:
        """What counts as the request's input."""
        return self.text_tokens + self._source_tokens

    @property
    def tokens_per_step(self) -> int:
        """What one denoising step of a picture counts as, in output tokens."""
        return -(-self.image.width * self.image.height // PIXELS_PER_TOKEN)

    @property
    def _source_tokens(self) -> int:
        return self.tokens_per_step if self.jobs[0].images else 0

    def tokens_of(self, positions: list[int]) -> int:
        """The output tokens of pictures that have come so far; the position after the last step is no step."""
        return sum(min(position, self.image.steps_run) for position in positions) * self.tokens_per_step

    def usage(self, pictures: int) -> ImageUsage:
        """Of so many of the pictures."""
        output = self.tokens_of([self.image.steps_run] * pictures)
        return ImageUsage(
            input_tokens=self.prompt_tokens,
            input_tokens_details=ImageTokens(text_tokens=self.text_tokens, image_tokens=self._source_tokens),
            output_tokens=output,
            total_tokens=self.prompt_tokens + output,
        )


async def prepare(preparer: Preparer, asked: ImageRequest | ImageEdit, origin: Origin) -> PreparedImages:
    """The request, with its adapters resolved, its prompts tokenized and its source picture scaled.

    Raises BadRequest (naming the field), PromptTooLong, TooLarge, ModelNotFound or Overloaded.
    """
    edit = asked if isinstance(asked, ImageEdit) else None
    request: ImageRequest | ImageEditRequest = edit.request if edit is not None else asked  # type: ignore[assignment]
    return await _Draft(preparer, request, origin, edit.files if edit is not None else {}).prepared()


class _Draft:
    """A request on its way to its jobs."""

    def __init__(
        self, preparer: Preparer, request: ImageRequest | ImageEditRequest, origin: Origin, files: dict[str, bytes]
    ) -> None:
        self.drawing = preparer.drawing_now()
        self.preparer, self.request, self.origin, self.files = preparer, request, origin, files
        self.config = preparer.config.images
        self.kind: ImageKind = "inpaint" if "mask" in files else "image" if "image" in files else "text"

    async def prepared(self) -> PreparedImages:
        """The request that is ready to run."""
        adapters = self._adapters()
        self._check_base()
        steps, guidance = self._steps(), self._guidance()
        tokens = await self.origin.run(
            lambda: self.drawing.base.tokens(self.request.prompt, self.request.negative_prompt or "")
        )
        size, pictures = await self._pictures()
        return self._made(
            adapters, tokens, ImageParams(width=size[0], height=size[1], steps=steps, guidance=guidance), pictures
        )

    def _made(
        self, adapters: tuple[Weighted, ...], tokens: PromptTokens, sized: ImageParams, pictures: list[Image]
    ) -> PreparedImages:
        request, origin, preparer, base = self.request, self.origin, self.preparer, self.drawing.base
        quality = request.output_compression
        image = msgspec.structs.replace(
            sized,
            negative=tokens.negative,
            prompt_2=tokens.prompt_2,
            negative_2=tokens.negative_2,
            sampler=request.sampler or base.sampler,
            strength=self._strength(),
            kind=self.kind,
            previews=request.partial_images or 0,
            format=request.output_format or "png",
            quality=max(1, quality) if quality is not None else QUALITY,
            metadata=self.config.image_metadata,
        )
        if not image.steps_run:
            raise BadRequest(f"strength: {image.strength} of {image.steps} steps is none", param="strength")
        seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
        plain = adapters[0].ref if len(adapters) == 1 and adapters[0].weight == 1.0 else None
        timeout_s = origin.timeout_s or preparer.config.requests.request_timeout_s
        max_tokens = image.steps_run + 2  # one more than there are: a lost last item is missed, and not taken for the end
        job = Job(
            request_id="",
            model=request.model or preparer.base_model,
            prompt=tokens.prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            slo=self._objective(max_tokens, timeout_s),
            adapter=plain,
            adapters=() if plain is not None else adapters,
            tenant=origin.tenant,
            tenant_weight=preparer.weight(origin.tenant),
            priority=request.priority or 0,
            needs={"draws": "model"},
            images=pictures,
            image=image,
            timeout_s=timeout_s,
            arrived_s=origin.arrived_s,
        )
        jobs = [self._numbered(job, index, (seed + index) & SEED_MAX) for index in range(request.n or 1)]
        origin.tell(PREFIX, origin.named or request.request_id)
        return PreparedImages(
            request=request,
            model=job.model,
            created_s=unix_ms() // 1000,
            jobs=jobs,
            text_tokens=tokens.own,
            drawing=self.drawing,
            use="res" if origin.durable else "url" if request.response_format == "url" else None,
            files_url=origin.files_url,
            progress=origin.progress,
        )

    def _objective(self, max_tokens: int, timeout_s: float) -> Slo:
        """The request's objective. Where it has none for the whole answer, that is its timeout: later, it would be in vain."""
        slo = self.preparer.objective(self.origin, max_tokens)
        if slo.e2e_slo_ms:
            return slo
        return msgspec.structs.replace(slo, e2e_slo_ms=timeout_s * 1000, e2e_is_timeout=True)

    def _numbered(self, job: Job, index: int, seed: int) -> Job:
        """The job of one picture."""
        return msgspec.structs.replace(
            job,
            request_id=f"{PREFIX}{self.origin.drawn}-{index}",
            sampling=msgspec.structs.replace(job.sampling, seed=seed),
            image=msgspec.structs.replace(_image(job), index=index, pictures=self.request.n or 1),
        )

    def _adapters(self) -> tuple[Weighted, ...]:
        """The adapters with their weights; one of weight 0 changes nothing and is left out."""
        request, preparer, tenant = self.request, self.preparer, self.origin.tenant
        first = preparer.adapter(request.model, tenant)
        found = [Weighted(first)] if first is not None else []
        for i, asked in enumerate(request.adapters or ()):
            param = f"adapters[{i}].name"
            ref = preparer.adapter(asked.name, tenant, param=param)
            if ref is None:
                raise BadRequest(f"{param}: {asked.name} is the base model, which is always there", param=param)
            if any(one.ref.digest == ref.digest for one in found):
                raise BadRequest(f"{param}: {asked.name} is asked for twice", param=param)
            found.append(Weighted(ref, asked.weight))
        if len(found) > ADAPTERS_MAX:
            raise BadRequest(f"adapters: with the one in model they are {len(found)}, at most {ADAPTERS_MAX}", param="adapters")
        return tuple(one for one in found if one.weight)

    def _check_base(self) -> None:
        if self.drawing.base.redraws_only and self.kind != "inpaint":
            param = "mask" if self.kind == "image" else "model"
            reason = "this base draws parts of a picture anew: use /v1/images/edits with an image and a mask"
            raise BadRequest(f"{param}: {reason}", param=param)

    def _steps(self) -> int:
        most = self.config.image_max_steps
        steps = self.request.num_inference_steps or min(self.config.image_steps, most)
        if steps > most:
            reason = f"{steps} steps, at most {most} are run (--image-max-steps)"
            raise BadRequest(f"num_inference_steps: {reason}", param="num_inference_steps")
        return steps

    def _guidance(self) -> float:
        given = self.request.guidance_scale
        guidance = given if given is not None else self.config.image_guidance or self.drawing.base.guidance
        if guidance <= 1.0 and self.request.negative_prompt:
            raise BadRequest("negative_prompt: it needs a guidance_scale above 1", param="negative_prompt")
        return guidance

    def _strength(self) -> float:
        if isinstance(self.request, ImageEditRequest):
            return self.request.strength if self.request.strength is not None else STRENGTH[self.kind]
        return 1.0

    async def _pictures(self) -> tuple[tuple[int, int], list[Image]]:
        """The size to draw, and the source picture and the mask at this size."""
        if not self.files:
            return self.drawing.base.size(self.request.size, self.config.image_max_pixels), []
        held = sum(map(len, self.files.values()))
        if held > self.config.image_source_max_bytes:
            most = self.config.image_source_max_bytes
            raise TooLarge(
                f"image: the files have {held} bytes, at most {most} are read (--image-source-max-bytes)", param="image"
            )
        # small files can be large pictures, so none is decoded in the event loop
        return await self.drawing.lane.run(self._scaled, max(held, INLINE_BYTES + 1), self.origin.tenant)

    def _scaled(self) -> tuple[tuple[int, int], list[Image]]:
        config, base = self.config, self.drawing.base
        sources = {
            name: source_pictures.Source(data, name, config.image_source_max_pixels) for name, data in self.files.items()
        }
        source = sources["image"].upright()
        size = base.size(self.request.size, config.image_max_pixels, source.size)
        room = self.preparer.message_bytes() - REQUEST_BYTES - size[0] * size[1] // PIXELS_PER_STATE_BYTE
        found: dict[str, bytes] = {}
        if "mask" in sources:
            mask = sources["mask"].upright()
            if mask.size != source.size:
                told = f"{mask.width}x{mask.height} pixels, and the image has {source.width}x{source.height}"
                raise BadRequest(f"mask: it has {told}", param="mask")
            found["mask"] = source_pictures.encoded(source_pictures.mask_of(mask, size), "mask", max(0, room))
        shown = source_pictures.scaled(source_pictures.rgb_of(source), size)
        found["image"] = source_pictures.encoded(shown, "image", max(0, room - len(found.get("mask", b""))))
        self.files.clear()  # the request is kept while it runs
        return size, [Image(data=found[name], param=name) for name in ("image", "mask") if name in found]


def _image(job: Job) -> ImageParams:
    assert job.image is not None, "only jobs for pictures are here"
    return job.image


async def collect(owner: Owner, prepared: PreparedImages, held: Part) -> Answer:
    """Run a request to its end and return OpenAI's answer, in a durable request's form if it is one.

    Raises the MotetError of the first picture that fails; the others are cancelled then.
    """
    pictures, streams = await _drawn(owner, prepared, held)
    told, breath = list[Any](), Breath()
    tell = _stored if prepared.use == "res" else _shown
    for picture in pictures:
        told.append(await tell(prepared, picture))
        await breath.take()
    kind: type[DrawnImages | StoredImages] = StoredImages if prepared.use == "res" else DrawnImages
    used = prepared.usage(len(pictures))
    body = kind(
        created=prepared.created_s,
        model=prepared.model,
        output_format=prepared.image.format,
        size=prepared.size,
        data=told,
        usage=used,
    )
    return Answer(body, owner.made_by(streams[0]), used.output_tokens)


async def _drawn(owner: Owner, prepared: PreparedImages, held: Part) -> tuple[list[Picture], list[Stream]]:
    """All pictures of a request, in order, and their streams. Their bytes are counted in `held`. Raises as `collect`."""
    streams, signal = await open_all(owner, prepared.jobs)
    running = set(streams)
    try:
        while True:
            for stream in list(running):
                stream.take()  # its steps: nobody watches them here
                if stream.ended:
                    stream.take()  # raises what ended it
                    hold(held, len(finished(stream).data))
                    running.discard(stream)
            if not running:
                return [finished(stream) for stream in streams], streams
            await signal.wait()
    finally:
        for stream in streams:
            stream.cancel()


def finished(stream: Stream) -> Picture:
    """The picture of a stream that has ended."""
    picture = stream.picture
    if picture is None:
        raise MotetError("the worker answered without a picture")
    return picture


async def _shown(prepared: PreparedImages, picture: Picture) -> DrawnImage:
    if prepared.use is None:
        return DrawnImage(b64_json=base64.b64encode(picture.data).decode(), seed=picture.seed)
    return DrawnImage(url=prepared.files_url + await _keep(prepared, "url", picture), seed=picture.seed)


async def _stored(prepared: PreparedImages, picture: Picture) -> StoredImage:
    files = prepared.drawing.files
    picture_id = await _keep(prepared, "res", picture)
    return StoredImage(
        bucket=files.bucket("res"),
        object=files.object_name(prepared.jobs[0].tenant, picture_id),
        path=FILES_PATH + picture_id,
        type=TYPES[picture.format],
        bytes=len(picture.data),
        sha256=hashlib.sha256(picture.data).hexdigest(),
        seed=picture.seed,
    )


async def _keep(prepared: PreparedImages, use: Use, picture: Picture) -> str:
    return await prepared.drawing.files.keep(prepared.jobs[0].tenant, use, picture.data, picture.format)
