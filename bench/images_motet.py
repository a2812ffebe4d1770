"""Motet's image engine for `bench.images`, called directly: the engine of a worker, without the worker."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.images_diffusers import Asked, Latents
from bench.images_files import Adapter
from motet.policies.times.step_times import StepTimes
from motet.services.registry.image_lora import image_blob, read_image_lora
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.image_engine.assemble import assemble
from motet.shared.adapter_blob import digest_of
from motet.shared.clock import now_s
from motet.shared.image_shapes import read_image_shapes
from motet.shared.model import AdapterRef, ImageParams, SamplingParams, Weighted
from motet.shared.wire.request import pack_tokens

MAX_RANK, MAX_BYTES = 64, 1 << 30


class Motet:
    """The engine with one thread, and the adapters in host memory. `prompt_tokens`: the ids of a padded prompt."""

    def __init__(self, model: Path, adapters: Sequence[Adapter], prompt_tokens: Callable[[str], list[int]]) -> None:
        config = WorkerConfig.of(model=str(model), engine="images", threads=1, max_loras=64, max_running=64)
        made: Any = assemble(config, model, StepTimes(START_PERF))
        self.engine, self._tokens, self._numbers = made.engine, prompt_tokens, count()
        self._latents: Latents = {}
        self._keep_latents()
        shapes = read_image_shapes(model)
        self.hosts: dict[str, HostAdapter] = {}
        with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:  # mapped: adapters outlive it
            for adapter in adapters:
                (file,) = adapter.folder.glob("*.safetensors")
                with file.open("rb") as weights:
                    lora = read_image_lora(weights, file.stat().st_size, shapes, max_rank=MAX_RANK, max_bytes=MAX_BYTES)
                blob = image_blob(lora, shapes, max_bytes=MAX_BYTES)
                path = Path(directory) / adapter.name
                path.write_bytes(blob)
                self.hosts[adapter.name] = made.parse_adapter(path, digest_of(blob))

    def _keep_latents(self) -> None:
        """Look at the latents on their way into the decoder: they are what is compared."""
        passes = self.engine._passes
        decode = passes.decode

        def decoding(drawings: Sequence[Any]) -> Any:
            self._latents |= {drawing.seed: drawing.latents.numpy().copy() for drawing in drawings}
            return decode(drawings)

        passes.decode = decoding

    def request(self, one: Asked, **image: Any) -> EngineRequest:
        """A request as a worker's shell gives it to the engine."""
        hosts = [self.hosts[name] for name, _ in one.adapters]
        refs = [AdapterRef(name=host.digest, digest=host.digest, rank=host.rank, size_bytes=host.blob_bytes) for host in hosts]
        return EngineRequest.local(
            f"request-{next(self._numbers)}",
            self._tokens(one.prompt),
            SamplingParams(max_tokens=one.steps + 2, seed=one.seed),
            gateway_id="gateway",
            arrival_s=now_s(),
            adapters=tuple(Weighted(ref, weight) for ref, (_, weight) in zip(refs, one.adapters, strict=True)),
            copies=tuple(hosts),
            image=ImageParams(
                width=one.side_px,
                height=one.side_px,
                steps=one.steps,
                guidance=one.guidance,
                sampler="ddim",
                negative=pack_tokens(self._tokens("")),
                **image,
            ),
        )

    def draw(self, asked: Sequence[Asked]) -> Latents:
        """Draw all pictures together; the latents of each. The pictures are encoded as PNG, which the others' are not."""
        self._latents = {}
        self.pictures(asked)
        return self._latents

    def pictures(self, asked: Sequence[Asked]) -> list[np.ndarray]:
        """The pictures, uint8 [side, side, RGB], in the order of `asked`. Raises the error of a request that has none."""
        requests = [self.request(one) for one in asked]
        for request in requests:
            self.engine.add(request, now_s())
        found: dict[str, bytes] = {}
        while self.engine.has_work():
            for item in self.step():
                if item.finish is not None and item.picture is not None:
                    found[item.request_id] = item.picture.data
        return [np.asarray(Image.open(io.BytesIO(found[request.request_id])).convert("RGB")) for request in requests]

    def step(self) -> list[Any]:
        """One step of the engine; its items."""
        output = self.engine.step(now_s())
        if output.failure is not None:
            raise output.failure
        items = [item for some in output.items.values() for item in some]
        for item in items:
            if item.error is not None:
                raise RuntimeError(f"{item.request_id}: {item.error.message}")
        return items
