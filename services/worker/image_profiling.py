"""Measures a live image worker, for `motet profile`: its steps by size, rows and adapters, and adapter transfers.

The worker is the whole service on a private NATS server, as in `services.worker.profiling`. Requests of a batch arrive
together, so their pictures are drawn side by side. A step lasts from its beginning to the beginning of the next one.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from motet.policies.times.image_fit import ImageStep
from motet.policies.times.image_times import Bucket
from motet.services.worker.config import MIB, WorkerConfig
from motet.services.worker.profiling import GATEWAY, REPLY_S, Observed, copying, publish
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, write_site_blob
from motet.shared.clip_tokenizer import PART_TOKENS
from motet.shared.clock import now_s
from motet.shared.hf_config import read_json
from motet.shared.image_shapes import UNET, read_image_shapes
from motet.shared.model import AdapterRef, AdapterVersion, ImageParams, SamplingParams, Slo, Weighted, WorkerLimits
from motet.shared.profile import LinkFacts
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import AssignReply, GenerateRequest, pack_tokens

if TYPE_CHECKING:
    from motet.services.worker.engines.request import StepReport

REQUESTS = (1, 2, 4, 8, 16, 32)
"""Requests of a batch, each with two rows."""
STEPS = 6
RANKS = (8, 16, 32, 64)
ADAPTERS = 8
DISTINCT = (0, 1, ADAPTERS)
"""Different adapters of a batch."""
USUAL_PX, SHARES = 512, (1.0, 0.5)
"""Measured sizes, as shares of the sides of the pictures for which the base was made."""
WARM_UP = 6  # batches


@dataclass(slots=True)
class MeasuredImages:
    """All measurements: steps, and adapter transfers as (MiB, ms)."""

    limits: WorkerLimits
    latent_px: int
    rows_max: int  # what the engine's memory allows in a step, as `area_max`
    area_max: int  # positions of all latents
    steps: list[ImageStep] = field(default_factory=list)
    disk: list[tuple[float, float]] = field(default_factory=list)
    store: list[tuple[float, float]] = field(default_factory=list)
    link: LinkFacts | None = None


async def measure_images(
    config: WorkerConfig, model_dir: Path, *, seconds: float, progress: Callable[[float], None] = lambda share: None
) -> MeasuredImages:
    """Profile the image worker that `config` describes, for about `seconds`, and until every batch was measured once.

    `config.bus.nats_url` is a NATS server with Motet's buckets and no other clients.
    """
    worker = Observed(config)
    try:
        await worker.service.start()
        profiler = ImageProfiler(worker, model_dir)
        await profiler.publish()
        batches = list(profiler.batches())
        for batch in batches[:WARM_UP]:
            await profiler.run(*batch, tell=False)
        began_s, done = now_s(), 0
        while done < len(batches) or now_s() - began_s < seconds:
            order = np.random.default_rng(done).permutation(len(batches))  # no kind should meet only the machine's slow times
            for place in order.tolist():
                await profiler.run(*batches[place], tell=True)
                done += 1
                took_s = now_s() - began_s
                progress(min(1.0, min(took_s / seconds, done / len(batches))))
                if done > len(batches) and took_s > seconds:
                    break
        await profiler.transfers()
        return profiler.measured
    finally:
        await worker.service.stop()


class ImageProfiler:
    """Draws batches of pictures on one worker."""

    def __init__(self, worker: Observed, model_dir: Path) -> None:
        assert worker.service.bus is not None, "the worker has started"
        self._worker, self._bus, self._model_dir = worker, worker.service.bus, model_dir
        self._random, self._requests = np.random.default_rng(0), itertools.count()
        self.adapters: list[AdapterRef] = []
        image = worker.service.facts.image
        vae, unet = (read_json(model_dir / part / "config.json") or {} for part in ("vae", UNET))
        latent_px, usual = 2 ** (len(vae["block_out_channels"]) - 1), unet.get("sample_size")
        self._usual_px = usual * latent_px if isinstance(usual, int) else USUAL_PX
        assert image is not None, "it draws pictures"
        self.measured = MeasuredImages(worker.limits, latent_px, image.rows_max, image.area_max)

    async def publish(self) -> None:
        """Publish adapters of every rank, as the registry would; as many as fit on the device together."""
        for number, rank in zip(range(ADAPTERS), itertools.cycle(RANKS), strict=False):
            rank = min(rank, self._worker.limits.max_lora_rank)
            blob, version = random_image_adapter(self._model_dir, self._worker.limits.base_model, rank, number)
            self.adapters.append(await publish(self._bus, blob, version, f"profile-{rank}-{number}"))

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(side of the pictures in pixels, requests, different adapters) of all batches."""
        image = self._worker.service.facts.image
        assert image is not None, "it draws pictures"
        step_px = image.step_px
        sides = sorted({max(step_px, round(self._usual_px * share / step_px) * step_px) for share in SHARES})
        for side, requests, adapters in itertools.product(sides, REQUESTS, DISTINCT):
            enough = adapters <= requests or (adapters == ADAPTERS and requests > 1)
            if enough and requests <= self._worker.limits.max_running:
                yield side, requests, adapters

    async def run(self, side: int, requests: int, adapters: int, *, tell: bool) -> None:
        """Draw a batch. `tell`: record its steps."""
        seen = self._worker.seen
        seen.clear()
        for place in range(requests):
            one = self.adapters[place % adapters] if adapters else None
            await self.ask(side, STEPS, one)
        await self._worker.idle()
        for copies in (report.output.stats.copies for report in seen):
            if copies is not None and copies.bytes_per_s:
                self.measured.link = LinkFacts(gb_per_s=copies.bytes_per_s / 1e9, layers=1, drag=1.0)
        if tell:
            self.measured.steps += image_steps(seen, self.measured.latent_px)

    async def ask(self, side: int, steps: int, adapter: AdapterRef | None) -> str:
        """Assign a request to the worker; returns its id. Raises RuntimeError if the worker refuses."""
        number = next(self._requests)
        request = GenerateRequest(
            request_id=f"profile-{number}",
            gateway_id=GATEWAY,
            base_model=self._worker.limits.base_model,
            prompt=pack_tokens(self._random.integers(self._worker.vocab_size, size=PART_TOKENS).tolist()),
            sampling=SamplingParams(max_tokens=steps + 2, seed=number),
            slo=Slo(),
            needs={"draws": "prompt"},
            image=ImageParams(width=side, height=side, steps=steps),
            adapters=() if adapter is None else (Weighted(adapter),),
        )
        reply = await self._bus.request(
            subjects.assign(self._worker.service.worker_id), request, AssignReply, timeout_s=REPLY_S
        )
        if isinstance(reply, Refused):
            raise RuntimeError(f"the worker refuses a request of its profile: {reply.error.message}")
        return request.request_id

    async def transfers(self) -> None:
        """Fetch the adapters from the store, and read them again from disk."""
        with tempfile.TemporaryDirectory(prefix="motet-profile-") as directory:
            for source, times in (("store", self.measured.store), ("disk", self.measured.disk)):
                found = await self._worker.load_times(self.adapters, directory, source)  # type: ignore[arg-type]
                times += [(adapter.size_bytes / MIB, ms) for adapter, ms in zip(self.adapters, found, strict=True)]


def image_steps(reports: Sequence[StepReport], latent_px: int) -> list[ImageStep]:
    """The steps of square pictures, each with the time until the next one began. Those beside a copy are left out."""
    found = []
    steps = [report for report in reports if report.output.stats.drawing is not None]
    for report, after in itertools.pairwise(steps):
        stats, drawing = report.output.stats, report.output.stats.drawing
        assert drawing is not None
        if not (stats.running + stats.waiting) or copying(stats) or copying(after.output.stats):
            continue
        side = round(drawing.pixels**0.5) // latent_px
        unit_rows = float(stats.decode_rows) if drawing.stage == "denoise" else drawing.pictures * drawing.pixels / 512**2
        found.append(
            ImageStep(
                stage=drawing.stage,
                bucket=Bucket(side, side, text_tokens=PART_TOKENS),
                pictures=drawing.pictures,
                took_ms=(after.began_s - report.began_s) * 1000,
                rows=drawing.rows,
                unit_rows=unit_rows,
                row_ranks=float(stats.decode_rank_sum),
                adapters=stats.distinct_adapters,
            )
        )
    return found


def random_image_adapter(model_dir: Path, base_model: str, rank: int, number: int) -> tuple[bytes, AdapterVersion]:
    """An adapter of all attention layers of the UNet with random weights: its blob, and the registry's record of it."""
    draw, sites_changed = np.random.default_rng((rank, number)), 0
    shapes = read_image_shapes(model_dir)
    classes = {}
    for name, sites in shapes.classes().items():
        mine = {}
        for at, site in enumerate(sites):
            if site.part == UNET and ".attn" in site.name and site.kind == "linear":
                lora_a, lora_b = draw.standard_normal((rank, site.size_in)), draw.standard_normal((site.size_out, rank))
                mine[at] = (1.0, (0.01 * lora_a).astype(np.float32), (0.01 * lora_b).astype(np.float32))
        classes[name] = (mine, len(sites))
        sites_changed += len(mine)
    blob = write_site_blob(classes, dtype="F32")
    return blob, AdapterVersion(
        digest=digest_of(blob),
        base_model=base_model,
        rank=rank,
        modules=("attention",),
        layers=0,
        dtype="F32",
        size_bytes=len(blob),
        source="random",
        created_unix_ms=0,
        family=shapes.family,
        sites=sites_changed,
    )
