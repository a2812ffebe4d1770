"""A simulated image engine: what services/worker/image_engine does from one step to the next, under the virtual clock.

    plan ─> encode, or one denoising step, or decode ─> done ─> plan ...

`policies.step.image_batch` plans. What takes time are steps (`twin.image_steps`) and copies to the device (`twin.link`), which
run beside the steps. A denoising step is an output token, and the picture is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

from msgspec.structs import replace

from motet.policies.step.image_batch import ImageBatch, ImagePlan, due_s
from motet.policies.times.image_times import Bucket
from motet.policies.worker.assemble import DeviceMemory, image_slots
from motet.policies.worker.worker_events import Stepped
from motet.shared.model import AdapterRef, ImageParams, RequestBrief
from motet.twin.engine import Shell
from motet.twin.events import STEP, Events, to_ps
from motet.twin.image_steps import ImageStepModel, measured_times
from motet.twin.link import DeviceLink
from motet.twin.metrics import Metrics
from motet.twin.run import Drawn
from motet.twin.worker_spec import ImageSpec, WorkerSpec
from motet.twin.workload import Request

IDLE_COPY_BYTES = 64 << 20
"""What an engine that has nothing to compute copies before it looks again."""


def drawn(spec: ImageSpec, request: Request, image: ImageParams, brief: RequestBrief, now_s: float, before: Any) -> Drawn:
    """A request in the state in which an engine gets it, from its scheduler or, after `before`, from another worker."""
    latent_px = spec.steps.latent_px
    return Drawn(
        order=0,
        bucket=Bucket(image.height // latent_px, image.width // latent_px, text_tokens=max(1, request.prompt_tokens)),
        rows=2 if image.guided else 1,
        steps=image.steps_run,
        step=before.step if before is not None else 0,
        adapters=tuple([(one.digest, one.size_bytes) for one in request.adapters]),
        resumed=before is not None and before.step > 0,
        pictures=image.pictures,
        arrival_s=now_s,
        due_s=due_s(request.slo, now_s),
        request=request,
        brief=brief,
        row_ranks=image.rows * sum([one.rank for one in request.adapters]),
        last_token_ps=before.last_token_ps if before is not None else -1,
    )


class ImageEngine:
    """The image engine of one worker. Commands take effect between two steps; `wake` follows them.

    Raises ValueError for a worker whose link is not known.
    """

    def __init__(self, spec: WorkerSpec, events: Events, metrics: Metrics, shell: Shell) -> None:
        if spec.images is None or spec.link is None:
            raise ValueError("an image worker copies adapters beside its steps: its steps and its link are expected")
        self._spec, self._events, self._metrics, self._shell = spec, events, metrics, shell
        self._model, self._link_model = ImageStepModel(spec.images.steps), spec.link
        self._link = DeviceLink(spec.link)
        slots = image_slots(DeviceMemory.of(spec.limits), spec.options)
        self.batch: ImageBatch[Drawn] = spec.images.batch(
            self._model.limits, slots=slots, times=measured_times(spec.images.steps)
        )
        slots.waited = self._wanted
        self.max_run = 1
        self.dead = False
        """Killed: nothing that was under way has an effect."""
        self.busy_ps = 0
        self.plans: Callable[[ImagePlan[Drawn]], None] = lambda plan: None
        """Gets each plan that has requests, before its step."""
        self._order = count()
        self._plan: ImagePlan[Drawn] | None = None  # of the present step
        self._began_ps = self._took_ps = 0
        self._serial = 0
        self._woken = False
        self._coming: list[tuple[AdapterRef, Collection[str] | None]] = []
        self._leaving: list[tuple[Drawn, Callable[[Drawn], None]]] = []

    # ---- commands

    @property
    def idle(self) -> bool:
        """Whether no step is running."""
        return self._plan is None

    def add(self, live: Drawn) -> None:
        """A request begins to wait."""
        live.order = next(self._order)
        self.batch.add(live)
        self._woken = True

    def load(self, adapter: AdapterRef, over: Collection[str] | None) -> None:
        """Copy an adapter to the device, as `worker_events.CopyIn` says."""
        self._coming.append((adapter, over))

    def pin(self, digests: Collection[str]) -> None:
        """These adapters, and no others, are evicted after all others."""
        self.batch.slots.pinned = digests

    def preload(self, adapter: AdapterRef) -> None:
        """Put an adapter on the device at once, if there is room without evicting."""
        if adapter.digest not in self.batch.slots and self.batch.slots.prefetch(
            adapter.digest, adapter.size_bytes, evicting=False
        ):
            self.batch.slots.arrived(adapter.digest)
            self._shell.report(Stepped(device=[(adapter.digest, True)]))

    def stop(self, request_id: str, epoch: int, then: Callable[[Drawn], None] = lambda live: None) -> None:
        """A request of this epoch or an older one leaves after the present step, and `then` gets it unless it has ended."""
        leaving = [live for live, _ in self._leaving]
        for live in self.batch:
            if live.brief.request_id == request_id and live.brief.epoch <= epoch and live not in leaving:
                self._leaving.append((live, then))
        if self._plan is None:
            self._hand_over()

    def wake(self) -> None:
        """Look at what the last commands brought: now, or when the present step has ended."""
        if (self._woken or self._coming) and self._plan is None:
            self._begin()
        self._woken = False

    def shorten(self) -> None:
        """Something has arrived; every step is an event of its own."""

    def step_end_ps(self) -> int:
        """When the present step ends; now without one."""
        return self._events.now_ps if self._plan is None else self._began_ps + self._took_ps

    def progress(self) -> Stepped:
        """Free memory, and the steps of all requests, as a snapshot tells them."""
        return Stepped(free=self._free(), progress=[(one.brief.request_id, one.step) for one in self.batch])

    # ---- a step

    def _begin(self) -> None:
        """Plan the next step and schedule its end; or wait for a copy."""
        if self.dead or not (self._shell.busy or self._coming):
            return
        self._look()
        self._bring()
        if not self._shell.busy:
            return
        now_ps = self._events.now_ps
        plan = self.batch.plan(self._events.now_s)
        self._move_adapters(plan)
        self._serial += 1
        if plan.stage is None:
            if queued_ps := self._link.queued_ps:
                look_ps = to_ps(IDLE_COPY_BYTES / self._link_model.bytes_per_s * 1000.0)
                self._events.at(now_ps + max(1, min(queued_ps, look_ps)), STEP, self._resume, self._serial)
            return
        self.plans(plan)
        warm_ps = self._model.step_ps(plan, sum([one.row_ranks for one in plan.requests]))
        took_ps = self._link_model.dragged_ps(warm_ps, self._link.queued_ps)
        self._plan, self._began_ps, self._took_ps = plan, now_ps, took_ps
        self._events.at(now_ps + took_ps, STEP, self._end, self._serial)

    def _resume(self, serial: int) -> None:
        """A copy is complete."""
        if serial == self._serial and self._plan is None:
            self._begin()
            self._shell.announce()

    def _look(self) -> None:
        """Take in the copies that have ended by now."""
        arrived = self._link.advance(self._events.now_ps)
        for digest in arrived:
            self.batch.slots.arrived(digest)
        if arrived:
            self._shell.report(Stepped(device=[(digest, True) for digest in arrived]))

    def _landed(self) -> None:
        if self._plan is None and not self.dead:
            self._look()

    def _bring(self) -> None:
        """Begin the copies that no request has asked for, as `services.worker.image_engine.device_adapters` does."""
        coming, self._coming = self._coming, []
        slots = self.batch.slots
        for adapter, over in coming:
            digest, size_bytes = adapter.digest, adapter.size_bytes
            if digest in slots or (over is not None and (slots.loading or any(one.stage == "encode" for one in self.batch))):
                continue
            grant = (
                slots.prefetch(digest, size_bytes, evicting=digest in slots.pinned)
                if over is None
                else slots.foresee(digest, size_bytes, over)
            )
            if grant is None:
                continue
            self._left(grant.evicted)
            self._link.begin(digest, size_bytes, self._events.now_ps)
            self._events.at(self._events.now_ps + self._link.queued_ps, STEP, self._landed)
            self._metrics.foreseen += over is not None

    def _move_adapters(self, plan: ImagePlan[Drawn]) -> None:
        """Carry out the plan's evictions, and begin its copies."""
        self._left(plan.evictions)
        sizes = {digest: size_bytes for live, _, _ in plan.loads for digest, size_bytes in live.adapters}
        for _, digest, _ in plan.loads:
            self._link.begin(digest, sizes[digest], self._events.now_ps)
        self._metrics.device_loads += len(plan.loads)

    def _left(self, evicted: list[tuple[str, int]]) -> None:
        for digest, _ in evicted:
            self._link.cancel(digest)
        self._metrics.evictions += len(evicted)
        if evicted:
            self._shell.report(Stepped(device=[(digest, False) for digest, _ in evicted]))

    def _end(self, serial: int) -> None:
        """The step is over: count it, end requests, and begin the next one."""
        plan = self._plan
        if plan is None or serial != self._serial or self.dead:
            return
        self._plan = None
        self.busy_ps += self._took_ps
        ended = self.batch.done(plan, self._took_ps / 1e9)
        for live in ended:
            live.complete = True
        if plan.stage == "encode":
            self._encoded(plan.requests)
        else:
            self._drew(plan.requests)
        for live in ended:
            self._metrics.ended(live.request.index, self._events.now_ps, live.steps + 1)
        if ended:
            self._shell.ended(ended)
        if self._leaving:
            self._hand_over()
        if self._plan is None:
            self._begin()
        self._shell.announce_changes()

    def _encoded(self, lives: list[Drawn]) -> None:
        for live in lives:
            live.brief = replace(live.brief, phase="running")
            self._metrics.adapter_admissions += len(live.adapters)
            if live.last_token_ps < 0:
                self._metrics.admitted(live.request.index, self._began_ps)
        self._shell.report(Stepped([live.brief for live in lives]))

    def _drew(self, lives: list[Drawn]) -> None:
        """These requests have drawn an output position: a step, or the picture."""
        now_ps, metrics = self._events.now_ps, self._metrics
        for live in lives:
            if live.last_token_ps < 0:
                metrics.first_token(live.request.index, now_ps)
            else:
                metrics.gaps(now_ps - live.last_token_ps, 0, 1, 1)
            live.last_token_ps = now_ps
        self._shell.drew(lives)

    def _hand_over(self) -> None:
        """Requests leave the engine between two steps."""
        here = set(self.batch)
        leaving, self._leaving = self._leaving, []
        for live, then in leaving:
            if live in here:
                self.batch.remove(live)
                self._shell.report(Stepped(ended=[(live.brief.request_id, live.brief.epoch)]))
                then(live)

    def _free(self) -> tuple[int, int]:
        """KV blocks as if each request had full length, and the bytes of adapter memory that are free."""
        limits = self._spec.limits
        return max(0, limits.kv_blocks_total - len(self.batch) * limits.max_model_len), self.batch.slots.bytes_free

    def _wanted(self) -> Collection[str]:
        """The adapters that waiting requests need."""
        return {digest for live in self.batch if not live.holds for digest, _ in live.adapters}
