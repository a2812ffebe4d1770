"""Promise: KV blocks travel only where that is faster, and blocks that are held for a move are neither evicted nor changed."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.kv_travel import HeldBlocks, compatible, content_keys, travel
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence
from motet.policies.times.link_times import SMALL_BYTES, LinkTimes
from tests.policies.test_kv_blocks import cached, keys_of
from tests.policies.test_rebalance import PERF
from tests.support_worker import worker_limits

MIB = 1 << 20
LINKED = msgspec.structs.replace(PERF, kv_base_ms=2.0, kv_ms_per_mib=10.0)
PROMPT = list(range(40))


def test_blocks_travel_where_the_link_is_clearly_faster_than_the_prefill() -> None:
    long = travel(LINKED, tokens=4000, rank=0, token_bytes=4096)  # 15.6 MiB, or a prefill of 410 ms
    assert (long.copy_ms, long.again_ms) == (pytest.approx(2.0 + 156.25), pytest.approx(410.0)) and long.pays
    assert not travel(LINKED, tokens=4000, rank=0, token_bytes=8192).pays, "faster, but not clearly"
    assert not travel(LINKED, tokens=4000, rank=0, token_bytes=1 << 20).pays
    assert not travel(PERF, tokens=4000, rank=0, token_bytes=1).pays, "the link has not been measured"


def test_only_workers_that_compute_alike_take_over_blocks_of_each_other() -> None:
    one, other = worker_limits(kv_format="a"), worker_limits(kv_format="b")
    assert compatible(one, one) and not compatible(one, other)
    assert not compatible(worker_limits(), worker_limits()), "engines that cannot"


def test_small_transfers_give_the_latency_of_the_link_and_large_ones_its_rate() -> None:
    link = LinkTimes()
    link.observe(SMALL_BYTES, 3.0)
    assert (link.base_ms, link.ms_per_mib, link.bytes_per_s) == (3.0, 0.0, 0.0)
    link.observe(10 * MIB, 103.0)
    assert link.ms_per_mib == pytest.approx(10.0) and link.bytes_per_s == pytest.approx(100 * MIB)
    for _ in range(30):
        link.observe(10 * MIB, 53.0)
    assert link.ms_per_mib == pytest.approx(5.0, rel=0.01)
    link.observe(MIB, 1.0)
    assert 0 < link.ms_per_mib < 5.0, "it took less than the way alone was said to take"


def test_blocks_are_named_as_sequences_name_theirs() -> None:
    keys = keys_of(PROMPT, adapter="a")
    tokens = array("i", PROMPT).tobytes()
    assert content_keys([tokens[at : at + 16] for at in range(0, len(tokens), 16)], "a", b"") == keys


def test_held_blocks_stay_while_everything_else_leaves() -> None:
    kv = KvBlocks(10, 4)
    held, keys = HeldBlocks(kv, lambda: 0), keys_of(PROMPT)
    blocks = cached(kv, keys)
    assert held.hold("out", keys[:6]) == 6 and kv.free == 4
    taken = kv.allocate(4)
    assert held.slice("out", 2, 3) == blocks[2:5] and held.slice("out", 4, 3) is None and held.slice("other", 0, 1) is None
    held.drop("out")
    held.drop("out")
    assert kv.free == 6 and kv.match(keys) == blocks[:6], "they can still be found"
    kv.release(taken)
    kv.check([])


def test_blocks_whose_content_does_not_count_any_more_are_not_read() -> None:
    kv = KvBlocks(10, 4)
    held, keys = HeldBlocks(kv, lambda: 0), keys_of(PROMPT)
    cached(kv, keys)
    held.hold("out", keys)
    kv.forget_all()
    assert held.slice("out", 0, 1) is None
    held.drop("out")
    kv.check([])
    assert kv.blank == 10


def test_blocks_that_come_find_room_beside_sequences_or_not_at_all() -> None:
    kv = KvBlocks(10, 4)
    held, keys = HeldBlocks(kv, lambda: 3), keys_of(PROMPT)
    own = cached(kv, keys[:2])
    assert held.hold("in", keys) == 2, "these are here"
    assert held.grow("in", 6) is None, "three are left to running sequences"
    fresh = held.grow("in", 5)
    assert fresh is not None and kv.match(keys) == own, "blocks that have not been written cannot be found"
    held.publish("in", keys[2:7])
    assert kv.match(keys) == [*own, *fresh] and held.slice("in", 1, 4) == [own[1], *fresh[:3]]
    held.drop("in")
    assert kv.free == 10 and kv.match(keys) == [*own, *fresh]
    assert held.grow("in", 1) is None, "the move has been dropped"
    kv.check([])


def test_held_blocks_follow_when_the_boundary_to_adapters_moves() -> None:
    block = 1000
    slots = AdapterSlots(8, 10 * block, asynchronous=False)
    core: BatchCore[Sequence] = BatchCore(
        AdmissionLimits(max_running=4, max_step_tokens=64),
        kv=KvBlocks(20, 4, capacity=30, block_bytes=block),
        slots=slots,
        shared=True,
    )
    kv, boundary, keys = core.state.kv, core.boundary, keys_of(PROMPT)
    assert boundary is not None
    filler = kv.allocate(10)  # the lower ids
    cached(kv, keys)
    core.travelling.hold("out", keys)
    kv.release(filler)
    before = core.travelling.slice("out", 0, 10)
    assert boundary.for_adapter(14 * block), "adapters need more than their share"
    moves = dict(boundary.settle())
    after = core.travelling.slice("out", 0, 10)
    assert moves and after == [moves.get(one, one) for one in before or []] and kv.match(keys) == after
    core.check()
    core.travelling.drop("out")
    core.check()


@pytest.mark.parametrize("seed", range(5))
def test_accounts_add_up_whatever_is_held_dropped_and_evicted(seed: int) -> None:
    draw, kv = random.Random(seed), KvBlocks(24, 4)
    held = HeldBlocks(kv, lambda: 2)
    prompts = [keys_of([draw.randrange(3) for _ in range(40)]) for _ in range(6)]
    names: list[str] = []
    others: list[list[int]] = []
    for number in range(400):
        match draw.randrange(5):
            case 0 if len(names) < 4:
                names.append(f"n{number}")
                keys = draw.choice(prompts)
                rest = keys[held.hold(names[-1], keys) :][: draw.randrange(6)]
                if rest and held.grow(names[-1], len(rest)) is not None:
                    held.publish(names[-1], rest)
            case 1 if names:
                held.drop(names.pop(draw.randrange(len(names))))
            case 2 if kv.free >= 3:
                others.append(kv.allocate(3))
            case 3 if others:
                kv.release(others.pop())
            case 4 if names:
                held.slice(draw.choice(names), draw.randrange(4), draw.randrange(4))
        kv.check([*held.lists, *others])
