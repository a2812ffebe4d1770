"""An OpenAI server of any make in a process of its own, started as its users start it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from bench.rig.http import BASE, completion
from bench.rig.processes import ChildProcess
from bench.rig.waiting import until

START_S = 600.0
END_S = 60.0
EVERY_S = 0.02
QUIET_S = 0.5  # what a server must have been idle for before another one is measured
SETTLE_S = 30.0
IDLE_SHARE = 0.2  # of one core, by all of its processes


class Server:
    """One server. A context manager that starts it and waits for the first tokens of its base model and of `adapter`."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], port: int, adapter: str) -> None:
        self.name, self.port = name, port
        self.process = ChildProcess(name, argv, environment, end_s=END_S)
        self._adapter = adapter
        self.first_token_s = self.first_adapter_token_s = 0.0

    def __enter__(self) -> Server:
        began_s = time.monotonic()
        self.process.__enter__()
        try:
            self.first_token_s = self._wait(BASE, began_s)
            self.first_adapter_token_s = self._wait(self._adapter, began_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.__exit__(None, None, None)  # also after an error it ends as users end it

    def _wait(self, model: str, began_s: float) -> float:
        """Ask until there is an answer. Returns the seconds since `began_s`."""
        answer = ""
        while time.monotonic() - began_s < START_S and not self.process.ended:
            status, answer = _complete(self.port, model)
            if status == 200:
                return time.monotonic() - began_s
            time.sleep(EVERY_S)
        raise RuntimeError(f"{self.name} does not serve {model!r} ({answer}); the end of its log:\n{self.process.said()}")

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
