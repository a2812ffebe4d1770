"""Copies KV blocks to a worker that needs them: of a request that moves there, or of a prompt that another worker has cached.
Decides whether a copy is faster than a prefill, and keeps the blocks on both workers until the copy has ended.

    old worker   running ──hold──> held ──read──> bytes ─┐      it frees them when they were read, or after a moment
    lender       cached  ──hold──> held ──read──> bytes ─┤
    new worker   idle    ──hold──> held ──grow──> written ──publish──> held ──drop──> idle ──> its request finds them by key

Blocks are named by content (`policies.memory.kv_blocks`), so a request that starts on the new worker takes what has arrived
from the prefix cache and computes the rest. Whether blocks travel, and how many arrive, changes the time only, not the result.

Copying pays when it is predicted to take clearly less time than the prefill that it saves (`SURE`). Both sides are measured:
prefill by `policies.times.step_times`, the link by `policies.times.link_times`. A request waits for its blocks at most as long
as their prefill was predicted to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from motet.policies.memory.kv_blocks import KvBlocks, chain_key, root_key
from motet.policies.times.perf_model import MIB, prefill_ms
from motet.shared.model import PerfModel, WorkerLimits

SURE = 0.7
"""Blocks travel when fetching them takes less than this share of the prefill that they save."""
MOVES = 4
"""Fetches at a time of one worker, requests that moved away whose blocks it holds, and prompts of which it lends blocks."""
MOST_BYTES = 256 << 20
"""Largest size of the blocks of one fetch; further blocks are computed."""


class Travel(msgspec.Struct, frozen=True):
    """The times to fetch a request's KV blocks from another worker, and to compute them again."""

    copy_ms: float
    again_ms: float

    @property
    def pays(self) -> bool:
        """Whether fetching is predicted to be faster."""
        return self.copy_ms < SURE * self.again_ms


def travel(perf: PerfModel, *, tokens: int, rank: int, token_bytes: int) -> Travel:
    """The prediction for a request with `tokens` computed tokens, on the worker of `perf`.

    Without a measured link, fetching takes forever.
    """
    again_ms = prefill_ms(perf, float(tokens), float(rank))
    if not perf.kv_ms_per_mib:
        return Travel(float("inf"), again_ms)
    return Travel(perf.kv_base_ms + perf.kv_ms_per_mib * tokens * token_bytes / MIB, again_ms)


class Stretch(NamedTuple):
    """The full blocks of a request that a worker fetches: from `first` to before `end`. It has those before `first`."""

    first: int
    end: int


def stretch(tokens: int, from_tokens: int, to_tokens: int, *, block_size: int, block_bytes: int) -> Stretch:
    """The blocks of a request with so many tokens between two numbers of tokens. The last token is always computed."""
    first = from_tokens // block_size
    end = min((tokens - 1) // block_size, to_tokens // block_size, first + MOST_BYTES // block_bytes)
    return Stretch(first, max(first, end))


def wait_ms(perf: PerfModel, blocks: Stretch, block_size: int, rank: int) -> float:
    """How long a request waits for its blocks at most: the prefill that they save; 0 for none."""
    tokens = (blocks.end - blocks.first) * block_size
    return prefill_ms(perf, float(tokens), float(rank)) if tokens else 0.0


def compatible(one: WorkerLimits, other: WorkerLimits) -> bool:
    """Whether these workers can exchange KV blocks."""
    return bool(one.kv_format) and one.kv_format == other.kv_format


def content_keys(tokens: Sequence[bytes], adapter_digest: str, scope: bytes) -> list[bytes]:
    """The keys of full blocks, each with its token ids as int32 bytes."""
    keys, parent = [], root_key(adapter_digest, scope)
    for block in tokens:
        parent = chain_key(parent, block)
        keys.append(parent)
    return keys


class HeldBlocks:
    """Blocks that are held for a copy instead of a sequence, under the name of the copy.

    `reserve`: how many blocks fetched blocks leave free for sequences.
    """

    def __init__(self, kv: KvBlocks, reserve: Callable[[], int]) -> None:
        self._kv, self._reserve = kv, reserve
        self._held: dict[str, list[int]] = {}
        self._keys: dict[str, list[bytes]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def lists(self) -> Iterable[list[int]]:
        """The blocks of every name. The caller may rename blocks in place."""
        return self._held.values()

    def hold(self, name: str, keys: Sequence[bytes]) -> int:
        """Hold the cached blocks of the longest known beginning of `keys`; returns their number. The name must be new."""
        blocks = self._kv.match(keys)
        self._kv.take(blocks)
        self._held[name], self._keys[name] = blocks, list(keys[: len(blocks)])
        return len(blocks)

    def slice(self, name: str, first: int, count: int) -> list[int] | None:
        """`count` held blocks from the `first` on; None when one is no longer held or its content is no longer valid."""
        blocks, keys = self._held.get(name, [])[first : first + count], self._keys.get(name, [])[first : first + count]
        if len(blocks) < count or any(self._kv.key_of(block) != key for block, key in zip(blocks, keys, strict=True)):
            return None
        return blocks

    def grow(self, name: str, count: int) -> list[int] | None:
        """Hold `count` more blocks, which have no content yet. None, and no change, without room or for an unknown name."""
        if name not in self._held or self._kv.free < count + self._reserve():
            return None
        blocks = self._kv.allocate(count)
        self._held[name] += blocks
        return blocks

    def publish(self, name: str, keys: Sequence[bytes]) -> None:
        """The blocks of the last `grow` have been written: give them these keys."""
        held = self._held[name]
        first = len(held) - len(keys)
        for index, (block, key) in enumerate(zip(held[first:], keys, strict=True), first):
            self._kv.publish(block, key, index)
        self._keys[name] += keys

    def drop(self, name: str) -> None:
        """Release the blocks of this name. Unknown names are ignored."""
        blocks = self._held.pop(name, None)
        if blocks is not None:
            del self._keys[name]
            self._kv.release(blocks)
