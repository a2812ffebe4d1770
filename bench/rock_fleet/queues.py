"""ROCK's dispatch: queues by pattern, split to what a node can do, matched with nodes every 90 s (`bench.rivals.rock.matching`).

A queue's load is estimated from the requests of the last 90 s and from those that wait; a matching moves waiting requests along
with their queue. In between a request goes to the part of its pattern's queue that has its adapter, or else to the one that has
the least to do; of several, to the one that has the least to do.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from bench.rivals.rock.matching import BEST_USE, EVERY_S, Part, match, split
from bench.rock_fleet.dispatches import Dispatch, backlog_s
from bench.rock_fleet.jobs import KINDS, Job
from bench.rock_fleet.watched import Watched

if TYPE_CHECKING:
    from bench.rock_fleet.fleet import Fleet, Node


EVEN=0
CACHED=False
class Queues(Dispatch):
    """`matched`: by algorithm 1; else each part goes to the node that has the least to do."""

    def __init__(self, watched: Watched, *, matched: bool = True) -> None:
        self.watched, self.matched = watched, matched

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._window: deque[tuple[float, Job]] = deque()
        self._parts: list[list[tuple[Part, Node]]] = [[] for _ in KINDS]  # of each base model
        fleet.every(EVERY_S, self._match)

    def choose(self, job: Job) -> Node:
        self._window.append((self.fleet.now_s, job))
        return self._node(job)

    def _node(self, job: Job) -> Node:
        mine = [one for one in self._parts[job.kind] if one[0].queue == self.watched.label(job)] or self._parts[job.kind]
        if not mine:
            return min(self.of_base[job.kind], key=lambda node: backlog_s(self.fleet, node))
        has_it = [one for one in mine if job.adapter in one[0].adapters or (CACHED and job.adapter in one[1].slots)]
        part, node = min(has_it or mine, key=lambda one: backlog_s(self.fleet, one[1]))
        part.adapters.setdefault(job.adapter, 0.0)
        return node

    def _match(self) -> None:
        fleet = self.fleet
        while self._window and self._window[0][0] <= fleet.now_s - EVERY_S:
            self._window.popleft()
        for base, nodes in enumerate(self.of_base):
            waiting = [(job, node) for node in nodes for job in node.waiting if job not in node.holding]
            tasks = [job for _, job in self._window if job.kind == base] + [job for job, _ in waiting]
            self._parts[base] = self._matched(tasks, nodes, self._use(nodes))
            for job, node in sorted(waiting, key=lambda one: one[0].at):
                fleet.take(job, node)
            for job, _ in sorted(waiting, key=lambda one: one[0].at):
                fleet.put(job, self._node(job))

    def _use(self, nodes: list[Node]) -> np.ndarray:
        """The share of the next 90 s that each node needs for what it has begun."""
        fleet = self.fleet
        waiting = [sum(fleet.work_s(job) for job in node.waiting) / node.gpu.speed for node in nodes]
        return np.array([(backlog_s(fleet, node) - later) / EVERY_S for node, later in zip(nodes, waiting, strict=True)])

    def _matched(self, tasks: list[Job], nodes: list[Node], use: np.ndarray) -> list[tuple[Part, Node]]:
        fleet = self.fleet
        speed = np.array([node.gpu.speed for node in nodes])
        loads: dict[int, dict[str, float]] = {}
        for job in tasks:
            its = loads.setdefault(self.watched.label(job), {})
            its[job.adapter] = its.get(job.adapter, 0.0) + fleet.work_s(job) / EVERY_S
        total=sum(sum(one.values()) for one in loads.values())
        cap=BEST_USE * float(speed.mean())
        if EVEN: cap=min(cap, EVEN*total/len(nodes))
        parts = [part for queue in sorted(loads) for part in split(queue, loads[queue], cap)] if loads else []
        if not parts: return []
        if not self.matched:
            found = []
            for part in sorted(parts, key=lambda one: -one.load):
                at = int(np.argmin(use + part.load / speed))
                use[at] += part.load / speed[at]
                found.append((part, nodes[at]))
            return found
        load_s = [sum(fleet.loads.mean_s(adapter) for adapter in part.adapters) for part in parts]
        delay_s = np.array([part.load * EVERY_S / speed + its for part, its in zip(parts, load_s, strict=True)])
        chosen = match(parts, [node.cached() for node in nodes], use, speed, delay_s)
        return [(part, nodes[int(at)]) for part, at in zip(parts, chosen, strict=True)]
