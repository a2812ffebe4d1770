"""Which requests to move between workers, and which adapters must be loaded for it (dLoRA section 5.2).

    minimise  max over workers j  [ sum_i c_ij x_ij  +  overflow_j / B  +  eta * adapters of j ]

    x_ij = 1      request i is on worker j; each request is on one worker
    c_ij          its work L_i where it is now; gamma * L_i + the time to compute its tokens anew elsewhere
    y_kj >= x_ij  an adapter is where its requests are; it takes memory there and costs eta
    overflow_j    memory of requests and adapters beyond the worker's own, which is swapped at the rate B

Requests move from the `top` workers with the most work to the `top` with the least; all others stay. x and y are relaxed to
real numbers and solved with HiGHS. Every request goes to the largest of its x; then single requests move on while that lowers
the maximum, and moves that do not lower it are taken back. A plan that gains too little moves nothing.

The paper applies gamma to every request, which would only scale the objective; here it applies to moved ones, "inhibiting the
frequent migration". KV moves as tokens that are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

LEAST_SHARE = 1e-3
"""Weight of the moved work beside the maximum, so that of two equal plans the one that moves less wins."""


class Held(msgspec.Struct, frozen=True, gc=False):
    """A request on a worker."""

    request_id: str
    adapter: str  # digest, "" for the base
    work_ms: float  # L: the engine's time that it still needs
    memory: float  # M, in the unit of `Replica.memory`
    again_ms: float = 0.0  # to compute its tokens elsewhere
    fixed: bool = False  # it must not move


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A worker: its requests, the adapters on its device, and the memory that both share.

    `takes`: how many requests may move to it.
    """

    worker_id: str
    requests: Sequence[Held]
    adapters: Collection[str] = ()
    memory: float = float("inf")
    takes: int = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """The paper's gamma, B, eta and K, for which it states no values, and the hysteresis."""

    gamma: float = 1.1
    swap_ms: float = 0.1  # per unit of memory: 1 / B
    eta_ms: float = 50.0
    top: int = 4
    each: int = 16  # requests per overloaded worker that may move in one plan
    least_gain: float = 0.1  # of the maximum; a smaller gain moves nothing


class Moved(msgspec.Struct, frozen=True):
    """A request that moves."""

    request_id: str
    adapter: str
    source: str  # worker ids
    to: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The moves to make. `before_ms` and `after_ms`: the maximum without and with them.

    `bound_ms`: a lower bound of the maximum that such moves can reach.
    """

    moves: tuple[Moved, ...] = ()
    loads: tuple[tuple[str, str], ...] = ()  # (adapter, worker) that the moves need
    before_ms: float = 0.0
    after_ms: float = 0.0
    bound_ms: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()
    """Of each request that waits: its predicted wait without and with its move, in milliseconds."""


def plan(replicas: Sequence[Replica], adapter_memory: Mapping[str, float], config: PlanConfig) -> Plan:
    """The moves that lower the maximum. `adapter_memory`: {adapter: memory}, in the unit of `Replica.memory`."""
    model = _Model(replicas, adapter_memory, config)
    before_ms = max((load.time_ms(config) for load in model.loads), default=0.0)
    unchanged = Plan(before_ms=before_ms, after_ms=before_ms, bound_ms=before_ms)
    top = min(config.top, len(replicas) // 2)
    order = sorted(range(len(replicas)), key=lambda at: (-model.loads[at].time_ms(config), replicas[at].worker_id))
    over, under = order[:top], order[len(order) - top :]
    rows = model.movable(over)
    if not rows:
        return unchanged
    shares, bound_ms = model.solve(rows, under)
    model.round(rows, under, shares)
    model.improve(rows, under)
    model.take_back(rows)
    after_ms = max(load.time_ms(config) for load in model.loads)
    if after_ms > before_ms * (1.0 - config.least_gain):
        return replace(unchanged, bound_ms=bound_ms)
    moves = tuple(
        Moved(one.held.request_id, one.held.adapter, replicas[one.source].worker_id, replicas[one.at].worker_id)
        for one in rows
        if one.at != one.source
    )
    needed = sorted({(move.adapter, move.to) for move in moves if move.adapter})
    there = {one.worker_id: one.adapters for one in replicas}
    loads = tuple((adapter, worker) for adapter, worker in needed if adapter not in there[worker])
    return Plan(moves=moves, loads=loads, before_ms=before_ms, after_ms=after_ms, bound_ms=bound_ms)


@dataclass(slots=True)
class _Load:
    """The load that a worker would have. `users`: requests per adapter; adapters on the device without a request have 0."""

    memory: float
    work_ms: float = 0.0
    taken: float = 0.0
    users: dict[str, int] = field(default_factory=dict)
    room: int = 0  # requests that it may still get

    def time_ms(self, config: PlanConfig) -> float:
        """The worker's running time, in milliseconds."""
        overflow = max(0.0, self.taken - self.memory)
        return self.work_ms + config.swap_ms * overflow + config.eta_ms * len(self.users)


@dataclass(slots=True)
class _Row:
    held: Held
    source: int
    at: int


@dataclass(frozen=True, slots=True)
class _Variables:
    """The variables of the relaxed problem, numbered: x by request, y by adapter, overflows by worker, the maximum.

    Column 0 of a request's x means staying, column j the j-th worker of `under`.
    """

    rows: int
    adapters: list[str]  # of the requests
    sources: list[int]
    under: Sequence[int]

    @property
    def columns(self) -> int:
        """The number of a request's x."""
        return 1 + len(self.under)

    @property
    def workers(self) -> list[int]:
        return [*self.sources, *self.under]

    @property
    def maximum(self) -> int:
        """The last variable."""
        return self._first_overflow + len(self.workers)

    @property
    def _first_overflow(self) -> int:
        return self.rows * self.columns + len(self.adapters) * len(self.under)

    def column(self, worker: int) -> int:
        return 0 if worker in self.sources else 1 + self.under.index(worker)

    def x(self, row: int, column: int) -> int:
        return row * self.columns + column

    def y(self, adapter: str, column: int) -> int:
        return self.rows * self.columns + self.adapters.index(adapter) * len(self.under) + column - 1

    def overflow(self, worker: int) -> int:
        return self._first_overflow + self.workers.index(worker)


@dataclass(slots=True)
class _Limits:
    """The inequalities of the relaxed problem: in each, a weighted sum of variables is at most its bound."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)  # inequality, variable, weight
    bounds: list[float] = field(default_factory=list)

    def at_most(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        """Add one."""
        self.entries.extend([(len(self.bounds), variable, value) for variable, value in terms])
        self.bounds.append(bound)


class _Model:
    """Sums per worker, updated when a request is moved."""

    def __init__(self, replicas: Sequence[Replica], adapter_memory: Mapping[str, float], config: PlanConfig) -> None:
        self._replicas, self._memory, self._config = replicas, adapter_memory, config
        self.loads: list[_Load] = []
        for replica in replicas:
            load = _Load(replica.memory, users=dict.fromkeys(replica.adapters, 0), room=replica.takes)
            load.taken = sum([adapter_memory.get(adapter, 0.0) for adapter in replica.adapters])
            for held in replica.requests:
                self._put(load, held, held.work_ms)
            self.loads.append(load)
        self._kept = [set(replica.adapters) for replica in replicas]

    def _put(self, load: _Load, held: Held, work_ms: float) -> None:
        load.work_ms += work_ms
        load.taken += held.memory
        if held.adapter:
            if held.adapter not in load.users:
                load.taken += self._memory.get(held.adapter, 0.0)
            load.users[held.adapter] = load.users.get(held.adapter, 0) + 1

    def _remove(self, at: int, held: Held, work_ms: float) -> None:
        load = self.loads[at]
        load.work_ms -= work_ms
        load.taken -= held.memory
        if held.adapter:
            load.users[held.adapter] -= 1
            if not load.users[held.adapter] and held.adapter not in self._kept[at]:
                del load.users[held.adapter]
                load.taken -= self._memory.get(held.adapter, 0.0)

    def cost_ms(self, held: Held, *, moved: bool) -> float:
        """The cost c of the objective."""
        return self._config.gamma * held.work_ms + held.again_ms if moved else held.work_ms

    def shift(self, row: _Row, to: int) -> None:
        """Put a request on another worker."""
        if to == row.at:
            return
        self._remove(row.at, row.held, self.cost_ms(row.held, moved=row.at != row.source))
        self._put(self.loads[to], row.held, self.cost_ms(row.held, moved=to != row.source))
        self.loads[row.at].room += row.at != row.source
        self.loads[to].room -= to != row.source
        row.at = to

    def movable(self, over: Sequence[int]) -> list[_Row]:
        """The requests of these workers whose move costs least, relative to their work."""
        rows = []
        for at in over:
            free = [held for held in self._replicas[at].requests if not held.fixed]
            free.sort(key=lambda held: (held.again_ms / max(held.work_ms, 1e-9), held.request_id))
            rows += [_Row(held, at, at) for held in free[: self._config.each]]
        return rows

    def solve(self, rows: Sequence[_Row], under: Sequence[int]) -> tuple[np.ndarray, float]:
        """Solve the relaxed problem.

        Returns x [rows, 1 + under], whose first column means staying, and the objective as a bound.
        """
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        sources = sorted({row.source for row in rows})
        adapters = sorted({row.held.adapter for row in rows if row.held.adapter})
        variables = _Variables(len(rows), adapters, sources, under)
        columns, size = variables.columns, variables.maximum + 1
        limits = _Limits()
        for worker in variables.workers:
            self._limit(limits, variables, worker, rows)
        cost = np.zeros(size)
        cost[variables.maximum] = 1.0
        shares = [LEAST_SHARE * self.cost_ms(row.held, moved=True) / len(rows) for row in rows]
        for index, share in enumerate(shares):
            cost[index * columns + 1 : (index + 1) * columns] = share
        which, weighted, values = zip(*limits.entries, strict=True)
        ones = np.arange(len(rows) * columns)
        found = linprog(
            cost,
            A_ub=coo_array((values, (which, weighted)), shape=(len(limits.bounds), size)).tocsr(),
            b_ub=limits.bounds,
            A_eq=coo_array((np.ones(len(ones)), (ones // columns, ones)), shape=(len(rows), size)).tocsr(),
            b_eq=np.ones(len(rows)),
            method="highs",
        )
        others = [load.time_ms(self._config) for at, load in enumerate(self.loads) if at not in variables.workers]
        if found.x is None:  # numerical trouble: no request moves
            stay = np.zeros((len(rows), columns))
            stay[:, 0] = 1.0
            return stay, 0.0
        return found.x[: len(rows) * columns].reshape(len(rows), columns), max([float(found.fun) - sum(shares), *others])

    def _limit(self, limits: _Limits, variables: _Variables, worker: int, rows: Sequence[_Row]) -> None:
        """The inequalities of one worker: its time, its memory, its adapters, and how many requests it takes."""
        config, memory, load = self._config, self._memory, self.loads[worker]
        own, column, overflow = worker in variables.sources, variables.column(worker), variables.overflow(worker)
        here = [(variables.x(index, column), row.held) for index, row in enumerate(rows) if not own or row.source == worker]
        y = [(variables.y(one, column), one) for one in variables.adapters if not own and one not in load.users]
        work = [(x, self.cost_ms(held, moved=not own)) for x, held in here]
        room = [(x, held.memory) for x, held in here]
        fixed_ms, fixed = self._fixed(worker, [held for _, held in here] if own else [])
        time = [*work, *[(one, config.eta_ms) for one, _ in y], (overflow, config.swap_ms), (variables.maximum, -1.0)]
        limits.at_most(time, -fixed_ms)
        if np.isfinite(load.memory):
            taken = [*room, *[(one, memory.get(adapter, 0.0)) for one, adapter in y], (overflow, -1.0)]
            limits.at_most(taken, load.memory - fixed)
        for one, adapter in y:
            for x, held in here:
                if held.adapter == adapter:
                    limits.at_most([(x, 1.0), (one, -1.0)], 0.0)
        if not own and load.room < len(rows):
            limits.at_most([(x, 1.0) for x, _ in here], float(max(0, load.room)))

    def _fixed(self, worker: int, moving: Sequence[Held]) -> tuple[float, float]:
        """The time and the memory of a worker without its requests `moving`, of which the relaxed problem has variables."""
        config, memory, load = self._config, self._memory, self.loads[worker]
        fixed_ms, fixed = load.work_ms + config.eta_ms * len(load.users), load.taken
        if moving:
            leaving = self._leaving(worker, moving)
            fixed_ms -= sum([held.work_ms for held in moving]) + config.eta_ms * len(leaving)
            fixed -= sum([held.memory for held in moving]) + sum([memory.get(adapter, 0.0) for adapter in leaving])
        return fixed_ms, fixed

    def _leaving(self, worker: int, moving: Sequence[Held]) -> list[str]:
        """The adapters that a worker would not need without the requests `moving`.

        The relaxed problem does not count them there.
        """
        users = dict(self.loads[worker].users)
        for held in moving:
            if held.adapter:
                users[held.adapter] -= 1
        return [adapter for adapter, left in users.items() if not left and adapter not in self._kept[worker]]

    def round(self, rows: Sequence[_Row], under: Sequence[int], shares: np.ndarray) -> None:
        """Assign each request to the worker with the largest x; of equal ones, to the worker with the least work so far."""
        for row, x in zip(rows, shares, strict=True):
            columns = np.flatnonzero(x >= x.max() - 1e-6).tolist()
            choices = [under[column - 1] if column else row.source for column in columns]
            choices = [to for to in choices if to == row.source or self.loads[to].room > 0] or [row.source]
            self.shift(row, min(choices, key=lambda to: (self.loads[to].time_ms(self._config), to)))

    def improve(self, rows: Sequence[_Row], under: Sequence[int]) -> None:
        """Move single requests off the worker with the most work as long as this lowers the maximum.

        When none does, exchange two requests where a worker has no room for one more.
        """
        config = self._config
        while True:
            times = [load.time_ms(config) for load in self.loads]
            worst = int(np.argmax(times))
            best: tuple[float, _Row, int] | None = None
            for row in rows:
                if row.at != worst:
                    continue
                for to in {row.source, *under} - {worst}:
                    if to != row.source and self.loads[to].room <= 0:
                        continue
                    self.shift(row, to)
                    after = max(self.loads[worst].time_ms(config), self.loads[to].time_ms(config))
                    self.shift(row, worst)
                    if after < times[worst] - 1e-6 and (best is None or (after, to) < (best[0], best[2])):
                        best = after, row, to
            if best is not None:
                self.shift(best[1], best[2])
            elif not self._exchange(rows, under, worst, times[worst]):
                return

    def _exchange(self, rows: Sequence[_Row], under: Sequence[int], worst: int, worst_ms: float) -> bool:
        """Exchange a request of the worker with the most work for one of another worker, if one of the two has no room.

        Takes the first exchange that lowers the maximum of both. Returns whether there is one.
        """
        for row in [row for row in rows if row.at == worst]:
            for other in rows:
                to = other.at
                if to == worst or (self.loads[worst].room > 0 and self.loads[to].room > 0):
                    continue
                if to not in (row.source, *under) or worst not in (other.source, *under):
                    continue
                self.shift(row, to)
                self.shift(other, worst)
                if max(self.loads[worst].time_ms(self._config), self.loads[to].time_ms(self._config)) < worst_ms - 1e-6:
                    return True
                self.shift(other, to)
                self.shift(row, worst)
        return False

    def take_back(self, rows: Sequence[_Row]) -> None:
        """Undo moves that do not lower the maximum, the most expensive first."""
        config = self._config
        most = max(load.time_ms(config) for load in self.loads)
        for row in sorted(rows, key=lambda row: -row.held.again_ms):
            to = row.at
            if to == row.source:
                continue
            self.shift(row, row.source)
            if self.loads[row.source].time_ms(config) > most:
                self.shift(row, to)
