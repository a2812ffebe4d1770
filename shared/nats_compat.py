"""Private parts of nats-py that Motet uses, and workarounds for faults of nats-py.

`pyproject.toml` allows one minor version of nats-py, because this file depends on details of it.
`tests/shared/test_nats_compat.py` has a test for each detail, against a real server. Before a new minor version is allowed,
those tests must pass with it.

    Client             no password over an unencrypted connection; no waiting for a frozen server that is known to be lost
    gave_up            whether the client stopped reconnecting
    flush              a flush that includes what is still buffered
    outbox_full        whether the server reads too slowly
    leave              leave queue groups without dropping messages that are on their way
    take_endpoints     the endpoints of a micro service, so that its stop does not drop their messages
    message_of         the message behind a micro service's request
    stored_bytes       the size of a message with its headers
    stream_names       all streams that take a subject
    answered_control   flow control and heartbeats of push consumers
    FAILURES           everything that the library raises when the server is away or refuses
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import Client as _Client
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import errors as js_errors
from nats.micro.request import Request as MicroRequest
from nats.micro.service import Service as MicroService

from motet.shared.clock import now_s

FAILURES = (nats_errors.Error, OSError)  # JetStream's errors are nats_errors.Error, TimeoutError is an OSError
LINGER_S = 0.05
RETRY_S = 0.25  # between two attempts to reconnect to one server
NAMES_PAGE = 1024  # stream names in one answer of the server


class NatsClient(_Client):
    """The library's client with five changes.

    - With TLS configured it sends nothing over an unencrypted connection. The library upgrades to TLS only if the server's
      greeting says so. The greeting is not encrypted, so an attacker who changes it would get the password.
    - It reconnects to the server that failed least recently. The library tries its servers in random order. A frozen server
      accepts connections and does not greet, so trying it first would cost `connect_timeout`.
    - It aborts a lost connection. The library closes it in order and waits until all that it had written is sent, and over TLS
      until the server says goodbye. A frozen server does neither.
    - It aborts a connection whose greeting or login failed. The library forgets it without closing it, so its socket stays open
      until the garbage collector finds it: one for each attempt.
    - It closes its socket also when the last bytes cannot be written, after an error of the server that ends the connection. In
      the library the task that closes the connection dies of that, unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failed_s: dict[str, float] = {}  # server -> when it was lost or did not answer
        self._tried_s: dict[str, float] = {}  # server -> when a reconnection to it began

    def next_server(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        """The server to connect to now, and after how many seconds. For the option `reconnect_to_server_handler`."""
        now = now_s()
        if self._current_server is not None:  # the lost server, or the one chosen by the previous attempt
            self._failed_s[self._current_server.uri.netloc] = now
        chosen = min(servers, key=lambda server: self._failed_s.get(server.uri.netloc, -math.inf))
        wait_s = max(0.0, self._tried_s.get(chosen.uri.netloc, -math.inf) + RETRY_S - now)
        self._tried_s[chosen.uri.netloc] = now + wait_s
        return chosen, wait_s

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            raise nats_errors.Error("the server does not offer TLS")
        await super()._process_info(info, initial_connection)

    def abort(self) -> None:
        """Close the present connection at once, if there is one."""
        writer = getattr(self._transport, "_bare_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    async def _connect_to_server(self, server: Any) -> None:
        self.abort()
        await super()._connect_to_server(server)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            self.abort()
            await self._error_cb(error)

    async def _attempt_reconnect(self) -> None:
        self.abort()
        await super()._attempt_reconnect()


def gave_up(client: _Client) -> BaseException | None:
    """The unexpected error that ended the client's reconnecting; None otherwise."""
    returning = client._reconnection_task
    if client.is_reconnecting and returning is not None and returning.done() and not returning.cancelled():
        return returning.exception() or nats_errors.Error("the reconnection ended")
    return None


async def flush(client: _Client) -> None:
    """Wait until the server has received everything sent so far. Raises nats.errors.Error after ten seconds.

    The library's own flush sends its PING before messages that are still buffered, such as the newest subscription. The PONG
    would come back before the server has read them.
    """
    await client._flush_pending(force_flush=True)
    await client.flush()


def drop_unsent(client: _Client) -> None:
    """Discard the messages that wait to be sent. `close` would write them, and raise when the connection is lost."""
    client._pending, client._pending_data_size = [], 0


def outbox_full(client: _Client, limit_bytes: int) -> bool:
    """Whether more than `limit_bytes` wait to be sent.

    The library refuses messages only while it reconnects. For a connected server that does not read, its buffer would grow
    without limit.
    """
    return client.pending_data_size > limit_bytes


async def leave(client: _Client, subscriptions: Iterable[Subscription]) -> None:
    """As `Subscription.drain`, but stays subscribed `LINGER_S` longer.

    The server may have chosen this member of a queue group for a message just before the member left. The message then arrives
    after the answer to the flush, and a closed subscription would drop it.
    """
    subscriptions = list(subscriptions)
    for subscription in subscriptions:
        await client._send_unsubscribe(subscription._id)
    await flush(client)
    await asyncio.sleep(LINGER_S)
    for subscription in subscriptions:
        await subscription._pending_queue.join()
        subscription._stop_processing()
        client._remove_sub(subscription._id)


def take_endpoints(service: MicroService) -> list[Subscription]:
    """Take the endpoints' subscriptions out of a micro service, for `leave`.

    The service's own stop would drop requests that have arrived and are not handled yet.
    """
    endpoints, service._endpoints = service._endpoints, []
    return [endpoint._subscription for endpoint in endpoints if endpoint._subscription is not None]


def message_of(request: MicroRequest) -> Msg:
    """The NATS message behind a micro service request. Its reply subject shows whether JetStream sent it."""
    return request._msg


def stored_bytes(data: bytes, headers: Mapping[str, str]) -> int:
    """The size of a message as the server counts it, in bytes.

    The library's own check leaves out the headers, and the server closes the connection of a client that sends too much.
    """
    return len(data) + len(b"NATS/1.0\r\n\r\n") + sum(len(f"{k}: {v}\r\n".encode()) for k, v in headers.items())


async def stream_names(client: _Client, subject: str) -> list[str]:
    """The names of all streams that take messages on `subject`, which may have wildcards. The library's own search returns one.

    Raises one of FAILURES.
    """
    names: list[str] = []
    while True:
        ask = json.dumps({"subject": subject, "offset": len(names)}).encode()
        answer = json.loads((await client.request("$JS.API.STREAM.NAMES", ask, timeout=5.0)).data)
        if "error" in answer:
            raise js_errors.APIError(**{key: answer["error"].get(key) for key in ("code", "err_code", "description")})
        found = answer["streams"] or []
        names += found
        if len(found) < NAMES_PAGE:
            return names


async def answered_control(client: _Client, msg: Msg, sequence: int) -> bool:
    """Whether `msg`, from a push consumer, is flow control or a heartbeat instead of a message of the stream.

    Flow control is answered here, so that the server sends no faster than we read: the library answers it only at the next
    heartbeat. `sequence` is the consumer sequence of the last message. Raises nats.js.errors.Error when a heartbeat shows that
    a later message was lost.
    """
    headers = msg.headers or {}
    # a message of the stream carries the headers that its publisher chose, but its reply is the server's
    if headers.get("Status") != "100" or msg.reply.startswith("$JS.ACK."):
        return False
    if reply := msg.reply or headers.get("Nats-Consumer-Stalled"):
        await client.publish(reply)
    last = headers.get("Nats-Last-Consumer")
    if last is not None and int(last) != sequence:
        raise js_errors.Error(f"{int(last) - sequence} messages lost")
    return True
