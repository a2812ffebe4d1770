"""What an image engine computes for a list of requests: encode, one denoising step, decode.

encode     prompts -> encodings; source picture and mask -> latents; the first noise        once per request
denoise    one UNet call for rows of any requests of one bucket, then each row's sampler    once per step
decode     latents -> pixels                                                               once, and for previews
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.nn import functional

from motet.services.worker.image_engine import samplers
from motet.services.worker.image_engine.drawing import Drawing
from motet.services.worker.image_engine.model import Encoding, ImageModel, Prompt
from motet.services.worker.image_engine.pictures import as_pixels, read_mask, read_source, redrawn
from motet.services.worker.image_engine.sites import Sites, Text
from motet.shared.errors import BadRequest
from motet.shared.wire.request import unpack_tokens

ENCODINGS = 64
"""Encodings that are kept, since the pictures of one prompt share theirs."""
PREVIEW_PIXELS = 512 * 512
"""Previews of larger pictures are decoded at a smaller size."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """What stays the same while the same requests step together."""

    drawings: tuple[Drawing, ...]
    owner: torch.Tensor  # int64 [rows]: the request of each
    first: torch.Tensor  # int64 [requests]: its row without the prompt, or its only one
    last: torch.Tensor  # int64 [requests]: its row with the prompt
    guidance: torch.Tensor  # float32 [requests, 1, 1, 1]
    text: Text
    pooled: torch.Tensor | None
    time_ids: torch.Tensor | None
    masked: torch.Tensor | None  # [rows, 5, ...]
    row_slot: np.ndarray
    weights: np.ndarray


class Passes:
    """The forward passes. All calls come from the engine's thread. `slot_of`: the slots of adapters, by digest."""

    def __init__(self, model: ImageModel, sites: Sites, slot_of: Mapping[str, int]) -> None:
        self.model, self._sites, self._slot_of = model, sites, slot_of
        self._encodings: OrderedDict[tuple[object, ...], tuple[Encoding, Encoding | None]] = OrderedDict()
        self._batch: _Batch | None = None

    # ---- encode

    def encode(self, drawings: Sequence[Drawing]) -> None:
        """Encode the prompts of these requests in one pass of each text encoder."""
        jobs: list[tuple[Drawing, Prompt]] = []
        missing: dict[tuple[object, ...], tuple[Drawing, int, bool]] = {}
        for drawing in drawings:
            key = _encoding_key(drawing)
            if key in self._encodings or key in missing:
                continue
            prompts, has_negative = self._prompts(drawing)
            missing[key] = (drawing, len(jobs), has_negative)
            jobs += [(drawing, prompt) for prompt in prompts]
        if jobs:
            counts = [len(next(iter(prompt.parts.values()))) for _, prompt in jobs]
            self._sites.use(*adapter_rows([drawing for drawing, _ in jobs], counts, self._slot_of))
            found = self.model.encode([prompt for _, prompt in jobs])
            for key, (drawing, at, has_negative) in missing.items():
                negative = found[at + 1] if has_negative else self.model.nothing(found[at]) if drawing.guided else None
                self._encodings[key] = found[at], negative
        for drawing in drawings:
            key = _encoding_key(drawing)
            self._encodings.move_to_end(key)
            drawing.prompt, drawing.negative = self._encodings[key]
        while len(self._encodings) > ENCODINGS:
            self._encodings.popitem(last=False)

    def _prompts(self, drawing: Drawing) -> tuple[list[Prompt], bool]:
        """The prompt and, where it is encoded at all, the negative one; and whether there is that."""
        image, model = drawing.image, self.model
        positive = model.prompt(unpack_tokens(drawing.request.prompt), unpack_tokens(image.prompt_2), drawing.parts)
        if not drawing.guided:
            return [positive], False
        if image.negative:
            return [positive, model.prompt(unpack_tokens(image.negative), unpack_tokens(image.negative_2), drawing.parts)], True
        if model.checkpoint.zero_negative:
            return [positive], False
        return [positive, model.empty(drawing.parts)], True

    def prepare(self, drawing: Drawing) -> None:
        """Draw the first noise, and bring the source picture and the mask into latents. Raises BadRequest naming the field."""
        image, model = drawing.image, self.model
        drawing.generator.manual_seed(drawing.seed)
        if image.kind == "text":
            drawing.begin(drawing.draw(), None)
            return
        pixels, alpha = read_source(drawing.request.images[0], image.width, image.height)
        if image.kind == "image":
            source = model.to_latents(pixels, drawing.draw())
            drawing.begin(drawing.draw(), source)
            return
        if len(drawing.request.images) > 1:
            mask = read_mask(drawing.request.images[1], image.width, image.height)
        elif alpha is not None:
            mask = redrawn(alpha)
        else:
            param = drawing.request.images[0].param
            raise BadRequest(f"{param} has no transparency and there is no mask: what should be redrawn?", param=param)
        self._inpaint(drawing, pixels, mask)

    def _inpaint(self, drawing: Drawing, pixels: torch.Tensor, mask: torch.Tensor) -> None:
        reads_mask, whole = self.model.checkpoint.inpaints, drawing.image.strength >= 1.0
        source = None if reads_mask and whole else self.model.to_latents(pixels, drawing.draw())
        noise = drawing.draw()
        masked = self.model.to_latents(pixels * (mask < 0.5), drawing.draw())
        small = functional.interpolate(mask, size=drawing.shape[2:])
        if reads_mask:
            drawing.masked = torch.cat([small, masked], dim=1)[0]
        else:
            assert source is not None, "it is blended in"
            drawing.source, drawing.noise, drawing.mask = source[0], noise[0], small[0]
        drawing.begin(noise, None if whole else source)

    # ---- denoise

    @torch.inference_mode()
    def denoise(self, drawings: Sequence[Drawing]) -> list[bool]:
        """One step of each of these requests, which have one bucket. Returns which of them have finite latents.

        The caller counts the step.
        """
        batch = self._batched(drawings)
        rows = torch.stack([drawing.coefficients for drawing in drawings])
        latents = torch.stack([drawing.latents for drawing in drawings])  # type: ignore[misc]  # all have begun
        times = torch.tensor([drawing.time for drawing in drawings])
        inputs = samplers.scaled(latents, rows)[batch.owner]
        if batch.masked is not None:
            inputs = torch.cat([inputs, batch.masked], dim=1)
        self._sites.use(batch.row_slot, batch.weights, batch.text)
        found = self.model.predict(inputs, times[batch.owner], batch.text.encoded, batch.pooled, batch.time_ids)
        without, prediction = found[batch.first], found[batch.last]
        prediction = without + batch.guidance * (prediction - without)
        new, estimates = samplers.advance(latents, prediction, _previous(drawings), _noise(drawings), rows)
        finite: list[bool] = torch.isfinite(new).flatten(1).all(dim=1).tolist()
        for drawing, one, estimate in zip(drawings, new, estimates, strict=True):
            drawing.latents = one
            if samplers.keeps_estimate(drawing.image.sampler) or drawing.image.previews:
                drawing.estimate = estimate
            if drawing.mask is not None:
                _blend(drawing)
        return finite

    def _batched(self, drawings: Sequence[Drawing]) -> _Batch:
        if self._batch is None or self._batch.drawings != tuple(drawings):
            self._batch = self._composed(drawings)
        return self._batch

    def forget(self) -> None:
        """Free what is kept for the last batch, whose requests have ended."""
        self._batch = None
        self._sites.use(None)

    def _composed(self, drawings: Sequence[Drawing]) -> _Batch:
        encodings, ids, counts = [], [], [drawing.rows for drawing in drawings]
        for drawing in drawings:
            assert drawing.prompt is not None, "it has been encoded"
            size = drawing.image.width, drawing.image.height
            if drawing.guided:
                assert drawing.negative is not None, "it has been encoded"
                encodings.append(drawing.negative)
                ids.append(self.model.time_ids(*size, negative=True))
            encodings.append(drawing.prompt)
            ids.append(self.model.time_ids(*size, negative=False))
        ends = list(accumulate(counts))
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        pooled = [one.pooled for one in encodings if one.pooled is not None]
        masked = [drawing.masked for drawing in drawings if drawing.masked is not None]
        row_slot, weights = adapter_rows(drawings, counts, self._slot_of)
        return _Batch(
            drawings=tuple(drawings),
            owner=owner,
            first=torch.tensor([end - count for end, count in zip(ends, counts, strict=True)]),
            last=torch.tensor([end - 1 for end in ends]),
            guidance=torch.tensor([drawing.image.guidance for drawing in drawings]).view(-1, 1, 1, 1),
            text=Text(torch.stack([one.text for one in encodings])),
            pooled=torch.stack(pooled) if pooled else None,
            time_ids=torch.stack([one for one in ids if one is not None]) if ids[0] is not None else None,
            masked=torch.stack(masked)[owner] if masked else None,
            row_slot=row_slot,
            weights=weights,
        )

    # ---- decode

    def decode(self, drawings: Sequence[Drawing]) -> list[np.ndarray]:
        """The pixels of requests of one bucket, uint8 [height, width, 3] each."""
        return list(as_pixels(self.model.to_pictures(torch.stack([drawing.latents for drawing in drawings]))))  # type: ignore[misc]

    def preview(self, drawing: Drawing) -> np.ndarray:
        """What the picture is expected to become, uint8 [height, width, 3], of at most `PREVIEW_PIXELS`."""
        assert drawing.estimate is not None, "it is kept for previews"
        latents, pixels = drawing.estimate[None], drawing.image.width * drawing.image.height
        while pixels > PREVIEW_PIXELS:
            latents, pixels = functional.avg_pool2d(latents, 2), pixels // 4
        return as_pixels(self.model.to_pictures(latents))[0]


def adapter_rows(
    drawings: Sequence[Drawing], counts: Sequence[int], slot_of: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(slots int32, weights float32), both [rows, most adapters of a request]; `counts`: rows of each request."""
    width = max([len(drawing.adapters) for drawing in drawings], default=0)
    row_slot = np.full((len(drawings), max(1, width)), -1, dtype=np.int32)
    weights = np.zeros(row_slot.shape, dtype=np.float32)
    for at, drawing in enumerate(drawings):
        for number, one in enumerate(drawing.request.weighted):
            row_slot[at, number], weights[at, number] = slot_of[one.ref.digest], one.weight
    return np.repeat(row_slot, counts, axis=0), np.repeat(weights, counts, axis=0)


def _encoding_key(drawing: Drawing) -> tuple[object, ...]:
    image, request = drawing.image, drawing.request
    adapters = tuple((one.ref.digest, one.weight) for one in request.weighted)
    texts = (request.prompt, image.prompt_2, image.negative, image.negative_2)
    return (*texts, drawing.guided, drawing.parts, adapters)


def _previous(drawings: Sequence[Drawing]) -> torch.Tensor | None:
    """The estimates of the step before, zero for those that have none; None if no sampler needs them."""
    if not any(samplers.keeps_estimate(drawing.image.sampler) for drawing in drawings):
        return None
    return torch.stack(
        [torch.zeros(drawing.shape[1:]) if drawing.estimate is None else drawing.estimate for drawing in drawings]
    )


def _noise(drawings: Sequence[Drawing]) -> torch.Tensor | None:
    """The noise of this step, zero for samplers without; None if none needs any."""
    if not any(samplers.draws_noise(drawing.image.sampler) for drawing in drawings):
        return None
    return torch.cat(
        [drawing.draw() if samplers.draws_noise(drawing.image.sampler) else torch.zeros(drawing.shape) for drawing in drawings]
    )


def _blend(drawing: Drawing) -> None:
    """Put the source picture, at the noise of the next step, where nothing is redrawn."""
    source, noise, mask = drawing.source, drawing.noise, drawing.mask
    assert drawing.latents is not None and source is not None and noise is not None and mask is not None
    drawing.latents = (1 - mask) * drawing.noised(source, noise, drawing.step + 1) + mask * drawing.latents
