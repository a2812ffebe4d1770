"""The life of a request on a worker, as a table.

    new ──> loading ──> waiting <──> running ──> gone          the engine has waiting, running and leaving ones
                │          └──> leaving <──┘ ──> gone          leaving: the engine was told to stop it
                └────────────────────────────> gone

A request is loading while its adapters are loaded into host memory, or its KV blocks come from another worker. A request that
needs neither is waiting at once. Messages to and from the engine may cross, so a leaving request may still be admitted or
preempted.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from motet.shared.model import AdapterRef, RequestBrief

R = TypeVar("R")
Key = tuple[str, int]  # request id, epoch
EntryPhase = Literal["new", "loading", "waiting", "running", "leaving", "gone"]
What = Literal["start", "load", "admit", "preempt", "cancel", "end"]

TRANSITIONS: dict[EntryPhase, dict[What, EntryPhase]] = {
    "new": {"load": "loading", "start": "waiting", "end": "gone"},
    "loading": {"start": "waiting", "cancel": "gone", "end": "gone"},
    "waiting": {"admit": "running", "preempt": "waiting", "cancel": "leaving", "end": "gone"},
    "running": {"admit": "running", "preempt": "waiting", "cancel": "leaving", "end": "gone"},
    "leaving": {"admit": "leaving", "preempt": "leaving", "cancel": "leaving", "end": "gone"},
    "gone": {},
}


class Entry(msgspec.Struct, Generic[R], eq=False):
    """A request in the book. `brief`: the request as other services see it."""

    brief: RequestBrief
    owner: str  # gateway id
    adapters: tuple[AdapterRef, ...]
    payload: R
    phase: EntryPhase = "new"
    holds: tuple[str, ...] = ()  # digests of its adapters whose host copies it holds
    fetching: bool = False  # KV blocks from another worker

    @property
    def key(self) -> Key:
        """Request id and epoch."""
        return self.brief.request_id, self.brief.epoch

    @property
    def complete(self) -> bool:
        """Whether it holds host copies of all its adapters."""
        return len(self.holds) == len(self.adapters)

    def move(self, what: What) -> None:
        """Take the transition. Raises KeyError for one that is not in the table."""
        self.phase = TRANSITIONS[self.phase][what]
