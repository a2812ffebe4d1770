"""Moves waiting requests to workers where they are predicted to run sooner: `--rebalance auto`.

    ClusterState -> predicted waits of all queues -> the last of the longest queue goes where it waits less -> and again

A request that waits has no KV blocks and no token yet. So a move costs other requests only a prefill, as on the old worker, and
the copy of its adapter if the new worker lacks it. What a move costs the request itself is counted, too:

    here   = room + the queue's prefill                      (`shared_cost`: the time until it has a seat and KV memory)
    there  = the same on the other worker, behind its queue, its adapter's memory included, + the adapter's copy and fetch
             + the step under way here, before which it cannot leave
    others = the adapter's copy for all requests there, if their steps wait for it

It moves if there + others is below EVEN of here, and LEAST_GAIN_MS less; that separates a prediction from its errors. All times
are what workers measure. `move_check` compares the waits that requests had with those predicted, corrects the predictions,
and stops all moves for a while when they gained nothing. Running requests never move: their KV would be computed again.

Queues differ where answers come out longer or shorter than predicted, where requests follow their adapter, and with more work
than the workers can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.holders import ON_HOST
from motet.policies.cluster.migration_plan import Moved, Plan, PlanConfig
from motet.policies.cluster.move_check import MoveCheck
from motet.policies.cluster.rebalance import EVEN, Pressure, RebalanceConfig
from motet.policies.cluster.waits import room_share
from motet.policies.cluster.worker_load import tokens_left
from motet.policies.times.perf_model import Floats
from motet.shared.model import Mechanism, RequestBrief

MOST = 64
"""Requests that move at a time."""
LEAST_GAIN_MS = 250.0
"""A smaller gain could not be checked: waits are looked at every quarter of a second."""
LONGEST = 16
"""Queues, the longest, that are looked at for requests that stay and for objectives; bounds the time on the event loop."""
REST_S = 10.0
"""A request that moved stays for this time."""
SIZES_KEPT = 4096


class AdapterSizes:
    """Bytes of the adapters that were asked for lately; an unknown one counts as large as the mean of the others."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._total = 0

    def asked(self, digest: str, size_bytes: int) -> None:
        """A request for the adapter came."""
        if digest in self._sizes:
            return
        if len(self._sizes) >= SIZES_KEPT:
            self._total -= self._sizes.pop(next(iter(self._sizes)))
        self._sizes[digest] = size_bytes
        self._total += size_bytes

    def of(self, digest: str) -> float:
        """The size of an adapter."""
        return self._sizes.get(digest, self._total / max(1, len(self._sizes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingMoves:
    """What to move between the workers of a base model now. `answer` is there at once."""

    base_model: str
    pressure: Pressure
    plan: Plan

    def answer(self, config: PlanConfig) -> Plan:
        """The plan."""
        return self.plan


@dataclass(eq=False)
class QueueMoves:
    """The planning of one scheduler with `--rebalance auto`, called as `rebalance.Rebalancer` is."""

    sizes: AdapterSizes = field(default_factory=AdapterSizes)
    check: MoveCheck = field(default_factory=MoveCheck)
    config: RebalanceConfig = field(default_factory=RebalanceConfig)
    _moved_s: dict[str, float] = field(default_factory=dict)  # request id -> when it moved

    def questions(
        self, state: ClusterState, now_s: float, *, stale_s: float, avg_resp_len: float, always: bool = False
    ) -> list[WaitingMoves]:
        """What to move now. With `always` (a dry run) nothing is remembered, and earlier failures do not count."""
        if not always:
            self._moved_s = {one: at_s for one, at_s in self._moved_s.items() if now_s - at_s < REST_S}
            self.check.look(state, now_s)
        table, found = state.table, []
        live = (table["base"] >= 0) & (table["heard_s"] >= now_s - stale_s) & ~table["draining"]
        if not always and not (live & (table["queued"] > 0)).any():
            return []
        for base in np.unique(table["base"][live]).tolist():
            rows = np.flatnonzero(live & (table["base"] == base))
            if len(rows) < 2:
                continue
            queues = _Queues(state, rows, avg_resp_len, self.check.longer)
            waits = queues.wait_ms()
            if not always:
                self._follow(state, queues, waits, now_s)
                if not self.check.open(now_s):
                    continue
            plan = self._plan(state, queues)
            if always or plan.moves:
                pressure = Pressure(most_ms=float(waits.max()), least_ms=float(waits.min()), late=queues.late(waits))
                found.append(WaitingMoves(base_model=state.base_model(base), pressure=pressure, plan=plan))
        return found

    def moved(self, plans: Iterable[Plan], now_s: float) -> None:
        """These plans were carried out."""
        for plan in plans:
            for move, wait in zip(plan.moves, plan.waits, strict=True):
                self._moved_s[move.request_id] = now_s
                self.check.moved(move.request_id, move.to, now_s, wait)

    def mechanism(self, now_s: float) -> Mechanism:
        """Whether requests move, and why, for people."""
        check = self.check
        if not check.open(now_s):
            return Mechanism("waiting", f"moved requests waited no less; next try in {check.left_s(now_s):.0f} s")
        if not check.judged:
            return Mechanism("waiting", "no waiting request would run sooner elsewhere")
        return Mechanism("on", f"{check.judged} moved requests waited {check.gained_ms / check.judged:.0f} ms less each")

    def travels(self, state: ClusterState, request_id: str, source: str, to: str) -> bool:
        """Whether a request that moves should fetch its KV blocks: it has none."""
        return False

    def _follow(self, state: ClusterState, queues: _Queues, waits: Floats, now_s: float) -> None:
        """Remember what the last of each queue is predicted to wait."""
        for at in np.argsort(-waits, kind="stable")[:LONGEST].tolist():
            if waits[at] <= 0.0:
                return
            worker_id = state.ids[queues.rows[at]]
            last = _movable(state, worker_id, ())[-1:]
            for brief in last:
                self.check.stays(brief.request_id, worker_id, now_s, float(waits[at]))

    def _plan(self, state: ClusterState, queues: _Queues) -> Plan:
        waits = queues.wait_ms()
        before_ms = float(waits.max())
        movable: dict[int, list[RequestBrief]] = {}
        moves: list[Moved] = []
        expected: list[tuple[float, float]] = []
        loads: list[tuple[str, str]] = []
        while len(moves) < MOST:
            source = int(np.argmax(waits))
            if waits[source] <= 0.0:
                break
            if source not in movable:
                movable[source] = _movable(state, state.ids[queues.rows[source]], self._moved_s)
            brief = movable[source].pop() if movable[source] else None
            there, others = queues.there_ms(brief, source, self.sizes) if brief is not None else (waits, waits)
            to = int(np.argmin(there + others))
            if brief is None or there[to] + others[to] >= min(EVEN * waits[source], waits[source] - LEAST_GAIN_MS):
                waits[source] = 0.0  # nothing moves from here
                continue
            expected.append((float(waits[source]), float(there[to])))
            move = Moved(brief.request_id, brief.adapter_digest, *(state.ids[queues.rows[at]] for at in (source, to)))
            moves.append(move)
            loads += [(digest, move.to) for digest in brief.adapter_digests if digest not in state.adapters(move.to)]
            queues.shift(brief, source, to)
            now = queues.wait_ms()
            waits[source], waits[to] = now[source], 0.0  # what has come to a worker leaves it in no plan
        after_ms = float(queues.wait_ms().max())
        return Plan(moves=tuple(moves), loads=tuple(loads), before_ms=before_ms, after_ms=after_ms, waits=tuple(expected))


def _movable(state: ClusterState, worker_id: str, rest: Mapping[str, float] | tuple[()]) -> list[RequestBrief]:
    """The requests of a worker that wait and have no token yet, the last in its order at the end."""
    briefs = [
        one
        for one in state.requests(worker_id).values()
        if one.phase == "waiting" and not one.output_tokens and one.request_id not in rest
    ]
    briefs.sort(key=lambda one: one.ttft_slo_ms or float("inf"))  # as they came where that is equal
    return briefs


class _Queues:
    """The queues of the workers in `rows`, as they would be after moves. Waits are those of `shared_cost`."""

    def __init__(self, state: ClusterState, rows: NDArray[np.intp], avg_resp_len: float, longer: float) -> None:
        self.rows, self._state = rows, state
        self._coming: dict[str, list[int]] = {}  # where moves bring each adapter
        shared = ((one.block_size, one.kv_block_bytes) for one in (state.terms(state.ids[row])[0] for row in rows.tolist()))
        self._byte_tokens = np.array([size / block_bytes if block_bytes else 0.0 for size, block_bytes in shared])
        self._t = t = {name: state.table[name][rows] for name in _COLUMNS}
        self._answer_ms = longer * avg_resp_len * t["step_ms"]
        self._longer = longer

    def _wait_ms(self, behind: Floats, lacking: Floats, own_ms: Floats | float) -> Floats:
        return self._answer_ms * room_share(self._t, behind, lacking) + self._longer * (self._t["queue_ms"] + own_ms)

    def wait_ms(self) -> Floats:
        """What the last request of each queue is predicted to wait; 0 without one."""
        t = self._t
        wait = self._wait_ms(t["exists"] - t["max_running"], t["kv_tokens_promised"] - t["kv_tokens_free"], 0.0)
        return np.where(t["queued"] > 0, wait, 0.0)

    def there_ms(self, brief: RequestBrief, source: int, sizes: AdapterSizes) -> tuple[Floats, Floats]:
        """What this request of the worker `source` would wait on each other worker, and what it would cost all there."""
        t, tokens = self._t, float(brief.prompt_tokens)
        copy, fetch, room = self._adapter(brief.adapter_digest, sizes)
        for digest in brief.more:
            its_copy, its_fetch, its_room = self._adapter(digest, sizes)
            copy, fetch, room = copy + its_copy, fetch + its_fetch, room + its_room
        lacking = tokens + tokens_left(brief) + room + t["kv_tokens_promised"] - t["kv_tokens_free"]
        wait = self._wait_ms(t["exists"] - t["max_running"] + 1.0, lacking, t["prefill_token_ms"] * tokens)
        wait = wait + copy + fetch + t["step_ms"][source]
        wait[source] = np.inf
        full = (t["exists"] >= t["max_requests"]) | t["refusing"]
        return np.where(full, np.inf, wait), t["copies_stall"] * copy * t["exists"]

    def _adapter(self, digest: str, sizes: AdapterSizes) -> tuple[Floats, Floats, Floats]:
        """Of an adapter on each worker: the times of its copy and its fetch, and the KV tokens whose memory it would take."""
        state, rows = self._state, self.rows
        if not digest:
            return (np.zeros(len(rows)),) * 3
        size_bytes = sizes.of(digest)
        copy, fetch = (times[rows] for times in state.perf.transfer_ms(round(size_bytes)))
        room = size_bytes * self._byte_tokens
        if (held := state.holders(digest)) is not None:
            here = np.isin(rows, held.rows[held.loaded])
            near = here | np.isin(rows, held.rows[(held.bits & ON_HOST) > 0])
            copy, fetch, room = np.where(here, 0.0, copy), np.where(near, 0.0, fetch), np.where(here, 0.0, room)
        for to in self._coming.get(digest, ()):
            copy[to] = fetch[to] = room[to] = 0.0
        return copy, fetch, room

    def shift(self, brief: RequestBrief, source: int, to: int) -> None:
        """The request moves."""
        t, tokens = self._t, float(brief.prompt_tokens)
        for digest in (brief.adapter_digest, *brief.more):
            self._coming.setdefault(digest, []).append(to)
        for at, sign in ((source, -1.0), (to, 1.0)):
            t["exists"][at] += sign
            t["queued"][at] += sign
            t["kv_tokens_promised"][at] += sign * (tokens + tokens_left(brief))
            t["queue_ms"][at] += sign * t["prefill_token_ms"][at] * tokens

    def late(self, waits: Floats) -> int:
        """Workers where a request waits for longer than its objective."""
        return sum(
            any(0 < one.ttft_slo_ms < waits[at] for one in _movable(self._state, self._state.ids[row], ()))
            for at, row in ((at, int(self.rows[at])) for at in np.argsort(-waits, kind="stable")[:LONGEST].tolist())
            if waits[at] > 0
        )


_COLUMNS = (
    "exists", "running", "queued", "max_running", "max_requests", "refusing", "queue_ms", "step_ms", "kv_tokens_free",
    "kv_tokens_promised", "kv_tokens_total", "prefill_token_ms", "copies_stall",
)  # fmt: skip
