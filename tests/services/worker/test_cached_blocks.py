"""Promise: what vLLM tells of its KV cache becomes the keys that gateways compute, and what cannot be reused is not told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from motet.policies.memory.kv_blocks import cache_scope, prompt_keys
from motet.services.worker.vllm_engine.cached_blocks import CachedBlocks
from motet.services.worker.vllm_engine.requests import cache_salt
from motet.shared.wire.request import pack_tokens

SIZE = 64
ONE, TWO, THREE, OTHER = (list(range(first, first + SIZE)) for first in (0, 100, 200, 300))
PROMPT = ONE + TWO + THREE
DIGEST = "ab" * 32
SCOPE = cache_scope("acme", "alice")


def stored(
    names: list[Any], tokens: list[int], parent: Any = None, scope: bytes = SCOPE, digest: str = "", **fields: Any
) -> dict[str, Any]:
    """vLLM's event of blocks of a prompt; the first one has no parent."""
    shared = [digest] if digest else []
    own = [list(shared) for _ in names]
    if parent is None and (salt := cache_salt(scope, digest)):
        own[0].append(salt)
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": 7 if digest else None,
        "medium": "GPU",
        "lora_name": digest or None,
        "extra_keys": [one or None for one in own],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | fields


def removed(*names: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0} | fields


def batch_of(*events: dict[str, Any]) -> bytes:
    """A batch as vLLM sends it."""
    return msgspec.msgpack.encode([0.5, list(events), 0])


CLEARED = {"type": "AllBlocksCleared"}
IMAGE = ["image", 2]


class Told:
    """What a worker knows by all batches so far."""

    def __init__(self, size: int = SIZE) -> None:
        self.cached = CachedBlocks(size)
        self.keys: set[int] = set()
        self.number = 0

    def after(self, *events: dict[str, Any], lost: int = 0) -> set[int]:
        """Send these events as one batch, after `lost` batches that do not arrive."""
        self.number += lost
        self.cached.receive(self.number, batch_of(*events))
        self.number += 1
        for key, there in (self.cached.take_news() or {}).items():
            (self.keys.add if there else self.keys.discard)(key)
        return self.keys


@pytest.fixture
def told() -> Told:
    return Told()


def keys(prompt: list[int] = PROMPT, digest: str = "", scope: bytes = SCOPE, size: int = SIZE) -> set[int]:
    """What a gateway sends for a prompt that goes on after these blocks."""
    return set(prompt_keys(pack_tokens([*prompt, 1]), size, digest, scope))


@pytest.mark.parametrize("digest", ["", DIGEST], ids=["base", "adapter"])
@pytest.mark.parametrize("scope", [SCOPE, cache_scope("acme", shared=True), b""], ids=["tenant", "shared", "none"])
def test_the_keys_are_those_of_gateways(told: Told, digest: str, scope: bytes) -> None:
    assert told.after(stored([11, 12, 13], PROMPT, digest=digest, scope=scope)) == keys(digest=digest, scope=scope)


def test_a_prompt_that_comes_in_several_steps_is_one_chain(told: Told) -> None:
    told.after(stored([b"one"], ONE, digest=DIGEST))
    assert told.after(stored([b"two", b"three"], TWO + THREE, parent=b"one", digest=DIGEST)) == keys(digest=DIGEST)


def test_of_small_blocks_schedulers_know_some_and_the_others_carry_the_chain() -> None:
    told = Told(size=16)
    names = list(range(12))
    told.after(stored(names[:5], PROMPT[:80], block_size=16))
    assert told.after(stored(names[5:], PROMPT[80:], parent=4, block_size=16)) == keys(size=16)
    assert (len(told.keys), len(told.cached)) == (3, 12)
    assert told.after(removed(8), removed(11)) == keys(ONE + TWO, size=16)
    assert not told.after(CLEARED)


def test_evicted_blocks_are_gone_and_the_others_stay(told: Told) -> None:
    before = set(told.after(stored([11, 12, 13], PROMPT)))
    assert before - told.after(removed(13)) == keys() - keys(ONE + TWO)
    assert len(told.cached) == 2
    assert told.after(stored([13], THREE, parent=12)) == keys(), "it came back"


def test_a_block_that_vllm_has_twice_is_gone_with_the_second(told: Told) -> None:
    told.after(stored([11], ONE), stored([11], ONE))
    assert told.after(removed(11))
    assert not told.after(removed(11))
    assert not told.after(removed(11)) and len(told.cached) == 0


def test_a_block_that_comes_and_goes_within_a_batch_is_not_told(told: Told) -> None:
    assert not told.after(stored([11], ONE), removed(11))


def test_news_is_told_once(told: Told) -> None:
    told.cached.receive(0, batch_of(stored([11], ONE)))
    assert [told.cached.take_news(), told.cached.take_news()] == [dict.fromkeys(keys(ONE), True), None]


def test_a_cleared_cache_has_nothing(told: Told) -> None:
    told.after(stored([11, 12, 13], PROMPT))
    assert not told.after(CLEARED) and len(told.cached) == 0
    assert told.after(CLEARED, stored([11], ONE)) == keys(ONE)


def test_after_a_lost_batch_all_is_forgotten_and_new_prompts_are_told(told: Told) -> None:
    told.after(stored([11, 12, 13], PROMPT))
    assert told.after(stored([21, 22], OTHER + TWO), lost=1) == keys(OTHER + TWO)
    assert told.after(removed(11)) == keys(OTHER + TWO)
    assert told.after(stored([14], OTHER, parent=13)) == keys(OTHER + TWO), "its parent is not known any longer"


def test_a_core_that_counts_anew_has_an_empty_cache(told: Told) -> None:
    told.after(stored([11], ONE))
    told.number = 0
    assert told.after(stored([21], TWO)) == keys(TWO)


def test_what_is_not_understood_is_as_good_as_lost(told: Told) -> None:
    told.after(stored([11], ONE))
    assert not told.after({"type": "BlockMoved"}) and len(told.cached) == 0
    assert told.after(stored([11], ONE)) == keys(ONE)


def test_without_its_parent_a_block_is_left_out_with_all_that_follow(told: Told) -> None:
    assert not told.after(stored([12, 13], TWO + THREE, parent=11), stored([14], OTHER, parent=13))
    assert len(told.cached) == 0


@pytest.mark.parametrize("digest", ["", DIGEST], ids=["base", "adapter"])
def test_an_image_and_what_follows_it_is_left_out(told: Told, digest: str) -> None:
    event = stored([11, 12, 13], PROMPT, digest=digest)
    event["extra_keys"][1] = [*([digest] if digest else []), IMAGE]
    assert told.after(event, stored([14], OTHER, parent=13, digest=digest)) == keys(ONE, digest)


def test_an_image_in_the_first_block_is_left_out(told: Told) -> None:
    event = stored([11], ONE)
    event["extra_keys"][0].insert(0, IMAGE)
    assert not told.after(event)


def test_a_salt_that_is_not_ours_is_left_out(told: Told) -> None:
    assert not told.after(stored([11], ONE, extra_keys=[["other"]]))
    assert not told.after(stored([11], ONE, digest=DIGEST, extra_keys=[[DIGEST, SCOPE.hex()]]))


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"block_size": 32},
        {"kv_cache_spec_kind": "sliding_window", "group_idx": 1},
        {"token_ids": ONE + TWO},
    ],
    ids=["in host memory", "of another size", "of a sliding window", "with holes"],
)
def test_blocks_that_a_prompt_cannot_reuse_from_its_start_are_left_out(told: Told, fields: dict[str, Any]) -> None:
    assert not told.after(stored([11], ONE, **fields))


def test_the_groups_of_other_layers_do_not_count(told: Told) -> None:
    told.after(stored([11], ONE, group_idx=1), stored([11], ONE, group_idx=2))
    assert told.after(removed(11, group_idx=2), removed(11, medium="CPU", group_idx=1)) == keys(ONE)
    assert not told.after(removed(11, group_idx=1))
