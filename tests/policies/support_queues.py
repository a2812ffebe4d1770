"""A batch core with queues, for tests."""

from __future__ import annotations

from array import array
from itertools import count

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan, advance, due_s

TOKEN_BYTES = 1.0


class World:
    """A batch core with one of the queue policies; a second per step, and a token per step and request."""

    def __init__(self, queues: object = None, *, room: int = 1000, slots: int = 4, seats: int = 8, prefetch: int = 0) -> None:
        limits = AdmissionLimits(max_running=seats, max_step_tokens=64, prefetch=prefetch)
        self.core: BatchCore[Sequence] = BatchCore(
            limits,
            kv=KvBlocks(200, 4),
            slots=AdapterSlots(slots, room),
            queues=queues,  # type: ignore[arg-type]
        )
        self.ends: dict[int, int] = {}
        self.tokens = count(1000)
        self.now_s = 0.0
        self.began: list[Sequence] = []

    def add(
        self, prompt: int, output: int, *, predicted: int = 0, adapter: str = "", size: int = 10, **more: object
    ) -> Sequence:
        """A request that ends after `output` tokens."""
        seq = Sequence(
            order=0,
            due_s=due_s(self.now_s, 5000.0),
            tokens=array("i", [next(self.tokens) for _ in range(prompt)]),
            expected_length=prompt + (predicted or output),
            adapter=adapter,
            adapter_bytes=size if adapter else 0,
            **more,  # type: ignore[arg-type]
        )
        self.core.start(seq, self.now_s)
        self.ends[seq.order] = prompt + output
        return seq

    def step(self) -> StepPlan[Sequence]:
        """One step. Complete requests end."""
        self.now_s += 1.0
        plan = self.core.decide(self.now_s)
        self.began += plan.admitted
        for seq in advance(plan):
            seq.append(next(self.tokens))
            if seq.length >= self.ends[seq.order]:
                self.core.end(seq)
        self.core.check()
        return plan

    def run(self, steps: int = 5000) -> None:
        """Steps until no request is left."""
        for _ in range(steps):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("a request starves")
