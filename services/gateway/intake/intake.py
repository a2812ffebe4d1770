"""The intake: pulls durable requests from JetStream, runs them with the same Owner as HTTP, and acknowledges when stored.

    pull ──► result already stored? ── yes ───────────────────────────────────────────────► ack
                 │ no
                 ▼
             parse, prepare ─ can never succeed, or its time is over ─► dead letter, error result ─► ack
                 │
                 ▼
         ┌──► run it ── overloaded, unavailable ──► park: wait here, the delivery kept alive ──┐
         │       │                                                                             │
         └───────┼─────────────────────────────────────────────────────────────────────────────┘
                 ▼
             store result (one per request id) ── results full ──► park, with the result in hand
                 │
                 ▼
                ack

Each tenant has its own request stream, which is pulled separately (`_Queue`). At most `intake_concurrency` requests run. A
*parked* request waits for room; it runs nothing and takes no other tenant's slot. While a request is parked, nothing more is
pulled from its tenant's stream, so a gateway holds at most `intake_concurrency` requests of a tenant.

Waiting is not redelivery. The delivery of a held request is kept alive; if this process dies, the message goes to another
gateway after `ACK_WAIT_S`. A gateway that stops in order hands back what it holds and records that. Deliveries minus
hand-backs is the number of processes that died with the request; `MAX_DEATHS` of them make it poison.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from motet.policies.tenant_shares import Part
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.intake.durable import DurableRequest, check_answer_fits
from motet.services.gateway.openai import answers, images, texts
from motet.services.gateway.openai.image_requests import ImageEdit, ImageRequest
from motet.services.gateway.openai.lanes import Lane
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.openai.texts import Prepared
from motet.services.gateway.owner.encoding import encoded_at_once
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import TextDelta
from motet.services.gateway.tenants.limits import Limits, Turn
from motet.shared import streams, subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, Overloaded, Unavailable
from motet.shared.kv import Bucket
from motet.shared.provision import ACK_WAIT_S, request_bytes_max
from motet.shared.streams import Delivery, Pulls
from motet.shared.telemetry import counter, gauge, logger

T = TypeVar("T")
log = logger("motet.gateway.intake")

MAX_DEATHS = 20  # a request that so many processes died with is poison
PULL_BATCH = 8
HELD_BYTES = 256 << 20  # request bodies held here; each tenant has its share of it
WAIT_S = (0.25, 30.0)  # a parked request's first and longest wait
RESULTS_FULL = 0.9  # of its room: from here on nothing of a tenant is pulled, and what runs still finds room
TENANTS_EVERY_S = 5.0
FETCH_S = 5.0

FINISHED = counter("motet_intake_requests", "Durable requests by outcome: ok, duplicate, retried, dead.", ["outcome"])
for _outcome in ("ok", "duplicate", "retried", "dead"):
    FINISHED.labels(_outcome)  # from the start: an increase from nothing to one is not seen
RUNNING = gauge("motet_intake_running", "Durable requests in progress at this gateway, waiting ones included.")
PARKED = gauge("motet_intake_parked", "Durable requests at this gateway that wait for room.")


class _HandBack(Exception):
    """This gateway is stopping, so another one should run the request."""


class _Queue:
    """One request stream, and the requests of it that this gateway holds."""

    def __init__(self, stream: str, results: str, pulls: Pulls) -> None:
        self.stream, self.results, self.pulls = stream, results, pulls
        self.held: dict[asyncio.Task[None], int] = {}  # -> bytes of the request
        self.parked = 0
        self.full = False  # its results are: nothing is pulled
        self.puller: asyncio.Task[None] | None = None


class Intake:
    """Pulls durable requests while it has room and settles each exactly once."""

    def __init__(self, bus: Bus, owner: Owner, preparer: Preparer, lane: Lane, config: GatewayConfig, limits: Limits) -> None:
        self._bus, self._owner, self._preparer, self._config = bus, owner, preparer, config
        self._lane, self._limits = lane, limits
        self._queues: dict[str, _Queue] = {}
        self._slots = asyncio.Semaphore(config.requests.intake_concurrency)
        self._parked: deque[asyncio.Event] = deque()  # longest first
        self._changed = asyncio.Event()
        self._draining = False
        self._hand_backs: Bucket | None = None
        self._tenants: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Start pulling. Raises Unavailable when JetStream does not answer."""
        await self._find_queues()
        self._tenants = asyncio.get_running_loop().create_task(self._follow_tenants())

    async def drain(self) -> None:
        """Stop pulling, hand back waiting requests, and return when all running ones are settled."""
        self._draining = True
        await self._stop_pulling()
        self._wake(len(self._parked))
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Hand back running requests: another gateway gets them at once."""
        self._draining = True
        await self._stop_pulling()
        await _cancel(self._tasks())

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for queue in self._queues.values() for task in queue.held]

    async def _stop_pulling(self) -> None:
        """Stop pulling and withdraw pulls at the server: a message sent to one would be delayed by `ACK_WAIT_S`."""
        tasks = [self._tenants, *(queue.puller for queue in self._queues.values())]
        await _cancel([task for task in tasks if task is not None])
        self._tenants = None
        with contextlib.suppress(Unavailable):
            for queue in self._queues.values():
                if queue.puller is not None:
                    queue.puller = None
                    await queue.pulls.close()
            await self._bus.flush()

    # ---- the tenants' queues

    async def _follow_tenants(self) -> None:
        reconnects = self._bus.reconnects
        while True:
            await asyncio.sleep(TENANTS_EVERY_S)
            if self._bus.reconnects != reconnects:  # another server, or a restarted one, may take what the last one did not
                reconnects = self._bus.reconnects
                self._wake(len(self._parked))
            try:
                await self._find_queues()
            except MotetError as error:
                log.warning("cannot look for tenants", extra={"error": error.message})

    async def _find_queues(self) -> None:
        """Start pulling from new request streams."""
        for stream in await self._bus.stream_names(subjects.requests("*")):
            if stream in self._queues or not stream.startswith(subjects.STREAM_REQUESTS):
                continue
            results = subjects.STREAM_RESULTS + stream.removeprefix(subjects.STREAM_REQUESTS)
            pulls = await Pulls.open(self._bus, stream, subjects.CONSUMER_INTAKE)
            queue = self._queues[stream] = _Queue(stream, results, pulls)
            queue.puller = asyncio.get_running_loop().create_task(self._pull(queue))

    async def _pull(self, queue: _Queue) -> None:
        while True:
            room = self._room(queue)
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                if not await self._results_fit(queue):
                    await asyncio.sleep(1.0)
                    continue
                pulled = await queue.pulls.fetch(min(room, PULL_BATCH), FETCH_S)
            except (Overloaded, Unavailable) as error:
                log.warning("cannot pull", extra={"stream": queue.stream, "error": error.message})
                await asyncio.sleep(0.5)
                continue
            for delivery in pulled:
                task = asyncio.get_running_loop().create_task(self._settle(queue, delivery))
                queue.held[task] = len(delivery.data)
                task.add_done_callback(lambda task: self._finished(queue, task))
            RUNNING.set(len(self._tasks()))

    def _room(self, queue: _Queue) -> int:
        """The number of requests that may be pulled for this tenant now."""
        if queue.parked or (queue.held and sum(queue.held.values()) >= HELD_BYTES // len(self._queues)):
            return 0
        running = sum(len(other.held) - other.parked for other in self._queues.values())
        return self._config.requests.intake_concurrency - max(running, len(queue.held))

    async def _results_fit(self, queue: _Queue) -> bool:
        """Whether the tenant's result stream probably has room for results of requests pulled now."""
        held = await streams.size_of(self._bus, queue.results)
        full = 0 < held.bytes_max <= held.bytes / RESULTS_FULL
        if full != queue.full:
            queue.full = full
            log.warning(
                "results full, the tenant waits" if full else "results have room again", extra={"stream": queue.results}
            )
        return not full

    def _finished(self, queue: _Queue, task: asyncio.Task[None]) -> None:
        queue.held.pop(task, None)
        RUNNING.set(len(self._tasks()))
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("durable request failed; it will be delivered again", exc_info=error)

    # ---- waiting

    async def _park(self, queue: _Queue, attempt: int, hint_s: float | None, left_s: float | None = None) -> None:
        """Wait before the next attempt: twice as long each time, between `hint_s` and `left_s`. Raises _HandBack in a drain."""
        delay_s = min(max(WAIT_S[0] * 2 ** min(attempt, 16), hint_s or 0.0), WAIT_S[1])
        delay_s *= random.uniform(0.75, 1.25)  # those refused together do not come back together
        if left_s is not None:
            delay_s = min(delay_s, max(left_s, 0.0))
        woken = asyncio.Event()
        if self._draining:
            raise _HandBack
        queue.parked += 1
        self._parked.append(woken)
        self._observe_parked()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), delay_s)
        finally:
            queue.parked -= 1
            self._parked.remove(woken)
            self._observe_parked()
        if self._draining:
            raise _HandBack

    def _wake(self, count: int) -> None:
        """Let the requests that have waited longest try again now."""
        for woken in list(self._parked)[:count]:
            woken.set()

    def _observe_parked(self) -> None:
        PARKED.set(len(self._parked))
        self._changed.set()

    # ---- one request

    async def _settle(self, queue: _Queue, delivery: Delivery) -> None:
        """Take one delivery to its end: acknowledged or handed back."""
        request = DurableRequest(delivery)
        keeping = asyncio.get_running_loop().create_task(_keep_alive(delivery))
        try:
            await self._in_lane(delivery, lambda: request.read(request_bytes_max(self._bus)))
            outcome = await self._resolve(queue, request)
            FINISHED.labels(outcome).inc()
            try:
                await delivery.acknowledge()
            except Unavailable as error:
                log.warning("not acknowledged; it will come back and be known", extra={"error": error.message})
            if outcome == "ok":
                self._wake(1)  # there is room for one more
        except (asyncio.CancelledError, _HandBack) as error:
            await self._hand_back(request)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            keeping.cancel()

    async def _resolve(self, queue: _Queue, request: DurableRequest) -> str:
        """Run the request if needed and store its result; returns the outcome."""
        attempt = 0
        while True:
            try:
                if request.addressable and await self._answered(queue, request):
                    return "duplicate"
                try:
                    body = await self._answer(queue, request)
                    outcome = "ok"
                except Unavailable:
                    raise
                except MotetError as error:
                    log.info("dead letter", extra={"request_id": request.request_id, "reason": error.message})
                    await self._put(queue, *request.dead_letter(error))
                    body, outcome = request.failed(error), "dead"
                if request.addressable:
                    await self._put(queue, request.result_subject, body, {"Nats-Msg-Id": request.result_subject})
                return outcome
            except Unavailable as error:  # JetStream did not say whether there is a result
                log.warning("not settled yet", extra={"request_id": request.request_id, "error": error.message})
                await self._park(queue, attempt, error.retry_after_s)
                attempt += 1

    async def _answer(self, queue: _Queue, request: DurableRequest) -> bytes:
        """The result, after any number of attempts. Raises the MotetError that no further attempt can change."""
        if (deaths := await self._deaths(request)) > MAX_DEATHS:
            raise MotetError(f"{deaths} processes ended with this request and without a result")
        attempt = 0
        while True:
            try:
                async with self._slots:
                    request.check_time()
                    return await self._run(request)
            except (Overloaded, Unavailable) as error:
                FINISHED.labels("retried").inc()
                request.check_time(error)
                await self._park(queue, attempt, error.retry_after_s, request.left_s())
                request.check_time(error)
                attempt += 1
            except MotetError:
                raise
            except Exception as bug:  # it would fail again after every redelivery
                log.error("durable request failed", extra={"request_id": request.request_id}, exc_info=bug)
                raise MotetError(f"internal error: {type(bug).__name__}") from bug

    async def _run(self, request: DurableRequest) -> bytes:
        """The result of one attempt. Raises the MotetError that stopped it; a tenant's limit is retried."""
        turn, held = self._limits.begin(request.tenant), Part(self._owner.answers, request.tenant)
        try:
            answer = await self._run_in(turn, request, held)
            result = await request.ok(answer, held, self._result_bytes_max)
        except BaseException:
            turn.fail()
            raise
        finally:
            held.release()
        turn.end(answer.completion_tokens)
        return result

    async def _run_in(self, turn: Turn, request: DurableRequest, held: Part) -> Answer:
        parsed, slo, live = await self._in_lane(request.delivery, request.parse)
        left_s = request.left_s()
        most_s = self._config.requests.request_timeout_s
        timeout_s = most_s if left_s is None else min(left_s, most_s)
        origin = Origin(
            tenant=request.tenant,
            slo=self._preparer.slo(slo),
            timeout_s=max(timeout_s, 0.001),
            lane=self._lane,
            size=len(request.delivery.data),
            durable=True,
        )
        if isinstance(parsed, ImageRequest | ImageEdit):
            drawn = await images.prepare(self._preparer, parsed, origin)
            turn.spend(drawn.prompt_tokens)
            return await images.collect(self._owner, drawn, held)
        self._preparer.check_kind(draws=False)
        prepared = await texts.prepare(self._preparer, parsed, origin)
        check_answer_fits(prepared, self._result_bytes_max)
        turn.spend(prepared.prompt_tokens)
        if not live:
            return await answers.collect(self._owner, prepared, held)
        subject = subjects.tokens(request.tenant, request.request_id)
        answer = await answers.collect(self._owner, prepared, held, on_delta=self._live(subject, prepared))
        await self._say(subject, b"")
        return answer

    async def _in_lane(self, delivery: Delivery, work: Callable[[], T]) -> T:
        return await self._lane.run(work, len(delivery.data), delivery.subject)

    def _live(self, subject: str, prepared: Prepared) -> answers.OnDelta:
        """Publishes each delta as the chunk that HTTP would have streamed."""

        parsers = [prepared.parsing.open() if prepared.parsing else None for _ in prepared.jobs]

        async def publish(choice: int, delta: TextDelta) -> None:
            await self._say(subject, encoded_at_once(answers.live_chunk(prepared, choice, delta, parsers[choice])))

        return publish

    async def _say(self, subject: str, data: bytes) -> None:
        """Publish live tokens, best effort: only the stored result is authoritative."""
        with contextlib.suppress(MotetError):
            await self._bus.publish_encoded(subject, data)

    @property
    def _result_bytes_max(self) -> int:
        return self._bus.max_payload // 16 * 15  # the rest is for headers

    async def _put(self, queue: _Queue, subject: str, body: bytes, headers: dict[str, str]) -> None:
        """Store `body`, however long it takes: it is the only copy. An already stored result counts as success."""
        attempt = 0
        while True:
            try:
                await self._bus.store(subject, body, headers)
                return
            except (Overloaded, Unavailable) as error:
                log.warning("not stored yet", extra={"subject": subject, "error": error.message})
                # plain subscribers see every attempt, so a stream that stores nothing gets few; a new connection wakes us
                seldom = self._bus.stores.unwritable()
                await self._park(queue, attempt, WAIT_S[1] if seldom else error.retry_after_s)
                attempt += 1

    async def _answered(self, queue: _Queue, request: DurableRequest) -> bool:
        """Whether the result is stored, in the tenant's stream or in the common one of an older version."""
        for stream in {subjects.results_stream(request.tenant), queue.results}:
            if await streams.has(self._bus, stream, request.result_subject):
                return True
        return False  # a result that is stored in the meantime makes ours a refused duplicate

    # ---- deaths and hand-backs

    async def _deaths(self, request: DurableRequest) -> int:
        """The number of processes that took this request and never settled it. Looked up only when it could matter."""
        earlier = request.delivery.deliveries - 1
        return earlier if earlier <= MAX_DEATHS else earlier - await self._handed_back(request)

    async def _notes(self) -> Bucket:
        if self._hand_backs is None:
            self._hand_backs = await Bucket.open(self._bus, subjects.KV_INTAKE, wait_s=0.0)
        return self._hand_backs

    async def _handed_back(self, request: DurableRequest) -> int:
        found = await (await self._notes()).get(request.key)
        return int(found.value or b"0") if found is not None else 0

    async def _hand_back(self, request: DurableRequest) -> None:
        """Return the delivery for another gateway. Without the bus it is redelivered later and counts as a death."""
        with contextlib.suppress(MotetError, TimeoutError):
            async with asyncio.timeout(1.0):
                times = await self._handed_back(request) + 1
                await (await self._notes()).put(request.key, str(times).encode())
        with contextlib.suppress(Unavailable):
            await request.delivery.hand_back()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: `wait_for` may swallow a cancellation that arrives together with its result."""
    while tasks := [task for task in tasks if not task.done()]:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=2.0)


async def _keep_alive(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(ACK_WAIT_S / 3)
        with contextlib.suppress(Unavailable):
            await delivery.keep()
