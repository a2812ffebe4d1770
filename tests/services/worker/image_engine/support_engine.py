"""An image engine over a tiny checkpoint, driven step by step, and requests for it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from motet.kernels import LoraPool
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.step.image_batch import ImageBatchLimits
from motet.services.worker.engines.adapter_weights import class_shapes
from motet.services.worker.engines.request import EngineRequest, StepOutput
from motet.services.worker.image_engine.checkpoint import open_checkpoint
from motet.services.worker.image_engine.device_adapters import DeviceAdapters
from motet.services.worker.image_engine.drawing import Drawing
from motet.services.worker.image_engine.engine import ImageEngine
from motet.services.worker.image_engine.model import ImageModel
from motet.services.worker.image_engine.passes import Passes
from motet.services.worker.image_engine.sites import Sites
from motet.shared.model import AdapterRef, ImageParams, SamplingParams, Weighted, WorkerLimits
from motet.shared.wire.request import Image, pack_tokens
from motet.shared.wire.stream import StreamItem
from tests.support_image_models import MadeAdapter, Oracle

LIMITS = WorkerLimits(
    base_model="tiny",
    max_model_len=400,
    max_running=16,
    max_waiting=16,
    block_size=1,
    kv_blocks_total=32 * 400,
    adapter_bytes_total=0,
    max_lora_rank=64,
)


def png(pixels: np.ndarray, param: str = "image") -> Image:
    """An image of a request: uint8 [rows, columns] or [rows, columns, 3 or 4]."""
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return Image(file.getvalue(), param)


_ROW = np.linspace(0, 255, 32).astype(np.uint8)
SOURCE = png(np.stack([np.tile(_ROW, (32, 1)), np.tile(_ROW[:, None], (1, 32)), np.full((32, 32), 90, np.uint8)], axis=2))
MASK = png(np.pad(np.full((17, 13), 255, np.uint8), ((8, 7), (10, 9))), "mask")


class Recording(Passes):
    """Keeps the latents that are decoded, by request id."""

    def __init__(self, model: ImageModel, sites: Sites, slot_of: Mapping[str, int]) -> None:
        super().__init__(model, sites, slot_of)
        self.latents: dict[str, torch.Tensor] = {}
        self.batches: list[list[str]] = []

    def denoise(self, drawings: Sequence[Drawing]) -> list[bool]:
        self.batches.append([drawing.request.request_id for drawing in drawings])
        return super().denoise(drawings)

    def decode(self, drawings: Sequence[Drawing]) -> Any:
        for drawing in drawings:
            assert drawing.latents is not None
            self.latents[drawing.request.request_id] = drawing.latents.clone()
        return super().decode(drawings)


class Driven:
    """An engine, what it has reported, and requests in the oracle's words."""

    def __init__(self, model_dir: Path, oracle: Oracle, *, slots: int = 8, lora_bytes: int = 64 << 20, **options: Any) -> None:
        checkpoint = open_checkpoint(model_dir)
        pool = LoraPool(class_shapes(checkpoint.shapes), slots=slots, max_rank=64, bytes_total=lora_bytes, dtype=torch.float32)
        sites = Sites({"unet": checkpoint.unet, **checkpoint.encoders}, checkpoint.shapes, pool)
        self.oracle, self.adapters = oracle, DeviceAdapters(pool, AdapterSlots(slots, pool.bytes_total, asynchronous=True))
        self.passes = Recording(ImageModel(checkpoint), sites, self.adapters.slot_of)
        rows = options.pop("rows", 32)
        limits = ImageBatchLimits(rows_most=lambda _: rows)
        self.engine = ImageEngine(self.passes, self.adapters, limits, LIMITS, **options)
        self.items: list[StreamItem] = []
        self.outputs: list[StepOutput] = []

    def request(
        self,
        request_id: str,
        prompt: str,
        *,
        adapters: Mapping[str, float] | None = None,
        negative: str | None = None,
        seed: int = 0,
        images: Sequence[Image] = (),
        epoch: int = 0,
        output: Sequence[int] = (),
        **image: Any,
    ) -> EngineRequest:
        """A request as the worker's shell gives it to the engine."""
        made = {one.name: one for one in self.oracle.adapters}
        weighted = tuple(Weighted(_ref(made[name]), weight) for name, weight in (adapters or {}).items())
        tokens = self.oracle.tokens
        if hasattr(self.oracle.pipeline(), "tokenizer_2"):
            image["prompt_2"] = pack_tokens(tokens(prompt, second=True))
            if negative is not None:
                image["negative_2"] = pack_tokens(tokens(negative, second=True))
        if negative is not None:
            image["negative"] = pack_tokens(tokens(negative))
        return EngineRequest.local(
            request_id,
            tokens(prompt),
            SamplingParams(max_tokens=1000, seed=seed),
            output=output,
            gateway_id="gateway",
            adapters=weighted,
            copies=tuple(made[name].host for name in (adapters or {})),
            image=ImageParams(**{"width": 32, "height": 32, "steps": 4} | image),
            images=list(images),
            epoch=epoch,
        )

    def step(self) -> StepOutput:
        output = self.engine.step(0.0)
        self.outputs.append(output)
        self.items += [item for items in output.items.values() for item in items]
        return output

    def run(self, *requests: EngineRequest) -> None:
        """Draw these requests to their ends, and check the ledgers."""
        for request in requests:
            self.engine.add(request, 0.0)
        while self.engine.has_work():
            output = self.step()
            if output.failure is not None:
                raise output.failure
        self.engine.check()

    def of(self, request_id: str, epoch: int = 0) -> list[StreamItem]:
        """The items of a request. Checks that positions are consecutive and that it ended at most once."""
        found = [item for item in self.items if (item.request_id, item.epoch) == (request_id, epoch)]
        for before, after in pairwise(found):
            assert after.index == before.index + len(before.tokens)
        assert all(item.tokens == list(range(item.index, item.index + len(item.tokens))) for item in found)
        assert sum(item.finish is not None for item in found) <= 1
        return found


def _ref(made: MadeAdapter) -> AdapterRef:
    return AdapterRef(name=made.name, digest=made.host.digest, rank=made.host.rank, size_bytes=made.host.blob_bytes)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
