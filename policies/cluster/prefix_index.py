"""Which workers have which prefix blocks, for any number of workers: one dictionary from a block's key to a set of workers.

    key of a block (60 bits of its chain's hash)  ->  a bit mask of workers

A prompt's blocks form a chain, and a worker that has a block nearly always has those before it: its cache gives up the last
blocks of a sequence first. So the masks along a prompt only lose bits. `depths` finds the places where they do by bisection:
a few lookups for each group of workers that is equally far, however long the prompt is.

A worker that is lost, or that lists its blocks anew, gets a new bit. Its old bit is retired: lookups ignore it, and
sweeps remove it from the dictionary little by little. So nothing takes longer than adding the blocks that are added.

What is known here may be old. That costs time, never an answer: a worker uses only what its own cache has. A key tells nothing
about the tokens, and starts from the tenant's scope (`policies.memory.kv_blocks.cache_scope`).

A request that a scheduler assigns brings its blocks to the worker (`expect`): others that come at the same time find them. What
the worker has not confirmed in EXPECTED_S is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEYS_MAX = 10_000_000
"""Keys that are kept. A block that comes when there are so many is not known."""
EXPECTED_S = 10.0
EXPECTED_KEYS = 512
"""Keys of one request whose blocks are expected, at most."""
SHARDS = 4096
SWEEP = 500  # keys looked at with each message of a worker, while there are retired bits
_MASKS_KEPT = 65_536


class Depth(NamedTuple):
    """`rows` of the workers' table have the blocks of exactly the first `keys` keys of a prompt."""

    rows: NDArray[np.intp]
    keys: int


class PrefixIndex:
    """The prefix blocks of all workers. Workers are named by their row of the table."""

    def __init__(self, most: int = KEYS_MAX) -> None:
        self._most = most
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._size = 0
        self.version = 0
        """Counts the changes of what workers have."""
        self._bit: dict[int, int] = {}  # row -> its bit's number
        self._rows = np.full(64, -1, np.intp)  # bit's number -> row, -1 for a retired or a free one
        self._free: list[int] = []  # numbers that no key has
        self._used = 0  # numbers so far
        self._live = 0  # the bits of rows
        self._retired = 0  # bits without a row that keys may still have
        self._retiring = 0  # those that the present round of the sweep removes
        self._next_shard = 0
        self._masks: dict[int, int] = {}  # so that equal masks are one object
        self._expected: dict[int, set[int]] = {}  # row -> keys that it has not confirmed
        self._due: deque[tuple[float, int, list[int]]] = deque()  # (until when, row, keys) in the order of time

    def __len__(self) -> int:
        return self._size

    # ---- what workers have

    def add(self, row: int, keys: Iterable[int]) -> None:
        """The worker has these blocks, too."""
        if expected := self._expected.get(row):
            keys = list(keys)
            expected.difference_update(keys)
        self._add(row, keys)

    def _add(self, row: int, keys: Iterable[int]) -> None:
        self.version += 1
        number = self._bit.get(row)
        bit = 1 << (self._take(row) if number is None else number)
        shards, intern, added = self._shards, self._masks, 0
        for key in keys:
            shard = shards[key % SHARDS]
            mask = shard.get(key)
            if mask is None:
                if self._size + added < self._most:
                    shard[key] = intern.setdefault(bit, bit)
                    added += 1
            elif not mask & bit:
                mask |= bit
                shard[key] = intern.setdefault(mask, mask)
        self._size += added
        if len(intern) > _MASKS_KEPT:
            intern.clear()
        if self._retired and added:
            self._sweep(2 * added)

    def remove(self, row: int, keys: Iterable[int]) -> None:
        """The worker has these blocks no longer; unknown ones are ignored."""
        number = self._bit.get(row)
        if number is None:
            return
        self.version += 1
        gone, shards = ~(1 << number), self._shards
        for key in keys:
            shard = shards[key % SHARDS]
            mask = shard.get(key)
            if mask is None:
                continue
            mask &= gone
            if mask:
                shard[key] = self._masks.setdefault(mask, mask)
            else:
                del shard[key]
                self._size -= 1

    def expect(self, row: int, keys: Sequence[int], now_s: float) -> None:
        """The worker is about to have these blocks, because a request that has them is assigned to it."""
        new = [key for key in keys[:EXPECTED_KEYS] if not self.has(row, key)]
        if new:
            self._expected.setdefault(row, set()).update(new)
            self._due.append((now_s + EXPECTED_S, row, new))
            self._add(row, new)

    def disappoint(self, row: int, keys: Iterable[int]) -> None:
        """The worker will not have those of these blocks that it has not confirmed."""
        expected = self._expected.get(row)
        if expected:
            late = expected.intersection(keys)
            expected -= late
            self.remove(row, late)

    def settle(self, now_s: float) -> None:
        """Forget what was expected for too long, and some of what was retired. Call it often: a call does little."""
        while self._due and self._due[0][0] <= now_s:
            _, row, keys = self._due.popleft()
            self.disappoint(row, keys)
        if self._retired:
            self._sweep(SWEEP)

    def expects(self, row: int, key: int) -> bool:
        """Whether the worker is only about to have this block, as far as is known."""
        expected = self._expected.get(row)
        return expected is not None and key in expected

    def has(self, row: int, key: int) -> bool:
        """Whether the worker is known to have a block."""
        number = self._bit.get(row)
        return number is not None and bool(self._mask(key) >> number & 1)

    def forget(self, row: int) -> None:
        """Nothing is known of the worker any more: it has gone, or will list its blocks anew."""
        self.version += 1
        number = self._bit.pop(row, None)
        self._expected.pop(row, None)
        if number is not None:
            self._rows[number] = -1
            self._live ^= 1 << number
            self._retired |= 1 << number

    # ---- what a request finds

    def depths(self, keys: Sequence[int]) -> list[Depth]:
        """How many of a prompt's keys each worker has from the first one on, for the workers that have any."""
        if not keys:
            return []
        first = self._mask(keys[0]) & self._live
        if not first:
            return []
        last = self._mask(keys[-1]) & first
        found = [] if not last else [Depth(self._workers(last), len(keys))]
        parts = [(0, first, len(keys) - 1, last)]
        while parts:
            low, at_low, high, at_high = parts.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                found.append(Depth(self._workers(at_low & ~at_high), high))
                continue
            middle = (low + high) // 2
            at_middle = (self._mask(keys[middle]) & at_low) | at_high
            parts += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
        return found

    def _mask(self, key: int) -> int:
        return self._shards[key % SHARDS].get(key, 0)

    def _workers(self, mask: int) -> NDArray[np.intp]:
        bits = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        return self._rows[np.flatnonzero(np.unpackbits(bits, bitorder="little"))]

    # ---- bits

    def _take(self, row: int) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = self._used
            self._used += 1
            if number == len(self._rows):
                self._rows = np.concatenate([self._rows, np.full(number, -1, np.intp)])
        self._bit[row], self._rows[number] = number, row
        self._live |= 1 << number
        return number

    def _sweep(self, most: int) -> None:
        """Remove retired bits from some keys. After a round over all shards, the bits are free for other workers."""
        while self._retired and most > 0:
            if not self._next_shard:
                self._retiring = self._retired
            shard, retiring = self._shards[self._next_shard], self._retiring
            most -= len(shard) + 16  # a visit costs something also without keys
            for key in [key for key, mask in shard.items() if mask & retiring]:
                mask = shard[key] & ~retiring
                if mask:
                    shard[key] = self._masks.setdefault(mask, mask)
                else:
                    del shard[key]
                    self._size -= 1
            self._next_shard = (self._next_shard + 1) % SHARDS
            if not self._next_shard:
                self._retired &= ~retiring
                self._free += [number for number in range(retiring.bit_length()) if retiring >> number & 1]
