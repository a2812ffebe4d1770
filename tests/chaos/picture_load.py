"""The pictures of a chaos run: streams with every step and previews, whole answers, and durable requests over NATS.

Every detail of a request is fixed, so its picture is, too. A client insists: it asks again when it was refused, or when its
gateway died, until it has the picture or `ASK_S` are over.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import aiohttp
import numpy as np
import orjson
from nats import errors as nats_errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js import errors as js_errors
from PIL import Image

from motet.examples.demo_images.scenes import CAPTIONS, SIDE_PX
from motet.shared import subjects
from motet.shared.bus import decode
from motet.shared.clock import now_s
from motet.shared.model import Sampler
from motet.shared.wire.request import TOKEN_BYTES, GenerateRequest
from tests.chaos.load import ASK_S, PAUSE_S, Ask, Attempt, Durable, DurableLoad

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
WEIGHTS = (1.0, 0.8, 0.6)
STRENGTH = 0.8
_STEP = re.compile(rb"^: step (\d+)/(\d+)$", re.M)

Way = Literal["steps", "whole", "durable"]
Pixels = np.ndarray  # uint8 [height, width, 3]


@dataclass(frozen=True)
class Steps:
    """The range of a picture's denoising steps."""

    least: int
    most: int


def make_pictures(count: int, adapters: list[str], base: str, steps: Steps, *, seed: int) -> list[Ask]:
    """Requests with no adapter to four, with every sampler, with and without guidance; some change or redraw a source."""
    draw = random.Random(seed)
    samplers = get_args(Sampler)
    asks = []
    for i in range(count):
        number = draw.choice([0, 1, 1, 1, 2, 2, 3, 4])
        named = draw.sample(adapters, number)
        body: dict[str, Any] = {
            "model": base,
            "prompt": str(draw.choice(CAPTIONS)),
            "adapters": [{"name": name, "weight": draw.choice(WEIGHTS)} for name in named],
            "sampler": samplers[i % len(samplers)],
            "guidance_scale": 1.0 if i // len(samplers) % 4 == 0 else draw.choice([1.5, 2.0, 3.0]),
            "num_inference_steps": draw.randint(steps.least, steps.most),
            "seed": 1000 + i,
        }
        if i % 7 == 3:
            body |= {"image": data_url(_source(draw), "RGB"), "strength": STRENGTH}
        elif i % 7 == 5:
            body |= {"image": data_url(_source(draw), "RGB"), "mask": data_url(_mask(), "RGBA")}
        asks.append(Ask(EDITS if "image" in body else GENERATIONS, body))
    return asks


def _source(draw: random.Random) -> Pixels:
    """Two colours with an edge between them."""
    pixels = np.empty((SIDE_PX, SIDE_PX, 3), np.uint8)
    pixels[:] = [draw.randrange(256) for _ in range(3)]
    pixels[draw.randrange(8, 24) :] = [draw.randrange(256) for _ in range(3)]
    return pixels


def _mask() -> np.ndarray:
    mask = np.full((SIDE_PX, SIDE_PX, 4), 255, np.uint8)
    mask[8:24, 8:24, 3] = 0
    return mask


def data_url(pixels: np.ndarray, mode: str) -> str:
    """The pixels as a PNG in a data URL."""
    with io.BytesIO() as file:
        Image.fromarray(pixels, mode).save(file, "png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def pixels_of(data: bytes) -> Pixels:
    """The pixels of a PNG."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def steps_run(ask: Ask) -> int:
    """The denoising steps that a request runs."""
    steps = int(ask.body["num_inference_steps"])
    return int(steps * ask.body["strength"]) if "strength" in ask.body else steps


@dataclass
class Shown:
    """What came of one request: the picture, and the previews of a stream. `twice`: what came more than once."""

    picture: Pixels
    previews: list[Pixels] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    def difference(self, other: Shown) -> int:
        """The largest difference of a value of a pixel, of 255. Previews that one of the two lacks are not compared."""
        pairs = [(self.picture, other.picture), *zip(self.previews, other.previews, strict=False)]
        return max(int(np.abs(one.astype(int) - two.astype(int)).max()) for one, two in pairs)


def shown_of_stream(data: bytes, ask: Ask, previews: int) -> Shown:
    """What a stream with `x-motet-progress` shows. Raises ValueError if it is not complete."""
    twice, total = [], steps_run(ask)
    told = [(int(step), int(of)) for step, of in _STEP.findall(data)]
    steps = [step for step, _ in told]
    twice += [f"step {b} after step {a}" for a, b in itertools.pairwise(steps) if b <= a]
    parts: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    for block in data.split(b"\n\n"):
        line = block.split(b"\n")[-1]
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"]))
        (parts if event["type"].endswith(".partial_image") else pictures).append(event)
    if not pictures or b"data: [DONE]" not in data:
        raise ValueError("the stream ended without a picture")
    if not told or told[-1] != (total, total):
        raise ValueError(f"the last of {total} steps was not told: {told[-1:]}")
    numbers = [event["partial_image_index"] for event in parts]
    if missing := set(range(previews)).difference(numbers):
        raise ValueError(f"previews {sorted(missing)} of {previews} are missing")
    twice += [f"{len(pictures)} pictures"] if len(pictures) > 1 else []
    twice += [f"preview {number} came {count} times" for number, count in Counter(numbers).items() if count > 1]
    made = [pixels_of(base64.b64decode(event["b64_json"])) for event in parts]
    return Shown(pixels_of(base64.b64decode(pictures[0]["b64_json"])), made, twice)


def shown_of_answer(data: bytes) -> Shown:
    """The picture of a whole answer. Raises ValueError if there is none."""
    found = orjson.loads(data)["data"]
    twice = [f"{len(found)} pictures"] if len(found) > 1 else []
    return Shown(pixels_of(base64.b64decode(found[0]["b64_json"])), twice=twice)


class Pictures:
    """Clients that ask for pictures over HTTP, each attempt at the next gateway. `previews`: of every stream."""

    def __init__(self, urls: list[str], asks: list[Ask], *, previews: int) -> None:
        self._urls, self.asks, self.previews = urls, asks, previews
        self.attempts: list[Attempt] = []
        self.shown: dict[int, Shown] = {}  # by `id` of the attempt, which `attempts` keeps
        self._turn = 0
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=ASK_S)
        )

    async def close(self) -> None:
        await self._session.close()

    async def insist(self, i: int, way: Way) -> Attempt:
        """Ask until there is a picture, or the stream of an attempt is lost. Returns the last attempt."""
        deadline = now_s() + ASK_S
        while True:
            attempt = await self.ask(i, way)
            if attempt.outcome in ("done", "lost") or now_s() > deadline:
                return attempt
            await asyncio.sleep(PAUSE_S)  # time: a pause after an error

    async def ask(self, i: int, way: Way) -> Attempt:
        """One request, followed to its end."""
        ask, gateway = self.asks[i], self._turn % len(self._urls)
        self._turn += 1
        attempt = Attempt(i, gateway, now_s())
        self.attempts.append(attempt)
        body, headers = ask.body, {}
        if way == "steps":
            body, headers = body | {"stream": True, "partial_images": self.previews}, {"x-motet-progress": "1"}
        try:
            async with self._session.post(self._urls[gateway] + ask.path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    attempt.outcome, attempt.reason = "refused", f"{answer.status}: {(await answer.text())[:200]}"
                    return attempt
                attempt.request_id = answer.headers["x-request-id"]
                async for data in answer.content.iter_any():
                    attempt.chunks.append((now_s(), data))
            whole = b"".join(data for _, data in attempt.chunks)
            self.shown[id(attempt)] = shown_of_stream(whole, ask, self.previews) if way == "steps" else shown_of_answer(whole)
            attempt.outcome = "done"
        except aiohttp.ClientConnectorError as error:
            attempt.outcome, attempt.reason = "refused", repr(error)
        except aiohttp.ClientError as error:
            attempt.outcome, attempt.reason = "broken", repr(error)
        except (ValueError, KeyError, OSError) as error:
            attempt.outcome, attempt.reason = "lost", repr(error)
        except TimeoutError:
            attempt.outcome, attempt.reason = "lost", f"no end within {ASK_S:g} s"
        finally:
            attempt.ended_s = now_s()
        return attempt

    def flowing(self) -> int:
        """Streams that have told of a step and are not at their end."""
        return sum(1 for one in self.attempts if one.outcome is None and steps_only(one).chunks)


def steps_only(attempt: Attempt) -> Attempt:
    """The attempt with those chunks alone that tell of new steps."""
    return replace(attempt, chunks=[(at_s, data) for at_s, data in attempt.chunks if _STEP.search(data)])


class DurablePictures(DurableLoad):
    """Durable requests for pictures; their results name objects."""

    def __init__(self, nats: NatsClient, asks: list[Ask], tenants: tuple[str, ...]) -> None:
        super().__init__(nats, [replace(ask, body=ask.body | {"kind": "image"}) for ask in asks], tenants, 0, seed=0)

    async def picture_of(self, one: Durable) -> Pixels:
        """The picture that a result names. Raises ValueError for an error, or for an object that is not what it names."""
        result = one.result or {}
        if result.get("status") != "ok":
            raise ValueError(str(result.get("error")))
        (told,) = result["response"]["data"]
        try:
            store = await self._js.object_store(told["bucket"])
            data = (await store.get(told["object"])).data or b""
        except (js_errors.Error, nats_errors.Error, TimeoutError) as error:
            raise ValueError(f"{told['object']} cannot be read: {error!r}") from None
        if len(data) != told["bytes"] or hashlib.sha256(data).hexdigest() != told["sha256"]:
            raise ValueError(f"{told['object']} is not what the result says")
        return pixels_of(data)


class RepeatedSteps:
    """Counts the denoising steps that are run again: their gateway has received them, but its checkpoint is older."""

    def __init__(self) -> None:
        self._repeated: dict[tuple[str, int], int] = {}  # (request, epoch): steps
        self.kept: dict[tuple[str, int], int] = {}  # (request, epoch): steps that it had behind it

    async def listen(self, nats: NatsClient) -> None:
        """Hear every assignment."""
        await nats.subscribe(subjects.assign("*"), cb=self._hear)

    async def _hear(self, message: Msg) -> None:
        request = decode(message.data, GenerateRequest)
        if request.image is None or not request.epoch:
            return
        done = min(len(request.output) // TOKEN_BYTES, request.image.steps_run)
        key = request.request_id, request.epoch
        self.kept[key], self._repeated[key] = done, done - request.image.state_step

    @property
    def steps(self) -> int:
        """All that were repeated."""
        return sum(self._repeated.values())
