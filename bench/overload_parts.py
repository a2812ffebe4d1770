"""The client of the benches overload and rebalance: requests at given times, over plain sockets, without awaiting answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from motet.cli.stack import Stack, StackOptions
from motet.examples.demo import BASE, DEMO
from motet.shared.clock import now_s

PATIENCE_S = 120.0  # after the last request was sent
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class of requests. `ttft_slo_ms` and `tpot_slo_ms` go with each request as headers."""

    name: str
    ttft_slo_ms: float
    tpot_slo_ms: float
    share: float = 1.0


@dataclass(slots=True, kw_only=True)
class Request:
    """What is asked and when, and what the client saw. Times in seconds from the start of the run."""

    at_s: float
    kind: Kind
    tenant: str
    wire: bytes
    status: int = 0
    answered_s: float = 0.0  # the first byte
    first_s: float = 0.0  # the first token
    last_s: float = 0.0
    tokens: int = 0
    retry_after_s: float = 0.0
    data: bytearray = field(default_factory=bytearray)
    keep: bool = False  # the answer's text, for `text`

    @property
    def text(self) -> str:
        """The text of the whole answer."""
        lines = bytes(self.data).decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    @property
    def kept(self) -> bool:
        """Whether the request was answered within its objectives."""
        if self.status != 200 or self.tokens < 2:
            return False
        ttft_ms = 1000.0 * (self.first_s - self.at_s)
        tpot_ms = 1000.0 * (self.last_s - self.first_s) / (self.tokens - 1)
        return ttft_ms <= self.kind.ttft_slo_ms and tpot_ms <= self.kind.tpot_slo_ms


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times in [0, seconds)."""
    draw, times, at = random.Random(seed), [], 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


class Asking:
    """Makes requests for one gateway: random prompts, fixed output length, models in turn."""

    def __init__(self, *, vocabulary: int, prompt_tokens: int, output_tokens: int, models: Sequence[str]) -> None:
        self._vocabulary, self._prompt, self._output, self._models = vocabulary, prompt_tokens, output_tokens, models
        self._draw = random.Random(1)
        self._count = 0

    def request(self, at_s: float, kind: Kind, tenant: str, model: str = "") -> Request:
        self._count += 1
        body = {
            "model": model or self._models[self._count % len(self._models)],
            "prompt": [self._draw.randrange(2, self._vocabulary) for _ in range(self._prompt)],
            "max_tokens": self._output, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        text = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer key-{tenant}\r\nx-slo-class: {kind.name}\r\nx-slo-ttft-ms: {kind.ttft_slo_ms:g}\r\n"
            f"x-slo-tpot-ms: {kind.tpot_slo_ms:g}\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        return Request(at_s=at_s, kind=kind, tenant=tenant, wire=head.encode() + text)

    def mixed(self, times: Sequence[float], kinds: Sequence[Kind], tenant: str, seed: int) -> list[Request]:
        """A request at each time, its kind drawn by the kinds' shares."""
        drawn = random.Random(seed).choices(kinds, [kind.share for kind in kinds], k=len(times))
        return [self.request(at_s, kind, tenant) for at_s, kind in zip(times, drawn, strict=True)]


def play(port: int, requests: Sequence[Request]) -> None:
    """Send each request at its time and read every answer to its end. Raises RuntimeError if some do not end."""
    coming = sorted(requests, key=lambda request: request.at_s, reverse=True)
    open_: dict[int, tuple[socket.socket, Request]] = {}
    poll = select.epoll()
    began_s = now_s()
    last_s = coming[0].at_s if coming else 0.0
    while coming or open_:
        at_s = now_s() - began_s
        if at_s > last_s + PATIENCE_S:
            raise RuntimeError(f"{len(open_)} requests have no end after {PATIENCE_S:g} s")
        while coming and coming[-1].at_s <= at_s:
            request = coming.pop()
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request.wire)
            request.at_s = now_s() - began_s  # the client's own delay is not the server's
            poll.register(connection.fileno(), select.EPOLLIN)
            open_[connection.fileno()] = connection, request
        wait_s = max(0.0, coming[-1].at_s - at_s) if coming else 1.0
        for number, _ in poll.poll(wait_s):
            connection, request = open_[number]
            data = connection.recv(1 << 18)
            if not data:
                poll.unregister(number)
                del open_[number]
                connection.close()
            else:
                _read(request, data, now_s() - began_s)
    poll.close()


def _read(request: Request, data: bytes, at_s: float) -> None:
    if request.keep or not request.status:
        request.data += data
    if not request.status:
        if b"\r\n\r\n" not in request.data:
            return
        data = bytes(request.data)
        request.status, request.answered_s = int(data[9:12]), at_s
        if found := _RETRY_AFTER.search(data):
            request.retry_after_s = float(found[1])
    if request.status == 200 and (events := data.count(b'"text"')):
        request.first_s = request.first_s or at_s
        request.last_s, request.tokens = at_s, request.tokens + events


@contextmanager
def demo_mesh(variables: Mapping[str, str], keys: str, *, workers: int = 1, module: str = "motet") -> Iterator[int]:
    """A stack with the demo model and `MOTET_*` variables; yields the port of its gateway. `keys`: lines of its key file;
    `module`: what Python runs as each service."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory, asyncio.Runner() as runner:
        key_file = Path(directory) / "keys"
        key_file.write_text(keys)
        before = {name: os.environ.get(name) for name in variables}
        os.environ |= variables  # the services take what no flag says from their environment
        options = StackOptions(
            model=str(DEMO / "model"),
            served_model_name=BASE,
            adapters_dir=str(DEMO / "adapters"),
            data_dir=Path(directory) / "data",
            workers=workers,
            api_keys_file=str(key_file),
            threads=1,
            port=0,
            drain_s=2.0,
        )
        stack = Stack(options, _Quiet(), program=(sys.executable, "-m", module))
        try:
            runner.run(stack.start())
            yield int(stack.urls[0].rsplit(":", 1)[1])
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            runner.run(stack.stop())


class _Quiet:
    """Receives state changes of the stack's services and reports failures only."""

    def changed(self, name: str, state: str, note: str) -> None:
        if state in ("restarting", "failed"):
            print(f"{name}: {state} {note}")
