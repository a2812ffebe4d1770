"""JetStream streams: pulling from a durable consumer, and reading stored messages.

Pulls ──fetch──► Delivery ──acknowledge──► the server deletes it (work queue)
                    │  ├────keep──────────► not delivered again for another `ACK_WAIT_S`
                    │  └────hand_back─────► delivered again at once, to any consumer
                    └── no answer for `ACK_WAIT_S` (shared.provision) ──► delivered again
"""

from __future__ import annotations

from typing import NamedTuple

from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors

from motet.shared.bus import Bus, reaching


class Delivery:
    """One delivery of a message by a durable consumer. Its methods raise Unavailable."""

    __slots__ = ("_message", "data", "deliveries", "headers", "published_unix_ms", "sequence", "stream", "subject")

    def __init__(self, message: Msg) -> None:
        meta = message.metadata
        self._message = message
        self.data = message.data
        self.subject = message.subject
        self.headers: dict[str, str] = message.headers or {}
        self.stream: str = meta.stream
        self.sequence: int = meta.sequence.stream
        self.deliveries: int = meta.num_delivered or 1  # this one included
        self.published_unix_ms = int(meta.timestamp.timestamp() * 1000)

    async def acknowledge(self) -> None:
        """Settle the message: it is not delivered again. Returns when the server has confirmed this."""
        with reaching(self.stream):
            await self._message.ack_sync()

    async def keep(self) -> None:
        """Tell the server that the message is still being processed, so that it is not delivered again yet."""
        with reaching(self.stream):
            await self._message.in_progress()

    async def hand_back(self) -> None:
        """Let the server deliver the message again, to this or to another process."""
        with reaching(self.stream):
            await self._message.nak()


class Pulls:
    """A durable pull consumer of one stream. Make one with `await Pulls.open(...)`."""

    def __init__(self, stream: str, subscription: JetStreamContext.PullSubscription) -> None:
        self._stream, self._subscription = stream, subscription

    @classmethod
    async def open(cls, bus: Bus, stream: str, consumer: str) -> Pulls:
        """Bind to a consumer that `shared.provision` has made. Raises Unavailable."""
        with reaching(stream):
            return cls(stream, await bus.js.pull_subscribe_bind(consumer, stream))

    async def fetch(self, count: int, wait_s: float) -> list[Delivery]:
        """Up to `count` messages; an empty list if none arrives within `wait_s`. Raises Unavailable."""
        with reaching(self._stream):
            try:
                return [Delivery(message) for message in await self._subscription.fetch(count, timeout=wait_s)]
            except (nats_errors.TimeoutError, TimeoutError):
                return []

    async def close(self) -> None:
        """Cancel the pull requests that are open at the server. Raises Unavailable."""
        with reaching(self._stream):
            await self._subscription.unsubscribe()


class Size(NamedTuple):
    """How much a stream holds."""

    messages: int
    bytes: int
    bytes_max: int  # 0: no limit
    first: int  # sequence numbers
    last: int


async def size_of(bus: Bus, stream: str) -> Size:
    """How much `stream` holds. Raises Unavailable."""
    with reaching(stream):
        info = await bus.js.stream_info(stream)
    state = info.state
    return Size(state.messages, state.bytes, max(info.config.max_bytes or 0, 0), state.first_seq, state.last_seq)


async def has(bus: Bus, stream: str, subject: str) -> bool:
    """Whether `stream` holds a message on `subject`; False also when there is no such stream. Raises Unavailable."""
    with reaching(stream):
        try:
            await bus.js.get_last_msg(stream, subject, direct=True)
        except (js_errors.NotFoundError, nats_errors.NoRespondersError):
            return False
    return True


async def message_at(bus: Bus, stream: str, sequence: int) -> bytes | None:
    """A stored message, None when it has left the stream. Raises Unavailable."""
    with reaching(stream):
        try:
            return (await bus.js.get_msg(stream, sequence, direct=True)).data or b""
        except js_errors.NotFoundError:
            return None
