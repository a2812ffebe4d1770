"""Closed loop over HTTP: a fixed number of streams, each asked for again when it ends, and counters of what came.

The client takes as little CPU time as is possible in Python, to keep up with the fastest server.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from bench.rig.http import READ_BYTES, connect, post

TAIL = 32  # longer than an event's beginning and than the end of an answer


class Counters:
    """Shared between processes: how much the client has seen, and how far ahead of it the engine may be."""

    def __init__(self, context: Any, window: int) -> None:
        self.seen = context.Value("Q", 0, lock=False)  # events
        self.reads = context.Value("Q", 0, lock=False)
        self.window = context.Value("i", window, lock=False)  # steps


def load(port: int, streams: int, body: Mapping[str, Any], counters: Counters) -> None:
    """Keep `streams` streaming requests running and count their events, until terminated."""
    request = post(body)
    sockets: dict[int, socket.socket] = {}
    with select.epoll() as poll, ExitStack() as opened:
        for _ in range(streams):
            connection = opened.enter_context(connect(port))
            connection.sendall(request)
            sockets[connection.fileno()] = connection
            poll.register(connection.fileno(), select.EPOLLIN)
        _read(poll, sockets, request, counters)


def _read(poll: select.epoll, sockets: Mapping[int, socket.socket], request: bytes, counters: Counters) -> None:
    tails = dict.fromkeys(sockets, b"")
    seen, reads = counters.seen, counters.reads
    while True:
        for number, _ in poll.poll():
            data = sockets[number].recv(READ_BYTES)
            if not data:
                raise RuntimeError("the server closed a connection")
            reads.value += 1
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data[:500].decode())
            text = tails[number] + data
            seen.value += text.count(b"data: ") - tails[number].count(b"data: ")
            if text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                tails[number] = b""
                sockets[number].sendall(request)
            else:
                tails[number] = text[-TAIL:]
