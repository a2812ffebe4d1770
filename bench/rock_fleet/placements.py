"""Which adapters are loaded ahead of requests: by burst tolerance (dLoRA, Motet), or as ROCK's three layers say."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from bench.rivals.rock import layers
from bench.rock_fleet.fleet import Fleet, Node, Placement
from bench.rock_fleet.jobs import KINDS, Job, adapter_size
from bench.rock_fleet.machines import GPU_KINDS
from bench.rock_fleet.watched import Watched
from motet.policies.cluster.placement import LEAST, Room, preload
from motet.policies.times.load_forecast import Forecast


class BurstTolerance(Placement):
    """The adapters of lowest burst tolerance get copies (`policies.cluster.placement.preload`), from the rates of all requests
    so far. They have half of each node's memory, and stay until the next placement."""

    def __init__(self, period_s: float = 180.0) -> None:
        self.period_s = period_s

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._rates = [Forecast() for _ in KINDS]
        fleet.every(self.period_s, self._place)

    def arrived(self, job: Job) -> None:
        self._rates[job.kind].used(job.adapter, self.fleet.now_s)

    def _place(self) -> None:
        now_s = self.fleet.now_s
        for base, rates in enumerate(self._rates):
            nodes = {f"n{node.at}": node for node in self.fleet.nodes if node.gpu.base == base}
            load = {adapter: rate for adapter in rates if (rate := rates.rate(adapter, now_s)) >= LEAST}
            sizes = {adapter: _bytes(adapter) for adapter in load}
            rooms = {name: Room(free_bytes=node.slots.bytes_total // 2, slots=64) for name, node in nodes.items()}
            placed = preload(load, sizes, rooms, {name: node.cached() for name, node in nodes.items()})
            for name, adapters in placed.items():
                nodes[name].slots.pinned = frozenset(adapters)
                for adapter in adapters:
                    self.fleet.bring(adapter, sizes[adapter], nodes[name])


class ThreeLayers(Placement):
    """ROCK's placement, every 45 s. `partitions`: else all nodes of a base model are one. `formula`: the replicas of formula 5,
    else one. `squared`: one of three nodes by formula 6, else the best one. `uses_in_s`: the unit of the frequency."""

    def __init__(
        self,
        watched: Watched,
        *,
        partitions: bool = True,
        formula: bool = True,
        squared: bool = True,
        uses_in_s: float = layers.WINDOW_S,
    ) -> None:
        self.watched, self.partitions, self.formula, self.squared = watched, partitions, formula, squared
        self.uses_in_s = uses_in_s

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._window: deque[tuple[float, Job]] = deque()
        self._rng = np.random.default_rng(7)
        kinds = np.array(
            [[one.gpu.kind.memory_gb, one.gpu.kind.tb_s / one.gpu.kind.memory_gb, 0.0, one.gpu.speed] for one in fleet.nodes]
        )
        self._group = layers.groups(layers.unit(kinds))
        fleet.every(layers.WINDOW_S, self._place)

    def arrived(self, job: Job) -> None:
        self._window.append((self.fleet.now_s, job))

    def _place(self) -> None:
        while self._window and self._window[0][0] <= self.fleet.now_s - layers.WINDOW_S:
            self._window.popleft()
        for base in range(len(KINDS)):
            self._place_base([job for _, job in self._window if job.kind == base], base)

    def _place_base(self, jobs: list[Job], base: int) -> None:
        uses = Counter(job.adapter for job in jobs)
        if not uses:
            return
        nodes = [node for node in self.fleet.nodes if node.gpu.base == base]
        pattern = _most_common(
            {adapter: [self.watched.label(job) for job in jobs if job.adapter == adapter] for adapter in uses}
        )
        heat: Counter[int] = Counter()
        for adapter, count in uses.items():
            heat[pattern[adapter]] += count
        parts = self._parts(nodes, heat, pattern) if self.partitions else {label: nodes for label in heat}
        mean_mb = float(np.mean([adapter_size(adapter)[1] for adapter in uses]))
        for adapter, count in uses.most_common():
            mb = adapter_size(adapter)[1]
            wanted = layers.replicas(count * self.uses_in_s / layers.WINDOW_S, mb, mean_mb) if self.formula else 1
            self._replicate(adapter, wanted, parts[pattern[adapter]] or nodes)

    def _parts(self, nodes: list[Node], heat: Counter[int], pattern: dict[str, int]) -> dict[int, list[Node]]:
        """The nodes of each pattern's partitions in all groups; those that have most of its adapters already."""
        parts: dict[int, list[Node]] = {label: [] for label in heat}
        labels = [label for label, _ in heat.most_common()]
        for group in sorted({int(self._group[node.at]) for node in nodes}):
            left = [node for node in nodes if self._group[node.at] == group]
            for label, size in zip(labels, layers.partition_sizes([heat[one] for one in labels], len(left)), strict=True):
                managed = {adapter for adapter, its in pattern.items() if its == label}
                left.sort(key=lambda node: (-len(managed & node.cached()), node.at))
                parts[label] += left[:size]
                left = left[size:]
        return parts

    def _replicate(self, adapter: str, wanted: int, nodes: list[Node]) -> None:
        """Load the adapter on more of these nodes, until so many have it."""
        missing = wanted - sum(adapter in node.slots for node in nodes)
        for _ in range(min(missing, len(nodes))):
            machines = {node.gpu.machine for node in self.fleet.nodes if adapter in node.slots}
            free = [node for node in nodes if adapter not in node.slots]
            if not free:
                return
            score = layers.scores(
                np.array([node.gpu.kind.tb_s for node in free]) / max(kind.tb_s for kind in GPU_KINDS),
                np.array([1.0 - node.slots.bytes_free / node.slots.bytes_total for node in free]),
                np.array([1.0 if not machines or node.gpu.machine in machines else 2.0 for node in free]),
            )
            self.fleet.bring(adapter, _bytes(adapter), free[layers.place(score, self._rng, squared=self.squared)])


def _bytes(adapter: str) -> int:
    return round(adapter_size(adapter)[1] * 2**20)


def _most_common(labels: dict[str, list[int]]) -> dict[str, int]:
    return {adapter: Counter(its).most_common(1)[0][0] for adapter, its in labels.items()}
