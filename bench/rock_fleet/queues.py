"""ROCK's dispatch: queues by pattern, split to what a node can do, matched with nodes every 90 s (`rivals.rock.matching`).

A queue's load is estimated from the requests of the last 90 s and from those that wait; a matching moves waiting requests along
with their queue. In between a request goes to the part of its pattern's queue that has its adapter, or else to the one that has
the least to do. By the letter of algorithm 1 a queue is bound to one node for 90 s. But its output is a "task-to-GPU mapping",
and replicas would be of no use. So two readings are built: `bound`, and one in which each request goes to the best candidate.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from bench.rivals.rock.matching import BEST_USE, EVERY_S, Part, match, split
from bench.rock_fleet.dispatches import backlog_s
from bench.rock_fleet.fleet import Dispatch, Fleet, Node
from bench.rock_fleet.jobs import KINDS, Job
from bench.rock_fleet.watched import Watched


class Queues(Dispatch):
    """`matched`: by algorithm 1; else each part goes to the node that has the least to do. `bound`: all of a part's requests go
    to its node; else each one goes to the candidate of its part that has the least to do, or to a node of its pattern that has
    its adapter and less to do. `every_s`: between two matchings; loads are of this time, too.
    """

    def __init__(self, watched: Watched, *, matched: bool = True, bound: bool = False, every_s: float = EVERY_S) -> None:
        self.watched, self.matched, self.bound, self.every_s = watched, matched, bound, every_s

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._window: deque[tuple[float, Job]] = deque()
        self._parts: list[list[tuple[Part, list[Node]]]] = [[] for _ in KINDS]  # of each base model, with their candidates
        fleet.every(self.every_s, self._match)

    def choose(self, job: Job) -> Node:
        self._window.append((self.fleet.now_s, job))
        return self._node(job)

    def _node(self, job: Job) -> Node:
        label = self.watched.label(job)
        mine = [one for one in self._parts[job.kind] if one[0].queue == label] or self._parts[job.kind]
        if not mine:
            return min(self.of_base[job.kind], key=self._to_do_s)
        its = [one for one in mine if job.adapter in one[0].adapters or (not self.bound and job.adapter in one[1][0].slots)]
        choices = [(part, node) for part, nodes in its or mine for node in (nodes[:1] if self.bound else nodes)]
        to_do_s = {node: self._to_do_s(node) for _, node in choices}
        part, node = min(choices, key=lambda one: to_do_s[one[1]])
        part.adapters.setdefault(job.adapter, 0.0)
        return node

    def _to_do_s(self, node: Node) -> float:
        return backlog_s(self.fleet, node)

    def _match(self) -> None:
        fleet = self.fleet
        while self._window and self._window[0][0] <= fleet.now_s - self.every_s:
            self._window.popleft()
        for base, nodes in enumerate(self.of_base):
            waiting = [(job, node) for node in nodes for job in node.waiting if job not in node.holding]
            waiting.sort(key=lambda one: one[0].at)
            for job, node in waiting:
                fleet.take(job, node)
            tasks = [job for _, job in self._window if job.kind == base] + [job for job, _ in waiting]
            self._parts[base] = self._matched(tasks, nodes)
            for job, _ in waiting:
                fleet.put(job, self._node(job))

    def _matched(self, tasks: list[Job], nodes: list[Node]) -> list[tuple[Part, list[Node]]]:
        fleet = self.fleet
        speed = np.array([node.gpu.speed for node in nodes])
        use = np.array([self._to_do_s(node) for node in nodes]) / self.every_s  # of the next 90 s, by what they have begun
        loads: dict[int, dict[str, float]] = {}
        for job in tasks:
            its = loads.setdefault(self.watched.label(job), {})
            its[job.adapter] = its.get(job.adapter, 0.0) + fleet.work_s(job) / self.every_s
        parts = [part for queue in sorted(loads) for part in split(queue, loads[queue], BEST_USE * float(speed.mean()))]
        if not self.matched:
            return spread(parts, nodes, use, speed)
        load_s = [sum(fleet.loads.mean_s(adapter) for adapter in part.adapters) for part in parts]
        delay_s = np.array([part.load * self.every_s / speed + its for part, its in zip(parts, load_s, strict=True)])
        chosen = match(parts, [node.cached() for node in nodes], use, speed, delay_s)
        return [(part, [nodes[at] for at in its]) for part, its in zip(parts, chosen, strict=True)]


def spread(parts: list[Part], nodes: list[Node], use: np.ndarray, speed: np.ndarray) -> list[tuple[Part, list[Node]]]:
    """Without algorithm 1: each part, the largest first, goes to the node that is used least."""
    found = []
    for part in sorted(parts, key=lambda one: -one.load):
        at = int(np.argmin(use + part.load / speed))
        use[at] += part.load / speed[at]
        found.append((part, [nodes[at]]))
    return found
