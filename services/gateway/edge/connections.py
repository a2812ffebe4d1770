"""Limits on HTTP connections before a request has arrived: header bytes, time, and number of connections.

uvicorn's parser keeps headers of any size and waits without limit for the rest of a request. `GuardedProtocol` counts incoming
bytes and their times; `watch` checks all connections once a second and closes those that are too slow:

    connected ──► silent, or half a head ── HEAD_S ──────────────────────────► 408, closed
        ▲             │ head complete
        │             ▼
        │         half a body ── BODY_S, and a second more per BODY_BYTES_PER_S ──► 408, closed
        │             │ body complete
        └─ keep-alive ┴──► answered (uvicorn's own keep-alive time ends idle ones)

Time in which this side does not read a body does not count against the client. Data of a refused client is discarded until the
client closes, for at most `LINGER_S`: closing while it sends could lose the answer. Nothing here runs per streamed token.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any, Literal

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from motet.services.gateway.edge.upgrade import PlainParser
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, HeadersTooLarge, MotetError, Overloaded, Timeout

HEAD_S = 15.0
HEAD_BYTES = 64 << 10  # request line and headers; a read of the socket may bring at most 256 KiB more before it is noticed
HEADERS_MAX = 128
BODY_S = 30.0
BODY_BYTES_PER_S = 4096
DISCARD_BYTES = 8 << 20  # of a body whose answer was sent before it was read; reading some of it lets the client see the answer
LINGER_S = 2.0
CLOSING_S = 30.0  # a client that does not read the end of its answer holds it no longer
LOOK_S = 1.0
SPARE_FILES = 256  # for NATS, files, uploads
FILES_MOST = 1 << 20  # some systems allow a thousand times as many


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection with limits. `max_connections` is set once at start for the process."""

    max_connections = 16_384

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain = PlainParser(self)
        self.parser = self._plain  # type: ignore[assignment]  # it has what uvicorn uses
        self.phase: Literal["head", "body", "answer"] = "head"
        self.since_s = now_s()  # when the phase began
        self.closing_s = 0.0  # when it was refused, or first seen closing
        self.refused = False
        self._bytes = 0  # of the phase
        self._count = 0  # headers of this head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.refuse(Overloaded(f"{self.max_connections} connections are open already", retry_after_s=1.0), linger=False)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            self._bytes += len(data)
            if self._bytes > DISCARD_BYTES:
                self.transport.abort()
            return
        phase, since_s = self.phase, self.since_s
        super().data_received(data)
        if self.phase == phase and self.since_s == since_s:  # no head or body began in these bytes
            self._bytes += len(data)
            if phase == "head" and self._bytes > HEAD_BYTES:
                self._too_large()
            elif phase == "body" and self._bytes > DISCARD_BYTES and self.cycle.response_complete:
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.phase != "head":
            self._enter("head")
        self._count = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > HEAD_BYTES:
            self._too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        if self._count > HEADERS_MAX or len(value) > HEAD_BYTES:
            self._too_large()
        elif not self.refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.refused or self._plain.begins_again():
            return
        self._enter("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.refused or self._plain.ignoring:
            return
        self._enter("answer")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(BadRequest(msg))

    def look(self, now: float) -> None:
        """Close the connection when its client is too slow."""
        transport = self.transport
        if self.refused or transport.is_closing():
            self.closing_s = self.closing_s or now
            if now - self.closing_s > (LINGER_S if self.refused else CLOSING_S):
                transport.abort()
        elif self.phase == "head":
            # An idle keep-alive connection stays in "answer" until the first byte of its next request.
            if now - self.since_s > HEAD_S:
                self.refuse(Timeout(f"the request's headers did not arrive within {HEAD_S:g} s"))
        elif self.phase == "body":
            if self.flow.read_paused:
                self.since_s += LOOK_S
            elif now - self.since_s > BODY_S + self._bytes / BODY_BYTES_PER_S:
                self.refuse(Timeout(f"the request's body came slower than {BODY_BYTES_PER_S} bytes/s"))

    def refuse(self, error: MotetError, *, linger: bool = True) -> None:
        """Answer with `error` unless an answer has begun, and close."""
        transport, cycle = self.transport, self.cycle
        if self.refused or transport.is_closing():
            return
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            transport.close()
            return
        body = msgspec.json.encode(error.openai())
        retry = b"retry-after: 1\r\n" if error.retry_after_s is not None else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n%s\r\n" % (len(body), retry)
        transport.write(STATUS_LINE[error.status] + head + body)
        self.refused, self.closing_s, self._bytes = True, now_s(), 0
        if cycle is not None and not cycle.response_complete:  # a handler that awaits its body stops waiting
            cycle.disconnected = True
            cycle.message_event.set()
        if linger and transport.can_write_eof():
            self._unset_keepalive_if_required()
            transport.write_eof()
        else:
            transport.close()

    def _enter(self, phase: Literal["head", "body", "answer"]) -> None:
        self.phase, self.since_s, self._bytes = phase, now_s(), 0

    def _too_large(self) -> None:
        self.refuse(HeadersTooLarge(f"a request has at most {HEADERS_MAX} headers and {HEAD_BYTES >> 10} KiB of them"))


async def watch(connections: set[Any]) -> None:
    """Close slow connections until cancelled; a check of 10,000 connections takes about a millisecond."""
    while True:
        await asyncio.sleep(LOOK_S)
        now = now_s()
        for connection in list(connections):
            connection.look(now)


def files_for(connections: int) -> int:
    """Raise this process's limit of open files to what the system allows; returns how many of `connections` then have room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MOST if hard == resource.RLIM_INFINITY else min(hard, FILES_MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return connections if soft == resource.RLIM_INFINITY else max(min(connections, soft - SPARE_FILES), 1)
