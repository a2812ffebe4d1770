"""Promise: a worker with `--engine images` draws what schedulers assign to it, with the registry's adapters."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image as Pillow

from motet.services.worker import metrics
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Wiring, open_engine
from motet.services.worker.observe import size_label
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import ConfigError
from motet.shared.model import (
    PICTURE_STEPS_MAX,
    AdapterEntry,
    AdapterRef,
    AdapterVersion,
    ImageParams,
    SamplingParams,
    Weighted,
)
from motet.shared.wire.request import Cancel, GenerateRequest, pack_tokens
from tests.services.worker.conftest import Start
from tests.services.worker.image_engine.conftest import Oracles
from tests.services.worker.image_engine.support_engine import MASK, SOURCE, Driven
from tests.services.worker.support_service import BASE, generate, latest
from tests.support import eventually, reading
from tests.support_image_models import MadeAdapter, Oracle

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = "a red circle on sky"


async def publish(bus: Bus, made: MadeAdapter, family: str) -> AdapterRef:
    """Publish an adapter as the registry does."""
    digest, size_bytes = made.host.digest, made.host.blob_bytes
    version = AdapterVersion(
        digest=digest,
        base_model=BASE,
        rank=made.host.rank,
        modules=("attn1.to_q",),
        layers=0,
        dtype="F32",
        size_bytes=size_bytes,
        source="test",
        created_unix_ms=0,
        family=family,
        sites=1,
    )
    entry = AdapterEntry(name=made.name, digest=digest, version=1, updated_unix_ms=0)
    store, kv = await bus.object_store(subjects.BLOBS), await bus.key_value(subjects.KV_ADAPTERS)
    await store.put(digest, bytes(made.host.memory))
    await kv.put(f"version.{digest}", msgspec.json.encode(version))
    await kv.put(f"name.{made.name}", msgspec.json.encode(entry))
    return AdapterRef(name=made.name, digest=digest, rank=made.host.rank, size_bytes=size_bytes)


def draw(oracle: Oracle, adapters: tuple[Weighted, ...] = (), seed: int = 0, **image: Any) -> GenerateRequest:
    params = ImageParams(**{"width": 32, "height": 32, "steps": 4} | image)
    sampling = SamplingParams(max_tokens=params.steps_run + 2, seed=seed)
    return generate(oracle.tokens(PROMPT), sampling=sampling, image=params, adapters=adapters, needs={"draws": "prompt"})


def pixels(picture: Any) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(picture.data)), dtype=int)


async def test_a_worker_draws_pictures_with_the_registrys_adapters(start: Start, bus: Bus, oracles: Oracles) -> None:
    oracle = oracles("sd15")
    worker = await start(model=str(oracle.model_dir), engine="images", max_lora_rank=32)
    limits = (await eventually(lambda: latest(worker))).limits
    assert limits.engine == "images" and limits.capabilities == ("draws",) and limits.block_size == 1
    small, words = [await publish(bus, oracle.adapters[number], "sd15") for number in (0, 3)]
    both = (Weighted(small, 0.7), Weighted(words, 1.0))
    requests = [draw(oracle, both, seed=3), draw(oracle, (Weighted(small, 1.0),), steps=6), draw(oracle, guidance=1.0)]
    await worker.accepted(*requests)
    for request in requests:
        end = await worker.mesh.ended(request.request_id)
        assert end.finish == "stop" and end.picture is not None, end
        image = request.image
        assert image is not None and worker.mesh.tokens(request.request_id) == list(range(image.steps + 1))
    driven = Driven(oracle.model_dir, oracle)
    driven.run(driven.request("same", PROMPT, adapters={"small": 0.7, "words": 1.0}, seed=3))
    alone, end = driven.of("same")[-1].picture, await worker.mesh.ended(requests[0].request_id)
    assert np.abs(pixels(end.picture) - pixels(alone)).max() <= 2
    await eventually(
        lambda: {one.digest for one in latest(worker).adapters if one.tier == "device"} == {small.digest, words.digest}
    )
    await worker.service.engine.check()


async def test_metrics_count_what_a_worker_draws(start: Start, oracles: Oracles) -> None:
    oracle = oracles("sd15")
    worker = await start(model=str(oracle.model_dir), engine="images")
    worker.slow_down(0.2)  # so that checkpoints are due
    steps = metrics.IMAGE_STEPS.labels("64"), metrics.IMAGE_ROWS, metrics.IMAGE_ADAPTERS, metrics.IMAGE_PASS_S.labels("denoise")
    before = [count(metric) for metric in steps]
    drawn = [reading(metrics.IMAGE_PICTURES.labels(stage)) for stage in ("encode", "decode")]
    kept, shown = reading(metrics.IMAGE_CHECKPOINT_BYTES), reading(metrics.IMAGE_PREVIEWS)
    tokens = reading(metrics.TOKENS.labels("decode"))
    await worker.accepted(request := draw(oracle, steps=16, previews=2))
    await worker.mesh.ended(request.request_id)
    assert [count(metric) - then for metric, then in zip(steps, before, strict=True)] == [16] * 4
    assert [reading(metrics.IMAGE_PICTURES.labels(stage)) for stage in ("encode", "decode")] == [one + 1 for one in drawn]
    states = [len(item.state) for item in worker.mesh.items(request.request_id)]
    assert reading(metrics.IMAGE_CHECKPOINT_BYTES) - kept == sum(states) > 0 and reading(metrics.IMAGE_PREVIEWS) - shown == 2
    assert 1 <= reading(metrics.IMAGE_KNEE_ROWS.labels("64")) <= 64
    assert reading(metrics.TOKENS.labels("decode")) == tokens, "rows are no tokens"


def count(metric: Any) -> float:
    """The value of a counter, or how often a histogram observed something."""
    ends = ("_total", "_count")
    return sum(one.value for family in metric.collect() for one in family.samples if one.name.endswith(ends))


@pytest.mark.parametrize(
    ("pixels", "told"), [(1, "64"), (64 * 64, "64"), (512 * 768, "768"), (1 << 20, "1024"), (1 << 30, "2048")]
)
def test_the_sizes_of_pictures_are_few_labels(pixels: int, told: str) -> None:
    assert size_label(pixels) == told


async def test_a_worker_that_draws_takes_no_text_and_no_other_familys_adapters(
    start: Start, bus: Bus, oracles: Oracles
) -> None:
    oracle = oracles("sd15")
    worker = await start(model=str(oracle.model_dir), engine="images", max_lora_rank=32)
    assert "pictures, no text" in str(await worker.refusal(generate(oracle.tokens(PROMPT))))
    other = await publish(bus, oracle.adapters[1], "sdxl")
    assert "is for sdxl" in str(await worker.refusal(draw(oracle, (Weighted(other, 1.0),))))
    for change, why in (
        ({"width": 12}, "size: 12x32"),
        ({"steps": PICTURE_STEPS_MAX + 1}, "num_inference_steps"),
        ({"kind": "image"}, "source"),
    ):
        assert why in str(await worker.refusal(draw(oracle, **change)))
    await worker.accepted(last := draw(oracle))
    assert (await worker.mesh.ended(last.request_id)).finish == "stop"


async def test_a_picture_is_cancelled_between_two_steps(start: Start, oracles: Oracles) -> None:
    oracle = oracles("sd15")
    worker = await start(model=str(oracle.model_dir), engine="images")
    worker.slow_down(0.02)
    await worker.accepted(request := draw(oracle, steps=90))
    await eventually(lambda: len(worker.mesh.items(request.request_id)) > 2)
    await worker.control(Cancel(request_id=request.request_id, epoch=0))
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "cancelled" and 2 < end.index < 90


async def test_a_long_picture_sends_checkpoints_from_which_another_worker_continues(start: Start, oracles: Oracles) -> None:
    oracle = oracles("sd15")
    first = await start(model=str(oracle.model_dir), engine="images")
    first.slow_down(0.06)
    options = {"steps": 60, "sampler": "dpmpp_2m"}
    await first.accepted(request := draw(oracle, seed=8, **options))
    kept = await eventually(lambda: next((item for item in first.mesh.items(request.request_id) if item.state), None))
    done = kept.index + len(kept.tokens)
    end = await first.mesh.ended(request.request_id)
    second = await start(model=str(oracle.model_dir), engine="images")
    resumed = msgspec.structs.replace(
        draw(oracle, seed=8, state=kept.state, state_step=done, **options), epoch=1, output=pack_tokens(range(done + 1))
    )
    await second.accepted(resumed)
    again = await second.mesh.ended(resumed.request_id, 1)
    assert second.mesh.items(resumed.request_id, 1)[0].index == done + 1
    assert np.abs(pixels(again.picture) - pixels(end.picture)).max() <= 2


async def test_a_worker_of_an_inpainting_base_redraws_what_the_mask_says(start: Start, oracles: Oracles) -> None:
    oracle = oracles("sd2")
    worker = await start(model=str(oracle.model_dir), engine="images")
    request = msgspec.structs.replace(draw(oracle, kind="inpaint"), images=[SOURCE, MASK])
    await worker.accepted(request)
    assert pixels((await worker.mesh.ended(request.request_id)).picture).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantization": "int8"}, "--quantization"),
        ({"load_format": "dummy"}, "--load-format"),
        ({"merge": "on"}, "--merge on"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_options_that_an_image_engine_does_not_have_are_refused_by_name(options: dict[str, str], why: str) -> None:
    config = WorkerConfig.of(model="somewhere", engine="images", **options)
    with pytest.raises(ConfigError, match=why):
        open_engine(config, Path("somewhere"), Wiring(lambda _: None, None))  # type: ignore[arg-type]
