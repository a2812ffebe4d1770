"""The half of a worker's core that runs between two steps: sequences, KV blocks, adapter slots, cold starts.

    start, end ───────────────> BatchCore ──StepPlan──> one step of the model
    copies that became whole ──>    │     ──evictions, loads──> the link to the device
    load, unload ──────────────>    └── memory: who holds how many bytes of the device

The live engine calls it in its own thread, the twin under its clock. `policies.worker.worker_core` is the other half, which
never waits for a step. `look` and `decide` make a step's plan; when it has run, `policies.step.batch_state.advance` says which
sequences draw a token. Return values name the adapters that came to the device or left it, in order.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from math import inf
from typing import Generic, Protocol

from motet.policies.memory.adapter_slots import AdapterSlots, Grant
from motet.policies.memory.boundary import Boundary
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.kv_travel import HeldBlocks
from motet.policies.memory.ledger import Budget, device_budget
from motet.policies.step.batch_admission import AdmissionLimits, BatchAdmission
from motet.policies.step.batch_state import AdmissionState, S, StepPlan, remove, slot_users, turn, wait
from motet.policies.step.cold_start import AssistRates, ColdStarts
from motet.policies.step.merge_decision import Merging, Modes
from motet.policies.step.merged_copy import MergedCopy, SpareMemory
from motet.policies.step.paying_merge import PayingMerge
from motet.policies.step.request_queues import Queues, mechanisms_of
from motet.policies.times.perf_model import Coefficients
from motet.shared.model import Mechanism, PerfModel


class CopyLink(Protocol):
    """The link that copies adapters to the device beside the steps, in its present state."""

    @property
    def perf(self) -> Coefficients[float]:
        """The present estimate of step times."""

    @property
    def assist(self) -> AssistRates | None:
        """Rates of the CPU LoRA processes; None without processes, or before they have been measured."""

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of the link."""

    @property
    def bytes_queued(self) -> float:
        """Bytes that all running copies still have to transfer."""

    @property
    def launch_ms(self) -> float:
        """The least time of a step with an incomplete copy; 0 where such a step is launched like any other."""

    def layers_loaded(self, digest: str, slot: int) -> int:
        """Layers of an unfinished copy that are on the device."""

    def bytes_ahead(self, digest: str, slot: int) -> float:
        """Bytes to transfer until this copy is complete, including the copies before it."""


class BatchCore(Generic[S]):
    """One engine's batches.

    `cold` is None where steps wait for copies; slots are not asynchronous then. `shared`: KV blocks and adapters share one
    budget, which needs `kv.block_bytes`; `kv.capacity` bounds the blocks. `modes` decides when an adapter is merged, in an
    engine that can merge; it gets the number of steps that have run. `copies`: a merged copy of the weights is made beside the
    steps (`copy`), and its costs are estimated from these step times; `modes` must be a `Merging` or `PayingMerge` then.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        kv: KvBlocks,
        slots: AdapterSlots,
        cold: ColdStarts | None = None,
        shared: bool = False,
        queues: Queues[S] | None = None,
        modes: Modes | None = None,
        copies: PerfModel | None = None,
    ) -> None:
        self.state: AdmissionState[S] = AdmissionState(kv=kv, adapters=slots)
        slots.waited = self._waited
        self.slots, self.cold = slots, cold
        self.seats = limits.seats
        """Sequences that run at most."""
        self.memory: Budget = device_budget(kv, slots)
        """The device's memory by claim and class; without `kv.block_bytes` KV counts as nothing."""
        self.travelling = HeldBlocks(kv, lambda: len(self.state.running))
        """KV blocks that are on their way to another worker, or from one."""
        self.boundary: Boundary | None = None
        if shared:
            self.boundary = self.state.boundary = Boundary(
                kv,
                slots,
                self.memory,
                holders=self._block_lists,
                waited=self._waited,
            )
        self._admission: BatchAdmission[S] = BatchAdmission(limits, cold, queues, modes)
        self.modes = modes
        self.copy: MergedCopy | None = None
        if copies is not None:
            assert isinstance(modes, (Merging, PayingMerge)), "a copy needs a policy"
            self._careful = isinstance(modes, PayingMerge)
            lender = self.boundary or SpareMemory(self.memory)
            self.copy = MergedCopy(modes, lender, copies, careful=self._careful, block_size=kv.block_size)
        self.weighs = modes is not None
        """Whether the last plan's mode was chosen, so that the policy has to be told what became of it."""
        self._copy_leaves = False  # with the next decision: sequences lack memory, or its adapter is gone
        self._orders = count()
        self._foreseen = ""  # the last adapter that came without a request
        self.doomed: set[str] = set()
        """Adapters that leave as soon as no sequence uses them."""

    @property
    def kv_blocks_free(self) -> int:
        """Blocks that a new sequence could get, including unused cached blocks and the memory of idle adapters."""
        return self.state.kv.free if self.boundary is None else self.boundary.blocks_free

    @property
    def adapter_bytes_free(self) -> int:
        """Empty bytes that adapters may fill."""
        return self.slots.bytes_free if self.boundary is None else self.boundary.adapter_bytes_free

    # ---- sequences

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.state.running or self.state.waiting)

    def start(self, seq: S, now_s: float = 0.0) -> None:
        """A sequence begins to wait, behind earlier sequences of equal priority and due time."""
        seq.order = next(self._orders)
        wait(self.state, seq)
        if self._admission.queues is not None:
            self._admission.queues.arrived(seq, now_s)

    def _block_lists(self) -> list[list[int]]:
        return [*[seq.blocks for seq in self.state.running], *self.travelling.lists]

    def _waited(self) -> set[str]:
        return {seq.adapter for seq in self.state.waiting}

    @property
    def squashed(self) -> int:
        """How many sequences were preempted so far because they had overtaken another one."""
        return self._admission.overtaking.squashed if self._admission.overtaking is not None else 0

    def end(self, seq: S, *, spoiled: bool = False) -> None:
        """A sequence ends and gives back its blocks and its slot. `spoiled`: its K and V must not be reused."""
        queues = self._admission.queues
        if queues is not None:
            if seq.blocks:
                queues.stopped(seq, self.slots.eviction.now_s)
            queues.left(seq)
        remove(self.state, seq, spoiled=spoiled)

    @property
    def mechanisms(self) -> dict[str, Mechanism]:
        """Those that turn on by themselves, by name, and why they are on or not."""
        found = mechanisms_of(self._admission.queues, len(self.state.waiting))
        if self.copy is not None:
            found["merge"] = self.copy.mechanism
        return found

    def order_holds_s(self, now_s: float) -> float:
        """Until when no other waiting sequence may join if nothing else happens."""
        if not self.state.waiting or len(self.state.running) >= self.seats:
            return inf
        queues = self._admission.queues
        return queues.holds_s(now_s) if queues is not None else inf

    # ---- a step

    def look(self, link: CopyLink) -> list[str]:
        """Read the progress of the copies before a decision. Returns the adapters completed since the last call, in order."""
        slots, cold, boundary = self.slots, self.cold, self.boundary
        if boundary is not None and self.state.waiting:
            boundary.costs.perf = link.perf
            if cold is not None:
                boundary.costs.bytes_per_s = link.bytes_per_s
        if cold is None:
            return []
        loading = slots.loading
        whole = [digest for digest, slot in loading.items() if link.layers_loaded(digest, slot) >= cold.layers]
        for digest in whole:
            slots.arrived(digest)
        if loading or self.state.waiting:  # otherwise the decision needs none of it
            cold.observe(
                perf=link.perf,
                bytes_per_s=link.bytes_per_s,
                queued_bytes=link.bytes_queued,
                under_way={
                    digest: (slots.size_bytes(digest), link.bytes_ahead(digest, slot), link.layers_loaded(digest, slot))
                    for digest, slot in loading.items()
                },
                assist=link.assist,
                launch_ms=link.launch_ms,
            )
        return whole

    def decide(self, now_s: float = 0.0) -> StepPlan[S]:
        """The plan of the next step. Before the step runs, its evictions are carried out and then its loads begin."""
        self.slots.eviction.now_s = now_s
        boundary, copy = self.boundary, self.copy
        dropped = copy is not None and self._before(copy, now_s)
        plan = self._admission.decide(self.state, now_s)
        if copy is not None:
            plan.dropped = dropped
            self._after(copy, plan)
        if boundary is not None:
            boundary.admitted(len(plan.admitted))
            plan.evictions += boundary.evicted
            boundary.evicted = []
        if self._foreseen and (plan.loads or plan.prefetched):
            self._make_way(plan)
        return plan

    def _before(self, copy: MergedCopy, now_s: float) -> bool:
        """Drop the merged copy if sequences lack the memory that it has, or if its adapter is gone.

        Returns whether it was dropped.
        """
        state, modes, boundary = self.state, self.modes, self.boundary
        assert isinstance(modes, (Merging, PayingMerge)), "a copy has a policy"
        self.weighs = modes.looks(state, now_s)
        self._admission.modes = modes if self.weighs else None
        if self.weighs:
            copy.weigh(state.running)
        if not copy.adapter:
            return False
        short = boundary is not None and boundary.lacks(len(state.running), careful=self._careful)
        if not (self._copy_leaves or short or modes.gives_up):
            return False
        copy.drop()
        turn(state, "")
        return True

    def _after(self, copy: MergedCopy, plan: StepPlan[S]) -> None:
        """Claim memory for a merged copy if the step should have been merged."""
        self._copy_leaves = self.boundary is not None and (plan.starved or bool(plan.preempted))
        if not plan.merge_candidate or self._copy_leaves:
            return
        before, state = copy.adapter, self.state
        size_bytes = next(seq.merged_bytes for seq in (*state.running, *state.waiting) if seq.adapter == plan.merge_candidate)
        if copy.want(plan.merge_candidate, size_bytes):
            plan.copy_started = plan.merge_candidate
        plan.dropped = plan.dropped or before not in ("", plan.merge_candidate)

    def _make_way(self, plan: StepPlan[S]) -> None:
        """If the step needs copies, cancel the copy of an adapter that no request has asked for."""
        digest, self._foreseen = self._foreseen, ""
        slots = self.slots
        if digest in slots.loading and not slots.users(digest) and digest not in self._waited():
            plan.evictions.append(slots.evict(digest))

    @property
    def wait_ms(self) -> float:
        """For an idle engine: time until a waiting sequence may join, as of the last decision; 0 without running copies."""
        return self.cold.wait_ms if self.cold is not None and self.slots.loading else 0.0

    # ---- adapters without a request

    def load(self, digest: str, size_bytes: int) -> Grant | None:
        """The slot for a prefetched adapter; None when it is resident already or does not fit without evicting.

        For a pinned adapter, idle adapters are evicted that are neither pinned nor waited for, and cached KV blocks. It may
        have taken KV blocks, so that the device's memory has to be divided anew before the copy (`boundary`).
        """
        self.doomed.discard(digest)
        if digest in self.slots:
            return None
        pinned = digest in self.slots.pinned
        if self.boundary is not None:
            self.boundary.for_adapter(size_bytes, evicting=pinned)
        return self.slots.prefetch(digest, size_bytes, evicting=pinned)

    def foresee(self, digest: str, size_bytes: int, over: Collection[str]) -> Grant | None:
        """The slot for an adapter that may be requested soon; None without room.

        Also None when it is resident already, when steps wait for copies, and while any adapter is copied or any request waits.
        Room is empty memory and idle adapters of `over`. It may have taken blank KV blocks, as with `load`.
        """
        slots = self.slots
        if digest in slots or not slots.asynchronous or slots.loading or self.state.waiting:
            return None
        if self.boundary is not None:
            self.boundary.for_adapter(size_bytes, evicting=False)
        grant = slots.foresee(digest, size_bytes, over)
        if grant is not None:
            self._foreseen = digest
        return grant

    def unload(self, digest: str) -> None:
        """Take an adapter off the device, complete or not, as soon as no sequence uses it: `sweep` returns it then."""
        self.doomed.add(digest)

    def sweep(self) -> list[tuple[str, int]]:
        """The adapters that leave now because of `unload`, with the slots that become free."""
        if not self.doomed:
            return []
        used = {seq.adapter for seq in (*self.state.waiting, *self.state.running)}
        idle = self.doomed - used
        self.doomed -= idle
        if self.copy is not None and self.copy.adapter in idle:
            self._copy_leaves = True
        return [(digest, self.slots.drop(digest)) for digest in sorted(idle) if digest in self.slots]

    def check(self) -> None:
        """Assert that blocks, slots and bytes add up (tests, and idle moments)."""
        state = self.state
        state.kv.check(self._block_lists())
        state.adapters.check(slot_users(state))
        self.memory.check()
        if self.boundary is not None:
            self.boundary.check()
