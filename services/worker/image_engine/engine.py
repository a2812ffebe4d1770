"""The image engine: requests of any adapters, weights, samplers and step counts in one denoising batch.

    add ──> encode ──> denoise, step by step ──> decode ──> the picture

`policies.step.image_batch` plans each step: it encodes new requests, takes one denoising step of requests of one size, or
decodes pictures that are ready. A denoising step is an output position, and the picture is one more. Between two steps a
request is its latents, so any request may sit out any step, and adapters are copied meanwhile (`device_adapters`).

Single-threaded like the native engine. An error of one request ends that request only: a source picture that cannot be read, or
latents that are not finite. A forward pass that fails ends the requests in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

import numpy as np

from motet.policies.step.image_batch import ImageBatch, ImageBatchLimits, ImagePlan, due_s
from motet.policies.times.image_times import Bucket, ImageTimes
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.protocol import DRAWS
from motet.services.worker.engines.request import DrawingStats, EngineRequest, StepOutput, StepStats
from motet.services.worker.image_engine import samplers
from motet.services.worker.image_engine.device_adapters import DeviceAdapters
from motet.services.worker.image_engine.drawing import Drawing
from motet.services.worker.image_engine.passes import Passes
from motet.services.worker.image_engine.pictures import write_picture
from motet.shared.clip_tokenizer import PART_TOKENS, PARTS_MAX
from motet.shared.clock import now_s as clock_s
from motet.shared.errors import BadRequest, InvalidAdapter, MotetError
from motet.shared.model import Capability, ImageParams, RequestBrief, WorkerLimits
from motet.shared.telemetry import logger
from motet.shared.wire.request import TOKEN_BYTES
from motet.shared.wire.stream import Picture, StreamItem

log = logger("motet.worker.engine")
COPY_BYTES = 8 << 20
"""What is copied of adapters between two steps, while there is something to compute."""
IDLE_COPY_BYTES = 64 << 20
KEEP_S = 0.5
"""Least time between two checkpoints of a request: about as much is drawn again when its worker dies."""


class ImageEngine:
    """One image model, many requests.

    `batch`: which of them step together. `worker`: its limits, whose KV blocks are what requests of full length would take.
    `keep_s`: least time between two checkpoints of a request. `describe` gives what is written into a picture's file.
    """

    def __init__(
        self,
        passes: Passes,
        adapters: DeviceAdapters,
        limits: ImageBatchLimits,
        worker: WorkerLimits,
        *,
        describe: Callable[[EngineRequest], dict[str, str]] = lambda _: {},
        keep_s: float = KEEP_S,
    ) -> None:
        self.pause_s = 0.0
        self._passes, self._adapters, self._worker = passes, adapters, worker
        self.batch: ImageBatch[Drawing] = ImageBatch(limits, slots=adapters.slots, times=ImageTimes())
        self._describe, self._keep_s = describe, keep_s
        self._order = count()
        self._output = StepOutput()
        self._changed: dict[str, RequestBrief] = {}
        adapters.slots.waited = self._wanted

    # ---- the thread's side (`engines.thread.SteppedEngine`)

    @property
    def serves(self) -> frozenset[Capability]:
        """It draws."""
        return DRAWS

    @property
    def kv_blocks_free(self) -> int:
        """There are no KV blocks; each request here counts as one of full length, so there is room for all that may come."""
        return max(0, self._worker.kv_blocks_total - len(self.batch) * self._worker.max_model_len)

    @property
    def adapter_bytes_free(self) -> int:
        """Empty memory for adapters."""
        return self._adapters.slots.bytes_free

    def take_prefixes(self) -> None:
        """Nothing is cached that other requests could use."""

    def has_work(self) -> bool:
        """Whether `step` would compute or report anything."""
        return bool(len(self.batch) or self._adapters.copying or self._adapters.changes or not self._output.empty)

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request. Raises BadRequest naming the field, or InvalidAdapter, if it cannot be drawn here."""
        drawing = self._made(request)
        if not self.batch.fits(drawing.adapters):
            needed, slots = sum(size_bytes for _, size_bytes in drawing.adapters), self._adapters.slots
            raise InvalidAdapter(
                f"adapters: {len(drawing.adapters)} with {needed} bytes; the device has room for {slots.slots} (--max-loras)"
                f" with {slots.bytes_total} bytes in all",
                param="adapters",
            )
        self.batch.add(drawing)
        self._changed[request.request_id] = drawing.brief()

    def cancel(self, request_id: str, epoch: int) -> bool:
        """Stop the request of this id if its epoch is `epoch` or older; its last item says "cancelled"."""
        drawing = next((one for one in self.batch if one.request.request_id == request_id), None)
        if drawing is None or drawing.request.epoch > epoch:
            return False
        self._end(drawing, drawing.request.item(drawing.reported, "cancelled"))
        return True

    def load_adapter(self, adapter: HostAdapter, over: Collection[str] | None = None) -> bool:
        """Copy an adapter that no request has asked for, if there is room. Returns whether it is there or comes."""
        if over is not None and any(drawing.stage == "encode" for drawing in self.batch):
            return adapter.digest in self._adapters.slots
        return self._adapters.prefetch(adapter, over)

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Pin these adapters, and no others."""
        self._adapters.slots.pinned = digests

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        """End the requests with this adapter, and take it off the device."""
        for drawing in [one for one in self.batch if digest in [name for name, _ in one.adapters]]:
            self._fail(drawing, error)
        self.unload_adapter(digest)

    def unload_adapter(self, digest: str) -> bool:
        """Take an adapter off the device when no request holds it. Returns whether it is gone."""
        self._adapters.unload(digest)
        return digest not in self._adapters.slots

    def abort_all(self, error: MotetError) -> StepOutput:
        """End every request with `error`."""
        for drawing in self.batch:
            self._fail(drawing, error)
        return self._take_output()

    def check(self) -> None:
        """Assert that slots, copies and requests agree."""
        self.batch.check()
        self._adapters.check()
        ids = [drawing.request.request_id for drawing in self.batch]
        assert len(set(ids)) == len(ids), "two requests of one id"

    def forget_times(self) -> None:
        """Forget the times of the steps so far: those of a cold process say nothing about the next ones."""
        self.batch.times = ImageTimes()

    def close(self) -> None:
        """Nothing runs beside the steps."""

    # ---- a step

    def step(self, now_s: float) -> StepOutput:
        """Encode, or take one denoising step, or decode; or only copy adapters and report."""
        stats = self._output.stats
        plan = self.batch.plan(now_s)
        self._move_adapters(plan)
        self._adapters.advance(COPY_BYTES if plan.requests else IDLE_COPY_BYTES)
        if plan.requests:
            self._run(plan, stats)
        self._adapters.sweep()
        if not len(self.batch):
            self._passes.forget()
        stats.running = sum(drawing.stage != "encode" for drawing in self.batch)
        stats.waiting = len(self.batch) - stats.running
        return self._take_output()

    def _move_adapters(self, plan: ImagePlan[Drawing]) -> None:
        """Carry out the plan's evictions, and begin its copies. An adapter that the pool cannot take ends its requests."""
        for digest, slot in plan.evictions:
            self._adapters.left(digest, slot)
        for drawing, digest, slot in plan.loads:
            adapter = next(one for one in drawing.request.copies if one.digest == digest)
            try:
                self._adapters.begin(slot, adapter)
            except Exception as error:
                answer = MotetError(f"adapter {digest} could not be loaded: {type(error).__name__}: {error}", param="model")
                log.exception("adapter not loaded", extra={"digest": digest})
                for holder in [one for one in self.batch if one.holds and any(digest == name for name, _ in one.adapters)]:
                    self._fail(holder, answer)
                self._adapters.slots.drop(digest)

    def _run(self, plan: ImagePlan[Drawing], stats: StepStats) -> None:
        assert plan.stage is not None, "it has requests"
        began_s, image = clock_s(), plan.requests[0].image
        stats.drawing = told = DrawingStats(plan.stage, image.width * image.height, len(plan.requests))
        try:
            if plan.stage == "encode":
                self._encode(plan, stats, began_s)
            elif plan.stage == "decode":
                self._decode(plan, began_s)
            else:
                self._denoise(plan, stats, told, began_s)
        except Exception as error:  # whatever it was, its requests must be answered and the others served
            self._output.failure, told.pictures = error, 0
            here = set(self.batch)
            for drawing in plan.requests:
                if drawing in here:
                    self._fail(drawing, MotetError(f"the engine step failed: {type(error).__name__}: {error}"))
        told.took_s = clock_s() - began_s

    def _encode(self, plan: ImagePlan[Drawing], stats: StepStats, began_s: float) -> None:
        self._passes.encode(plan.requests)
        for drawing in plan.requests:
            drawing.encoded_s = drawing.kept_s = clock_s()
            try:
                self._passes.prepare(drawing)
            except MotetError as error:
                self._fail(drawing, error)
        self.batch.done(plan, (clock_s() - began_s) * 1000)
        for drawing in plan.requests:
            if drawing.stage != "encode":
                self._changed[drawing.request.request_id] = drawing.brief()
        stats.prefill_requests = len(plan.requests)
        stats.prefill_tokens = sum(drawing.request.prompt_tokens for drawing in plan.requests)
        stats.prefill_rank_sum, stats.prefill_max_rank = _ranks(plan.requests)

    def _denoise(self, plan: ImagePlan[Drawing], stats: StepStats, told: DrawingStats, began_s: float) -> None:
        self._count(stats, plan.requests)
        finite = self._passes.denoise(plan.requests)
        for drawing, fine in zip(plan.requests, finite, strict=True):
            if not fine:
                at = f"step {drawing.step + 1} of {drawing.steps}"
                self._fail(drawing, MotetError(f"the latents are not finite after {at}"))
        now_s = clock_s()
        self.batch.done(plan, (now_s - began_s) * 1000)
        told.rows, told.knee_rows = plan.rows, self.batch.rows_limit(plan.requests[0].bucket)
        for drawing, fine in zip(plan.requests, finite, strict=True):
            if fine and drawing.step > drawing.reported:
                item = self._step_item(drawing, now_s)
                self._emit(drawing, item)
                told.checkpoint_bytes += len(item.state)
                told.previews += item.picture is not None

    def _step_item(self, drawing: Drawing, now_s: float) -> StreamItem:
        """The item of a step, with a checkpoint or a preview where one is due."""
        item = drawing.item()
        if drawing.preview_due:
            item.picture = self._picture(drawing, self._passes.preview(drawing), preview=True)
        if now_s - drawing.kept_s >= self._keep_s:
            item.state, drawing.kept_s = drawing.state(), now_s
        return item

    def _decode(self, plan: ImagePlan[Drawing], began_s: float) -> None:
        pictures = self._passes.decode(plan.requests)
        for drawing, pixels in zip(plan.requests, pictures, strict=True):
            item = drawing.item("stop")
            item.picture = self._picture(drawing, pixels, preview=False)
            self._end(drawing, item)
        self.batch.done(plan, (clock_s() - began_s) * 1000)

    def _picture(self, drawing: Drawing, pixels: np.ndarray, *, preview: bool) -> Picture:
        image, height, width = drawing.image, *pixels.shape[:2]
        told = self._describe(drawing.request) if image.metadata and not preview else None
        data = write_picture(pixels, image.format, image.quality, told)
        return Picture(data, image.format, width, height, preview, drawing.seed)

    # ---- requests

    def _made(self, request: EngineRequest) -> Drawing:
        image, checkpoint = request.image, self._passes.model.checkpoint
        if image is None:
            raise BadRequest("this worker's model draws images, and the request asks for text", param="model")
        table = samplers.table(checkpoint.noise, image.sampler, image.steps)
        _check(request, image, checkpoint.multiple_px, inpaints=checkpoint.inpaints)
        parts = max(_parts(name, data) for name, data in _texts(request, image))
        latent_px = checkpoint.latent_px
        return Drawing(
            order=next(self._order),
            bucket=Bucket(image.height // latent_px, image.width // latent_px, text_tokens=parts * PART_TOKENS),
            rows=2 if image.guided else 1,
            steps=image.steps_run,
            adapters=tuple((one.digest, self._adapters.size_bytes(one)) for one in request.copies),
            request=request,
            image=image,
            table=table,
            parts=parts,
            resumed=request.output_tokens > 0,
            pictures=image.pictures,
            arrival_s=request.arrival_s,
            due_s=due_s(request.slo, request.arrival_s),
            reported=min(request.output_tokens, image.steps_run),
        )

    def _wanted(self) -> Collection[str]:
        """The adapters that waiting requests need."""
        return {digest for drawing in self.batch if not drawing.holds for digest, _ in drawing.adapters}

    def _emit(self, drawing: Drawing, item: StreamItem) -> None:
        self._output.items.setdefault(drawing.request.gateway_id, []).append(item)

    def _fail(self, drawing: Drawing, error: MotetError) -> None:
        self._end(drawing, drawing.request.item(drawing.reported, "error", error=error))

    def _end(self, drawing: Drawing, item: StreamItem) -> None:
        self._emit(drawing, item)
        self.batch.remove(drawing)
        self._changed.pop(drawing.request.request_id, None)

    def _count(self, stats: StepStats, drawings: Sequence[Drawing]) -> None:
        """What the step's duration depends on. Rows are fractions of whole ones, as in `RequestBrief.rows`."""
        rows: Any = sum(drawing.image.rows for drawing in drawings)
        stats.decode_rows = rows
        stats.decode_rank_sum, stats.decode_max_rank = _ranks(drawings)
        stats.row_rank_sum = stats.decode_rank_sum
        used = dict(adapter for drawing in drawings for adapter in drawing.adapters)
        stats.distinct_adapters, stats.adapter_bytes = len(used), sum(used.values())
        stats.sampled = len(drawings)

    def _take_output(self) -> StepOutput:
        out, self._output = self._output, StepOutput()
        out.residency, self._adapters.changes = self._adapters.changes, []
        out.changed = list(self._changed.values())
        self._changed.clear()
        if not out.empty:
            out.stats.copies = self._adapters.stats()
        out.stats.adapters_loaded, self._adapters.arrived = self._adapters.arrived, 0
        return out


def _check(request: EngineRequest, image: ImageParams, multiple_px: int, *, inpaints: bool) -> None:
    """Raise BadRequest for what the base cannot draw. `inpaints`: the base reads a mask."""
    for name, size in (("width", image.width), ("height", image.height)):
        if size < multiple_px or size % multiple_px:
            near = max(multiple_px, round(size / multiple_px) * multiple_px)
            raise BadRequest(f"{name} is {size}: multiples of {multiple_px} are possible, such as {near}", param="size")
    if inpaints and image.kind != "inpaint":
        raise BadRequest("this base redraws parts of pictures: a source picture and a mask are expected", param="image")
    needed = 0 if image.kind == "text" else 1
    if not needed <= len(request.images) <= 2 * needed:
        raise BadRequest(f"{len(request.images)} pictures came with a request of kind {image.kind!r}", param="image")
    if not image.steps_run:
        raise BadRequest(f"strength {image.strength} leaves none of the {image.steps} steps", param="strength")


def _texts(request: EngineRequest, image: ImageParams) -> tuple[tuple[str, bytes], ...]:
    """The texts of a request by the fields' names."""
    second = ("prompt", image.prompt_2), ("negative_prompt", image.negative_2)
    return ("prompt", request.prompt), ("negative_prompt", image.negative), *second


def _parts(name: str, data: bytes) -> int:
    """The number of parts of a text, at least one. Raises BadRequest for too many, and for a part that is not whole."""
    parts, rest = divmod(len(data), PART_TOKENS * TOKEN_BYTES)
    if rest:
        raise BadRequest(f"{name} has {len(data) // TOKEN_BYTES} tokens: whole parts of {PART_TOKENS} are expected", param=name)
    if parts > PARTS_MAX:
        raise BadRequest(f"{name} has {parts} parts, {PARTS_MAX} at most are served", param=name)
    return max(1, parts)


def _ranks(drawings: Sequence[Drawing]) -> tuple[Any, int]:
    """(sum over requests of rows times ranks, largest rank)."""
    ranks = [(drawing.image.rows, [one.ref.rank for one in drawing.request.weighted]) for drawing in drawings]
    return sum(rows * sum(some) for rows, some in ranks), max((rank for _, some in ranks for rank in some), default=0)
