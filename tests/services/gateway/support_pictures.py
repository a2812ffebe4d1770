"""An image base without weights, a gateway of it before scripted workers that draw, and small pictures."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from motet.examples.demo_images.model_files import scheduler_config, vae_config, write_tokenizer
from motet.shared.bus import Bus
from motet.shared.model import ImageParams, PictureFormat
from motet.shared.provision import provision
from motet.shared.wire.request import GenerateRequest
from motet.shared.wire.stream import Picture
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, FakeScheduler, put_adapter, running_gateway, start_workers
from tests.support import eventually
from tests.support_images import TINY, write_checkpoint
from tests.support_worker import FakeWorker

DIVISOR_PX = 16  # of the family sd15 in `TINY`: three blocks of the UNet and three of the autoencoder
NATIVE_PX = 32


def write_image_base(directory: Path, family: str = "sd15", pad: str = "") -> Path:
    """A tiny checkpoint as gateways read it: configurations and tokenizers. `pad`: the pad token of `tokenizer_2`."""
    index, parts = TINY[family]
    names = [name for name in ("tokenizer", "tokenizer_2") if name.replace("tokenizer", "text_encoder") in parts]
    index = index | {name: ["transformers", "CLIPTokenizer"] for name in names}
    parts = parts | {"vae": vae_config(), "unet": parts["unet"] | {"sample_size": NATIVE_PX // 4}}
    write_checkpoint(directory, index, parts)
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(scheduler_config() | {"_class_name": "EulerDiscreteScheduler"})
    )
    for name in names:
        write_tokenizer(directory / name)
        if pad and name == "tokenizer_2":
            for file in ("tokenizer_config.json", "special_tokens_map.json"):
                told = json.loads((directory / name / file).read_text())
                (directory / name / file).write_text(json.dumps(told | {"pad_token": pad}))
    return directory


def file_of(
    kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (NATIVE_PX, NATIVE_PX), colour: Any = None, **how: Any
) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    Image.new(mode, size, colour if colour is not None else 0).save(file, kind, **how)
    return file.getvalue()


def hole(size: tuple[int, int] = (NATIVE_PX, NATIVE_PX)) -> bytes:
    """A mask whose left half is transparent."""
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, size[0] // 2, size[1]))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


def image_of(request: GenerateRequest) -> ImageParams:
    assert request.image is not None
    return request.image


def picture(request: GenerateRequest, data: bytes | None = None, *, preview: bool = False) -> Picture:
    """What a worker sends for this request: a file that tells pictures apart by their seed."""
    asked = image_of(request)
    form: PictureFormat = asked.format
    data = data if data is not None else f"{'preview' if preview else 'picture'} {request.sampling.seed}".encode()
    return Picture(data, form, asked.width, asked.height, preview, request.sampling.seed)


async def paint(worker: FakeWorker, request: GenerateRequest, *, begun: int = 0, data: bytes | None = None) -> None:
    """Send the steps from `begun` on, and the picture."""
    steps = image_of(request).steps_run
    for step in range(begun, steps):
        await worker.emit(request, step, [step])
    await worker.emit(request, steps, [steps], "stop", picture=picture(request, data))


@asynccontextmanager
async def drawing_mesh(
    connect: Connect, bus: Bus, nats_url: str, tmp_path: Path, *, family: str = "sd15", **options: Any
) -> AsyncIterator[Mesh]:
    """A gateway of an image base "demo", before the workers `w1` and `w2` and with the adapters `sepia` and `frame`."""
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    model = write_image_base(tmp_path / "demo", family)
    workers = await start_workers(connect, "w1", "w2", capabilities=("draws",), engine="images")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    for name in ("sepia", "frame"):
        await put_adapter(bus, name)
    async with running_gateway(nats_url, tmp_path, model=str(model), **options) as gateway:
        await eventually(lambda: not gateway.not_ready() and gateway.adapters.resolve("frame"))
        yield Mesh(gateway, scheduler, workers, bus)
