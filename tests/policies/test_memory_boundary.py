"""Promise: KV blocks and adapters share one budget. Cached entries are evicted in the order of their worth, entries in use
stay, and every request ends."""

from __future__ import annotations

import random
from array import array

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.boundary import Boundary
from motet.policies.memory.kv_blocks import KvBlocks, chain_key, root_key
from motet.policies.memory.ledger import device_budget
from motet.policies.memory.worth import Reuse
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan, advance, steady_steps
from motet.policies.step.cold_start import ColdStarts
from motet.shared.model import PerfModel

SIZE, BLOCK = 4, 10  # tokens and bytes of a KV block
LAYERS = 4
PERF = PerfModel(
    prefill_base_ms=1.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.0,
    decode_base_ms=1.0,
    decode_row_ms=0.0,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=1.0,
)


class Given:
    """Worths that a test sets."""

    def __init__(self, *, adapter: float, prefix: float) -> None:
        self.adapter, self.prefix = adapter, prefix

    def of_adapter(self, digest: str, size_bytes: int) -> float:
        return self.adapter

    def of_prefix(self) -> float:
        return self.prefix


class Memory:
    """A budget of `blocks` KV blocks and `adapters` bytes, and the lists of blocks that are in use."""

    def __init__(self, blocks: int, adapters: int, *, adapter: float = 1.0, prefix: float = 1.0) -> None:
        self.kv = KvBlocks(blocks, SIZE, capacity=blocks + adapters // BLOCK, block_bytes=BLOCK)
        self.slots = AdapterSlots(8, adapters)
        self.held: list[list[int]] = []
        self.budget = device_budget(self.kv, self.slots)
        worth = Given(adapter=adapter, prefix=prefix)
        self.waited: set[str] = set()
        self.boundary = Boundary(
            self.kv,
            self.slots,
            self.budget,
            holders=lambda: self.held,
            waited=lambda: self.waited,
            worth=worth,
        )

    def cache_prefixes(self, count: int) -> None:
        """Allocate blocks and release them with known content."""
        parent = root_key(f"digest-{len(self.held)}")
        blocks = self.kv.allocate(count)
        for block in blocks:
            parent = chain_key(parent, block.to_bytes(4, "little"))
            self.kv.publish(block, parent)
        self.kv.release(blocks)

    def keep_adapters(self, *digests: str, size_bytes: int = 20) -> None:
        """Load adapters and release them."""
        for digest in digests:
            assert self.slots.acquire(digest, size_bytes)
            self.slots.release(digest)

    def check(self) -> None:
        self.kv.check(self.held)
        self.budget.check()
        self.boundary.check()
        assert self.kv.total * BLOCK + self.slots.bytes_total == self.budget.total_bytes


def test_memory_that_holds_no_adapter_becomes_kv_blocks() -> None:
    memory = Memory(8, 80)
    assert memory.boundary.for_blocks(12)
    assert memory.kv.free >= 12
    assert memory.boundary.moved
    memory.check()


def test_idle_adapters_leave_for_kv_blocks_and_used_ones_never() -> None:
    memory = Memory(4, 60)
    assert memory.slots.acquire("used", 20)
    memory.keep_adapters("idle-1", "idle-2")
    assert memory.boundary.for_blocks(6)
    assert [digest for digest, _ in memory.boundary.evicted] == ["idle-1"]
    assert not memory.boundary.for_blocks(9), "only the used one's room is left"
    assert "idle-2" in memory.slots, "in vain, nothing leaves"
    assert memory.boundary.for_blocks(8)
    assert memory.slots.digests() == ["used"]
    memory.check()


def test_kv_beyond_its_share_leaves_room_for_adapters_while_it_has_prefix_blocks_to_reuse() -> None:
    memory = Memory(8, 80)
    memory.cache_prefixes(8)
    assert memory.boundary.for_blocks(12)
    assert memory.kv.blank == 6 and memory.slots.bytes_free == 20, "a quarter of the adapters' share is left"
    memory.held.append(memory.kv.allocate(14))
    assert memory.boundary.for_blocks(2), "without prefix blocks running sequences get that too"
    assert memory.slots.bytes_free == 0
    memory.check()


def test_idle_adapters_count_as_room_for_adapters() -> None:
    memory = Memory(8, 60, adapter=1.0, prefix=9.0)
    memory.keep_adapters("a", "b", "c")
    memory.cache_prefixes(8)
    assert memory.boundary.for_blocks(9)
    assert len(memory.boundary.evicted) == 2 and memory.slots.bytes_total == 20, "worthless, but a quarter is theirs"
    memory.check()


def test_room_for_an_adapter_comes_from_blank_blocks_beyond_the_reserve() -> None:
    memory = Memory(16, 40)
    memory.keep_adapters("a", "b")
    assert memory.boundary.for_adapter(100)
    assert memory.slots.bytes_free == 100 and memory.kv.blank == 6 and not memory.boundary.evicted
    memory.check()


def test_without_evicting_a_prefetched_adapter_takes_what_is_blank_and_nothing_else() -> None:
    memory = Memory(16, 20)
    memory.cache_prefixes(8)
    assert not memory.boundary.for_adapter(70, evicting=False)
    assert memory.boundary.for_adapter(60, evicting=False) and memory.kv.idle == 8
    memory.check()


@pytest.mark.parametrize(("prefix", "leaves"), [(0.5, "prefixes"), (0.9, "adapter"), (2.0, "adapter")])
def test_prefixes_leave_for_an_adapter_only_when_they_are_worth_clearly_less_than_idle_adapters(
    prefix: float, leaves: str
) -> None:
    memory = Memory(8, 40, prefix=prefix)
    memory.cache_prefixes(8)
    memory.keep_adapters("a", "b")
    assert memory.boundary.for_adapter(20)
    grant = memory.slots.acquire("new", 20)
    assert grant is not None and bool(grant.evicted) == (leaves == "adapter")
    assert memory.kv.cached == (6 if leaves == "prefixes" else 8)
    memory.check()


@pytest.mark.parametrize(("prefix", "leaves"), [(0.5, "prefixes"), (1.4, "prefixes"), (2.0, "adapter")])
def test_idle_adapters_leave_for_blocks_only_when_they_are_worth_clearly_less_than_prefixes(prefix: float, leaves: str) -> None:
    memory = Memory(8, 40, prefix=prefix)
    memory.cache_prefixes(8)
    memory.keep_adapters("a", "b")
    assert memory.boundary.for_blocks(2)
    memory.held.append(memory.kv.allocate(2))
    assert bool(memory.boundary.evicted) == (leaves == "adapter")
    assert memory.kv.cached == (6 if leaves == "prefixes" else 8)
    memory.check()


def test_prefixes_leave_whatever_they_are_worth_when_an_adapter_fits_no_other_way() -> None:
    memory = Memory(16, 40, prefix=1e9)
    assert memory.slots.acquire("used", 40)
    memory.cache_prefixes(16)
    assert memory.boundary.for_adapter(40) and memory.slots.bytes_free == 40
    assert not memory.boundary.for_adapter(41 + 8 * BLOCK), "the reserve is not for adapters"
    memory.check()


def test_adapters_take_their_share_back_from_blank_blocks_and_not_more_than_the_reserve_allows() -> None:
    memory = Memory(8, 40)
    assert memory.boundary.for_blocks(12) and memory.slots.bytes_total == 0
    assert memory.boundary.for_adapter(40, blocks=100) and memory.slots.bytes_free == 40
    assert memory.slots.acquire("used", 40)
    assert not memory.boundary.for_adapter(20, blocks=5), "waiting sequences need five blocks, the running ones two"
    assert memory.boundary.for_adapter(20, blocks=4)
    memory.check()


def test_adapters_that_are_waited_for_leave_for_the_share_of_kv_alone() -> None:
    memory = Memory(8, 40)
    memory.keep_adapters("a", "b")
    assert memory.boundary.for_adapter(40)
    memory.keep_adapters("c", "d")
    memory.waited = {"a", "b", "c", "d"}
    memory.held.append(memory.kv.allocate(4))
    assert memory.kv.total == 4 and memory.boundary.for_blocks(4)
    memory.held.append(memory.kv.allocate(4))
    assert memory.slots.digests() == ["c", "d"]
    assert not memory.boundary.for_blocks(1)
    memory.waited = {"d"}
    assert memory.boundary.for_blocks(1) and memory.slots.digests() == ["d"]
    memory.check()


def test_new_sequences_use_no_more_than_the_share_of_kv_while_an_adapter_lacks_room() -> None:
    memory = Memory(8, 40)
    assert memory.boundary.for_blocks(12)
    memory.held.append(memory.kv.allocate(11))
    assert memory.boundary.admits(1)
    assert not memory.boundary.for_adapter(20) and not memory.boundary.admits(1)
    memory.kv.release(memory.held.pop())
    assert memory.boundary.admits(8) and not memory.boundary.admits(9)
    assert memory.boundary.for_adapter(20)
    memory.check()


def test_blocks_above_the_boundary_move_below_it_with_users_and_keys() -> None:
    memory = Memory(8, 20)
    first, second = memory.kv.allocate(6), memory.kv.allocate(2)
    memory.kv.publish(second[1], b"key")
    memory.kv.release(first[:5])
    memory.held = [first[5:], second]
    before = list(second)
    assert memory.boundary.for_adapter(20 + 3 * BLOCK)
    moves = dict(memory.boundary.settle())
    assert [moves.get(block, block) for block in before] == memory.held[1] and memory.kv.match([b"key"]) == [second[1]]
    assert max(block for held in memory.held for block in held) < memory.kv.total == 5
    memory.check()


def test_an_adapter_that_is_needed_with_the_blocks_still_fits_afterwards() -> None:
    memory = Memory(4, 60)
    memory.keep_adapters("a", "b", "c")
    assert not memory.boundary.for_blocks(9, adapter="new", adapter_bytes=20)
    assert memory.boundary.for_blocks(8, adapter="new", adapter_bytes=20)
    assert memory.slots.fits(20)
    memory = Memory(4, 60)
    memory.keep_adapters("a", "b", "c")
    assert memory.boundary.for_blocks(8, adapter="a") and memory.slots.digests() == ["a"]
    memory.check()


def test_the_chance_of_reuse_is_that_of_entries_about_to_leave() -> None:
    often, seldom = Reuse(), Reuse()
    for _ in range(50):
        for one in (often, seldom):
            one.left(100)
        often.used(90)
        seldom.used(3)  # soon after: it would not have left yet
    assert 0.45 < often.chance < 0.55
    assert seldom.chance < 0.3


# ---- whole histories


class Device:
    """A BatchCore over memory that records what was written: a block's rows are (adapter, tokens up to there).

    Copies use a link of `per_step` bytes per step, or are complete at once when it is 0.
    """

    def __init__(
        self, *, blocks: int, adapters: int, shared: bool, per_step: float, prefix_cache: bool, seats: int = 6
    ) -> None:
        self.budget_bytes, self.per_step = blocks * BLOCK + adapters, per_step
        capacity = blocks + adapters // BLOCK if shared else blocks
        self.core: BatchCore[Sequence] = BatchCore(
            AdmissionLimits(max_running=seats, max_step_tokens=24),
            kv=KvBlocks(blocks, SIZE, prefix_cache=prefix_cache, capacity=capacity, block_bytes=BLOCK),
            slots=AdapterSlots(5, adapters, asynchronous=per_step > 0),
            cold=ColdStarts(LAYERS, 24, "auto") if per_step else None,
            shared=shared,
        )
        self.rows: dict[int, tuple[str, tuple[int, ...]]] = {}  # by block * SIZE + offset
        self.left: dict[str, float] = {}  # bytes, of copies under way
        self.there: set[str] = set()
        self.steps = self.evictions = self.preemptions = self.divisions = 0

    # the link
    perf, assist, launch_ms = PERF, None, 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.per_step * 1000

    @property
    def bytes_queued(self) -> float:
        return sum(self.left.values())

    def layers_loaded(self, digest: str, slot: int) -> int:
        size = self.core.slots.size_bytes(digest)
        return int((size - self.left.get(digest, 0.0)) * LAYERS / size + 1e-9)

    def bytes_ahead(self, digest: str, slot: int) -> float:
        digests = list(self.left)
        return sum(self.left[one] for one in digests[: digests.index(digest) + 1]) if digest in self.left else 0.0

    # steps
    def step(self) -> list[Sequence]:
        """One step. Returns the sequences that draw a token."""
        core = self.core
        self.steps += 1
        self.there.update(core.look(self))
        running = {seq.adapter for seq in core.state.running}
        plan = core.decide()
        self._move(plan, running)
        for seq in plan.decodes + plan.prefills:
            self._write(seq)
        budget, copying = self.per_step, bool(self.left)
        for digest in list(self.left):
            part = min(self.left[digest], budget)
            budget -= part
            self.left[digest] -= part
            if not self.left[digest]:
                del self.left[digest]
        assert plan.tokens or copying or not core.busy, "no progress"
        core.check()
        return advance(plan)

    def divide(self) -> None:
        """Do what an engine does when the boundary has moved."""
        boundary, kv = self.core.boundary, self.core.state.kv
        if boundary is None or not boundary.moved:
            return
        self.divisions += 1
        for block, to in boundary.settle():
            for offset in range(SIZE):
                self.rows[to * SIZE + offset] = self.rows.get(block * SIZE + offset, ("", ()))
        self.rows = {at: row for at, row in self.rows.items() if at < kv.total * SIZE}

    def _move(self, plan: StepPlan[Sequence], running: set[str]) -> None:
        self.evictions += len(plan.evictions)
        self.preemptions += len(plan.preempted)
        preempted = {seq.adapter for seq in plan.preempted}
        for digest, _ in plan.evictions:
            assert digest not in running - preempted, "an adapter that is running was evicted"
            self.left.pop(digest, None)
            self.there.discard(digest)
        self.divide()
        for seq in plan.loads:
            if self.per_step:
                self.left[seq.adapter] = float(seq.adapter_bytes)
            else:
                self.there.add(seq.adapter)
        slots, kv = self.core.slots, self.core.state.kv
        assert kv.total * BLOCK + slots.bytes_total <= self.budget_bytes
        assert self.there | set(self.left) <= set(slots.digests()) | self.there & set(slots.loading)

    def _write(self, seq: Sequence) -> None:
        ids = [block * SIZE + offset for block in seq.blocks for offset in range(SIZE)]
        for at in range(seq.computed, seq.computed + seq.scheduled):
            assert ids[at] < self.core.state.kv.total * SIZE
            self.rows[ids[at]] = seq.adapter, tuple(seq.tokens[: at + 1])
        for at in range(seq.computed + seq.scheduled):
            assert self.rows[ids[at]] == (seq.adapter, tuple(seq.tokens[: at + 1])), "another sequence's K and V"


def work_off(device: Device, draw: random.Random, requests: int) -> None:
    """Serve random requests until each has drawn all its tokens."""
    sizes = {f"adapter-{i}": draw.choice([20, 30, 50]) for i in range(9)}
    drawn: dict[int, int] = {}
    wanted: dict[int, int] = {}
    number = 0
    for _ in range(20_000):
        while number < requests and draw.random() < 0.4:
            adapter = draw.choice(["", *sizes])
            prompt = [draw.randrange(2) for _ in range(draw.randint(1, 30))]
            seq = Sequence(order=0, tokens=array("i", prompt), adapter=adapter, adapter_bytes=sizes.get(adapter, 0), rank=8)
            device.core.start(seq)
            drawn[seq.order], wanted[seq.order] = 0, draw.randint(1, 25)
            number += 1
        if draw.random() < 0.02:
            device.core.unload(draw.choice(list(sizes)))
        for digest, _ in device.core.sweep():
            device.left.pop(digest, None)
            device.there.discard(digest)
        if draw.random() < 0.1:
            digest = draw.choice(list(sizes))
            if device.core.load(digest, sizes[digest]) is not None:
                device.divide()
                if device.per_step:
                    device.left[digest] = float(sizes[digest])
                else:
                    device.there.add(digest)
        for seq in device.step():
            drawn[seq.order] += 1
            seq.append(draw.randrange(2))
            if drawn[seq.order] == wanted[seq.order]:
                device.core.end(seq)
        if number == requests and not device.core.busy:
            assert drawn == wanted
            return
    raise AssertionError("requests are left")


@pytest.mark.parametrize("seed", range(12))
def test_kv_and_adapters_at_the_limit_fail_no_request_and_never_exceed_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    device = Device(
        blocks=draw.randint(15, 24),  # the longest sequence has 54 tokens
        adapters=draw.randint(50, 150),
        shared=True,
        per_step=draw.choice([0.0, 3.0, 15.0]),
        prefix_cache=draw.random() < 0.6,
    )
    work_off(device, draw, 150)
    assert device.divisions and device.evictions


@pytest.mark.parametrize(("blocks", "adapters"), [(16, 300), (46, 0)])
def test_shares_that_do_not_suit_the_load_cost_less_than_fixed_regions(blocks: int, adapters: int) -> None:
    figures = {}
    for shared in (False, True):
        device = Device(blocks=blocks, adapters=adapters + 60, shared=shared, per_step=0.0, prefix_cache=False, seats=8)
        work_off(device, random.Random(1), 200)
        figures[shared] = device.steps
    assert figures[True] < 0.95 * figures[False]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_run_of_equal_steps_ends_before_the_boundary_would_move(prefix_cache: bool) -> None:
    device = Device(blocks=16, adapters=100, shared=True, per_step=0.0, prefix_cache=prefix_cache)
    core = device.core
    slot = core.load("idle", 50)
    assert slot is not None
    for _ in range(2):
        core.start(Sequence(order=0, tokens=array("i", [1, 2, 3])))
    core.decide()
    for seq in core.state.running:
        seq.computed, seq.scheduled = 3, 0
        seq.append(1)
    plan = core.decide()
    steps = steady_steps(core.state, plan, 1000)
    boundary, kv = core.boundary, core.state.kv
    assert boundary is not None
    total = kv.total
    for step in range(1, 1000):
        if kv.total != total or boundary.evicted:
            break
        for seq in advance(plan):
            seq.append(step)
        plan = core.decide()
    assert steps == step - 1


def test_a_loan_takes_whole_blocks_and_gives_them_back() -> None:
    memory = Memory(8, 80)
    memory.boundary.lends(lambda: {"idle": memory.boundary.lent_bytes})
    assert memory.boundary.lend(BLOCK) and memory.kv.total == 7 and memory.boundary.lent_bytes == BLOCK
    assert memory.boundary.lend(BLOCK - 1) and memory.kv.total == 7, "a part of a block is one"
    memory.budget.check()
    memory.boundary.check()
    assert memory.boundary.lend(0) and memory.kv.total == 8 and memory.boundary.lent_bytes == 0
