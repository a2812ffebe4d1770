"""Accepts TLS connections. A connection counts from its first packet, and its handshake takes a bounded time.

An asyncio server shows a TLS connection to its protocol only after the handshake. Until then nothing counts or closes a client
that is silent, for a minute by default, so such clients could use up all open files. `TlsListener` accepts by itself:

    accepted ──► ClientHello is complete ──► handshake ──► GuardedProtocol: counted and watched as without TLS
        │                                        │
        └──── HANDSHAKE_S for both; at the connection limit the oldest without a ClientHello, else the oldest ──► closed

A client of good will sends its ClientHello with the packet that completes the connection. So at the limit those without one are
closed first, whatever their age: however fast silent clients come, they only push each other out. A handshake that goes on is
closed when it is older than YOUNG_S.

Memory for TLS is taken once the ClientHello is complete: a client that does not send it costs a file descriptor only.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sized

from motet.services.gateway import metrics
from motet.shared.clock import now_s
from motet.shared.telemetry import logger

log = logger("motet.gateway.tls")
HANDSHAKE_S = 10.0
YOUNG_S = 1.0  # a client of good will ends a handshake faster, unless its network is slow
BACKLOG = 2048
ACCEPTED_AT_ONCE = 64  # then the loop serves others
PAUSE_S = 0.1  # without a free file descriptor
PEEK_S = 0.05  # between two looks at an incomplete ClientHello
HANDSHAKE_RECORD, RECORD_HEAD, RECORD_BYTES = 22, 5, 16_384  # RFC 8446, 5.1
NO_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsListener:
    """Serves `listener`, in the place of an asyncio server. Each finished handshake gets a protocol of `make_protocol`.

    `connections` are those after the handshake. Together with the handshakes there are at most `max_connections`.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        max_connections: int,
    ) -> None:
        self._listener, self._context, self._make_protocol = listener, context, make_protocol
        self._connections, self._max_connections = connections, max_connections
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], float] = {}  # -> when accepted; the oldest first
        self._silent: dict[asyncio.Task[None], None] = {}  # those without a whole ClientHello
        self._pause: asyncio.TimerHandle | None = None
        metrics.HANDSHAKES.set_function(lambda: len(self._handshakes))

    def start(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting; handshakes go on. The listening socket stays open: it is the caller's."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)

    async def end(self) -> None:
        """Stop accepting and close unfinished handshakes."""
        self.close()
        for task in self._handshakes:
            task.cancel()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_FILE:
                    raise
                self._on_no_file()
                return
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        if len(self._handshakes) + len(self._connections) >= self._max_connections and not self._end_oldest():
            metrics.HANDSHAKE_FAILURES.labels("limit").inc()
            client.close()
            return
        client.setblocking(False)
        task = self._loop.create_task(self._shake(client))
        self._handshakes[task], self._silent[task] = now_s(), None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        self._silent.pop(task, None)

    async def _shake(self, client: socket.socket) -> None:
        ends_s, task = now_s() + HANDSHAKE_S, asyncio.current_task()
        assert task is not None
        try:
            try:
                await asyncio.wait_for(self._hello(client), HANDSHAKE_S)
                self._silent.pop(task, None)
            except BaseException:
                client.close()  # from here on the transport closes it
                raise
            left_s = max(ends_s - now_s(), 0.01)
            await self._loop.connect_accepted_socket(
                self._make_protocol, client, ssl=self._context, ssl_handshake_timeout=left_s
            )
        except (OSError, TimeoutError):  # it left, speaks no TLS, or is too slow
            metrics.HANDSHAKE_FAILURES.labels("client").inc()
        except asyncio.CancelledError:
            metrics.HANDSHAKE_FAILURES.labels("limit").inc()

    async def _hello(self, client: socket.socket) -> None:
        """Wait until the first record has arrived, and leave it in the socket."""
        readable = asyncio.Event()
        self._loop.add_reader(client, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(client)
        while True:
            seen = client.recv(RECORD_HEAD + RECORD_BYTES, socket.MSG_PEEK)
            if not seen:
                raise ConnectionResetError
            if seen[0] != HANDSHAKE_RECORD or len(seen) >= RECORD_HEAD + int.from_bytes(seen[3:RECORD_HEAD]):
                return
            await asyncio.sleep(PEEK_S)

    def _end_oldest(self) -> bool:
        """Close the oldest silent client, else the oldest handshake unless it is young, too. Returns whether that made room."""
        oldest = next((task for task in self._silent if not task.cancelling()), None)
        if oldest is None:
            oldest = next((task for task in self._handshakes if not task.cancelling()), None)
            if oldest is None or now_s() - self._handshakes[oldest] < YOUNG_S:
                return False
        oldest.cancel()
        return True

    def _on_no_file(self) -> None:
        """Without a file descriptor, accepting would fail again at once: make room, and try a little later."""
        log.warning("no free file descriptor for a connection")
        self._end_oldest()
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)
