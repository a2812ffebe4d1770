"""Moves the boundary between KV blocks and adapters within one budget of device memory.

    device budget   |-- claim "kv" ------------------------->|<-- claim "adapters" ----------|
                    | running | prefix | blank               | used | idle | free            |
                                                             ^ moves by whole KV blocks

Each claim begins with its share. A claim may grow beyond its share into memory that the other claim does not need, and gives
that memory back when the other needs it. While both need their whole shares, the regions are as if fixed. What makes room:

    empty memory                  a claim beyond its share leaves a part of the other's (`RESERVE`): KV leaves room for adapters
                                  while it has prefix blocks to reuse, adapters leave blank blocks for running requests, and
                                  for waiting requests whose adapter is on the device
    prefix blocks, idle adapters  the one of which a byte is worth less is evicted first (`policies.memory.worth`); prefix
                                  blocks are evicted in any case when an adapter fits in no other way
    adapters that waiting         are evicted only for KV within its share
    requests hold or will use
    running KV, used adapters     are never evicted

To keep the boundary from swinging, it moves in steps of `grain` blocks where it can, and an entry of the other claim's cache is
evicted only if it is worth clearly less than one of the claim's own (`MARGIN`).

A merged copy of the weights (`policies.step.merged_copy`) may borrow KV blocks: `lend`. It is a third claim, a cache that is
dropped as a whole when KV is short. The KV share is smaller by the blocks that are lent.

Block ids are 0 .. blocks - 1. When the number of blocks shrinks, used blocks above the end get ids below it; `settle` says
which blocks to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.ledger import Budget, Class
from motet.policies.memory.worth import ExpectedSavings, Reuse, Worth

GRAINS = 64
"""Number of steps that would move the boundary through the whole budget."""
MAX_GRAIN_BYTES = 8 << 20
"""A larger step would copy blocks, and clear pages, for longer than a decode step takes."""
MARGIN = 1.5
RESERVE = 4
"""One in this many bytes of a claim's share is left to it when the other claim grows beyond its own. So a burst of requests, as
when another worker has died, finds room without a move of the boundary."""

SELDOM = 0.05
"""If fewer of the oldest prefix blocks are used again, the prefix cache does not miss them."""


class Boundary:
    """The boundary between the KV blocks and the adapters in a device's memory.

    `holders` returns the lists of used blocks, in which blocks are renamed. `waited` returns the adapters that waiting
    sequences will use. Without `worth`, `ExpectedSavings` says what a byte is worth, from the step and copy times in `costs`.
    """

    def __init__(
        self,
        kv: KvBlocks,
        slots: AdapterSlots,
        budget: Budget,
        *,
        holders: Callable[[], Iterable[list[int]]],
        waited: Callable[[], Collection[str]] = tuple,
        worth: Worth | None = None,
    ) -> None:
        self._kv, self._slots, self._budget, self._block_bytes = kv, slots, budget, kv.block_bytes
        self._holders, self._waited = holders, waited
        slots.reuse, kv.reuse = Reuse(), Reuse()
        self.costs = ExpectedSavings(slots.reuse, kv.reuse, block_size=kv.block_size, block_bytes=kv.block_bytes)
        self._worth: Worth = worth or self.costs
        self.grain = max(1, min(kv.capacity // GRAINS, MAX_GRAIN_BYTES // kv.block_bytes))
        self._kv_share, self._lora_share = kv.total, slots.bytes_total
        self._reserve, self._lora_reserve = kv.total // RESERVE, slots.bytes_total // RESERVE
        self._lent = 0  # blocks
        self._prefixes_left = 0  # prefix blocks that leave before worths are compared again
        self.crowded = False
        """Whether an adapter has found no room since this was reset."""
        self._moves: list[tuple[int, int]] = []
        self.moved = False
        """Whether the boundary has moved since the last `settle`."""
        self.evicted: list[tuple[str, int]] = []
        """(digest, slot) of adapters that left; the owner takes them out of the list."""

    def admitted(self, sequences: int) -> None:
        """Advance the clock of both caches by this many admissions."""
        self._kv.clock += sequences
        self._slots.clock = self._kv.clock

    @property
    def gives_blocks(self) -> bool:
        """Whether the adapters' claim could give a block to KV."""
        return self._slots.bytes_free + self._slots.idle_bytes >= self._block_bytes

    @property
    def blocks_free(self) -> int:
        """KV blocks that a new sequence could get if all cached entries were evicted."""
        slots = self._slots
        return self._kv.free + self._lent + (slots.bytes_free + slots.idle_bytes) // self._block_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of the blocks lent to the merged copy."""
        return self._lent * self._block_bytes

    @property
    def adapter_bytes_free(self) -> int:
        """Bytes that hold neither an adapter nor a KV block."""
        return self._slots.bytes_free + self._kv.blank * self._block_bytes

    def owns(self, count: int) -> bool:
        """Whether `count` more KV blocks in use are within their share."""
        return self._kv.total - self._kv.free + count <= self._kv_share

    def admits(self, count: int) -> bool:
        """Whether a new sequence may use `count` blocks: beyond the KV share only while no adapter lacks room."""
        return not self.crowded or self.owns(count)

    def for_blocks(self, count: int, *, adapter: str = "", adapter_bytes: int = 0) -> bool:
        """Make `count` blocks free. False, and no change, when that is not possible.

        `adapter`: the adapter of the sequence that needs the blocks. It stays on the device, or still fits afterwards.
        """
        kv, slots, size = self._kv, self._slots, self._block_bytes
        if kv.blank >= count:
            return True
        if not self.gives_blocks:
            return kv.free >= count
        lacking = count - kv.blank
        if self._prefixes_left >= lacking <= kv.idle:
            self._prefixes_left -= lacking
            return True
        kept = 0 if not adapter or adapter in slots else adapter_bytes
        waited = () if not slots.idle_bytes or self.owns(count) else self._waited()
        leaving = [one for one in slots.victims() if one != adapter and one not in waited]
        if kv.free + max(0, slots.bytes_free - kept + sum(map(slots.size_bytes, leaving))) // size < count:
            return False
        leaving.reverse()
        prefixes = 0  # that will leave when the blocks are allocated
        while (lacking := count - kv.blank - prefixes) > 0:
            reserved = self._lora_reserve - slots.idle_bytes if prefixes < kv.idle else 0
            spare = (slots.bytes_free - kept - max(0, reserved)) // size
            if spare > 0:
                self._to_kv(min(spare, max(lacking, self.grain)))
            elif prefixes < kv.idle and not (
                leaving
                and slots.bytes_free - kept - reserved >= size
                and self._of_adapter(leaving[-1]) * MARGIN < self._worth.of_prefix()
            ):
                prefixes += min(max(lacking, self.grain), kv.idle - prefixes)
            else:
                self.evicted.append(slots.evict(leaving.pop()))
        self._prefixes_left = max(0, min(prefixes, -lacking))
        return True

    def for_adapter(self, size_bytes: int, *, blocks: int = 0, evicting: bool = True) -> bool:
        """Make room so that an adapter of this size, which is not here, fits; False, and no change, when it cannot.

        `blocks`: the blocks that this sequence and the waiting ones with a resident adapter are going to need. Idle adapters
        are left for `AdapterSlots.acquire` to evict. Without `evicting` no cached entry leaves.
        """
        kv, slots, size = self._kv, self._slots, self._block_bytes
        lacking = -(-(size_bytes - slots.bytes_free) // size)
        if lacking <= 0 or not slots.fits(0, evicting=evicting):
            return slots.fits(0, evicting=evicting)
        owed, left = max(0, self._lora_share - slots.bytes_total) // size, self._reserve + blocks
        blank = max(min(kv.blank, owed), kv.blank - left, 0)
        if not evicting:
            if lacking <= blank:
                self._to_adapters(min(blank, max(lacking, self.grain)))
            return lacking <= blank
        most = max(min(kv.free, owed), kv.free - left, 0)
        if size_bytes > slots.bytes_free + slots.idle_bytes + most * size:
            self.crowded = True
            return False
        given = min(blank, lacking)
        room = slots.bytes_free + given * size
        victims = slots.victims()
        victim = next(victims, None)
        while room < size_bytes:
            if given < most and (victim is None or self._worth.of_prefix() * MARGIN < self._of_adapter(victim)):
                more = min(-(-(size_bytes - room) // size), most - given)
                given, room = given + more, room + more * size
            else:
                assert victim is not None, "they were counted"
                room += slots.size_bytes(victim)
                victim = next(victims, None)
        if given:
            self._to_adapters(max(given, min(self.grain, blank)))
        return True

    def lends(self, held: Callable[[], Mapping[Class, int]]) -> None:
        """From now on a merged copy may borrow blocks. `held` returns its bytes by class."""
        self._budget.claim("merged", 0, held)

    def spare_blocks(self, *, careful: bool) -> int:
        """The KV blocks that a merged copy may borrow. `careful`: none that the prefix cache would miss."""
        kv = self._kv
        missed = careful and kv.reuse is not None and kv.reuse.chance > SELDOM
        return kv.blank if missed else kv.free

    def lacks(self, count: int, *, careful: bool) -> bool:
        """Whether the merged copy has to give back its blocks because `count` are needed. `careful`: a few more stay empty, so
        that a request that begins takes none from the prefix cache.
        """
        return self.spare_blocks(careful=careful) < count + (self._reserve // RESERVE if careful else 0)

    def lend(self, size_bytes: int, *, careful: bool = False) -> bool:
        """Change the memory lent to the merged copy to `size_bytes`. It grows by at most one step of the boundary per call.

        Returns whether the copy has that much now. A loan leaves a part of the KV share free (`RESERVE`). `careful`: it takes
        `spare_blocks`.
        """
        kv, blocks = self._kv, -(-size_bytes // self._block_bytes)
        more = blocks - self._lent
        if more > 0:
            if self.spare_blocks(careful=careful) - more < self._reserve:
                return False
            self._shrink_kv(min(more, self.grain))
            self._lend(min(more, self.grain))
            self._claim("kv", "merged")
        elif more < 0:
            kv.resize(kv.total - more)
            self._lend(more)
            self._claim("merged", "kv")
        return self._lent == blocks

    def settle(self) -> list[tuple[int, int]]:
        """The (from, to) of KV blocks to copy, in order, before the device's memory is divided anew.

        The caller does both now.
        """
        moves, self._moves, self.moved = self._moves, [], False
        return moves

    def check(self) -> None:
        """Assert that claims and owners agree on sizes."""
        claims = self._budget.claims
        assert claims["kv"].size_bytes == self._kv.total * self._block_bytes, "the claim of KV blocks"
        assert claims["adapters"].size_bytes == self._slots.bytes_total, "the claim of adapters"
        assert "merged" not in claims or claims["merged"].size_bytes == self.lent_bytes, "the claim of the merged copy"

    def _of_adapter(self, digest: str) -> float:
        return self._worth.of_adapter(digest, self._slots.size_bytes(digest))

    def _to_kv(self, blocks: int) -> None:
        self._slots.resize(self._slots.bytes_total - blocks * self._block_bytes)
        self._kv.resize(self._kv.total + blocks)
        self._claim("adapters", "kv")

    def _to_adapters(self, blocks: int) -> None:
        self._shrink_kv(blocks)
        self._slots.resize(self._slots.bytes_total + blocks * self._block_bytes)
        self._claim("kv", "adapters")

    def _lend(self, blocks: int) -> None:
        self._lent += blocks
        self._kv_share -= blocks

    def _shrink_kv(self, blocks: int) -> None:
        moves = self._kv.resize(self._kv.total - blocks)
        if moves:
            self._moves += moves
            renamed = dict(moves)
            for held in self._holders():
                if not renamed.keys().isdisjoint(held):
                    held[:] = [renamed.get(block, block) for block in held]

    def _claim(self, smaller: str, larger: str) -> None:
        """Resize both claims; the one that shrinks first, because the budget has no room for both otherwise."""
        sizes = {
            "kv": self._kv.total * self._block_bytes,
            "adapters": self._slots.bytes_total,
            "merged": self.lent_bytes,
        }
        for name in (smaller, larger):
            assert self._budget.claims[name].resize(sizes[name]), f"{name} cannot claim {sizes[name]} bytes"
        self.moved = True
