"""The NATS connection of a service: typed msgpack messages, bounded buffers, typed errors.

Rules of this file:
- Every buffer is bounded. Messages that do not fit are counted in `motet_bus_refused` and, if they are requests, answered.
- A handler of `serve` runs in its own task, at most `concurrency` at a time; beyond that the caller gets Overloaded.
- Losing the server is not fatal: the client reconnects without limit, and requests meanwhile raise Unavailable.
- A connection that the server closed for good (any `-ERR` that closes it, credentials that it no longer accepts) does not
  come back: `Bus.lost` gives the reason, and the process must exit (shared.service does that).
- Messages larger than the server's limit are not sent: the server would answer `-ERR maximum payload` and close the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore
from nats.micro.request import Request as MicroRequest
from nats.micro.service import Service as MicroService
from nats.micro.service import ServiceConfig as MicroConfig

from motet.shared import nats_compat
from motet.shared.clock import now_s
from motet.shared.config import BusConfig, read_secret
from motet.shared.errors import DeadlineExceeded, MotetError, Overloaded, TooLarge, Unavailable
from motet.shared.stores import Stores
from motet.shared.telemetry import BUS_RECONNECTS, BUS_REFUSED, BUS_REQUEST_S, logger
from motet.shared.wire.refusal import Refused

T = TypeVar("T")
log = logger("motet.bus")
TAKEN_OR_FULL = 10077  # JetStream's error code for a message that a limit of its stream refuses
MESSAGE_TOO_LARGE = 10054
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

PENDING_MSGS = 65_536
PENDING_BYTES = 64 * 1024 * 1024
OUTBOX_BYTES = 16 * 1024 * 1024
CONNECT_S = 5.0
PING_S, PINGS = 0.5, 2  # a server that answers none of `PINGS` pings is lost: after 1.5 s at most
REFUSED_S = 10.0  # so long may a server that we return to refuse our credentials: it may be reloading its configuration
FAMILY_WORDS = 4  # of a subject: the stream, but not the message
FULL = (10023, 10028, 10047, TAKEN_OR_FULL)  # no resources; account's storage; server's storage; a limit of the stream


class Watch(Protocol):
    """A watch of a bucket."""

    def trouble(self) -> str:
        """Why its bucket cannot be followed; "" if it is."""


def encode(message: msgspec.Struct) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """A message of type (or union) `kind`. Raises msgspec.ValidationError or DecodeError."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # the library lets them through
        raise msgspec.DecodeError(str(error)) from None


@contextlib.contextmanager
def reaching(what: str) -> Iterator[None]:
    """A context that turns the client library's errors into Overloaded when `what` is full, and into Unavailable otherwise."""
    try:
        yield
    except js_errors.APIError as error:
        if error.err_code in FULL:
            raise Overloaded(f"{what} is full: {error.description}") from error
        raise Unavailable(f"{what} does not answer: {error!r}") from error
    except nats_compat.FAILURES as error:
        raise Unavailable(f"{what} does not answer: {error!r}") from error


class Bus:
    """A NATS connection for Motet's messages. Make one with `await Bus.connect(...)`."""

    def __init__(self, client: nats_compat.NatsClient, name: str) -> None:
        self.nc = client
        self.name = name
        self.js: JetStreamContext = client.jetstream(timeout=5.0)
        self._micro: MicroService | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answering: set[asyncio.Task[Any]] = set()
        self._reason = ""  # of the latest error, for people
        self._subscribed = True  # the server knows of all subscriptions; not before a reconnection is complete
        self._closing = False
        self._refused_since_s: float | None = None
        self._lost = ""
        self.stores = Stores()
        self.watches: list[Watch] = []
        """The watches of buckets that run (`shared.kv_watch`)."""

    @classmethod
    async def connect(cls, config: BusConfig, name: str, *, inbox: str = "client") -> Bus:
        """Connect as `name`; replies come to `_INBOX_<inbox>.>` so that permissions can keep services apart.

        The first connection raises Unavailable after `CONNECT_S`; later reconnections are tried without limit.
        """

        options: dict[str, Any] = {}
        if config.nats_user:
            options |= {"user": config.nats_user, "password": read_secret(config.nats_password_file)}
        if (tls := config.nats_tls()) is not None:
            options["tls"] = tls
        bus = cls(nats_compat.NatsClient(), name)
        try:
            await asyncio.wait_for(
                bus.nc.connect(
                    [url.strip() for url in config.nats_url.split(",")],
                    name=name,
                    error_cb=bus._on_error,
                    reconnected_cb=bus._on_reconnect,
                    disconnected_cb=bus._on_disconnect,
                    max_reconnect_attempts=-1,
                    ping_interval=PING_S,  # type: ignore[arg-type]
                    max_outstanding_pings=PINGS,
                    reconnect_to_server_handler=bus.nc.next_server,
                    pending_size=OUTBOX_BYTES,
                    inbox_prefix=f"_INBOX_{inbox}".encode(),
                    **options,
                ),
                timeout=CONNECT_S,
            )
        except (OSError, nats_errors.Error, TimeoutError) as error:
            bus.nc.abort()
            raise Unavailable(f"NATS at {config.nats_url} does not answer: {bus._reason or repr(error)}") from error
        return bus

    async def _on_error(self, error: Exception) -> None:
        reason = "slow_consumer" if isinstance(error, nats_errors.SlowConsumerError) else "bus_error"
        BUS_REFUSED.labels(reason).inc()
        self._reason = repr(error)
        log.warning("bus error", extra={"error": self._reason})
        if "authorization" not in (text := str(error).lower()) and "authentication" not in text:
            return
        if not self.nc.is_connected:  # the client would try the same credentials for ever; a fresh process reads them again
            self._refused_since_s = self._refused_since_s or now_s()
            if now_s() - self._refused_since_s > REFUSED_S:
                self._lose(f"NATS refuses the credentials: {error}")

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            log.error("bus lost for good", extra={"error": why})

    async def _on_reconnect(self) -> None:
        self._subscribed, self._refused_since_s = True, None
        self.stores.forget()
        BUS_RECONNECTS.inc()
        log.info("bus reconnected")

    async def _on_disconnect(self) -> None:
        self._subscribed = False
        if not self._closing:
            log.warning("bus disconnected")

    @property
    def connected(self) -> bool:
        """Whether the server is reachable and knows our subscriptions, also after a reconnection."""
        return self.nc.is_connected and self._subscribed

    @property
    def lost(self) -> str:
        """Why the connection is closed for good; "" while it is open or can come back."""
        if (why := nats_compat.gave_up(self.nc)) is not None:
            self._lose(f"the client gave up reconnecting: {why!r}")
        elif self.nc.is_closed and not self._closing:  # its callback is not always called
            self._lose(f"NATS closed the connection: {self.nc.last_error}")
        return self._lost

    def troubles(self) -> list[str]:
        """Why a connected NATS does not do its work, for `/ready`: streams that store nothing, buckets that cannot be read."""
        if not self.connected:
            return []
        unwritable = [
            f"NATS has stored nothing in {stream} for {since_s:.0f} s: its disk is or was full; a nats-server keeps such an"
            " error until it is restarted"
            for stream, since_s in self.stores.unwritable().items()
        ]
        return [*unwritable, *(trouble for watch in self.watches if (trouble := watch.trouble()))]

    @property
    def reconnects(self) -> int:
        """The number of reconnections so far. When it changes, messages may have been missed."""
        return int(self.nc.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, in bytes."""
        return self.nc.max_payload

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        """Publish a message that gets no answer.

        Raises TooLarge, or Unavailable when the outgoing buffer is full or the bus is closed.
        """
        await self.publish_encoded(subject, _encoder.encode(message))

    async def publish_encoded(self, subject: str, data: bytes) -> None:
        """`publish` for a message that is encoded already."""
        try:
            if nats_compat.outbox_full(self.nc, OUTBOX_BYTES):
                raise nats_errors.OutboundBufferLimitError
            await self.nc.publish(subject, data)
        except nats_errors.MaxPayloadError:
            BUS_REFUSED.labels("publish").inc()
            raise self._too_large(subject, len(data)) from None
        except nats_errors.Error as error:
            BUS_REFUSED.labels("publish").inc()
            raise Unavailable(f"cannot publish to {subject}: {error!r}") from error

    def _too_large(self, subject: str, size: int) -> TooLarge:
        return TooLarge(f"a message of {size} bytes to {subject} is larger than the {self.max_payload} that NATS takes")

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> bool:
        """Publish to JetStream and wait until the message is stored.

        Returns False when the stream keeps one message per subject and already has one. Raises TooLarge (headers count),
        Overloaded when the stream is full, and Unavailable when it is unknown whether the message was stored: repeat it with
        the same Nats-Msg-Id.
        """
        size = nats_compat.stored_bytes(data, headers)
        if size > self.max_payload:
            raise self._too_large(subject, size)
        with self.stores.writing(".".join(subject.split(".")[:FAMILY_WORDS])):
            return await self._store(subject, data, headers, size)

    async def _store(self, subject: str, data: bytes, headers: Mapping[str, str], size: int) -> bool:
        try:
            await self.js.publish(subject, data, headers=dict(headers))
        except js_errors.APIError as error:
            why = error.description or ""
            if error.err_code == TAKEN_OR_FULL and "per subject" in why:
                return False
            if error.err_code == TAKEN_OR_FULL and "maximum" in why:
                raise Overloaded(f"the stream of {subject} is full: {why}") from error
            if error.err_code == MESSAGE_TOO_LARGE:
                raise TooLarge(f"a message of {size} bytes to {subject}: {why}") from error
            raise Unavailable(f"cannot store {subject}: {why or error!r}") from error
        except (js_errors.Error, nats_errors.Error, TimeoutError) as error:
            raise Unavailable(f"cannot store {subject}: {error!r}") from error
        return True

    async def stream_names(self, subject: str) -> list[str]:
        """The JetStream streams that take messages on `subject`, which may have wildcards. Raises Unavailable."""
        with reaching("JetStream"):
            return await nats_compat.stream_names(self.nc, subject)

    async def flush(self) -> None:
        """Wait until the server has received everything sent so far. Raises Unavailable after ten seconds."""
        with reaching("NATS"):
            await nats_compat.flush(self.nc)

    async def request(self, subject: str, message: msgspec.Struct, reply: Any, *, timeout_s: float) -> Any:
        """Send and wait for a message of type `reply`.

        Raises TooLarge, Unavailable when no service listens or NATS is away, DeadlineExceeded after `timeout_s`. A `Refused`
        answer is returned, not raised: the caller decides (`from_info`).
        """
        began = now_s()
        data = _encoder.encode(message)
        try:
            answer = await self.nc.request(subject, data, timeout=timeout_s)
        except nats_errors.MaxPayloadError:
            raise self._too_large(subject, len(data)) from None
        except nats_errors.NoRespondersError:
            raise Unavailable(f"no service answers {subject}") from None
        except (nats_errors.TimeoutError, TimeoutError):
            raise DeadlineExceeded(f"{subject} did not answer in {timeout_s:g} s") from None
        except nats_errors.Error as error:
            raise Unavailable(f"cannot reach {subject}: {error!r}") from error
        BUS_REQUEST_S.labels(_verb(subject)).observe(now_s() - began)
        return decode(answer.data, reply)

    async def subscribe(
        self, subject: str, kind: Any, handler: Callable[[Any], Awaitable[None] | None], *, queue: str = ""
    ) -> Subscription:
        """Call `handler(message)` for each message, in order. A message that does not decode is counted and dropped."""

        async def deliver(msg: Msg) -> None:
            if (msg.reply or msg.headers) and _out_of_a_stream(msg):
                _refuse_stored(msg)
                return
            try:
                message = decode(msg.data, kind)
            except msgspec.MsgspecError as error:
                BUS_REFUSED.labels("undecodable").inc()
                log.warning("undecodable message", extra={"subject": msg.subject, "error": str(error)})
                return
            try:
                waiting = handler(message)
                if waiting is not None:
                    await waiting
            except Exception:
                log.exception("handler failed", extra={"subject": msg.subject})

        subscription = await self.nc.subscribe(
            subject, queue=queue, cb=deliver, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES
        )
        await self.flush()  # the server knows before we return: nothing sent from now on is missed
        return subscription

    async def serve(
        self,
        name: str,
        subject: str,
        kind: Any,
        handler: Callable[[Any], Awaitable[msgspec.Struct]],
        *,
        queue: str,
        concurrency: int = 1024,
    ) -> None:
        """Answer requests on `subject` as a NATS micro service endpoint (`nats micro ls` shows it).

        `handler` returns the reply; a MotetError it raises is answered as `Refused`, anything else as an internal
        error. Beyond `concurrency` running handlers the caller gets Overloaded at once.
        """
        if self._micro is None:
            self._micro = MicroService(self.nc, MicroConfig(name=self.name.split("-")[0], version="1.0.0"))
            await self._micro.start()
        running = 0

        async def answer(request: MicroRequest) -> None:
            nonlocal running
            try:
                reply: msgspec.Struct = await handler(decode(request.data, kind))
            except MotetError as error:
                reply = Refused(error=error.info())
            except msgspec.MsgspecError as error:
                reply = Refused(error=MotetError(f"undecodable request: {error}").info())
            except Exception as error:
                log.exception("handler failed", extra={"subject": subject})
                reply = Refused(error=MotetError(f"{subject}: {error!r}").info())
            finally:
                running -= 1
            data = _encoder.encode(reply)
            if len(data) > self.max_payload:
                data = _encoder.encode(Refused(error=self._too_large(f"{subject}'s caller", len(data)).info()))
            try:
                await request.respond(data)
            except nats_errors.Error as error:
                BUS_REFUSED.labels("respond").inc()
                log.warning("reply lost", extra={"subject": subject, "error": repr(error)})

        async def accept(request: MicroRequest) -> None:
            nonlocal running
            message = nats_compat.message_of(request)
            if not message.reply or _out_of_a_stream(message):
                _refuse_stored(message)
                return
            if running >= concurrency:
                BUS_REFUSED.labels("concurrency").inc()
                busy = Overloaded(f"{subject} is at its limit of {concurrency} requests", retry_after_s=1.0)
                await request.respond(_encoder.encode(Refused(error=busy.info())))
                return
            running += 1
            task = self.spawn(answer(request))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        await self._micro.add_endpoint(name=name, subject=subject, queue_group=queue, handler=accept)
        await self.flush()  # from here on the server routes requests to us

    async def stop_serving(self) -> None:
        """Leave every queue group of `serve` and wait until all requests received so far are answered.

        For a drain: other members of the groups get all further requests, and none is lost.
        """
        micro, self._micro = self._micro, None
        if micro is not None and self.connected:
            try:
                await nats_compat.leave(self.nc, nats_compat.take_endpoints(micro))
                await micro.stop()
            except nats_compat.FAILURES as error:
                log.warning("queue groups were not left in order", extra={"error": repr(error)})
        await asyncio.gather(*self._answering, return_exceptions=True)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine in a task that the bus keeps alive and whose failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)

    async def key_value(self, bucket: str, *, wait_s: float = 15.0) -> KeyValue:
        """The library's view of a KV bucket, for `shared.kv`. Waits until the registry has provisioned the bucket.

        Raises Unavailable after `wait_s`.
        """
        return await self._provisioned(lambda: self.js.key_value(bucket), bucket, wait_s)

    async def object_store(self, bucket: str, *, wait_s: float = 15.0) -> ObjectStore:
        """The library's view of an object store, for `shared.objects`. Waits and raises as `key_value` does."""
        return await self._provisioned(lambda: self.js.object_store(bucket), bucket, wait_s)

    async def _provisioned(self, get: Callable[[], Awaitable[T]], bucket: str, wait_s: float) -> T:
        deadline = now_s() + wait_s
        while True:
            try:
                return await get()
            except nats_compat.FAILURES as error:
                if now_s() > deadline:
                    raise Unavailable(f"bucket {bucket} is not there: {error!r}") from error
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Finish what was received, flush, disconnect."""
        self._closing = True
        while self._tasks:  # again for those that missed it: wait_for may swallow a cancellation that meets its result
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1.0)
        await self.stop_serving()
        if not self.nc.is_closed:
            try:
                await asyncio.wait_for(self.nc.drain(), timeout=5.0)
            except (nats_errors.Error, TimeoutError):
                nats_compat.drop_unsent(self.nc)
                await self.nc.close()


def _out_of_a_stream(msg: Msg) -> bool:
    """Whether JetStream stored and sent this message: a consumer's delivery, or the answer to a direct get.

    The server checks what a user may publish, but not the subject to which a consumer delivers or a get is answered. Without
    this check, every user who may store a message could send it on any subject.
    """
    return (msg.reply or "").startswith("$JS.ACK.") or "Nats-Stream" in (msg.headers or {})


def _refuse_stored(msg: Msg) -> None:
    BUS_REFUSED.labels("stored").inc()
    log.warning("refused: sent by JetStream, or asks for no answer", extra={"subject": msg.subject})


def _verb(subject: str) -> str:
    """The last token of a subject, or the one before an id: a metric label with few values."""
    return subject.rsplit(".", 1)[-1]
