"""Which node gets a request: ROCK's three rivals', and Motet's own dispatch.

Left open by the paper: LRUMS's weights (equal; its queue lengths are relative to the longest one) and Proactive's dispatch (the
least pending time, with the load, as in dLoRA, from which it is adapted).
"""

from __future__ import annotations

import numpy as np

from bench.rock_fleet.fleet import Dispatch, Fleet, Node
from bench.rock_fleet.jobs import Job
from motet.policies.cluster import dispatch as policy
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.worker_table import hash_of
from motet.shared.model import PerfModel, PictureBrief, RequestBrief, WorkerLimits


class RoundRobin(Dispatch):
    """RROD: the nodes in turn. `blind`: also those with another base model."""

    def __init__(self, *, blind: bool = False) -> None:
        self.blind = blind

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._turn = [0, 0, 0]

    def choose(self, job: Job) -> Node:
        kind = 0 if self.blind else job.kind
        nodes = self.fleet.nodes if self.blind else self.of_base[kind]
        self._turn[kind] += 1
        return nodes[self._turn[kind] % len(nodes)]


class Score(Dispatch):
    """LRUMS: the node with the highest matching score; of equal ones, any.

    Score: `cached` where the adapter is loaded + `short` * (1 - its queue / the longest queue). The base model's presence, the
    third term, is the same for all nodes that are looked at.
    """

    def __init__(self, cached: float = 0.5, short: float = 0.5) -> None:
        self.cached, self.short = cached, short

    def choose(self, job: Job) -> Node:
        nodes = self.of_base[job.kind]
        queue = np.array([len(node.waiting) + len(node.held_up) + len(node.running) for node in nodes], float)
        held = np.array([job.adapter in node.slots for node in nodes], float)
        score = self.cached * held + self.short * (1.0 - queue / max(1.0, queue.max()))
        best = np.flatnonzero(score >= score.max() - 1e-9)
        return nodes[int(best[hash_of(job.request_id) % len(best)])]


class Pending(Dispatch):
    """Proactive: the least pending time (dLoRA section 5.1): the requests before it, its load, its steps; of equal ones, any.

    dLoRA's GPUs are alike, so times are those of a mean GPU. `speeds`: of the GPU.
    """

    def __init__(self, *, speeds: bool = False) -> None:
        self.speeds = speeds

    def choose(self, job: Job) -> Node:
        fleet, nodes = self.fleet, self.of_base[job.kind]
        pending = []
        for node in nodes:
            work_s = backlog_s(fleet, node) * node.gpu.speed + fleet.work_s(job)
            load_s = 0.0 if job.adapter in node.slots else fleet.loads.mean_s(job.adapter)
            pending.append(load_s + work_s / (node.gpu.speed if self.speeds else 1.0))
        best = [node for node, one in zip(nodes, pending, strict=True) if one <= min(pending) + 1e-9]
        return best[hash_of(job.request_id) % len(best)]


def backlog_s(fleet: Fleet, node: Node) -> float:
    """The time of the steps that the node's requests still have to do, one request at a time."""
    left = 0.0
    if node.running:
        done = (fleet.now_s - node.since_s) / fleet.step_s(node)
        left = sum(max(0.0, steps - done) / job.steps * fleet.work_s(job) for job, steps in node.running.items())
    if node.held_up or node.waiting:
        left += sum(map(fleet.work_s, node.held_up)) + sum(map(fleet.work_s, node.waiting))
    return left / node.gpu.speed


MANY = 1 << 30


class Motet(Dispatch):
    """Motet's dispatch (`policies.cluster.shared_cost`) on the state that its schedulers keep; a picture is as many rows as its
    steps take longer than the mean one. `load_weight`: how often a load's time counts."""

    def __init__(self, load_weight: float = 1.0) -> None:
        self.load_weight = load_weight

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self.state = ClusterState()
        self._steps = 0.0
        self._count = 0
        self._choose = policy.POLICIES.named("motet")()
        slope, base = (self.load_weight * one for one in fleet.loads.line())
        for node in fleet.nodes:
            speed = node.gpu.speed
            self.state.put_worker(
                f"n{node.at}",
                WorkerLimits(
                    base_model=f"base{node.gpu.base}", max_model_len=4096, max_running=64, max_waiting=MANY, block_size=16,
                    kv_blocks_total=MANY, adapter_bytes_total=node.gpu.room_bytes, max_lora_rank=64,
                    copies="wait" if fleet.worker.mixed else "stall",
                ),
                PerfModel(
                    prefill_base_ms=0.0, prefill_token_ms=0.0, prefill_lora_ms=0.0, decode_lora_ms=0.0,
                    decode_base_ms=1000.0 * fleet.base_s / speed, decode_row_ms=1000.0 * fleet.mean_row_s / speed,
                    load_base_ms=1000.0 * float(base), load_ms_per_mib=1000.0 * float(slope),
                ),
            )  # fmt: skip
            self.state.heard(f"n{node.at}", 0.0, kv_blocks_free=MANY, draining=False)

    def choose(self, job: Job) -> Node:
        self._steps += job.steps
        self._count += 1
        ask = Ask(
            base_model=f"base{job.kind}", rank=job.rank, tokens=1, tpot_slo_ms=float("inf"), out_tokens=job.steps,
            adapter=job.adapter, adapter_bytes=job.size_bytes, key=hash_of(job.request_id), rows=self._rows(job),
        )  # fmt: skip
        now_s = self.fleet.now_s
        found = policy.decide(
            self._choose, self.state, ask, now_s, stale_s=float("inf"), avg_resp_len=self._steps / self._count
        )
        assert found.worker_id is not None
        return self.fleet.nodes[int(found.worker_id[1:])]

    def _rows(self, job: Job) -> float:
        return (1.0 - self.fleet.worker.launch) * job.alone_s / job.steps / self.fleet.mean_row_s

    def _tell(self, job: Job, node: Node, phase: str) -> None:
        brief = RequestBrief(
            job.request_id, 0, job.adapter, job.rank, 1, 0, job.steps, "running" if phase == "running" else "waiting",
            picture=PictureBrief(self._rows(job)),
        )  # fmt: skip
        self.state.put_request(f"n{node.at}", brief, self.fleet.now_s)

    def queued(self, job: Job, node: Node) -> None:
        self._tell(job, node, "waiting")

    def began(self, job: Job, node: Node) -> None:
        self._tell(job, node, "running")

    def left(self, job: Job, node: Node) -> None:
        self.state.drop_request(f"n{node.at}", job.request_id)

    ended = left

    def came(self, adapter: str, node: Node) -> None:
        self.state.put_adapter(f"n{node.at}", adapter, "device")

    def gone(self, adapter: str, node: Node) -> None:
        self.state.drop_adapter(f"n{node.at}", adapter)
