"""Durable requests: pulled from JetStream, run by the same Owner as HTTP, acknowledged only when their result is stored.

    pull ──► result already stored? ── yes ──────────────────────────────► ack
                 │ no
                 ▼
             parse, plan ── can never succeed ──► dead letter, error result ► term
                 │
                 ▼
             run it ──────── overloaded, unavailable ─────────────────────► nak with a delay, tried again later
                 │
                 ▼
             store result (message id: stored twice is stored once) ──────► ack

While a request runs its delivery is kept alive; when this process dies the message comes back to another copy after
`ACK_WAIT_S`. Bounded: at most `intake_concurrency` requests are pulled and unfinished.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import orjson
from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig
from prometheus_client import Counter, Gauge

from services.gateway import answers, protocol
from services.gateway.config import GatewayConfig
from services.gateway.owner import Owner
from services.gateway.planner import Plan, Planner
from services.gateway.stream import Delta
from shared import subjects
from shared.bus import Bus
from shared.clock import now_s
from shared.errors import BadRequest, MotetError, Overloaded, Unavailable
from shared.telemetry import REGISTRY, logger

log = logger("motet.gateway.intake")

CONSUMER = "intake"
ACK_WAIT_S = 30.0
MAX_DELIVERIES = 100  # a request that takes this many processes with it is poison too
MAX_DELAY_S = 30.0
_WORD = re.compile(r"[A-Za-z0-9_-]{1,128}")

FINISHED = Counter("motet_intake_requests", "Durable requests by what became of them.", ["outcome"], registry=REGISTRY)
for _outcome in ("ok", "duplicate", "retried", "dead"):
    FINISHED.labels(_outcome)  # from the start: an increase from nothing to one is not seen
RUNNING = Gauge("motet_intake_running", "Durable requests pulled and not yet settled.", registry=REGISTRY)


class Intake:
    """Pulls durable requests while it has room and settles each exactly once."""

    def __init__(self, bus: Bus, owner: Owner, planner: Planner, config: GatewayConfig) -> None:
        self._bus, self._owner, self._planner, self._config = bus, owner, planner, config
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._puller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to pull. Raises Unavailable when the request stream is not provisioned."""
        consumer = ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=10_000,
        )
        try:
            self._pulls = await self._bus.js.pull_subscribe(
                subjects.requests("*"), durable=CONSUMER, stream=subjects.STREAM_REQUESTS, config=consumer
            )
        except (js_errors.Error, nats_errors.Error, TimeoutError) as error:
            raise Unavailable(f"durable requests cannot be pulled: {error!r}") from error
        self._puller = asyncio.get_running_loop().create_task(self._pull(self._pulls))

    async def _pull(self, subscription: JetStreamContext.PullSubscription) -> None:
        while True:
            room = self._config.intake_concurrency - len(self._tasks)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            try:
                messages = await subscription.fetch(min(room, 32), timeout=5)
            except (nats_errors.TimeoutError, TimeoutError):
                continue
            except (nats_errors.Error, js_errors.Error) as error:
                log.warning("cannot pull", extra={"error": repr(error)})
                await asyncio.sleep(0.5)
                continue
            for message in messages:
                task = asyncio.get_running_loop().create_task(self._settle(message))
                self._tasks.add(task)
                RUNNING.set(len(self._tasks))
                task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        RUNNING.set(len(self._tasks))
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("durable request failed; it will be delivered again", exc_info=error)

    async def drain(self) -> None:
        """Pull nothing new; return when everything pulled is settled."""
        await self._stop_pulling()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Hand back what still runs: another copy gets it at once."""
        await self._stop_pulling()
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _stop_pulling(self) -> None:
        """Also withdraw the pull that waits at the server: a message sent to it would rest until `ACK_WAIT_S`."""
        if self._puller is None:
            return
        self._puller.cancel()
        await asyncio.gather(self._puller, return_exceptions=True)
        self._puller = None
        with contextlib.suppress(nats_errors.Error):
            await self._pulls.unsubscribe()
            await self._bus.flush()

    async def _settle(self, message: Msg) -> None:
        """Take one delivery to its end: acked, terminated or handed back."""
        request = _Request(message)
        keeping = asyncio.get_running_loop().create_task(_keep_alive(message))
        try:
            if await self._answered(request):
                FINISHED.labels("duplicate").inc()
                await message.ack_sync()
                return
            try:
                answer = await self._run(request)
            except (Overloaded, Unavailable) as error:
                FINISHED.labels("retried").inc()
                await message.nak(delay=request.delay_s(error))
                return
            except MotetError as error:
                await self._bury(request, error)
                return
            await self._store(request, {"status": "ok", "response": answer})
            FINISHED.labels("ok").inc()
            await message.ack_sync()
        except asyncio.CancelledError:
            with contextlib.suppress(nats_errors.Error):
                await message.nak()
            raise
        finally:
            keeping.cancel()

    async def _run(self, request: _Request) -> dict[str, Any]:
        """The OpenAI response body. Raises the MotetError that stopped it."""
        if request.deliveries > MAX_DELIVERIES:
            raise MotetError(f"delivered {MAX_DELIVERIES} times without a result")
        parsed, slo, live = request.parse()
        plan = await self._planner.plan(
            parsed, tenant=request.tenant, slo=self._planner.slo(slo), timeout_s=self._config.request_timeout_s
        )
        if not live:
            return await answers.collect(self._owner, plan)
        subject = subjects.tokens(request.tenant, request.request_id)
        answer = await answers.collect(self._owner, plan, on_delta=self._live(subject, plan))
        await self._bus.nc.publish(subject, b"")
        return answer

    def _live(self, subject: str, plan: Plan) -> answers.OnDelta:
        """Publishes each delta as the chunk that HTTP would have streamed."""

        async def publish(choice: int, delta: Delta) -> None:
            await self._bus.nc.publish(subject, orjson.dumps(answers.chunk(plan, choice, delta)))

        return publish

    async def _answered(self, request: _Request) -> bool:
        try:
            await self._bus.js.get_last_msg(subjects.STREAM_RESULTS, request.result_subject, direct=True)
        except js_errors.NotFoundError:
            return False
        return True

    async def _store(self, request: _Request, result: dict[str, Any]) -> None:
        """Store the result, trying for as long as the delivery is ours: it is the only copy of the work done."""
        body = orjson.dumps({"request_id": request.request_id, **result})
        headers = {"Nats-Msg-Id": request.result_subject}
        for attempt in range(60):
            try:
                await self._bus.js.publish(request.result_subject, body, headers=headers)
                return
            except (js_errors.Error, nats_errors.Error, TimeoutError) as error:
                log.warning("result not stored yet", extra={"request_id": request.request_id, "error": repr(error)})
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
        raise Unavailable(f"result of {request.request_id} could not be stored")

    async def _bury(self, request: _Request, error: MotetError) -> None:
        """Dead-letter the original with the reason, answer with the error, and never see it again."""
        log.info("dead letter", extra={"request_id": request.request_id, "reason": error.message})
        headers = {
            "Motet-Reason": " ".join(error.message.split())[:1000],
            "Motet-Code": error.code,
            "Motet-Subject": request.message.subject,
            "Motet-Sequence": str(request.sequence),
            "Nats-Msg-Id": f"dead.{request.sequence}",
        }
        tenant = request.tenant if _WORD.fullmatch(request.tenant) else "invalid"
        await self._bus.js.publish(subjects.dead(tenant), request.message.data, headers=headers)
        await self._store(request, {"status": "error", "error": error.openai()["error"]})
        FINISHED.labels("dead").inc()
        await request.message.term()


class _Request:
    """One delivery and what can be known of it before its body is trusted."""

    def __init__(self, message: Msg) -> None:
        self.message = message
        meta = message.metadata
        self.sequence: int = meta.sequence.stream
        self.deliveries: int = meta.num_delivered or 1
        self.tenant = message.subject.rsplit(".", 1)[-1]
        self._began_s = now_s()
        message_id = (message.headers or {}).get("Nats-Msg-Id", "")
        self.request_id = message_id if _WORD.fullmatch(message_id) else f"seq-{self.sequence}"
        self._body: Any = None
        self._problem = ""
        try:
            self._body = orjson.loads(message.data)
        except orjson.JSONDecodeError as error:
            self._problem = f"not JSON: {error}"
        if isinstance(self._body, dict):
            given = self._body.pop("request_id", None)
            if isinstance(given, str) and _WORD.fullmatch(given):
                self.request_id = given
            elif given is not None:
                self._problem = "request_id: letters, digits, '_' and '-' only, at most 128"

    @property
    def result_subject(self) -> str:
        return subjects.results(self.tenant, self.request_id)

    def delay_s(self, error: MotetError) -> float:
        """How long to leave it alone: what the refusal said, else twice as long each time."""
        return min(error.retry_after_s or 0.25 * 2 ** min(self.deliveries, 10), MAX_DELAY_S)

    def parse(self) -> tuple[protocol.ChatRequest | protocol.CompletionRequest, dict[str, Any], bool]:
        """(request, slo, wants live tokens). Raises BadRequest naming the field."""
        if self._problem:
            raise BadRequest(self._problem, param="request_id" if "request_id" in self._problem else None)
        if not isinstance(self._body, dict):
            raise BadRequest("a request is a JSON object")
        if not _WORD.fullmatch(self.tenant):
            raise BadRequest(f"tenant {self.tenant!r}: letters, digits, '_' and '-' only")
        body = dict(self._body)
        slo = body.pop("slo", None) or {}
        if not isinstance(slo, dict):
            raise BadRequest("slo: an object is expected", param="slo")
        live = body.pop("stream", False)
        if not isinstance(live, bool):
            raise BadRequest("stream: true or false is expected", param="stream")
        return protocol.parse(orjson.dumps(body)), {"class": "batch"} | slo, live


async def _keep_alive(message: Msg) -> None:
    while True:
        await asyncio.sleep(ACK_WAIT_S / 3)
        with contextlib.suppress(nats_errors.Error):
            await message.in_progress()
