"""An OpenAI server of any make in a process of its own, started as its users start it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.rig.http import BASE, completion
from bench.rig.processes import ChildProcess
from bench.rig.waiting import until

START_S = 600.0
END_S = 60.0
EVERY_S = 0.02
QUIET_S = 0.5  # what a server must have been idle for before another one is measured
SETTLE_S = 30.0
IDLE_SHARE = 0.2  # of one core, by all of its processes


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and how long its first tokens took from the start of its process: of the base model, of an adapter."""

    name: str
    port: int
    process: ChildProcess
    first_token_s: float
    first_adapter_token_s: float

    def settle(self) -> None:
        """Wait until the server's threads have stopped spinning for work: they would run beside the server that is measured
        next.

        Raises RuntimeError if they never stop.
        """

        def idle() -> bool:
            began_s, before_s = time.monotonic(), self.process.cpu_s()
            time.sleep(QUIET_S)
            return self.process.cpu_s() - before_s < IDLE_SHARE * (time.monotonic() - began_s)

        until(idle, lambda: f"{self.name} is still busy {SETTLE_S:.0f} s after its last answer", within_s=SETTLE_S, every_s=0.0)


@contextmanager
def started_server(name: str, argv: Sequence[str], environment: Mapping[str, str], port: int, adapter: str) -> Iterator[Server]:
    """A context with a server that has answered for its base model and for `adapter`."""
    began_s = time.monotonic()
    with ChildProcess(name, argv, environment, end_s=END_S) as process:
        first_s = [_first_token_s(process, port, model, began_s) for model in (BASE, adapter)]
        yield Server(name, port, process, *first_s)


def _first_token_s(process: ChildProcess, port: int, model: str, began_s: float) -> float:
    """Ask until there is an answer. Returns the seconds since `began_s`."""
    answer = ""
    while time.monotonic() - began_s < START_S and not process.ended:
        status, answer = _complete(port, model)
        if status == 200:
            return time.monotonic() - began_s
        time.sleep(EVERY_S)
    raise RuntimeError(f"{process.name} does not serve {model!r} ({answer}); the end of its log:\n{process.said()}")


def _complete(port: int, model: str) -> tuple[int, str]:
    """(status, answer) of a request for one token; (0, reason) when no server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(completion(model, [5, 6, 7, 8], 1))
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()
