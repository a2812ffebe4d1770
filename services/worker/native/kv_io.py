"""The engine's side of KV blocks that travel between workers: holds them, and copies their bytes between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from motet.policies.memory.kv_travel import HeldBlocks
from motet.services.worker.native.backend import Backend


class KvIo:
    """The KV blocks of moved requests. `name` identifies a move.

    `keys_of(request_id, epoch)` returns the keys of the full blocks of a request that the engine has.
    """

    def __init__(self, held: HeldBlocks, runner: Backend, keys_of: Callable[[str, int], list[bytes]]) -> None:
        self._held, self._runner, self._keys_of = held, runner, keys_of

    def hold(self, name: str, request_id: str, epoch: int) -> list[bytes]:
        """Hold the blocks of a request, which may end afterwards. Returns their keys."""
        keys = self._keys_of(request_id, epoch)
        return keys[: self.find(name, keys)]

    def find(self, name: str, keys: Sequence[bytes]) -> int:
        """Hold the cached blocks with these keys. Returns how many of the first keys have a block."""
        return self._held.hold(name, keys)

    def read(self, name: str, first: int, count: int) -> np.ndarray | None:
        """A copy of held blocks, uint8; None when their content is no longer valid."""
        blocks = self._held.slice(name, first, count)
        return self._runner.read_kv(blocks) if blocks is not None else None

    def land(self, name: str, keys: Sequence[bytes], content: bytearray) -> bool:
        """Write the next blocks of a move, after those of `find` and earlier calls. They are held until `drop`.

        Returns False, and writes nothing, if there are no free blocks.
        """
        blocks = self._held.grow(name, len(keys))
        if blocks is None:
            return False
        self._runner.write_kv(blocks, content)
        self._held.publish(name, keys)
        return True

    def drop(self, name: str) -> None:
        """Release the blocks of this move. Blocks with a key can still be found in the prefix cache."""
        self._held.drop(name)
