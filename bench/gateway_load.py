"""The load client: plain sockets and epoll, so that it takes as little CPU time as possible in Python."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

TAIL = 32  # longer than an event's beginning and than the end of an answer
BODY = {"model": "bench", "prompt": [1, 2, 3], "stream": True, "ignore_eos": True}


class Counters:
    """Shared between processes: how much the client has seen, and how far ahead of it the engine may be."""

    def __init__(self, context: Any, window: int) -> None:
        self.seen = context.Value("Q", 0, lock=False)  # events
        self.reads = context.Value("Q", 0, lock=False)
        self.window = context.Value("i", window, lock=False)  # steps


def load(port: int, streams: int, stream_tokens: int, counters: Counters) -> None:
    """Keep `streams` streaming requests running and count their events, until terminated."""
    body = json.dumps(BODY | {"max_tokens": stream_tokens}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    tails: dict[int, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        sockets[connection.fileno()], tails[connection.fileno()] = connection, b""
        poll.register(connection.fileno(), select.EPOLLIN)
    seen, reads = counters.seen, counters.reads
    while True:
        for number, _ in poll.poll():
            data = sockets[number].recv(1 << 18)
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
