"""Promise: one load per adapter, bounded memory, no request starves, and the accounts add up in any order of events.

The live worker's and the twin's use of it is tested with them.
"""

from __future__ import annotations

import random

import pytest

from bench.rivals.evictions import Lru
from motet.policies.memory.host_tier import LOADS_AT_ONCE, Evict, Forget, HostTier, Load, TierAction
from motet.shared.model import AdapterRef

SIZE = 100


def ref(digest: str, size_bytes: int = SIZE) -> AdapterRef:
    return AdapterRef(name=digest, digest=digest, rank=8, size_bytes=size_bytes)


def size_of(digest: str) -> int:
    return SIZE // 2 + 50 * (int(digest[1:]) % 3)


def tier_with(room: int, *held: str, disk_bytes: int | None = None) -> HostTier[str]:
    """A tier in which `held` were loaded and are held once each."""
    tier: HostTier[str] = HostTier(room, disk_bytes, eviction="lru")
    for digest in held:
        assert not tier.hold(ref(digest), f"first-{digest}")
        assert tier.take_actions() == [Load(ref(digest), "store")]
        assert tier.loaded(digest, SIZE, SIZE) == [f"first-{digest}"]
    return tier


def test_many_waiting_requests_cause_one_load_and_hold_the_same_copy() -> None:
    tier: HostTier[int] = HostTier(SIZE, None)
    assert [tier.hold(ref("a"), number) for number in range(20)] == [False] * 20
    assert tier.take_actions() == [Load(ref("a"), "store")]
    assert tier.loaded("a", SIZE, SIZE) == list(range(20)) and tier.holders("a") == 20
    assert tier.hold(ref("a"), 20) and tier.take_actions() == []


def test_loads_run_in_their_order_and_only_so_many_at_once() -> None:
    tier: HostTier[int] = HostTier(100 * SIZE, None)
    names = [f"d{number}" for number in range(LOADS_AT_ONCE + 2)]
    for number, name in enumerate(names):
        tier.hold(ref(name), number)
    assert [action.adapter.digest for action in tier.take_actions()] == names[:LOADS_AT_ONCE]
    tier.failed(names[1])
    assert tier.take_actions() == [Load(ref(names[LOADS_AT_ONCE]), "store")]


def test_a_load_waits_for_room_until_a_copy_is_released_and_is_not_overtaken() -> None:
    tier = tier_with(2 * SIZE, "a", "b")
    tier.hold(ref("large", 2 * SIZE), "large")
    tier.hold(ref("small"), "small")
    assert tier.take_actions() == []
    tier.release("a")
    assert tier.take_actions() == [Evict("a", "host")]
    tier.release("b")
    assert tier.take_actions() == [Evict("b", "host"), Load(ref("large", 2 * SIZE), "store")]


def test_the_copy_released_longest_ago_leaves_first_and_comes_back_from_disk() -> None:
    tier = tier_with(2 * SIZE, "a", "b")
    tier.release("b")
    tier.release("a")
    tier.hold(ref("c"), "c")
    assert tier.take_actions() == [Evict("b", "host"), Load(ref("c"), "store")]
    tier.loaded("c", SIZE, SIZE)
    tier.release("c")
    tier.hold(ref("b"), "b")
    assert tier.take_actions() == [Evict("a", "host"), Load(ref("b"), "disk")]


def test_the_file_loaded_longest_ago_leaves_a_full_disk_also_while_its_copy_is_held() -> None:
    tier = tier_with(9 * SIZE, "a", "b", disk_bytes=2 * SIZE)
    tier.hold(ref("c"), "c")
    tier.take_actions()
    tier.loaded("c", SIZE, SIZE)
    assert tier.take_actions() == [Evict("a", "disk")] and tier.tier("a") == "host"


def test_a_version_dropped_while_it_is_loaded_or_held_leaves_with_its_last_holder_unless_it_is_wanted_again() -> None:
    tier = tier_with(9 * SIZE, "a")
    tier.drop("a")
    assert tier.take_actions() == []
    tier.release("a")
    assert tier.take_actions() == [Forget("a")] and tier.tier("a") is None
    tier.hold(ref("b"), "first")
    tier.drop("b")
    tier.give_up("b", "first")
    tier.take_actions()
    assert tier.loaded("b", SIZE, SIZE) == [] and tier.take_actions() == [Forget("b")]
    tier.hold(ref("c"), "first")
    tier.take_actions()
    tier.drop("c")
    tier.hold(ref("c"), "second")
    tier.loaded("c", SIZE, SIZE)
    tier.release("c")
    tier.release("c")
    assert tier.take_actions() == [] and tier.tier("c") == "host"


def test_a_full_file_system_costs_files_that_are_not_mapped_first() -> None:
    tier = tier_with(3 * SIZE, "a", "b", "c")
    assert tier.make_disk_room(SIZE) == "later"
    tier.release("b")
    assert tier.make_disk_room(SIZE) == "made"
    assert tier.take_actions() == [Evict("b", "host"), Evict("b", "disk")] and tier.tier("b") is None


def test_an_adapter_that_a_full_file_system_cannot_take_costs_no_other_its_file() -> None:
    tier = tier_with(3 * SIZE, "a", "b", "c")
    tier.release("a")
    tier.release("b")
    assert tier.make_disk_room(3 * SIZE + 1) == "never", "not even if everything went"
    assert tier.make_disk_room(2 * SIZE + 1) == "later", "c is in use"
    assert tier.take_actions() == [] and tier.files == ["a", "b", "c"]
    assert tier.make_disk_room(SIZE + 1) == "made", "two files, because one is not enough"
    assert tier.files == ["c"]
    assert tier.make_disk_room(0) == "made" and tier.files == ["c"]
    tier.check()


def test_an_adapter_larger_than_the_disk_tier_costs_no_other_its_file() -> None:
    tier: HostTier[str] = HostTier(9 * SIZE, 2 * SIZE)
    for name, size in (("a", SIZE), ("b", SIZE), ("huge", 3 * SIZE)):
        tier.hold(AdapterRef(name=name, digest=name, rank=8, size_bytes=size), name)
        tier.loaded(name, size, size)
    assert tier.files == ["a", "b"] and tier.tier("huge") == "host"
    assert tier.take_actions()[-1] == Evict("huge", "disk")
    tier.check()


def test_without_a_size_of_host_memory_every_adapter_is_there() -> None:
    tier: HostTier[int] = HostTier(None, None)
    assert tier.hold(ref("a"), 1) and tier.fits(1 << 60) and tier.tier("a") is None
    tier.release("a")
    assert tier.take_actions() == []


def test_lru_forgets_what_is_used_again() -> None:
    order = Lru()
    for digest in "abc":
        order.use(digest, SIZE)
        order.release(digest)
    order.use("a", SIZE)
    assert list(order) == ["b", "c"]
    order.release("a")
    order.forget("b")
    assert list(order) == ["c", "a"]


def test_a_copy_whose_file_is_gone_is_worth_more_than_one_that_is_on_disk() -> None:
    tier: HostTier[int] = HostTier(2 * SIZE, None, eviction="next-use")
    for holder, digest in enumerate("ab"):
        tier.hold(ref(digest), holder)
        tier.loaded(digest, SIZE, SIZE)
    tier.file_lost("a")
    for digest in "ab":
        tier.release(digest)
    assert list(tier.eviction) == ["b", "a"]


# in one piece: one match, with a case for each thing that may happen
@pytest.mark.parametrize("seed", range(10))
def test_accounts_add_up_and_every_request_is_served_in_random_histories(seed: int) -> None:
    chance = random.Random(seed)
    tier: HostTier[int] = HostTier(5 * SIZE, 9 * SIZE)
    waiting: dict[int, str] = {}
    holding: list[tuple[int, str]] = []
    loading: list[str] = []
    mirror: set[str] = set()  # the copies that exist after all actions have been carried out

    def carry_out(actions: list[TierAction]) -> None:
        for action in actions:
            if isinstance(action, Load):
                loading.append(action.adapter.digest)
            elif isinstance(action, Forget) or action.tier == "host":
                mirror.discard(action.digest)

    for number in range(3000):
        match chance.randrange(8):
            case 0 | 1 | 2 if len(waiting) < 40:
                which = chance.randrange(12)
                adapter = ref(f"d{which}", size_of(f"d{which}"))
                if tier.hold(adapter, number):
                    holding.append((number, adapter.digest))
                else:
                    waiting[number] = adapter.digest
            case 3 if holding:
                tier.release(holding.pop(chance.randrange(len(holding)))[1])
            case 4 if waiting:
                holder = chance.choice(list(waiting))
                tier.give_up(waiting.pop(holder), holder)
            case 5 if loading:
                digest = loading.pop(chance.randrange(len(loading)))
                if chance.random() < 0.2:
                    for holder in tier.failed(digest):
                        del waiting[holder]
                else:
                    mirror.add(digest)
                    holding += [(holder, waiting.pop(holder)) for holder in tier.loaded(digest, size_of(digest), SIZE)]
            case 6:
                tier.drop(f"d{chance.randrange(12)}")
            case 7 if chance.random() < 0.1:
                tier.make_disk_room(chance.randrange(4 * SIZE))
        carry_out(tier.take_actions())
        tier.check()
        assert mirror == set(tier.copies)
        assert tier.host_used_bytes + tier.reserved_bytes <= 5 * SIZE
    while waiting or holding:
        if loading:
            digest = loading.pop()
            mirror.add(digest)
            holding += [(holder, waiting.pop(holder)) for holder in tier.loaded(digest, size_of(digest), SIZE)]
        else:
            tier.release(holding.pop()[1])
        carry_out(tier.take_actions())
        tier.check()


def test_every_request_that_waited_for_a_copy_counts_as_a_use_of_it() -> None:
    tier: HostTier[str] = HostTier(2 * SIZE, None, eviction="score")
    for number in range(3):
        tier.hold(ref("often"), f"{number}")
    tier.loaded("often", SIZE, SIZE)
    for _ in range(3):
        tier.release("often")
    for number in range(2):
        tier.hold(ref("twice"), f"{number}")
        if number == 0:
            tier.loaded("twice", SIZE, SIZE)
        tier.release("twice")
    tier.take_actions()
    tier.hold(ref("new"), "new")
    assert Evict("twice", "host") in tier.take_actions()
    tier.check()
