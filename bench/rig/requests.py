"""Open loop over HTTP: requests are sent at given times, whether or not earlier ones are answered, and their tokens are timed.

requests = asking.mixed(poisson_within(10.0, 5.0, seed=1), kinds, tenant, seed=2)
play(port, requests)                  each request now knows its status, first_s, last_s, gaps_s, ...
"""

from __future__ import annotations

import json
import random
import re
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.rig.http import READ_BYTES, completion, connect, post
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

    @property
    def objectives(self) -> dict[str, str]:
        """The headers that say by when tokens are wanted."""
        return {"x-slo-ttft-ms": f"{self.ttft_slo_ms:g}", "x-slo-tpot-ms": f"{self.tpot_slo_ms:g}"}


HOUR_MS = 3_600_000.0
PATIENT = Kind(name="batch", ttft_slo_ms=HOUR_MS, tpot_slo_ms=HOUR_MS)
"""Requests that are never refused for being late."""


@dataclass(slots=True, kw_only=True)
class Request:
    """What is asked and when, and what the client saw. Times in seconds from the start of the run."""

    wire: bytes
    at_s: float = 0.0  # when it is due
    kind: Kind = PATIENT
    keep: bool = False  # the answer's text, for `text` and `whole`
    sent_s: float = 0.0
    status: int = 0
    answered_s: float = 0.0  # the first byte
    first_s: float = 0.0  # the first token
    last_s: float = 0.0
    ended_s: float = 0.0  # the connection was closed
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between tokens; those that came together share their gap
    retry_after_s: float = 0.0
    data: bytearray = field(default_factory=bytearray)

    def again(self) -> Request:
        """The same request, not sent yet."""
        return Request(wire=self.wire, at_s=self.at_s, kind=self.kind, keep=self.keep)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def text(self) -> str:
        """The text of the whole answer."""
        lines = bytes(self.data).decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    @property
    def whole(self) -> bool:
        """Whether the answer reached its full length."""
        return self.status == 200 and b'"finish_reason":"length"' in self.data.replace(b": ", b":")

    @property
    def kept(self) -> bool:
        """Whether the request was answered within its objectives."""
        if self.status != 200 or self.tokens < 2:
            return False
        tpot_ms = 1000.0 * (self.last_s - self.first_s) / (self.tokens - 1)
        return 1000.0 * self.ttft_s <= self.kind.ttft_slo_ms and tpot_ms <= self.kind.tpot_slo_ms


class Asking:
    """Makes requests for one gateway: random prompts, fixed output length, models in turn."""

    def __init__(self, *, vocabulary: int, prompt_tokens: int, output_tokens: int, models: Sequence[str]) -> None:
        self._vocabulary, self._prompt, self._output, self._models = vocabulary, prompt_tokens, output_tokens, models
        self._draw = random.Random(1)
        self._count = 0

    def request(self, at_s: float, kind: Kind, tenant: str, model: str = "", *, keep: bool = False) -> Request:
        """A request of a tenant, for `model` or the next one in turn."""
        self._count += 1
        prompt = [self._draw.randrange(2, self._vocabulary) for _ in range(self._prompt)]
        body = completion(model or self._models[self._count % len(self._models)], prompt, self._output, stream=True)
        headers = {"connection": "close", "authorization": f"Bearer key-{tenant}", "x-slo-class": kind.name, **kind.objectives}
        return Request(wire=post(body, headers), at_s=at_s, kind=kind, keep=keep)

    def mixed(self, times_s: Sequence[float], kinds: Sequence[Kind], tenant: str, seed: int) -> list[Request]:
        """A request at each time, its kind drawn by the kinds' shares."""
        drawn = random.Random(seed).choices(kinds, [kind.share for kind in kinds], k=len(times_s))
        return [self.request(at_s, kind, tenant) for at_s, kind in zip(times_s, drawn, strict=True)]


def play(port: int, requests: Sequence[Request], *, connected: bool = False, patience_s: float = PATIENCE_S) -> None:
    """Send each request at its time and read every answer to its end.

    `connected`: all connections are made before the clock starts. Raises RuntimeError if some answers have no end `patience_s`
    after the last request is due.
    """
    coming = sorted(requests, key=lambda request: request.at_s)[::-1]  # the next one is the last
    made = [connect(port) for _ in coming] if connected else []
    open_: dict[int, tuple[socket.socket, Request]] = {}
    poll = select.epoll()
    began_s = now_s()
    last_s = coming[0].at_s if coming else 0.0
    while coming or open_:
        at_s = now_s() - began_s
        if at_s > last_s + patience_s:
            raise RuntimeError(f"{len(open_)} requests have no end after {patience_s:g} s")
        while coming and coming[-1].at_s <= at_s:
            request = coming.pop()
            connection = made.pop() if made else connect(port)
            connection.sendall(request.wire)
            request.sent_s = now_s() - began_s  # the client's own delay is not the server's
            poll.register(connection.fileno(), select.EPOLLIN)
            open_[connection.fileno()] = connection, request
        wait_s = max(0.0, coming[-1].at_s - at_s) if coming else 1.0
        for number, _ in poll.poll(wait_s):
            connection, request = open_[number]
            data = connection.recv(READ_BYTES)
            if data:
                _read(request, data, now_s() - began_s)
                continue
            request.ended_s = now_s() - began_s
            poll.unregister(number)
            del open_[number]
            connection.close()
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
        if request.first_s:
            request.gaps_s += [(at_s - request.last_s) / events] * events
        request.first_s = request.first_s or at_s
        request.last_s, request.tokens = at_s, request.tokens + events


def served_per_s(port: int, requests: Sequence[Request]) -> float:
    """Requests per second while every seat is taken: all are sent at once.

    Raises RuntimeError if one is not served.
    """
    play(port, requests)
    if statuses := {request.status for request in requests} - {200}:
        raise RuntimeError(f"answers with status {statuses} while the capacity was measured")
    return len(requests) / max(request.last_s for request in requests)
