"""Pings workers that hold our requests but send nothing, to detect dead and frozen workers.

    no frame for QUIET_S ──ping──► answered ......................... alive
                               ├─► no responders, twice ............. dead: the broker saw its connection close
                               └─► no answer within ANSWER_S ........ frozen or cut off, provided that the broker answers us

A lease takes seconds to expire, while NATS reports at once that a subject has no subscriber. A ping needs permission for one
subject only, so it works with any NATS server.

Rules of this file:
- Only a worker that has answered a ping before can be declared lost by pings. Older workers, and workers behind a server that
  does not allow pings, never answer; only their leases are watched.
- For `GRACE_S` after this gateway's connection came back, or its event loop stood still, no worker is declared lost: workers
  may reconnect a moment later.
- If a worker is declared lost by mistake, that costs a prefill on another worker; epochs prevent repeated tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import DeadlineExceeded, Unavailable
from motet.shared.telemetry import logger
from motet.shared.wire.worker_state import Ping, Pong

log = logger("motet.pings")
LOOK_S = 0.025
QUIET_S = 0.06  # a worker in the middle of a batch sends a frame more often than this, or has a moment to answer
AGAIN_S = 0.04  # between questions; a live worker whose connection broke is back within this
ABSENCES = 2  # so many answers "no responders" in a row, and the worker is dead
ANSWER_S = 0.75
BROKER_S = 0.25
NOBODY = "-"  # no worker's id
STALL_S = 0.5
GRACE_S = 2.0
STRANGER_EVERY_S = 5.0  # how often one is asked that has never answered


class Pings:
    """Detects dead and silent workers and calls `on_lost(worker_id)` for each.

    `holders()`: the workers that hold our requests.
    """

    def __init__(self, bus: Bus, holders: Callable[[], set[str]], on_lost: Callable[[str], None]) -> None:
        self._bus, self._holders, self._on_lost = bus, holders, on_lost
        self._heard: dict[str, float] = {}  # workers that took a request or sent a frame
        self._answered: set[str] = set()
        self._asking: set[str] = set()
        self._asked: dict[str, float] = {}  # strangers, and when they were asked last
        self._looked_s = 0.0
        self._trust_s = 0.0  # questions asked before this moment prove nothing
        self._reconnects = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch in the background, until `stop`."""
        self._task = self._bus.spawn(self._keep_looking())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def heard(self, worker_id: str) -> None:
        """The worker accepted a request or sent a frame."""
        self._heard[worker_id] = now_s()

    async def _keep_looking(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        now, reconnects = now_s(), self._bus.reconnects
        if not self._bus.connected or reconnects != self._reconnects or now - self._looked_s > STALL_S:
            self._trust_s = now + GRACE_S
        self._looked_s, self._reconnects = now, reconnects
        if now < self._trust_s:
            return
        due = [worker_id for worker_id, heard_s in self._heard.items() if self._due(worker_id, heard_s, now)]
        holders = self._holders() if due else set()
        for worker_id in due:
            if worker_id not in holders:
                self._heard.pop(worker_id)
                self._asked.pop(worker_id, None)
                continue
            self._asking.add(worker_id)
            self._bus.spawn(self._ask(worker_id))

    def _due(self, worker_id: str, heard_s: float, now: float) -> bool:
        if worker_id in self._asking:
            return False
        if worker_id in self._answered:
            return now - heard_s > QUIET_S
        return now - self._asked.get(worker_id, 0.0) > STRANGER_EVERY_S

    async def _ask(self, worker_id: str) -> None:
        began = now_s()
        try:
            problem = await self._problem(worker_id)
        finally:
            self._asking.discard(worker_id)
        if not problem:
            self._answered.add(worker_id)
            self._asked.pop(worker_id, None)
            self.heard(worker_id)
        elif worker_id not in self._answered:
            self._asked[worker_id] = began
        elif self._certain(worker_id, began):
            log.info("worker silent", extra={"worker": worker_id, "problem": problem})
            self._answered.discard(worker_id)  # a worker that comes back under this id must answer first
            self._on_lost(worker_id)

    async def _problem(self, worker_id: str) -> str:
        """Why the worker does not answer; "" when it does. Pings are repeated: one that was under way when the worker died gets
        no reply, the next one gets "no responders"."""
        deadline = now_s() + ANSWER_S
        questions: set[asyncio.Task[Pong]] = set()
        absences = 0
        try:
            while (left_s := deadline - now_s()) > 0:
                ask = self._bus.request(subjects.ping(worker_id), Ping(), Pong, timeout_s=left_s)
                questions.add(asyncio.ensure_future(ask))
                settled, questions = await asyncio.wait(questions, timeout=AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                if not settled:
                    continue
                if any(question.exception() is None for question in settled):
                    return ""
                absences += any(isinstance(question.exception(), Unavailable) for question in settled)
                if absences == ABSENCES:
                    return "not connected"
                await asyncio.sleep(AGAIN_S)
        finally:
            for question in questions:
                question.cancel()
        if not await self._broker_answers():
            self._trust_s = now_s() + GRACE_S
        return "no answer"

    async def _broker_answers(self) -> bool:
        """Ping a worker that does not exist: "no responders" shows that the broker answers."""
        try:
            await self._bus.request(subjects.ping(NOBODY), Ping(), Pong, timeout_s=BROKER_S)
        except Unavailable:
            return self._bus.connected
        except DeadlineExceeded:
            return False
        return True

    def _certain(self, worker_id: str, began: float) -> bool:
        """Whether silence since `began` says anything about the worker."""
        return (
            began > self._trust_s
            and now_s() - self._looked_s < STALL_S
            and self._bus.connected
            and self._bus.reconnects == self._reconnects
            and self._heard.get(worker_id, 0.0) < began
        )
