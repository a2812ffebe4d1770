"""Builds a warm image engine from a configuration: models, adapter memory, limits, first steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from motet.kernels import LoraPool
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.eviction import make_eviction
from motet.policies.step.image_batch import ImageBatchLimits
from motet.policies.times.image_times import Bucket
from motet.policies.times.step_times import StepTimes
from motet.policies.worker.pins import PIN_SHARE
from motet.services.worker.config import MIB, WorkerConfig, free_host_bytes, lora_bytes_for
from motet.services.worker.engines.adapter_weights import HostAdapter, class_shapes
from motet.services.worker.engines.image_limits import ImageLimits
from motet.services.worker.engines.opening import Facts
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.image_engine.checkpoint import Checkpoint, open_checkpoint
from motet.services.worker.image_engine.device_adapters import DeviceAdapters
from motet.services.worker.image_engine.engine import ImageEngine
from motet.services.worker.image_engine.metadata import describe
from motet.services.worker.image_engine.model import ImageModel
from motet.services.worker.image_engine.passes import Passes
from motet.services.worker.image_engine.pictures import write_picture
from motet.services.worker.image_engine.sites import Sites
from motet.shared.clip_tokenizer import PART_TOKENS, PARTS_MAX
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.hf_config import UnsupportedModel
from motet.shared.model import PICTURE_PIXELS_MAX, PICTURE_STEPS_MAX, ImageKind, ImageParams, SamplingParams, WorkerLimits
from motet.shared.wire.request import Image

ROWS_MAX, ROWS_AREA = 64, 8 * 64 * 64
"""The most rows of a step, and the most of their latents' positions together: what memory holds."""
WARM_UP_STEPS, WARM_UP_PX = 3, 256
WARM_UP_REQUESTS = (1, 1, 2, 4, 8)
"""Numbers of requests that are drawn together; the first is the cold process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly(Facts):
    """An engine ready to run, and the facts about it."""

    engine: ImageEngine


def assemble(
    config: WorkerConfig, model_dir: Path, times: StepTimes, *, loaded: Callable[[float], None] = lambda _: None
) -> Assembly:
    """Load the models and draw a picture. Call it in the thread that will run the engine.

    `loaded` gets the share of the parts in memory. Raises ConfigError for what cannot be served.
    """
    torch.set_num_threads(config.engine_threads)
    try:
        checkpoint = open_checkpoint(model_dir, loaded)
    except UnsupportedModel as error:
        raise ConfigError(f"--model: {error}") from None
    classes = class_shapes(checkpoint.shapes)
    rank_bytes = 4 * sum((fan_in + fan_out) * count for fan_in, fan_out, count in classes.values())
    lora_bytes = lora_bytes_for(config.adapters, rank_bytes=rank_bytes, free_bytes=free_host_bytes(), on_cpu=True)
    pool = LoraPool(
        classes,
        slots=config.adapters.max_loras,
        max_rank=config.adapters.max_lora_rank,
        bytes_total=lora_bytes,
        dtype=torch.float32,
    )
    slots = AdapterSlots(
        config.adapters.max_loras,
        pool.bytes_total,
        asynchronous=True,
        eviction=make_eviction(config.adapters.adapter_eviction),
    )
    models = {"unet": checkpoint.unet, **checkpoint.encoders}
    adapters = DeviceAdapters(pool, slots)
    passes = Passes(ImageModel(checkpoint), Sites(models, checkpoint.shapes, pool), adapters.slot_of)
    limits = _limits(config, pool.bytes_total)
    tokenizer = next(iter(checkpoint.tokenizers.values()))
    engine = ImageEngine(
        passes,
        adapters,
        ImageBatchLimits(rows_most=rows_most),
        limits,
        describe=partial(describe, tokenizer=tokenizer),
    )
    _warm_up(engine, checkpoint, times)

    def parse_adapter(path: Path, digest: str) -> HostAdapter:
        return HostAdapter.from_blob(path, classes, dtype=torch.float32, digest=digest)

    return Assembly(
        engine=engine,
        limits=limits,
        vocab_size=min(model.config.vocab_size for model in checkpoint.encoders.values()),
        eos_token_ids=frozenset(),  # a picture ends after its steps
        parse_adapter=parse_adapter,
        image=ImageLimits(
            family=checkpoint.shapes.family,
            step_px=checkpoint.multiple_px,
            pixels_max=PICTURE_PIXELS_MAX,
            steps_max=PICTURE_STEPS_MAX,
            rows_max=ROWS_MAX,
            area_max=ROWS_AREA,
        ),
    )


def rows_most(bucket: Bucket) -> int:
    """The most rows of a denoising step of a bucket."""
    return max(1, min(ROWS_MAX, ROWS_AREA // bucket.area))


def _limits(config: WorkerConfig, adapter_bytes: int) -> WorkerLimits:
    """What the worker tells the other services about itself. Positions stand for tokens, and nothing is ever short of them."""
    longest = PICTURE_STEPS_MAX + PARTS_MAX * PART_TOKENS
    batch = config.batch
    return WorkerLimits(
        base_model=config.base.name,
        device="cpu",
        kernels="cpu",
        max_model_len=longest,
        max_running=batch.max_running,
        max_waiting=batch.max_waiting,
        block_size=1,
        kv_blocks_total=(batch.max_running + batch.max_waiting) * longest,
        adapter_bytes_total=adapter_bytes,
        max_lora_rank=config.adapters.max_lora_rank,
        copies="wait",
        pin_slots=config.adapters.max_loras // PIN_SHARE,
        pin_bytes=min(adapter_bytes, config.adapters.host_cache_mib * MIB) // PIN_SHARE,
    )


def _warm_up(engine: ImageEngine, checkpoint: Checkpoint, times: StepTimes) -> None:
    """Draw small pictures, more and more together, so that no user waits for lazy initialisation and step times are known."""
    tokenizer = next(iter(checkpoint.tokenizers.values()))
    usual_px = (checkpoint.unet.config.sample_size or 0) * checkpoint.latent_px
    side = min(max(checkpoint.multiple_px, usual_px // checkpoint.multiple_px * checkpoint.multiple_px), WARM_UP_PX)
    kind: ImageKind = "inpaint" if checkpoint.inpaints else "text"
    images = _blanks(side) if checkpoint.inpaints else []
    for cold, requests in enumerate(WARM_UP_REQUESTS):
        for number in range(requests):
            request = EngineRequest.local(
                f"warm-up-{requests}-{number}",
                tokenizer.parts([], 1),
                SamplingParams(max_tokens=WARM_UP_STEPS + 2, seed=number),
                arrival_s=now_s(),
                image=ImageParams(width=side, height=side, steps=WARM_UP_STEPS, kind=kind),
                images=images,
            )
            engine.add(request, now_s())
        while engine.has_work():
            began = now_s()
            output = engine.step(began)
            if output.failure is not None:
                raise output.failure
            output.stats.time_ms = (now_s() - began) * 1000
            if cold:
                times.observe(output.stats)
        if not cold:
            engine.forget_times()


def _blanks(side: int) -> list[Image]:
    """A source picture and a mask."""
    return [Image(write_picture(np.full((side, side, 3), grey, np.uint8), "png", 0), "image") for grey in (128, 255)]
