"""The Owner: keeps each request of a gateway alive from its submission to its last token, across worker failures.

    open(job) ──submit──> scheduler ──assign──> worker ──TokenFrame──> _on_frame ──push──> Stream ──> caller
                  ▲                                │
                  └── resume: epoch + 1, prompt + tokens so far ── worker silent, gap, retriable error, forgotten

Rules of this file:
- A frame's item counts only with the current epoch and from the worker that has the request. Any other item is answered with a
  Cancel to its sender, at most once a second per request.
- Token i has index i over all epochs. Known tokens are dropped. Early tokens wait `GAP_S` for the missing ones; then we resume.
- An epoch is submitted once. If the answer is lost, a worker may have the request, so the next attempt is the next epoch.
  Frames that arrive before the answer, or instead of it, count as the answer.
- A scheduler may ask for a move: the request is submitted again, in the next epoch, for the worker that it names. This does not
  count as a loss.
- A request whose output is constrained to a grammar starts again without the tokens so far, or is ended (`_can_go_on`).
- A request that loses `LOSSES_MAX` workers in a row without a new token is ended: it may be what kills them.
- Nothing here waits for a caller: streams are bounded, and a slow one is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from motet.policies.owner.recent_refusals import Kind, RecentRefusals
from motet.policies.tenant_shares import TenantShares
from motet.services.gateway import metrics
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.encoding import ANSWERS_BYTES_MAX
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.made_by import MadeBy, made_by
from motet.services.gateway.owner.observe import observe
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
from motet.shared.telemetry import logger
from motet.shared.wire.prediction import Outcome
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Cancel, GenerateRequest, KvOffer, Move, SubmitReply, pack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame, TokenLogprobs

log = logger("motet.owner")
SUBMIT_TIMEOUT_S = (1.0, 5.0)  # first, then twice as long each time: a scheduler that is frozen must not hold a request
OPEN_PATIENCE_S = 5.0  # a new request waits this long for a scheduler or worker to come back
RESUME_PATIENCE_S = 30.0  # a running one this long, and as long as the only worker loads its model
SET_BACK_S = 10.0  # one without a token waits this long for a part that is away: a cluster elects a leader in less
BACKOFF_S = (0.05, 1.0)
GAP_S = 0.25
SILENCE_S = 1.0
WATCH_S = 0.1
LOSSES_MAX = 4
EARLY_MAX = 256
IMAGE_BYTES_MAX = 256 << 20
UNREAD_BYTES_MAX = 128 << 20  # of tokens that are ready for callers which do not take them
STRAY_EVERY_S = 1.0
STRAYS_MAX = 4096


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
    ) -> None:
        self.gateway_id = gateway_id
        self.draining = False
        self.detokenizer = detokenizer
        self._bus, self._fleet, self._base_model = bus, fleet, base_model
        self._max_inflight, self._buffer_tokens = max_inflight, stream_buffer_tokens
        self._active: dict[str, Stream] = {}
        self._idle = asyncio.Event()  # set whenever the last one ends
        self._held: weakref.WeakSet[Stream] = weakref.WeakSet()  # by callers, also when they are complete
        self._gaps: dict[Stream, float] = {}  # streams with early items, and since when
        self._strays: dict[tuple[str, str], float] = {}
        self._refusals = RecentRefusals()
        self.answers = TenantShares(ANSWERS_BYTES_MAX)  # bytes of whole answers that are being made or sent
        self._holder = LeaseHolder(bus, "gateway", gateway_id, secrets.token_hex(8))
        self._leases = LeaseWatch(bus, "worker", self._on_lost, self._holder)
        self._pings = Pings(bus, self._holders, self._on_lost)
        self._submits: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Subscribe to frames, hold this gateway's lease, follow the workers' leases."""
        self._inlet = await self._bus.subscribe(subjects.stream(self.gateway_id), TokenFrame, self._on_frame)
        await self._bus.subscribe(subjects.MOVE, Move, self._on_move)
        await self._leases.start()
        await self._holder.start()
        self._watch = self._bus.spawn(self._keep_watch())
        self._pings.start()

    def made_by(self, stream: Stream) -> MadeBy:
        """What makes a stream's answer, by the worker that has or had it last."""
        known = self._fleet.workers().get(stream.worker_id or "")
        return made_by(self._fleet.base_model, stream.job.adapter, known.limits if known is not None else None)

    async def drain(self) -> None:
        """Accept no new request and return when none runs."""
        self.draining = True
        if self._active:
            await self._idle.wait()

    async def stop(self) -> None:
        """Cancel running requests and give up the lease, so that workers drop this gateway's requests."""
        self.draining = True
        for stream in list(self._active.values()):
            self._abort(stream, Unavailable("the gateway is shutting down"), "shutdown")
        if self._watch is not None:
            self._watch.cancel()
        self._pings.stop()
        with contextlib.suppress(MotetError):
            await self._holder.release()

    @property
    def inflight(self) -> int:
        """The number of owned sequences."""
        return len(self._active)

    # ---- what callers use

    def check_room(self) -> None:
        """Raises Overloaded at `max_inflight` sequences."""
        if len(self._active) >= self._max_inflight:
            metrics.REFUSED.labels("inflight").inc()
            raise Overloaded(f"this gateway is at its limit of {self._max_inflight} sequences", retry_after_s=1.0)

    def _check_image_room(self, job: Job) -> None:
        """Raises Overloaded beyond `IMAGE_BYTES_MAX`: images are kept until their request ends, for a resumption."""
        if job.images:
            held = sum(len(image.data) for stream in self._active.values() for image in stream.job.images)
            if held + sum(len(image.data) for image in job.images) > IMAGE_BYTES_MAX:
                metrics.REFUSED.labels("images").inc()
                raise Overloaded(f"this gateway is at its limit of {IMAGE_BYTES_MAX} bytes of images", retry_after_s=1.0)

    def _repeat_refusal(self, job: Job) -> None:
        """Raises Overloaded if a request that asked for no more was refused just now."""
        again = self._refusals.find(*_demands(job), now_s())
        if again is not None:
            metrics.REFUSED.labels("repeated").inc()
            raise Overloaded(again[0], retry_after_s=again[1])

    async def open(self, job: Job, *, signal: Signal | None = None) -> Stream:
        """Submit `job`; returns when a worker has accepted it. `signal` wakes a caller that has several streams.

        Raises Overloaded (here or everywhere), Unavailable (draining, or no worker within `OPEN_PATIENCE_S`),
        DeadlineExceeded, or what the scheduler refused it for.
        """
        if self.draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1.0)
        self.check_room()
        if job.request_id in self._active:
            raise Conflict(f"request {job.request_id} is already running")
        self._check_image_room(job)
        self._repeat_refusal(job)
        stream = Stream(job, self.detokenizer, self._on_cancel, signal, self._buffer_tokens)
        self._active[job.request_id] = stream
        self._held.add(stream)
        self._idle.clear()
        loop = asyncio.get_running_loop()
        stream.deadline = loop.call_later(job.timeout_s, self._on_deadline, stream)
        try:
            await self._place(stream, OPEN_PATIENCE_S)
        except MotetError as error:
            if isinstance(error, Overloaded) and error.retry_after_s is not None:
                self._refusals.add(*_demands(job), error.message, error.retry_after_s, now_s())
            if isinstance(error, Unavailable) and not self._fleet.workers() and (known := self._fleet.lost.summary(now_s())):
                error.message += f" (workers: {known}; GET /v1/status tells more)"
            self._abort(stream, error, error.code)
            raise
        except BaseException:
            stream.cancel()
            raise
        if stream.error is not None:
            raise stream.error
        return stream

    # ---- placing a request on a worker

    async def _place(self, stream: Stream, patience_s: float, to: str = "", kv: KvOffer | None = None) -> None:
        """Submit until a worker accepts, the request ends, or time runs out. First submissions raise, resumed ones `fail`.
        `to`: the worker to be tried first, and once, with `kv`."""
        first = stream.epoch == 0
        epoch, deadline, pause, timeout_s = stream.epoch, now_s() + patience_s, BACKOFF_S[0], SUBMIT_TIMEOUT_S[0]
        while stream.finish is None and stream.error is None and stream.epoch == epoch:
            try:
                # shielded: when the caller leaves now, the answer still tells us which worker to send the Cancel to
                await asyncio.shield(self._in_background(self._submit(stream, timeout_s, to, kv)))
                return
            except MotetError as error:
                to, kv = "", None
                if stream.worker_id is not None or stream.epoch != epoch:
                    return  # frames answered in the meantime, or another resume took over
                lasting = not isinstance(error, Unavailable | DeadlineExceeded | Overloaded)
                if not first and self._fleet.coming():
                    deadline = now_s() + patience_s  # its time counts when a worker serves
                if self._all_declined(stream):
                    return
                if lasting or now_s() > deadline or (first and isinstance(error, Overloaded)):
                    if first:
                        raise
                    self._abort(stream, error, error.code)
                    return
                if isinstance(error, DeadlineExceeded):  # some worker may have taken it
                    stream.epoch = epoch = epoch + 1
                    timeout_s = min(2 * timeout_s, SUBMIT_TIMEOUT_S[1])
                stream.excluded = [w for w in stream.excluded if w in stream.declined or not self._back(w)]
            pause = BACKOFF_S[0] if await self._fleet.newcomer(pause) else min(pause * 2, BACKOFF_S[1])

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._submits.add(task)
        task.add_done_callback(self._submitted)
        return task

    def _submitted(self, task: asyncio.Task[None]) -> None:
        self._submits.discard(task)
        if not task.cancelled():
            task.exception()  # a waiting caller gets it; without one it does not matter

    async def _submit(self, stream: Stream, timeout_s: float, to: str, kv: KvOffer | None) -> None:
        job, epoch = stream.job, stream.epoch
        request = GenerateRequest.of(
            job,
            gateway_id=self.gateway_id,
            base_model=self._base_model,
            epoch=epoch,
            output=pack_tokens(stream.tokens),
            exclude_workers=tuple(stream.excluded),
            repeated=self._refusals.take_repeated(job.tenant),
            move_to=to,
            kv=kv,
            losses=stream.losses,
        )
        if stream.prompt_logprobs is not None:  # known from an earlier epoch: any worker can do the rest
            sampling = msgspec.structs.replace(job.sampling, prompt_logprobs=None)
            needs = {word: field for word, field in job.needs.items() if word != "prompt_logprobs"}
            request = msgspec.structs.replace(request, sampling=sampling, needs=needs)
        reply = await self._bus.request(subjects.SUBMIT, request, SubmitReply, timeout_s=timeout_s)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        gone = self._active.get(job.request_id) is not stream
        if gone or stream.epoch != epoch or stream.worker_id not in (None, reply.worker_id):
            if not (gone and stream.finish is not None and stream.worker_id == reply.worker_id):
                self._cancel_at(reply.worker_id, job.request_id, epoch)
        elif stream.worker_id is None:
            stream.worker_id = reply.worker_id
            stream.sign_s = now_s()
            self._pings.heard(reply.worker_id)

    def _resume(self, stream: Stream, why: str, lost_worker: str | None = None) -> None:
        """Continue on another worker (or the same) with all tokens so far."""
        if lost_worker is not None:
            stream.losses += 1
        elif stream.worker_id is not None:
            self._cancel_at(stream.worker_id, stream.job.request_id, stream.epoch)
        self._next_epoch(stream, why, lost_worker)
        if len(stream.tokens) >= stream.job.sampling.max_tokens:  # only its last item was lost
            stream.end("length")
            self._done(stream)
        elif stream.losses >= LOSSES_MAX:
            self._abort(stream, WorkerLost(f"{stream.losses} workers in a row were lost with this request"), "worker_lost")
        elif self._can_go_on(stream):
            self._bus.spawn(self._place_again(stream, 0.0))

    def _set_back(self, stream: Stream, error: MotetError, worker_id: str) -> None:
        """Try another worker, or later: the present one lives but cannot serve, e.g. because the object store is away."""
        now = now_s()
        stream.set_back_s = stream.set_back_s or now
        if now - stream.set_back_s > (RESUME_PATIENCE_S if stream.tokens else SET_BACK_S):
            self._abort(stream, error, error.code, cancel=False)
            return
        self._next_epoch(stream, error.code, worker_id)
        if not self._can_go_on(stream):
            return
        # as long again as the trouble has lasted, within the usual bounds
        self._bus.spawn(self._place_again(stream, min(max(now - stream.set_back_s, BACKOFF_S[0]), BACKOFF_S[1])))

    def _decline(self, stream: Stream, error: WorkerFull, worker_id: str) -> None:
        """Try the other workers: the present one can never serve it."""
        stream.declined[worker_id] = error
        if self._all_declined(stream):
            return
        self._next_epoch(stream, error.code, worker_id)
        if self._can_go_on(stream):
            self._bus.spawn(self._place_again(stream, 0.0))

    def _all_declined(self, stream: Stream) -> bool:
        """Whether every worker has declined the request, which then ends with the latest reason."""
        if not stream.declined or any(known.worker_id not in stream.declined for known in self._fleet.workers()):
            return False
        error = list(stream.declined.values())[-1]
        self._abort(stream, error, error.code, cancel=False)
        return True

    def _on_move(self, move: Move) -> None:
        """A scheduler wants the request on another worker. The present worker is not excluded, because it was not lost."""
        stream = self._active.get(move.request_id)
        if stream is None or stream.epoch != move.epoch or stream.worker_id in (None, move.to):
            return
        begun = len(stream.tokens)
        if begun >= stream.job.sampling.max_tokens or (begun and stream.job.sampling.structured is not None):
            return  # only its last item is missing, or no other worker can continue it
        kv = None
        if move.kv and stream.worker_id is not None:
            kv = KvOffer(worker_id=stream.worker_id, token=secrets.token_urlsafe(16))
        self._cancel(stream, kv.token if kv is not None else "")
        self._leave_epoch(stream)
        metrics.MOVED.inc()
        log.info("moving", extra={"request_id": move.request_id, "to": move.to, "tokens": begun})
        self._bus.spawn(self._place_again(stream, 0.0, move.to, kv))

    def _leave_epoch(self, stream: Stream) -> None:
        stream.early.clear()
        self._gaps.pop(stream, None)
        stream.plain = False  # the next token ends the losses in a row
        stream.epoch, stream.worker_id, stream.sign_s = stream.epoch + 1, None, now_s()

    def _next_epoch(self, stream: Stream, why: str, avoid: str | None) -> None:
        self._leave_epoch(stream)
        if avoid is not None and avoid not in stream.excluded:
            stream.excluded.append(avoid)
        stream.resumed_s = stream.resumed_s or stream.sign_s
        metrics.RESUMED.labels(why).inc()
        log.info("resuming", extra={"request_id": stream.job.request_id, "why": why, "tokens": len(stream.tokens)})

    def _can_go_on(self, stream: Stream) -> bool:
        """Whether another worker can continue the request.

        No engine can continue a grammar in the middle of an output. A request with a constrained output begins again if none of
        its output was shown, and is ended otherwise.
        """
        if stream.job.sampling.structured is None or not stream.tokens or stream.begin_again():
            return True
        reason = "its worker was lost, and no other can continue an output that is constrained to a grammar"
        self._abort(stream, WorkerLost(reason), "worker_lost", cancel=False)
        return False

    async def _place_again(self, stream: Stream, pause_s: float, to: str = "", kv: KvOffer | None = None) -> None:
        epoch = stream.epoch
        try:
            await asyncio.sleep(pause_s)
            if stream.epoch != epoch:
                return  # another resumption took over
            await self._place(stream, RESUME_PATIENCE_S, to, kv)
        except Exception as error:  # no stream may wait for ever because of an answer we do not understand
            self._abort(stream, MotetError(f"cannot resume: {error!r}"), "error")
            raise

    # ---- frames

    def _on_frame(self, frame: TokenFrame) -> None:
        worker_id, active, now = frame.worker_id, self._active, now_s()
        self._pings.heard(worker_id)
        for item in frame.items:
            stream = active.get(item.request_id)
            if stream is None or item.epoch != stream.epoch:
                self._stray(worker_id, item)
                continue
            if stream.worker_id != worker_id:
                if stream.worker_id is not None:
                    self._stray(worker_id, item)
                    continue
                stream.worker_id = worker_id
            stream.sign_s = now
            if item.index == len(stream.tokens) and item.error is None:
                if stream.plain and item.finish is None and len(item.tokens) == 1:
                    if not stream.push_plain(item.tokens):
                        self._cancel(stream)
                        self._done(stream)
                    continue
                self._take(stream, item.tokens, item, item.logprobs)
                if stream.early:
                    self._take_early(stream)
            else:
                self._on_odd_item(stream, worker_id, item)

    def _take(self, stream: Stream, new: list[int], item: StreamItem, logprobs: list[TokenLogprobs] | None) -> None:
        if item.finish == "cancelled":  # not by us: its worker gave it up
            self._resume(stream, "given_up", stream.worker_id)
            return
        stream.losses, stream.set_back_s = 0, 0.0
        if stream.resumed_s:
            metrics.RESUME_S.observe(now_s() - stream.resumed_s)
            stream.resumed_s = 0.0
        stream.push(new, item, logprobs)
        if stream.finish is None and stream.error is None:
            return
        if stream.error is not None or item.finish is None:  # a slow reader, or a stop string: the worker does not know
            self._cancel(stream)
        self._done(stream)

    def _on_odd_item(self, stream: Stream, worker_id: str, item: StreamItem) -> None:
        """Handle an item that is not the next one: an error, known tokens, or early tokens."""
        if item.error is not None:
            error = from_info(item.error)
            if isinstance(error, WorkerLost):
                self._resume(stream, error.code, worker_id)
            elif isinstance(error, WorkerFull):
                self._decline(stream, error, worker_id)
            elif isinstance(error, Unavailable | Overloaded):
                self._set_back(stream, error, worker_id)
            else:
                self._abort(stream, error, error.code, cancel=False)
            return
        have = len(stream.tokens)
        if item.index < have:
            known = have - item.index
            new = item.tokens[known:]
            if new or item.finish is not None:
                self._take(stream, new, item, item.logprobs[known:] if item.logprobs else None)
                if stream.early:
                    self._take_early(stream)
        elif len(stream.early) < EARLY_MAX:
            stream.early[item.index] = item
            stream.plain = False
            self._gaps.setdefault(stream, now_s())
        else:
            self._resume(stream, "gap")

    def _take_early(self, stream: Stream) -> None:
        """Take held early items that are next now; overlaps are dropped like any known token."""
        while stream.early and stream.finish is None and stream.error is None:
            index = min(stream.early)
            have = len(stream.tokens)
            if index > have:
                return
            item = stream.early.pop(index)
            known = have - index
            if item.tokens[known:] or item.finish is not None:
                self._take(stream, item.tokens[known:], item, item.logprobs[known:] if item.logprobs else None)
        self._gaps.pop(stream, None)
        stream.see_plain()

    def _stray(self, worker_id: str, item: StreamItem) -> None:
        """Tell a worker to stop a request that no stream here waits for."""
        if item.finish is not None:
            return
        key, now = (worker_id, item.request_id), now_s()
        if now - self._strays.get(key, 0.0) < STRAY_EVERY_S:
            return
        if len(self._strays) >= STRAYS_MAX:
            self._strays = {k: t for k, t in self._strays.items() if now - t < STRAY_EVERY_S}
            if len(self._strays) >= STRAYS_MAX:
                return
        self._strays[key] = now
        metrics.STRAYS.inc()
        self._cancel_at(worker_id, item.request_id, item.epoch)

    # ---- watching

    def _on_lost(self, worker_id: str) -> None:
        self._fleet.lose(worker_id)
        for stream in [s for s in self._active.values() if s.worker_id == worker_id]:
            self._resume(stream, "worker_lost", worker_id)

    def _holders(self) -> set[str]:
        return {stream.worker_id for stream in self._active.values() if stream.worker_id is not None}

    def _back(self, worker_id: str) -> bool:
        """Whether a lost worker sends messages again."""
        return self._leases.alive(worker_id) and worker_id in self._fleet.workers()

    async def _keep_watch(self) -> None:
        """Detect what no message reports: lasting gaps, workers that disappeared, requests that a worker lost."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = now_s()
            self._end_unread()
            for stream in [s for s, since in self._gaps.items() if now - since > GAP_S]:
                self._resume(stream, "gap")
            if not self._bus.connected:
                continue
            for stream in list(self._active.values()):
                worker_id = stream.worker_id
                if worker_id is None or now - stream.sign_s < SILENCE_S:
                    continue
                if not self._leases.alive(worker_id):
                    self._resume(stream, "worker_lost", worker_id)
                elif self._fleet.forgot(worker_id, stream.job.request_id, stream.epoch, stream.sign_s + SILENCE_S):
                    self._resume(stream, "forgotten")

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
            if self._active.get(stream.job.request_id) is stream:
                self._cancel(stream)
                self._done(stream)

    def _on_deadline(self, stream: Stream) -> None:
        error = DeadlineExceeded(f"the request did not finish within {stream.job.timeout_s:g} s")
        self._abort(stream, error, error.code)

    # ---- endings

    def _on_cancel(self, stream: Stream) -> None:
        """The caller cancelled the stream."""
        if self._active.get(stream.job.request_id) is stream:
            self._cancel(stream)
            stream.finish = "cancelled"
            stream.signal.set()
            self._done(stream)

    def _abort(self, stream: Stream, error: MotetError, outcome: str, *, cancel: bool = True) -> None:
        if cancel:
            self._cancel(stream)
        stream.fail(error)
        self._done(stream, outcome)

    def _done(self, stream: Stream, outcome: str = "") -> None:
        """Forget an ended request, record its metrics, and tell the predictors its length."""
        if self._active.pop(stream.job.request_id, None) is None:
            return
        if not self._active:
            self._idle.set()
        self._gaps.pop(stream, None)
        stream.early.clear()
        if stream.deadline is not None:
            stream.deadline.cancel()
        if isinstance(stream.error, SlowReader):
            outcome = stream.error.code
        observe(stream, outcome or stream.finish or "error")
        if stream.finish in ("stop", "length") and stream.error is None and stream.job.embedding is None:
            adapter = stream.job.adapter
            report = Outcome(
                adapter_digest=adapter.digest if adapter else "",
                prompt_tokens=stream.job.prompt_tokens,
                output_tokens=len(stream.tokens),
                features=stream.job.features,
            )
            self._bus.spawn(self._publish(subjects.OUTCOME, report))

    def _cancel(self, stream: Stream, kv_token: str = "") -> None:
        if stream.worker_id is not None:
            self._cancel_at(stream.worker_id, stream.job.request_id, stream.epoch, kv_token)

    def _cancel_at(self, worker_id: str, request_id: str, epoch: int, kv_token: str = "") -> None:
        cancel = Cancel(request_id=request_id, epoch=epoch, kv_token=kv_token)
        self._bus.spawn(self._publish(subjects.control(worker_id), cancel))

    async def _publish(self, subject: str, message: Cancel | Outcome) -> None:
        with contextlib.suppress(Unavailable):  # counted by the bus; a lost Cancel is repeated when frames keep coming
            await self._bus.publish(subject, message)


def _demands(job: Job) -> tuple[Kind, int, int]:
    """What `RecentRefusals` compares: the kind, the prompt's tokens, the adapter's rank."""
    kind = Kind(job.tenant, job.slo.ttft_slo_ms, job.slo.tpot_slo_ms, job.priority, tuple(sorted(job.needs)))
    return kind, job.prompt_tokens, job.adapter.rank if job.adapter else 0
