"""The Owner: keeps each request of a gateway alive from its submission to its last token, across worker failures.

    open(job) ──> OwnerCore ──Submit──> scheduler ──> worker ──TokenFrame──> OwnerCore ──push──> Stream ──> caller

`policies.owner.owner_core` decides, and contains the rules. This file turns messages and timers into events and carries the
actions out. Nothing here waits for a caller: streams are bounded, and a slow one is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast

import msgspec

from motet.policies.owner.events import (
    Action,
    Answered,
    CancelAt,
    Cancelled,
    Ended,
    Event,
    MoveAsked,
    Newcomer,
    Over,
    Parked,
    Pause,
    PauseOver,
    Placed,
    Refused,
    Regained,
    Submit,
    Submitted,
    Tick,
    Told,
    Trouble,
    WorkerGone,
)
from motet.policies.owner.owner_core import OwnerCore
from motet.policies.owner.recent_refusals import Kind, RecentRefusals
from motet.policies.tenant_shares import TenantShares
from motet.services.gateway import metrics
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.encoding import ANSWERS_BYTES_MAX
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.made_by import MadeBy, made_by
from motet.services.gateway.owner.observe import observe
from motet.services.gateway.owner.parked import ParkedRequests
from motet.services.gateway.owner.pictures import Pictures
from motet.services.gateway.owner.pings import Pings
from motet.services.gateway.owner.stream import Job, Signal, SlowReader, Stream
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import (
    Conflict,
    DeadlineExceeded,
    MotetError,
    Overloaded,
    Unavailable,
    WorkerFull,
    WorkerLost,
    from_info,
)
from motet.shared.leases import LeaseHolder, LeaseWatch
from motet.shared.model import KvOffer
from motet.shared.telemetry import logger
from motet.shared.wire import refusal
from motet.shared.wire.prediction import Outcome
from motet.shared.wire.request import Cancel, GenerateRequest, Move, SubmitReply, pack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame

log = logger("motet.owner")
WATCH_S = 0.1
IMAGE_BYTES_MAX = 256 << 20
STATE_BYTES_MAX = 256 << 20  # of checkpoints of pictures
ROOM_BYTES = 64 << 10  # of a message, for all that is not images or a checkpoint
UNREAD_BYTES_MAX = 128 << 20  # of tokens that are ready for callers which do not take them


def trouble_of(error: MotetError) -> Trouble:
    """What an error means to the owner of a request."""
    match error:
        case WorkerLost():
            return Trouble("lost", error.code, error)
        case WorkerFull():
            return Trouble("declined", error.code, error)
        case Overloaded():
            return Trouble("overloaded", error.code, error)
        case Unavailable():
            return Trouble("unavailable", error.code, error)
        case DeadlineExceeded():
            return Trouble("late", error.code, error)
    return Trouble("final", error.code, error)


class Owner:
    """Owns the requests of a gateway process. HTTP and the durable intake share it and its limits."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        detokenizer: Detokenizer,
        *,
        gateway_id: str,
        base_model: str,
        max_inflight: int,
        stream_buffer_tokens: int,
        park_s: float = 0.0,
        parked_max: int = 1,
    ) -> None:
        self.gateway_id = gateway_id
        self.draining = False
        self.detokenizer = detokenizer
        self._bus, self._fleet, self._base_model = bus, fleet, base_model
        self._max_inflight, self._buffer_tokens = max_inflight, stream_buffer_tokens
        self._core = OwnerCore(
            self,
            trouble=lambda info: trouble_of(from_info(info)),
            lost=lambda reason: trouble_of(WorkerLost(reason)),
            park_s=park_s,
        )
        self._parked = ParkedRequests(bus, fleet, gateway_id, parked_max)
        self._early: set[Stream] = set()  # whose callers go on when they are parked
        self._idle = asyncio.Event()  # set whenever the last one ends
        self._held: weakref.WeakSet[Stream] = weakref.WeakSet()  # by callers, also when they are complete
        self._opening: dict[Stream, asyncio.Future[None]] = {}
        self._refusals = RecentRefusals()
        self._pictures = Pictures(bus)
        self._drawing: set[Stream] = set()  # the active ones of pictures
        self._reading: set[Stream] = set()  # those of them whose picture is read from the object store
        self.answers = TenantShares(ANSWERS_BYTES_MAX)  # bytes of whole answers that are being made or sent
        self._holder = LeaseHolder(bus, "gateway", gateway_id, secrets.token_hex(8))
        self._leases = LeaseWatch(bus, "worker", self._on_lost, self._holder)
        self._pings = Pings(bus, self._holders, self._on_lost)
        self._watch: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Subscribe to frames, hold this gateway's lease, follow the workers' leases."""
        self._inlet = await self._bus.subscribe(subjects.stream(self.gateway_id), TokenFrame, self._on_frame)
        await self._bus.subscribe(subjects.MOVE, Move, self._on_move)
        await self._leases.start()
        await self._holder.start()
        self._watch = self._bus.spawn(self._keep_watch())
        self._bus.spawn(self._greet())
        self._pings.start()

    def made_by(self, stream: Stream) -> MadeBy:
        """What makes a stream's answer, by the worker that has or had it last."""
        known = self._fleet.workers().get(stream.worker_id or "")
        return made_by(self._fleet.base_model, stream.job.weighted, known.limits if known is not None else None)

    async def drain(self) -> None:
        """Accept no new request and return when none runs."""
        self.draining = True
        if self._core.active:
            await self._idle.wait()

    async def stop(self) -> None:
        """Cancel running requests and give up the lease, so that workers drop this gateway's requests."""
        self.draining = True
        for owned in list(self._core.active.values()):
            self._on(Ended(owned, Unavailable("the gateway is shutting down"), "shutdown"))
        if self._watch is not None:
            self._watch.cancel()
        self._pings.stop()
        with contextlib.suppress(MotetError):
            await self._holder.release()

    @property
    def inflight(self) -> int:
        """The number of owned sequences."""
        return len(self._core.active)

    @property
    def parked(self) -> int:
        """The number of new requests that wait for a first worker."""
        return len(self._parked)

    def streams(self) -> Collection[Stream]:
        """The streams that have not ended."""
        return cast(Collection[Stream], self._core.active.values())

    # ---- what callers use

    def check_room(self) -> None:
        """Raises Overloaded at `max_inflight` sequences."""
        if len(self._core.active) >= self._max_inflight:
            metrics.REFUSED.labels("inflight").inc()
            raise Overloaded(f"this gateway is at its limit of {self._max_inflight} sequences", retry_after_s=1.0)

    def _check_image_room(self, job: Job) -> None:
        """Raises Overloaded beyond `IMAGE_BYTES_MAX`: images are kept until their request ends, for a resumption."""
        if job.images:
            held = sum(len(image.data) for stream in self.streams() for image in stream.job.images)
            if held + sum(len(image.data) for image in job.images) > IMAGE_BYTES_MAX:
                metrics.REFUSED.labels("images").inc()
                raise Overloaded(f"this gateway is at its limit of {IMAGE_BYTES_MAX} bytes of images", retry_after_s=1.0)

    def _repeat_refusal(self, job: Job) -> None:
        """Raises Overloaded if a request that asked for no more was refused just now."""
        again = self._refusals.find(*_demands(job), now_s())
        if again is not None:
            metrics.REFUSED.labels("repeated").inc()
            raise Overloaded(again[0], retry_after_s=again[1])

    async def open(self, job: Job, *, signal: Signal | None = None, early: bool = False) -> Stream:
        """Submit `job`; returns when a worker has accepted it. `signal` wakes a caller that has several streams.

        `early`: return also when it waits for a worker to start. Raises Overloaded (here or everywhere), Unavailable (draining,
        no worker within `OPEN_PATIENCE_S`, or none that starts within `park_s`), DeadlineExceeded, or what the scheduler
        refused it for.
        """
        if self.draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1.0)
        self.check_room()
        if job.request_id in self._core.active:
            raise Conflict(f"request {job.request_id} is already running")
        self._check_image_room(job)
        self._repeat_refusal(job)
        stream = Stream(job, self.detokenizer, self._on_cancel, signal, self._buffer_tokens)
        self._held.add(stream)
        if job.image is not None:
            self._drawing.add(stream)
        self._idle.clear()
        loop = asyncio.get_running_loop()
        stream.deadline = loop.call_later(job.timeout_s, self._on_deadline, stream)
        opened = self._opening[stream] = loop.create_future()
        if early:
            self._early.add(stream)
        self._on(Submitted(stream))
        try:
            await opened
        except MotetError as error:
            if isinstance(error, Overloaded) and error.retry_after_s is not None:
                self._refusals.add(*_demands(job), error.message, error.retry_after_s, now_s())
            if isinstance(error, Unavailable) and not self._fleet.workers() and (known := self._fleet.lost.summary(now_s())):
                error.message += f" (workers: {known}; GET /v1/status tells more)"
            if isinstance(error, Unavailable) and stream.parked_s:
                error.retry_after_s = self._fleet.start_s
            raise
        except BaseException:
            stream.cancel()
            raise
        finally:
            self._opening.pop(stream, None)
            self._early.discard(stream)
        return stream

    # ---- what the core sees of the workers

    def serving(self) -> Collection[str]:
        return [known.worker_id for known in self._fleet.workers()]

    def alive(self, worker_id: str) -> bool:
        return self._leases.alive(worker_id)

    def coming(self) -> bool:
        return self._fleet.coming()

    def resumes_structured(self) -> bool:
        return self._fleet.any_can("resumes_structured")

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        return self._fleet.forgot(worker_id, request_id, epoch, since_s)

    # ---- events

    def _on(self, event: Event) -> None:
        self._perform(self._core.on(event, now_s()))

    def _on_frame(self, frame: TokenFrame) -> None:
        self._pings.heard(frame.worker_id)
        items = frame.items
        if self._drawing and any(item.picture is not None and item.picture.object_name for item in items):
            items = self._without_stored(frame)
        if actions := self._core.frame(frame.worker_id, items, now_s()):
            self._perform(actions)

    def _without_stored(self, frame: TokenFrame) -> list[StreamItem]:
        """The items whose pictures are here. The others follow when they are read."""
        here = []
        for item in frame.items:
            stream = self._core.active.get(item.request_id)
            if stream is None or item.picture is None or not item.picture.object_name:
                here.append(item)
            elif stream not in self._reading:
                self._reading.add(cast(Stream, stream))
                self._bus.spawn(self._read_picture(frame.worker_id, cast(Stream, stream), item))
        return here

    async def _read_picture(self, worker_id: str, stream: Stream, item: StreamItem) -> None:
        try:
            whole = await self._pictures.fetch(item)
        finally:
            self._reading.discard(stream)
        if actions := self._core.frame(worker_id, [whole], now_s()):
            self._perform(actions)

    def _on_move(self, move: Move) -> None:
        kv = secrets.token_urlsafe(16) if move.kv else ""
        self._on(MoveAsked(move.request_id, move.epoch, move.to, kv))

    def _on_lost(self, worker_id: str) -> None:
        self._fleet.lose(worker_id)
        self._on(WorkerGone(worker_id))

    def _on_deadline(self, stream: Stream) -> None:
        error = DeadlineExceeded(f"the request did not finish within {stream.job.timeout_s:g} s")
        self._on(Ended(stream, error, error.code))

    def _on_cancel(self, stream: Stream) -> None:
        """The caller cancelled the stream."""
        self._on(Cancelled(stream))

    def _holders(self) -> set[str]:
        return {owned.worker_id for owned in self._core.active.values() if owned.worker_id is not None}

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._end_unread()
            if self._drawing:
                self._keep_pictures()
            self._wake()
            self._on(Tick(self._bus.connected))

    def _keep_pictures(self) -> None:
        """A picture that is read is a sign of life. Checkpoints beyond `STATE_BYTES_MAX` are dropped, the largest first."""
        for stream in self._reading:
            stream.sign_s = now_s()
        states = [stream.drawing for stream in self._drawing if stream.drawing is not None]
        total = sum(len(one.state) for one in states)
        while total > STATE_BYTES_MAX:
            largest = max(states, key=lambda one: len(one.state))
            total -= len(largest.state)
            largest.state, largest.state_step = b"", 0

    async def _greet(self) -> None:
        """Tell the core of workers that begin to serve."""
        while True:
            await self._fleet.newcomer()
            self._on(Newcomer())

    # ---- actions

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Submit():
                    self._bus.spawn(self._submit(action))
                case Pause(owned, serial, pause_s):
                    asyncio.get_running_loop().call_later(pause_s, self._on, PauseOver(owned, serial))
                case CancelAt(worker_id, request_id, epoch, kv):
                    cancel = Cancel(request_id=request_id, epoch=epoch, kv_token=kv)
                    self._bus.spawn(self._publish(subjects.control(worker_id), cancel))
                case Placed(owned, worker_id):
                    self._parked.remove(cast(Stream, owned))
                    self._tell_opener(cast(Stream, owned))
                case Parked(owned):
                    self._park(cast(Stream, owned))
                case Over(owned, outcome):
                    self._done(cast(Stream, owned), outcome)
                case Regained(_, after_s):
                    metrics.RESUME_S.observe(after_s)
                case Told():
                    _tell(action)

    async def _submit(self, asked: Submit) -> None:
        stream, epoch = cast(Stream, asked.owned), asked.epoch
        try:
            reply = await self._bus.request(
                subjects.SUBMIT, self._request(stream, asked), SubmitReply, timeout_s=asked.timeout_s
            )
            if isinstance(reply, refusal.Refused):
                raise from_info(reply.error)
        except MotetError as error:
            self._on(Refused(stream, epoch, trouble_of(error)))
        except Exception as error:  # no stream may wait for ever because of an answer we do not understand
            self._on(Ended(stream, MotetError(f"cannot place: {error!r}"), "error"))
            raise
        else:
            self._on(Answered(stream, epoch, reply.worker_id))
            if stream.worker_id == reply.worker_id:
                self._pings.heard(reply.worker_id)

    def _request(self, stream: Stream, asked: Submit) -> GenerateRequest:
        job = stream.job
        request = GenerateRequest.of(
            job,
            gateway_id=self.gateway_id,
            base_model=self._base_model,
            epoch=asked.epoch,
            output=pack_tokens(stream.tokens),
            exclude_workers=tuple(stream.excluded),
            repeated=self._refusals.take_repeated(job.tenant),
            move_to=asked.to,
            kv=KvOffer(worker_id=asked.kv[0], token=asked.kv[1]) if asked.kv is not None else None,
            losses=stream.losses,
        )
        if stream.drawing is not None and job.image is not None:
            state, state_step = stream.drawing.state, stream.drawing.state_step
            size_bytes = len(state) + sum(len(image.data) for image in job.images)
            if size_bytes + ROOM_BYTES > self._bus.max_payload:
                state, state_step = b"", 0  # the steps are repeated
            image = msgspec.structs.replace(job.image, state=state, state_step=state_step)
            return msgspec.structs.replace(request, image=image)
        if stream.tokens and "structured" in job.needs:
            request = msgspec.structs.replace(request, needs=job.needs | {"resumes_structured": job.needs["structured"]})
        if stream.prompt_logprobs is None:
            return request
        # known from an earlier epoch: any worker can do the rest
        sampling = msgspec.structs.replace(job.sampling, prompt_logprobs=None)
        needs = {word: field for word, field in request.needs.items() if word != "prompt_logprobs"}
        return msgspec.structs.replace(request, sampling=sampling, needs=needs)

    def _park(self, stream: Stream) -> None:
        """Keep a new request until a worker serves."""
        try:
            self._parked.add(stream)
        except Unavailable as error:
            self._on(Ended(stream, error, error.code))
            return
        self._parked.wake(1)
        if stream in self._early:
            self._tell_opener(stream)

    def _wake(self) -> None:
        """While nobody serves, say how many requests wait: new ones, and those of a worker that has left."""
        if self._fleet.coming() and (waiting := sum(one.phase == "placing" for one in self._core.active.values())):
            self._parked.wake(waiting)

    def _tell_opener(self, stream: Stream) -> None:
        opened = self._opening.pop(stream, None)
        if opened is None or opened.done():
            return
        if stream.error is not None:
            opened.set_exception(stream.error)
        else:
            opened.set_result(None)

    def _done(self, stream: Stream, outcome: str) -> None:
        """Record an ended request, and tell the predictors its length."""
        self._parked.remove(stream)
        self._tell_opener(stream)
        self._drawing.discard(stream)
        if not self._core.active:
            self._idle.set()
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.finish == "cancelled":
            stream.signal.set()
        if isinstance(stream.error, SlowReader):
            outcome = stream.error.code
        observe(stream, outcome or stream.finish or "error")
        if stream.finish in ("stop", "length") and stream.error is None and stream.job.embedding is None:
            adapter = next(iter(stream.job.weighted), None)
            report = Outcome(
                adapter_digest=adapter.ref.digest if adapter else "",
                prompt_tokens=stream.job.prompt_tokens,
                output_tokens=len(stream.tokens),
                features=stream.job.features,
            )
            self._bus.spawn(self._publish(subjects.OUTCOME, report))

    async def _publish(self, subject: str, message: Cancel | Outcome) -> None:
        with contextlib.suppress(Unavailable):  # counted by the bus; a lost Cancel is repeated when frames keep coming
            await self._bus.publish(subject, message)

    def _end_unread(self) -> None:
        """While more than `UNREAD_BYTES_MAX` are not read, end the largest stream of the tenant that has most."""
        unread = {stream: size for stream in self._held if (size := stream.unread_bytes)}
        total = sum(unread.values())
        while total > UNREAD_BYTES_MAX:
            tenants = Counter[str]()
            for stream, size in unread.items():
                tenants[stream.job.tenant] += size
            [(tenant, _)] = tenants.most_common(1)
            stream = max((one for one in unread if one.job.tenant == tenant), key=unread.__getitem__)
            total -= unread.pop(stream)
            stream.too_slow()
            self._on(Ended(stream, stream.error, ""))


def _tell(told: Told) -> None:
    """Count and log what the core has decided."""
    if told.owned is None:
        metrics.STRAYS.inc()
        return
    facts = {"request_id": told.owned.request_id, "tokens": len(told.owned.tokens)}
    if told.what == "moved":
        metrics.MOVED.inc()
        log.info("moving", extra=facts | {"to": told.why})
    else:
        metrics.RESUMED.labels(told.why).inc()
        log.info("resuming", extra=facts | {"why": told.why})


def _demands(job: Job) -> tuple[Kind, int, int]:
    """What `RecentRefusals` compares: the kind, the prompt's tokens, the adapter's rank."""
    slo, image = job.slo, job.image
    picture = (image.rows, image.steps_run) if image is not None else (0.0, 0)
    needs = (*sorted(job.needs), *(target for one in job.weighted for target in one.ref.targets))
    kind = Kind(job.tenant, slo.ttft_slo_ms, slo.tpot_slo_ms, job.priority, needs, slo.e2e_slo_ms, picture)
    return kind, job.prompt_tokens, sum([one.ref.rank for one in job.weighted])
