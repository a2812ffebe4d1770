"""The decision log: a file with all inputs of decisions and their outcomes, and its replay.

    8 bytes length, little-endian │ msgpack of a tagged struct          in the order in which things happened

The first record is the scheduler's configuration. Then follow the events that `WatchedCluster.on` took, decisions about
requests with their inputs and outcomes, and looks at how many workers there should be. A replay feeds the events to another
`WatchedCluster`, or the looks to other `BaseSizer`s, and decides again with the live code. The file ends at MAX_BYTES; it is
meant for debugging and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.dispatch import Decision
from motet.policies.cluster.scheduler_core import SchedulerCore
from motet.policies.scale.base_sizer import BaseSizer, Seen
from motet.policies.scale.need import Objective, Packed
from motet.policies.scale.sizing import SizingConfig
from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.events import ClusterEvent
from motet.shared.scheduler_options import SchedulerOptions
from motet.shared.telemetry import logger
from motet.shared.wire.scale import Decision as SizeDecision

log = logger("motet.scheduler.decision_log")
MAX_BYTES = 256 << 20


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """How the scheduler was configured."""

    options: SchedulerOptions
    drop_s: float
    sizing: tuple[SizingConfig, Objective] | None = None  # with --scale

    def cluster(self) -> WatchedCluster:
        """A new cluster with this configuration and without workers."""
        options = self.options
        return WatchedCluster(stale_s=options.stale_s, drop_s=self.drop_s, in_flight_s=options.in_flight_s)


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag="decided"):
    """A decision: its inputs other than the cluster's state, and its outcome."""

    ask: Ask
    now_s: float
    avg_resp_len: float
    worker_id: str | None
    total_cost: float


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """A look at how many workers a base model should have; no decision where another scheduler decides."""

    base_model: str
    seen: Seen
    decision: SizeDecision | None


LogRecord = Setup | Decided | Looked | ClusterEvent


class DecisionLog:
    """Writes the log. It stops before the record that would make the file larger than `max_bytes`."""

    def __init__(self, path: Path, setup: Setup, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = path.open("wb")
        self._left = max_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self.write(setup)

    def write(self, record: LogRecord) -> None:
        """Append a record. Events are written before the cluster applies them."""
        if self._left <= 0:
            return
        body = self._encode(record)
        self._left -= len(body) + 8
        if self._left <= 0:
            log.warning("decision log is full", extra={"file": self._file.name})
            self._file.close()
            return
        self._file.write(len(body).to_bytes(8, "little") + body)

    def decided(self, ask: Ask, now_s: float, avg_resp_len: float, decision: Decision) -> None:
        """Log a decision that was made on the present state."""
        worker_id, total_cost = decision.worker_id, decision.total_cost
        self.write(Decided(ask=ask, now_s=now_s, avg_resp_len=avg_resp_len, worker_id=worker_id, total_cost=total_cost))

    def close(self) -> None:
        self._file.close()


def replay(path: Path) -> Iterator[tuple[Decided, Decision]]:
    """Every logged decision, with the decision made now on the same inputs.

    Raises ValueError for a file that is not a decision log, naming the record.
    """
    setup, logged = _opened(path)
    cluster = setup.cluster()
    core = SchedulerCore(setup.options, cluster.state)
    for record in logged:
        match record:
            case Decided():
                yield record, core.decide(record.ask, record.now_s, record.avg_resp_len)
            case Looked():
                pass
            case Setup():
                raise ValueError(f"{path.name}: a second set-up")
            case _:
                cluster.on(record)


def replay_sizing(path: Path) -> Iterator[tuple[Looked, SizeDecision | None]]:
    """Every logged look at numbers of workers, with the decision made now on what was seen then. Raises as `replay`."""
    setup, logged = _opened(path)
    sizers: dict[str, BaseSizer] = {}
    for record in logged:
        if isinstance(record, Looked) and setup.sizing is not None:
            config, objective = setup.sizing
            sizer = sizers.setdefault(record.base_model, BaseSizer(config, Packed(objective)))
            yield record, sizer.look(record.seen)[1]


def _opened(path: Path) -> tuple[Setup, Iterator[LogRecord]]:
    """The set-up, and the records after it."""
    logged = records(path)
    setup = next(logged, None)
    if not isinstance(setup, Setup):
        raise ValueError(f"{path.name}: record 1 is not a scheduler's set-up")
    return setup, logged


def records(path: Path) -> Iterator[LogRecord]:
    """Every record of a log, in order. Raises ValueError for a file that is not one."""
    decode = msgspec.msgpack.Decoder(LogRecord).decode
    with path.open("rb") as file:
        number = 0
        while head := file.read(8):
            number += 1
            size = int.from_bytes(head, "little")
            body = file.read(size) if len(head) == 8 and size <= MAX_BYTES else b""
            try:
                yield decode(body)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path.name}: record {number}: {error}") from None
