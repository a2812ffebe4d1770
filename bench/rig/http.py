"""HTTP as the benches' clients speak it: bytes over plain sockets, because they share the machine with what they measure."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

BASE = "bench"
"""The name under which benches serve their base model."""
READ_BYTES = 1 << 18


def completion(model: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion of exactly `max_tokens`, and `more` fields of it."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | more


def post(body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> bytes:
    """The bytes of a request for a completion."""
    text = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in headers.items()]
    lines += ["host: localhost", "content-type: application/json", f"content-length: {len(text)}"]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + text


def connect(port: int) -> socket.socket:
    """A connection to a server of this machine, without delays for small packets."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
