"""The engine's side of KV blocks that travel between workers: holds them, and copies their bytes between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from motet.policies.kv_travel import HeldBlocks
from motet.services.worker.engine.backend import Backend


class TravellingKv:
    """`keys_of`: the keys of the full blocks of a request (id, epoch) that the engine has. Names are those of the moves."""

    def __init__(self, held: HeldBlocks, runner: Backend, keys_of: Callable[[str, int], list[bytes]]) -> None:
        self._held, self._runner, self._keys_of = held, runner, keys_of

    def hold(self, name: str, request_id: str, epoch: int) -> list[bytes]:
        """Hold the blocks of a request, which may end afterwards; returns their keys."""
        keys = self._keys_of(request_id, epoch)
        return keys[: self.find(name, keys)]

    def find(self, name: str, keys: Sequence[bytes]) -> int:
        """Hold the blocks of these keys that are here; returns how many of the first ones are."""
        return self._held.hold(name, keys)

    def read(self, name: str, first: int, count: int) -> np.ndarray | None:
        """A copy of blocks that are held, uint8; None when their content is no longer valid."""
        blocks = self._held.slice(name, first, count)
        return self._runner.read_kv(blocks) if blocks is not None else None

    def land(self, name: str, keys: Sequence[bytes], content: bytearray) -> bool:
        """Write a move's next blocks, after those that `find` or an earlier call got. They stay until `drop`. Without
        free blocks nothing is written, and the answer is False."""
        blocks = self._held.grow(name, len(keys))
        if blocks is None:
            return False
        self._runner.write_kv(blocks, content)
        self._held.publish(name, keys)
        return True

    def drop(self, name: str) -> None:
        """Release the blocks of this name; those with a key can still be found."""
        self._held.drop(name)
