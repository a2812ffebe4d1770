"""Checks whether requests that moved waited less than they would have waited without the move.

What a request would have waited is a prediction. So the last requests of queues, which did not move, are followed as well: what
they had to wait, over what was predicted for them, is by how much predictions are wrong here (`longer`). Predictions are
corrected by it before they decide anything.

    gain of a move  =  corrected wait that was predicted where it was  -  what it waited where it went

When the last moves gained nothing together, none is made for FIRST_S, then for twice as long each time, up to LONGEST_S. A gain
ends that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from motet.policies.cluster.cluster_state import ClusterState

JUDGED = 16
"""Moves after which the balance is looked at."""
FIRST_S, LONGEST_S = 10.0, 640.0
FOLLOWED = 256
"""Requests that are followed at a time, at most."""
LEARNING = 0.1
HALF_MS = 125.0
"""Half the time between two looks."""
LEAST_MS = 500.0
"""Shorter waits are not followed, as looks do not tell their length."""
BOUNDS = 0.25, 4.0
"""Of the correction."""


@dataclass(slots=True)
class _Followed:
    worker_id: str
    since_s: float
    here_ms: float  # predicted, without correction where it stays
    moved: bool


@dataclass(eq=False)
class MoveCheck:
    """Follows requests until they run. Times are seconds on the scheduler's clock."""

    longer: float = 1.0
    """What queues take, over what is predicted without this factor."""
    gained_ms: float = 0.0
    """Of all moves so far."""
    judged: int = 0
    _followed: dict[str, _Followed] = field(default_factory=dict)
    _gains_ms: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED))
    _pause_s: float = FIRST_S
    _until_s: float = float("-inf")

    def open(self, now_s: float) -> bool:
        """Whether requests may move."""
        return now_s >= self._until_s

    def left_s(self, now_s: float) -> float:
        """How long no request moves."""
        return max(0.0, self._until_s - now_s)

    def stays(self, request_id: str, worker_id: str, now_s: float, wait_ms: float) -> None:
        """The request is the last of its queue and is predicted to wait so long."""
        if wait_ms >= LEAST_MS and request_id not in self._followed and len(self._followed) < FOLLOWED:
            self._followed[request_id] = _Followed(worker_id, now_s, wait_ms / self.longer, False)

    def moved(self, request_id: str, to: str, now_s: float, waits_ms: tuple[float, float]) -> None:
        """The request moves. `waits_ms`: its predicted wait on the worker that it leaves, and on the worker where it goes."""
        self._followed.pop(request_id, None)
        if len(self._followed) < FOLLOWED:
            self._followed[request_id] = _Followed(to, now_s, waits_ms[0], True)

    def look(self, state: ClusterState, now_s: float) -> None:
        """See which of the followed requests run by now."""
        for request_id, one in list(self._followed.items()):
            brief = state.requests(one.worker_id).get(request_id) if one.worker_id in state else None
            if brief is not None and brief.phase != "running":
                continue
            del self._followed[request_id]
            had_ms = 1000.0 * (now_s - one.since_s) - HALF_MS  # it ran since the last look
            if one.moved:
                self._judge(one.here_ms - had_ms, now_s)
            elif brief is not None:
                share = min(max(had_ms / one.here_ms, BOUNDS[0]), BOUNDS[1])
                self.longer += LEARNING * (share - self.longer)

    def _judge(self, gain_ms: float, now_s: float) -> None:
        self._gains_ms.append(gain_ms)
        self.gained_ms += gain_ms
        self.judged += 1
        if len(self._gains_ms) < JUDGED:
            return
        if sum(self._gains_ms) > 0.0:
            self._pause_s = FIRST_S
        else:
            self._gains_ms.clear()
            self._until_s, self._pause_s = now_s + self._pause_s, min(LONGEST_S, 2.0 * self._pause_s)
