"""KV block accounting: the owners of blocks, and blocks that can be reused by content (prefix cache).

The cache is `total` blocks of `block_size` tokens, of up to `capacity`: `resize` changes it. Every block is in exactly one of
three places:

    blank   no user, content worthless                 a stack; allocated first
    idle    no user, content known under a key         oldest first; allocated when no blank is left; then the key is dropped
    held    one or more users (`users[block]` of them)

    allocate: blank|idle -> held      take: idle|held -> held (one more user)      release: held -> idle if keyed, else blank

A key names a *full* block's content: a chain over (adapter digest, scope, all tokens up to the block's end), so equal keys
mean equal K and V. The chain starts from the adapter's digest, not its name, so two adapters, or two versions of one name,
share nothing. An adapter that is merged into the weights has other K and V than the same adapter beside them, by rounding, so
its merged sequences have keys of their own (`merged_key`). The scope limits sharing (`cache_scope`): a hit shows in a client's
usage and time to first token, so a cache shared by all would reveal one tenant's prompts to another. Keys are BLAKE2b and not
Python's hash, because tenants choose the tokens and must not be able to create collisions. Only the first of two blocks with
equal content is keyed; blocks with a key are never written again.

Schedulers know the blocks that a worker has by shorter keys (`short_key`), and gateways compute those of a prompt
(`prompt_keys`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from motet.policies.memory.worth import Reuse
from motet.shared.wire.request import TOKEN_BYTES

KEY_BYTES = 16
TOLD_TOKENS = 64
"""Schedulers are told of blocks that end at multiples of this many tokens: four times fewer than all of 16 tokens."""
_SHORT = (1 << 60) - 1
_MERGED_BITS = 0x5A5_A5A5_A5A5_A5A5


def cache_scope(tenant: str, cache_salt: str = "", *, shared: bool = False) -> bytes:
    """The scope of shared blocks: sequences of one tenant with the same `cache_salt`, or of all tenants if `shared`.

    `cache_salt` divides a tenant's cache further, for example by user. As in vLLM, equal salts share, others do not.
    """
    owner = b"" if shared else b"t" + tenant.encode()
    return len(owner).to_bytes(4, "little") + owner + cache_salt.encode()


def root_key(adapter_digest: str, scope: bytes = b"") -> bytes:
    """The first parent key of an adapter's sequences within a scope. The digest "" is the base model."""
    digest = adapter_digest.encode()
    return blake2b(len(digest).to_bytes(4, "little") + digest + scope, digest_size=KEY_BYTES, person=b"motet-kv-root").digest()


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a full block: a hash of the key before it and the block's token ids (int32 bytes)."""
    return blake2b(tokens, digest_size=KEY_BYTES, key=parent).digest()


def merged_key(key: bytes) -> bytes:
    """The key of a block whose K and V are computed with the adapter merged into the weights."""
    return key + b"m"


def short_key(key: bytes) -> int:
    """The 60 bits of a key by which schedulers know the block."""
    short = int.from_bytes(key[:8], "little") & _SHORT
    return short if len(key) == KEY_BYTES else merged_short(short)


def merged_short(short: int) -> int:
    """The short form of `merged_key`."""
    return short ^ _MERGED_BITS


def told_every(block_size: int) -> int:
    """Blocks from one of which schedulers are told to the next."""
    return max(1, TOLD_TOKENS // block_size)


def told_tokens(block_size: int) -> int:
    """Tokens from one block of which schedulers are told to the next."""
    return block_size * told_every(block_size)


def prompt_keys(prompt: bytes, block_size: int, adapter_digest: str, scope: bytes) -> list[int]:
    """The short keys of a prompt's blocks of which schedulers are told, as far as its request can reuse them: without the last
    token. `prompt`: int32 bytes.
    """
    size, parent, told = block_size * TOKEN_BYTES, root_key(adapter_digest, scope), told_tokens(block_size) * TOKEN_BYTES
    keys = []
    for end in range(size, (len(prompt) - 1) // told * told + 1, size):
        parent = chain_key(parent, prompt[end - size : end])
        if not end % told:
            keys.append(short_key(parent))
    return keys


class KvBlocks:
    """Block accounting with a prefix cache. Block ids are 0 .. total - 1; all operations are O(blocks touched).

    `block_bytes`: bytes of one block over all layers, for callers that count bytes. `capacity`: the largest `total`.
    """

    def __init__(
        self, total: int, block_size: int, *, prefix_cache: bool = True, capacity: int = 0, block_bytes: int = 0
    ) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a KV cache of {total} blocks of {block_size} tokens holds nothing")
        self.total = total
        self.capacity = max(total, capacity)
        self.block_size, self.block_bytes = block_size, block_bytes
        self.prefix_cache = prefix_cache
        self._told_every = told_every(block_size)
        self.reuse: Reuse | None = None
        """If set, it counts whether idle blocks are used again or evicted."""
        self.news: dict[int, bool] | None = None
        """If set, it collects the short keys that came (True) or left (False), until its owner takes them."""
        self.clock = 0
        """The time of `reuse`: admissions so far, set by the owner."""
        self._users = [0] * self.capacity
        self._key_of: list[bytes | None] = [None] * self.capacity
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> `clock` when it became idle

    @property
    def blank(self) -> int:
        """Blocks without cached content, which are allocated first."""
        return len(self._blank)

    @property
    def free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones without users included."""
        return len(self._blank) + len(self._idle)

    @property
    def idle(self) -> int:
        """Free blocks whose content can still be found by a key."""
        return len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks whose content can be found by a key, with or without users."""
        return len(self._block_of)

    def take_news(self) -> dict[int, bool] | None:
        """What has come to `news` since the last call; None for nothing."""
        news = self.news
        if not news:
            return None
        self.news = {}
        return news

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def key_of(self, block: int) -> bytes | None:
        """The key under which a block can be found, if any."""
        return self._key_of[block]

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks for the longest possible beginning of `keys`. They get no user yet."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no user: taking them lowers `free` by this number."""
        users = self._users
        return len([block for block in blocks if not users[block]])

    def take(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these cached blocks."""
        for block in blocks:
            if not self._users[block]:
                since = self._idle.pop(block)
                if self.reuse is not None:
                    self.reuse.used(self.clock - since)
            self._users[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks of unknown content with one user each. The caller has checked `free`.

        Blank blocks are used first, then the least recently released cached blocks.
        """
        blank, users = self._blank, self._users
        if count <= len(blank):
            taken = blank[: -count - 1 : -1]
            del blank[len(blank) - count :]
        elif count > self.free:
            raise ValueError(f"{count} KV blocks asked for, {self.free} are free")
        else:
            taken = blank[::-1]
            blank.clear()
            while len(taken) < count:
                taken.append(self._evict())
        for block in taken:
            users[block] = 1
        return taken

    def extend(self, blocks: list[int], count: int = 1) -> None:
        """Allocate `count` blocks at the end of a sequence's list (see `allocate`)."""
        if count == 1 and self._blank:  # nearly always
            block = self._blank.pop()
            self._users[block] = 1
            blocks.append(block)
        else:
            blocks += self.allocate(count)

    def publish(self, block: int, key: bytes, index: int = 0) -> None:
        """Give a key to a full block with a user. No effect if another block has this key already.

        `index`: its place in the chain, which says whether schedulers are told.
        """
        if self.prefix_cache and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if self.news is not None and not (index + 1) % self._told_every:
                self.news[short_key(key)] = True

    def release(self, blocks: Sequence[int], *, spoiled: bool = False) -> None:
        """Remove a user from each block of a sequence, given in order. `spoiled`: their content must not be reused.

        The last blocks become idle first, so that prefixes are evicted last: more sequences share them.
        """
        if not self.prefix_cache:  # no block is shared, none has a key
            for block in blocks:
                self._users[block] = 0
            self._blank.extend(reversed(blocks))
            return
        for block in reversed(blocks):
            self._users[block] -= 1
            if spoiled:
                self._unkey(block)
            if self._users[block]:
                continue
            if self._key_of[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = self.clock

    def forget_all(self) -> None:
        """Drop every key, because cached content is no longer valid. Users keep their blocks."""
        if self.news is not None:
            self.news.update(dict.fromkeys(map(short_key, self._block_of), False))
        self._block_of.clear()
        self._key_of = [None] * self.capacity
        self._blank.extend(self._idle)
        self._idle.clear()

    def resize(self, total: int) -> list[tuple[int, int]]:
        """Change the number of blocks. Returns (from, to) of the blocks whose content has to be copied, in any order.

        `to` was blank, and users know the block by its new id from now on. Cached blocks are evicted when no blank ones are
        left. Raises ValueError when too many blocks have users.
        """
        old, idle = self.total, self._idle
        if not 0 < total <= self.capacity or old - total > self.free:
            raise ValueError(f"{old} KV blocks cannot become {total}: {self.free} are free, {self.capacity} the most")
        self.total = total
        if total >= old:
            self._blank[:0] = range(total - 1, old - 1, -1)
            return []
        while len(self._blank) < old - total:
            self._blank.append(self._evict())
        self._blank = sorted((block for block in self._blank if block < total), reverse=True)
        moves = {block: self._blank.pop() for block in range(total, old) if self._users[block] or block in idle}
        for block, to in moves.items():
            self._users[to], self._users[block] = self._users[block], 0
            key = self._key_of[to] = self._key_of[block]
            if key is not None:
                self._key_of[block], self._block_of[key] = None, to
        if idle and not moves.keys().isdisjoint(idle):
            self._idle = OrderedDict((moves.get(block, block), since) for block, since in idle.items())
        return list(moves.items())

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place and has as many users as `holders` (block lists) say.

        A worker does so between two requests, so whole lists are compared instead of blocks.
        """
        users = [0] * self.capacity
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a sequence holds a block twice: {blocks}"
            for block in blocks:
                users[block] += 1
        assert users == self._users, "reference counts differ from the holders' block lists"
        key_of, block_of, unused = self._key_of, self._block_of, [*self._blank, *self._idle]
        blank = len(self._blank)
        assert max(unused, default=0) < self.total, "a free block is beyond the cache"
        assert len(set(unused)) == len(unused), "a block is in the free lists twice"
        assert len(unused) == users[: self.total].count(0), "a block is neither free nor held"
        assert not any(map(users.__getitem__, unused)), "a block with users is in the free lists"
        assert not any(map(key_of.__getitem__, unused[:blank])), "a blank block has a key"
        assert all(map(key_of.__getitem__, unused[blank:])), "an idle block has no key"
        assert len(list(filter(None, key_of))) == len(block_of), "a block has a key under which it is not found"
        assert list(map(key_of.__getitem__, block_of.values())) == list(block_of), "keys and blocks disagree"

    def _evict(self) -> int:
        """The least recently released cached block. It loses its key."""
        block, since = self._idle.popitem(last=False)
        if self.reuse is not None:
            self.reuse.left(self.clock - since)
        self._unkey(block)
        return block

    def _unkey(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            if self.news is not None:
                self.news[short_key(key)] = False
