"""One request in the image engine: the latents between two steps, the noise, the checkpoints, the items for its gateway.

Everything random comes from one generator in the order in which diffusers draws for one picture: the source picture's latents,
the noise, the latents of a masked picture, then a noise for each step of a sampler that needs it. So a seed gives diffusers'
picture, and a request that continues from a checkpoint draws again what the steps behind it have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from motet.policies.step.image_batch import ImageSequence
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.image_engine import samplers
from motet.services.worker.image_engine.model import Encoding
from motet.services.worker.image_engine.samplers import Table
from motet.shared.errors import BadRequest
from motet.shared.model import FinishReason, ImageParams, RequestBrief
from motet.shared.wire.stream import StreamItem

SEEDS = 1 << 63


@dataclass(slots=True, eq=False, kw_only=True)
class Drawing(ImageSequence):
    """A request with its state. Latents are float32 [channels, rows, columns]; `step` counts from the first that runs."""

    request: EngineRequest
    image: ImageParams
    table: Table
    parts: int  # of its prompt
    reported: int = 0  # positions that its owner has
    told: bool = False  # its first item has gone out
    latents: torch.Tensor | None = None
    estimate: torch.Tensor | None = None  # x0 of the step before
    generator: torch.Generator = field(default_factory=torch.Generator)
    prompt: Encoding | None = None
    negative: Encoding | None = None
    source: torch.Tensor | None = None  # latents of the source picture, where they are blended in
    noise: torch.Tensor | None = None  # and the noise that it is blended with
    mask: torch.Tensor | None = None  # [1, rows, columns], 1 is redrawn
    masked: torch.Tensor | None = None  # [5, rows, columns]: mask and masked picture, for a base that reads them
    encoded_s: float = 0.0
    kept_s: float = 0.0  # when the last checkpoint was sent

    @property
    def first(self) -> int:
        """Steps of the table that a source picture skips, by its strength."""
        return self.table.steps - self.steps

    @property
    def guided(self) -> bool:
        """Whether it has two rows in a step."""
        return self.rows > 1

    @property
    def seed(self) -> int:
        """The seed of its own noise; the gateway gives each picture of a request another."""
        return self.request.sampling.seed % SEEDS

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of its latents, as a batch of one."""
        return (1, self.bucket.channels, self.bucket.height, self.bucket.width)

    @property
    def coefficients(self) -> torch.Tensor:
        """The sampler's row of the table for the next step."""
        return self.table.row(self.first + self.step, first=self.step == 0)

    @property
    def time(self) -> float:
        """What the model is told about the noise of the next step."""
        return float(self.table.timesteps[self.first + self.step])

    def draw(self) -> torch.Tensor:
        """The next noise, [1, channels, rows, columns]."""
        return torch.randn(self.shape, generator=self.generator)

    def begin(self, noise: torch.Tensor, source: torch.Tensor | None) -> None:
        """Set the latents of the first step, from the noise and the source picture's latents; or those of the checkpoint.

        Raises BadRequest for a checkpoint that does not fit.
        """
        self.latents = (noise * self.table.init_scale if source is None else self.noised(source, noise, 0))[0]
        if self.image.state:
            self._resume()

    def noised(self, picture: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Latents of a picture with the noise of a step; of the picture itself after the last one."""
        at = self.first + step
        if at == self.table.steps:
            return picture
        return picture * float(self.table.keep[at]) + noise * float(self.table.add[at])

    def _resume(self) -> None:
        latents, estimate = unpack_state(self.image, self.shape[1:])
        if not 1 <= self.image.state_step <= self.steps:
            at = self.image.state_step
            raise BadRequest(f"image.state_step is {at}: 1 to {self.steps} are possible", param="image")
        self.latents, self.estimate, self.step = latents, estimate, self.image.state_step
        for _ in range(self.step if samplers.draws_noise(self.image.sampler) else 0):
            self.draw()

    def state(self) -> bytes:
        """A checkpoint of the latents, and of the last estimate for a sampler that needs it: little-endian float32."""
        assert self.latents is not None, "it has begun"
        kept = [self.latents]
        if samplers.keeps_estimate(self.image.sampler) and self.estimate is not None:
            kept.append(self.estimate)
        return torch.stack(kept).numpy().astype("<f4").tobytes()

    def brief(self) -> RequestBrief:
        """The facts of the request that schedulers need."""
        return self.request.brief(max(self.reported, self.step), running=self.stage != "encode")

    def item(self, finish: FinishReason | None = None) -> StreamItem:
        """An item with the positions that are new: steps, and the picture's own with `finish`."""
        end = self.step + (finish is not None)
        tokens = list(range(self.reported, end))
        item = StreamItem(self.request.request_id, self.request.epoch, self.reported, tokens, finish)
        if not self.told:
            self.told, item.queue_ms = True, max(0.0, self.encoded_s - self.request.arrival_s) * 1000
        self.reported = max(self.reported, end)
        return item

    @property
    def preview_due(self) -> bool:
        """Whether the step just done is one of those after which a preview is shown: they divide the steps evenly."""
        parts, done, total = self.image.previews + 1, self.step, self.steps
        return parts > 1 and done < total and done * parts // total > (done - 1) * parts // total


def unpack_state(image: ImageParams, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(latents, estimate) of a checkpoint. `shape`: of the latents. Raises BadRequest for one of another size or not finite."""
    size = 4 * int(np.prod(shape))
    expected = size * (2 if samplers.keeps_estimate(image.sampler) else 1)
    if len(image.state) != expected:
        raise BadRequest(f"image.state has {len(image.state)} bytes, {expected} are expected", param="image")
    values = np.frombuffer(image.state, dtype="<f4").astype(np.float32).reshape(-1, *shape)
    if not np.isfinite(values).all():
        raise BadRequest("image.state has numbers that are not finite", param="image")
    tensors = torch.from_numpy(values)
    return tensors[0], tensors[1] if len(tensors) > 1 else None
