from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from motet.policies.memory.kv_blocks import KvBlocks, cache_scope, chain_key, merged_key, root_key, short_key
from motet.policies.memory.worth import Reuse


def keys_of(tokens: list[int], *, adapter: str = "", block_size: int = 4) -> list[bytes]:
    keys, parent = [], root_key(adapter)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain_key(parent, array("i", tokens[start : start + block_size]).tobytes())
        keys.append(parent)
    return keys


def cached(kv: KvBlocks, keys: list[bytes]) -> list[int]:
    """Blocks for `keys`, published and released: they have content and no user."""
    blocks = kv.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        kv.publish(block, key)
    kv.release(blocks)
    return blocks


def test_blocks_are_handed_out_once_and_come_back() -> None:
    kv = KvBlocks(5, 4)
    first, second = kv.allocate(2), kv.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert kv.free == 0
    kv.check([first, second])
    with pytest.raises(ValueError, match="1 KV blocks asked for, 0 are free"):
        kv.allocate(1)
    kv.release(first)
    assert kv.free == 2
    kv.check([second])


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        KvBlocks(0, 16)


def test_tokens_need_whole_blocks() -> None:
    kv = KvBlocks(5, 4)
    assert [kv.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_the_longest_known_beginning_is_found() -> None:
    kv = KvBlocks(10, 4)
    keys = keys_of(list(range(12)))
    blocks = cached(kv, keys)
    assert kv.match(keys) == blocks
    assert kv.match(keys_of([*range(8), 99, 99, 99, 99])) == blocks[:2]
    assert kv.match(keys_of([99, *range(11)])) == []


def test_a_block_is_known_by_everything_before_it_and_not_by_its_own_tokens_alone() -> None:
    same_end = [keys_of([*start, 5, 6, 7, 8])[1] for start in ([1, 2, 3, 4], [1, 2, 3, 9])]
    assert same_end[0] != same_end[1]


def test_adapters_do_not_share_blocks_and_neither_do_versions_of_one_adapter() -> None:
    kv = KvBlocks(10, 4)
    prompt = list(range(8))
    cached(kv, keys_of(prompt, adapter="digest-of-version-1"))
    assert kv.match(keys_of(prompt, adapter="digest-of-version-2")) == []
    assert kv.match(keys_of(prompt)) == []
    assert len(kv.match(keys_of(prompt, adapter="digest-of-version-1"))) == 2


def test_cached_blocks_serve_several_users_at_once() -> None:
    kv = KvBlocks(4, 4)
    keys = keys_of(list(range(8)))
    blocks = cached(kv, keys)
    for _ in range(2):
        kv.take(kv.match(keys))
    assert kv.free == 2
    kv.check([blocks, blocks])
    kv.release(blocks)
    kv.check([blocks])
    assert kv.free == 2


def test_taking_idle_blocks_costs_free_ones_and_sharing_held_ones_does_not() -> None:
    kv = KvBlocks(4, 4)
    blocks = cached(kv, keys_of(list(range(8))))
    assert kv.idle_among(blocks) == 2
    kv.take(blocks)
    assert kv.idle_among(blocks) == 0


def test_blank_blocks_are_used_before_cached_ones_and_the_oldest_cached_one_next() -> None:
    kv = KvBlocks(4, 4)
    old, new = keys_of([1, 1, 1, 1]), keys_of([2, 2, 2, 2])
    old_blocks, new_blocks = cached(kv, old), cached(kv, new)
    kv.allocate(2)
    assert kv.match(old) and kv.match(new)
    assert kv.allocate(1) == old_blocks
    assert kv.match(old) == []
    assert kv.match(new) == new_blocks


def test_using_a_cached_block_makes_it_young_again() -> None:
    kv = KvBlocks(2, 4)
    first, second = keys_of([1, 1, 1, 1]), keys_of([2, 2, 2, 2])
    cached(kv, first), cached(kv, second)
    again = kv.match(first)
    kv.take(again)
    kv.release(again)
    kv.allocate(1)
    assert kv.match(first) and not kv.match(second)


class Ages(Reuse):
    """Records what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ages: list[tuple[str, int]] = []

    def used(self, age: int) -> None:
        self.ages.append(("used", age))

    def left(self, age: int) -> None:
        self.ages.append(("left", age))


def test_a_cached_block_is_as_old_as_its_last_release() -> None:
    kv = KvBlocks(1, 4)
    kv.reuse = ages = Ages()
    kv.clock = 3
    blocks = cached(kv, keys_of([1, 1, 1, 1]))
    kv.clock = 10
    kv.take(blocks)
    kv.take(blocks)
    assert ages.ages == [("used", 7)], "a block in use has no age"
    kv.clock = 12
    kv.release(blocks)
    kv.release(blocks)
    kv.clock = 16
    kv.allocate(1)
    assert ages.ages == [("used", 7), ("left", 4)]


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning() -> None:
    kv = KvBlocks(3, 4)
    keys = keys_of(list(range(12)))
    blocks = cached(kv, keys)
    kv.allocate(1)
    assert kv.match(keys) == blocks[:2]


def test_of_two_blocks_with_equal_content_the_first_is_found() -> None:
    kv = KvBlocks(4, 4)
    key = keys_of([1, 2, 3, 4])[0]
    first, second = kv.allocate(1), kv.allocate(1)
    kv.publish(first[0], key)
    kv.publish(second[0], key)
    assert kv.match([key]) == first
    kv.release(second)
    kv.check([first])
    assert kv.cached == 1


def test_spoiled_content_is_not_found_again() -> None:
    kv = KvBlocks(4, 4)
    keys = keys_of(list(range(8)))
    blocks = kv.allocate(2)
    for block, key in zip(blocks, keys, strict=True):
        kv.publish(block, key)
    kv.take(blocks)
    kv.release(blocks, spoiled=True)
    assert kv.match(keys) == []
    kv.check([blocks])


def test_after_forgetting_everything_no_block_is_lost() -> None:
    kv = KvBlocks(4, 4)
    keys = keys_of(list(range(8)))
    cached(kv, keys)
    held = kv.allocate(1)
    kv.forget_all()
    assert kv.match(keys) == []
    assert kv.free == 3
    kv.check([held])


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    kv = KvBlocks(4, 4, prefix_cache=False)
    keys = keys_of(list(range(8)))
    cached(kv, keys)
    assert kv.match(keys) == []
    assert kv.cached == 0


def test_the_check_notices_a_lost_block() -> None:
    kv = KvBlocks(4, 4)
    kv.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        kv.check([])


@pytest.mark.parametrize("seed", range(5))
def test_accounts_add_up_after_any_sequence_of_operations(seed: int) -> None:
    draw = random.Random(seed)
    kv = KvBlocks(24, 4)
    held: list[list[int]] = []
    for _ in range(600):
        action = draw.random()
        if action < 0.5:
            tokens = [draw.randrange(2) for _ in range(4 * draw.randint(1, 4))]
            keys = keys_of(tokens, adapter=draw.choice(["", "a"]))
            found = kv.match(keys)
            if len(keys) - len(found) <= kv.free - kv.idle_among(found):
                kv.take(found)
                blocks = found + kv.allocate(len(keys) - len(found))
                for block, key in zip(blocks, keys, strict=True):
                    kv.publish(block, key)
                held.append(blocks)
        elif held:
            kv.release(held.pop(draw.randrange(len(held))), spoiled=action > 0.98)
        if action > 0.995:
            kv.forget_all()
        kv.check(held)


def test_a_prompt_is_found_only_by_its_own_tenant_and_salt() -> None:
    scopes = [cache_scope("acme"), cache_scope("globex"), cache_scope("acme", "user-1"), cache_scope("acme", "user-2")]
    assert len({root_key("", scope) for scope in scopes}) == len(scopes)
    assert root_key("", cache_scope("acme", "user-1")) == root_key("", cache_scope("acme", "user-1"))


def test_a_shared_cache_is_one_for_all_tenants_and_still_divided_by_salt() -> None:
    assert cache_scope("acme", shared=True) == cache_scope("globex", shared=True)
    assert cache_scope("acme", "salt", shared=True) != cache_scope("acme", shared=True)


def test_names_chosen_to_look_like_another_scope_do_not_reach_it() -> None:
    lookalikes = [
        cache_scope("acme", "x"),
        cache_scope("acmex"),
        cache_scope("", "acmex"),
        cache_scope("", "tacmex", shared=True),
    ]
    assert len({root_key(digest, scope) for digest in ("", "d") for scope in lookalikes}) == 8


def test_an_adapter_shares_no_blocks_with_itself_merged() -> None:
    plain = [chain_key(root_key(digest), b"tokens") for digest in ("a", "b")]
    keys = plain + [merged_key(key) for key in plain]
    assert len(set(keys)) == len(set(map(short_key, keys))) == 4


def lose(kv: KvBlocks) -> None:
    kv._blank.pop()  # private: a ledger is broken on purpose


def free_twice(kv: KvBlocks) -> None:
    kv._blank[-1] = kv._blank[-2]  # private: a ledger is broken on purpose


def free_beyond(kv: KvBlocks) -> None:
    kv._blank[-1] = kv.total  # private: a ledger is broken on purpose


def free_while_held(kv: KvBlocks) -> None:
    kv._blank[-1] = 0  # private: a ledger is broken on purpose


def blank_with_a_key(kv: KvBlocks) -> None:
    kv._blank.append(kv._idle.popitem()[0])  # private: a ledger is broken on purpose


def idle_without_a_key(kv: KvBlocks) -> None:
    kv._idle[kv._blank.pop()] = 0  # private: a ledger is broken on purpose


def key_that_is_not_found(kv: KvBlocks) -> None:
    kv._block_of.popitem()  # private: a ledger is broken on purpose


def key_of_another_block(kv: KvBlocks) -> None:
    blocks = kv._block_of  # private: a ledger is broken on purpose
    first, second, *_ = blocks
    blocks[first], blocks[second] = blocks[second], blocks[first]


def user_too_many(kv: KvBlocks) -> None:
    kv._users[0] += 1  # private: a ledger is broken on purpose


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lose, "neither free nor held"),
        (free_twice, "in the free lists twice"),
        (free_beyond, "beyond the cache"),
        (free_while_held, "a block with users is in the free lists"),
        (blank_with_a_key, "a blank block has a key"),
        (idle_without_a_key, "an idle block has no key"),
        (key_that_is_not_found, "under which it is not found"),
        (key_of_another_block, "keys and blocks disagree"),
        (user_too_many, "reference counts"),
    ],
)
def test_a_check_says_what_does_not_add_up(harm: Callable[[KvBlocks], None], says: str) -> None:
    kv = KvBlocks(8, 4, capacity=12)
    held = kv.allocate(2)
    assert 0 in held
    cached(kv, keys_of(list(range(12))))
    kv.check([held])
    harm(kv)
    with pytest.raises(AssertionError, match=says):
        kv.check([held])
