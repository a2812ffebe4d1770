"""Workers that do not serve: those that load their model, failed with a reason, or disappeared without a notice.

    notice "starting" ──► loading ──► first state: it serves, so it is removed here
    notice "failed"   ──► failed, with the reason that it gave
    notice "stopped"  ──► stopped on purpose: not reported
    lease expired, no notice ──► lost

Bounded: the latest `KEPT` workers, none older than `FORGET_S`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from motet.shared.wire.worker_state import WorkerNotice

KEPT = 64
TOLD = 3
HOPED_FOR = 3  # starts of a worker that has not served since: more look like a worker that cannot
FORGET_S = 600.0

LostState = Literal["loading", "failed", "lost", "stopped"]


class LostWorker(msgspec.Struct, kw_only=True):
    """A worker that does not serve. `starts`: how often it has started since it last served.

    `at_s`: time of the last change.
    """

    worker_id: str
    incarnation: str
    state: LostState
    words: str
    starts: int
    at_s: float

    def sentence(self, now_s: float) -> str:
        """A sentence for operators: which worker does not serve, since when, and why."""
        ago = f"{max(0.0, now_s - self.at_s):.0f} s"
        match self.state:
            case "loading":
                text = f"{self.worker_id} has been loading its model for {ago}"
            case "failed":
                text = f"{self.worker_id} failed {ago} ago: {self.words}"
            case _:
                text = f"{self.worker_id} was lost {ago} ago without a word (killed, out of memory, or cut off from NATS)"
        return text if self.starts < 2 else f"{text} [start {self.starts}]"


class LostWorkers:
    """Follows notices, states and leases of all workers of one base model."""

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model
        self._absent: dict[str, LostWorker] = {}  # in the order of `at_s`

    def on_notice(self, notice: WorkerNotice, now_s: float) -> None:
        """Take in a worker's notice."""
        if notice.base_model != self._base_model:
            return
        state: LostState = "loading" if notice.event == "starting" else notice.event
        before = self._absent.get(notice.worker_id)
        starts = (before.starts if before else 0) + (state == "loading")
        self._put(notice.worker_id, notice.incarnation, state, notice.reason, starts, now_s)

    def on_lost(self, worker_id: str, now_s: float) -> None:
        """The lease of a serving worker expired. If the worker had sent a notice, the notice stays."""
        if worker_id not in self._absent:
            self._put(worker_id, "", "lost", "", 0, now_s)

    def on_state(self, worker_id: str, incarnation: str) -> None:
        """The worker serves again. A state from before its last notice is ignored."""
        known = self._absent.get(worker_id)
        if known is not None and not (known.state in ("failed", "stopped") and known.incarnation == incarnation):
            del self._absent[worker_id]

    def all(self, now_s: float) -> list[LostWorker]:
        """All absent workers that did not stop on purpose, the latest change first."""
        while self._absent and (now_s - (oldest := next(iter(self._absent.values()))).at_s > FORGET_S):
            del self._absent[oldest.worker_id]
        return [absent for absent in reversed(self._absent.values()) if absent.state != "stopped"]

    def loading(self, now_s: float) -> bool:
        """Whether a worker is loading its model. A worker that restarts again and again does not count."""
        return any(absent.state == "loading" and absent.starts <= HOPED_FOR for absent in self.all(now_s))

    def sentences(self, now_s: float) -> list[str]:
        """Sentences on the latest `TOLD` workers, and the number of others."""
        known = self.all(now_s)
        more = [f"and {len(known) - TOLD} more"] if len(known) > TOLD else []
        return [absent.sentence(now_s) for absent in known[:TOLD]] + more

    def summary(self, now_s: float) -> str:
        """The number of workers per state, for clients: without names and reasons."""
        counts = Counter(absent.state for absent in self.all(now_s))
        return ", ".join(f"{count} {state}" for state, count in counts.items())

    def _put(self, worker_id: str, incarnation: str, state: LostState, words: str, starts: int, now_s: float) -> None:
        self._absent.pop(worker_id, None)
        self._absent[worker_id] = LostWorker(
            worker_id=worker_id, incarnation=incarnation, state=state, words=words, starts=starts, at_s=now_s
        )
        if len(self._absent) > KEPT:
            del self._absent[next(iter(self._absent))]
