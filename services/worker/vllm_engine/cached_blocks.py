"""Which KV blocks vLLM has cached, by the keys that gateways compute for prompts.

    BlockStored(parent's hash, hashes, token ids, extra keys) ──> key of each block: a chain from the adapter's root
    BlockRemoved(hashes), AllBlocksCleared                    ──> the key is gone

vLLM's hashes are not ours, so each is kept beside our key while vLLM has the block; that bounds what is kept by the blocks of
the cache. A prompt's first block says whose it is: the adapter's name at vLLM is its digest, and the salt is
`requests.cache_salt`. Blocks whose parent is not known are left out, and so are those with an image and all that follow them.
Of a model with several kinds of layers only those that attend to everything count.

Batches are numbered. When one is missing, everything is reported as gone: a block that schedulers do not know, or know in
vain, costs time and never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from motet.policies.memory.kv_blocks import chain_key, root_key, short_key, told_every
from motet.services.worker.vllm_engine.requests import scope_of
from motet.shared.model import TOKEN_BYTES
from motet.shared.telemetry import logger
from motet.shared.wire.request import pack_tokens

log = logger("motet.worker.vllm")
Hash = int | bytes
DEVICE = "GPU"
"""vLLM's name of the memory that its model computes in, also on a CPU."""
FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class BlockStored(msgspec.Struct, tag=True):
    """These blocks, one after another, can be reused. `extra_keys`: for each block what its hash covers beside tokens."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """One block of each of these hashes can no longer be reused."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be reused."""


class Batch(msgspec.Struct, array_like=True):
    """The events of one step of vLLM (`vllm.distributed.kv_events`), without the fields that nobody reads here."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decode = msgspec.msgpack.Decoder(Batch).decode


@dataclass(slots=True)
class _Block:
    """Blocks with equal content. `end`: which block of its prompt it is, from 1. `copies`: vLLM does not make one of two that
    are computed at once."""

    key: bytes
    end: int
    copies: int = 0


class CachedBlocks:
    """The cached blocks of one vLLM core, of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.news: dict[int, bool] = {}
        """Short keys that came (True) or left (False) since `take_news`."""
        self._block_size, self._told_every = block_size, told_every(block_size)
        self._blocks: dict[Hash, _Block] = {}
        self._group: int | None = None
        self._next = 0

    def __len__(self) -> int:
        """The number of different blocks."""
        return len(self._blocks)

    def take_news(self) -> dict[int, bool] | None:
        """What has come to `news` since the last call; None for nothing."""
        news, self.news = self.news, {}
        return news or None

    def receive(self, number: int, payload: bytes) -> None:
        """Take in a batch of events, in msgpack. Batches are numbered from 0."""
        if number != self._next:
            self.forget()
        self._next = number + 1
        try:
            batch = _decode(payload)
        except msgspec.DecodeError as error:
            log.error("vLLM's KV cache events were not understood", extra={"error": str(error)})
            self.forget()
            return
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self.forget()

    def forget(self) -> None:
        """Nothing is known to be cached any longer."""
        for block in self._blocks.values():
            self._tell(block, there=False)
        self._blocks.clear()

    def _tell(self, block: _Block, *, there: bool) -> None:
        if not block.end % self._told_every:
            self.news[short_key(block.key)] = there

    def _stored(self, event: BlockStored) -> None:
        size = self._block_size
        if event.medium != DEVICE or event.kv_cache_spec_kind not in FULL_ATTENTION or event.block_size != size:
            return
        if self._group is None:
            self._group = event.group_idx
        if event.group_idx != self._group or len(event.token_ids) != size * len(event.block_hashes):
            return
        parent = None if event.parent_block_hash is None else self._blocks.get(event.parent_block_hash)
        key, end = (None, 0) if parent is None else (parent.key, parent.end)
        tokens, width = pack_tokens(event.token_ids), size * TOKEN_BYTES
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        for index, (name, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            end += 1
            own = list(extra or ())[1 if event.lora_name else 0 :]  # an adapter's name comes first in every block
            if index == 0 and event.parent_block_hash is None:
                key = _root(event.lora_name or "", own)
            elif own:
                return
            if key is None:
                return
            key = chain_key(key, tokens[index * width : (index + 1) * width])
            block = self._blocks.setdefault(name, _Block(key, end))
            block.copies += 1
            self._tell(block, there=True)

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium != DEVICE or event.group_idx != self._group:
            return
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[name]
                self._tell(block, there=False)


def _root(adapter: str, extra: list[Any]) -> bytes | None:
    """The key before the first block of a prompt; None for one that is not a prompt of tokens alone."""
    match extra:
        case []:
            return root_key(adapter)
        case [str(salt)]:
            scope = scope_of(salt, adapter)
            return None if scope is None else root_key(adapter, scope)
        case _:
            return None
