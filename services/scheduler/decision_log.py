"""The decision log: a file with all inputs of decisions and their outcomes, and its replay.

    8 bytes length, little-endian │ msgpack [name, *arguments]          in the order in which things happened

The first record is the scheduler's configuration. Then follow the calls that change `WatchedCluster`, answers of `lease_held`,
and decisions with their inputs and outcomes. Replay uses the live code: the same class and policy get the same calls. The
file ends at MAX_BYTES; it is meant for debugging and tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from motet.policies.candidates import Ask
from motet.policies.dispatch import POLICIES, Decision, decide
from motet.policies.objectives import Admission
from motet.services.scheduler.cluster import WatchedCluster
from motet.shared.messages import WorkerDelta, WorkerSnapshot
from motet.shared.model import RequestBrief
from motet.shared.telemetry import logger

log = logger("motet.scheduler.decision_log")
MAX_BYTES = 256 << 20
CALLS: dict[str, tuple[Any, ...]] = {  # what changes a WatchedCluster, and the types of the arguments
    "on_state": (WorkerSnapshot | WorkerDelta, float),
    "lease_lost": (str,),
    "expire": (float,),
    "excuse_silence": (float,),
    "expect": (str, RequestBrief, float),
    "accepted": (str, str, float),
    "withdraw": (str, str),
    "unresponsive": (str, float),
    "refusing": (str,),
    "unavailable": (str,),
}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler was configured."""

    policy: str
    admission: Admission = "room"
    stale_s: float
    drop_s: float
    in_flight_s: float


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: its inputs besides the cluster's state, and its outcome."""

    ask: Ask
    now_s: float
    avg_resp_len: float
    worker_id: str | None
    total_cost: float


class DecisionLog:
    """Writes the log. It stops before the record that would make the file larger than `max_bytes`."""

    def __init__(self, path: Path, setup: Setup, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = path.open("wb")
        self._left = max_bytes
        self.write("setup", setup)

    def write(self, name: str, *arguments: Any) -> None:
        record = msgspec.msgpack.encode([name, *arguments])
        if self._left <= 0:
            return
        self._left -= len(record) + 8
        if self._left <= 0:
            log.warning("decision log is full", extra={"file": self._file.name})
            self._file.close()
            return
        self._file.write(len(record).to_bytes(8, "little") + record)

    def decided(self, ask: Ask, now_s: float, avg_resp_len: float, decision: Decision) -> None:
        """Log a decision on the present state."""
        made = Made(
            ask=ask, now_s=now_s, avg_resp_len=avg_resp_len, worker_id=decision.worker_id, total_cost=decision.total_cost
        )
        self.write("decided", made)

    def close(self) -> None:
        self._file.close()

    def follow(self, cluster: WatchedCluster) -> None:
        """Log every call that changes `cluster`, before it happens."""
        for name in CALLS:
            setattr(cluster, name, self._written(name, getattr(cluster, name)))

    def lease_held(self, held: Callable[[str], bool]) -> Callable[[str], bool]:
        """`held`, with its answers logged."""

        def answer(worker_id: str) -> bool:
            answered = held(worker_id)
            self.write("lease_held", answered)
            return answered

        return answer

    def _written(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        @wraps(call)
        def written(*arguments: Any) -> None:
            self.write(name, *arguments)
            call(*arguments)

        return written


def replay(path: Path) -> Iterator[tuple[Made, Decision]]:
    """Every logged decision, with the decision made now on the same inputs.

    Raises ValueError for a file that is not a decision log, naming the record.
    """
    records = _records(path)
    name, arguments = next(records, ("", []))
    if name != "setup":
        raise ValueError(f"{path.name}: record 1 is not a scheduler's set-up")
    setup = msgspec.convert(arguments[0], Setup)
    answers: deque[bool] = deque()
    cluster = WatchedCluster(
        stale_s=setup.stale_s,
        drop_s=setup.drop_s,
        in_flight_s=setup.in_flight_s,
        lease_held=lambda _: answers.popleft() if answers else False,
    )
    choose = POLICIES[setup.policy]()
    pending: tuple[str, list[Any]] | None = None  # a call whose answers from `lease_held` come after it
    for name, arguments in records:
        if name == "lease_held":
            answers.append(arguments[0])
            continue
        if pending is not None:
            getattr(cluster, pending[0])(*pending[1])
            pending = None
        if name == "decided":
            made = msgspec.convert(arguments[0], Made)
            yield (
                made,
                decide(
                    choose,
                    cluster.state,
                    made.ask,
                    made.now_s,
                    stale_s=setup.stale_s,
                    avg_resp_len=made.avg_resp_len,
                    admission=setup.admission,
                ),
            )
        else:
            types = CALLS[name]
            pending = name, [msgspec.convert(value, kind) for value, kind in zip(arguments, types, strict=True)]


def _records(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Name and arguments of each record."""
    with path.open("rb") as file:
        number = 0
        while head := file.read(8):
            number += 1
            size = int.from_bytes(head, "little")
            body = file.read(size) if len(head) == 8 and size <= MAX_BYTES else b""
            try:
                record = msgspec.msgpack.decode(body, type=list)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path.name}: record {number}: {error}") from None
            if not record or record[0] not in {"setup", "lease_held", "decided", *CALLS}:
                raise ValueError(f"{path.name}: record {number} is of no known kind")
            yield record[0], record[1:]
