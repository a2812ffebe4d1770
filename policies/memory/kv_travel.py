"""Copies the KV blocks of a moved request to its next worker: decides whether a copy is faster than another prefill, and keeps
the blocks on both workers until the copy has ended.

    old worker   running ──hold──> held ──read──> bytes ─┐      it frees them when they were read, or after a moment
    new worker   idle    ──hold──> held ──grow──> written ──publish──> held ──drop──> idle ──> its request finds them by key

Blocks are named by content (`policies.memory.kv_blocks`), so a request that starts on the new worker takes what has arrived
from the prefix cache and computes the rest. Whether blocks travel, and how many arrive, changes the time only, not the result.

Copying pays when it is predicted to take clearly less time than the prefill that it saves (`SURE`). Both sides are measured:
prefill by `policies.times.step_times`, the link by `policies.times.link_times`. A request waits for its blocks at most as long
as its prefill was predicted to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from motet.policies.memory.kv_blocks import KvBlocks, chain_key, root_key
from motet.policies.times.perf_model import MIB, prefill_ms
from motet.shared.model import PerfModel, WorkerLimits

SURE = 0.7
"""Blocks travel when fetching them takes less than this share of the prefill that they save."""


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
    """Blocks that are held for a move instead of a sequence, under the name of the move.

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
