"""KV blocks on their way to a simulated worker: of a request that moves, or of a prompt that another worker has cached.

    assign ─> lender holds what it has ─> (the lender's step, other copies of both) ─> copy ─> landed between two steps

The live counterpart is `services.worker.kv_transfer`. Its bounds apply (`policies.memory.kv_travel`): copies at a time, bytes,
and the time that a request waits. Copies of one worker take turns, which takes as long as sharing the link. A copy that is late
ends with the blocks that have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet.policies.memory import kv_travel
from motet.policies.memory.kv_travel import MOVES, Stretch
from motet.policies.step.batch_state import extend_keys
from motet.policies.times.perf_model import MIB
from motet.policies.worker.request_life import Entry
from motet.twin.engine import Engine
from motet.twin.events import MESSAGE, Events, to_ps
from motet.twin.run import Live
from motet.twin.worker_spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's blocks are. `lender`: the worker with cached ones of its prompt; None for the worker it left."""

    lender: Travels | None = None
    from_tokens: int = 0
    to_tokens: int = 0


class Travels:
    """The copies to one worker, and from its cache. `landed` gets requests, each with the number of blocks that came."""

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        events: Events,
        engine: Engine,
        landed: Callable[[list[tuple[Entry[Live], int]]], None],
    ) -> None:
        self._worker_id, self._spec, self._events, self._engine, self._landed = worker_id, spec, events, engine, landed
        self.coming = self.lent = 0
        self.free_ps = 0
        """When its link is free again."""
        self._same: dict[bytes, list[Entry[Live]]] = {}  # requests that wait for the same blocks, by the last key of these

    def blocks(self, source: Source, live: Live) -> Stretch:
        """The blocks to fetch, none while enough others come."""
        limits = self._spec.limits
        if self.coming >= MOVES or not limits.kv_token_bytes:
            return Stretch(0, 0)
        most = source.to_tokens if source.lender is not None else live.length
        size = limits.block_size
        block_bytes = limits.kv_token_bytes * size
        return kv_travel.stretch(live.length, source.from_tokens, most, block_size=size, block_bytes=block_bytes)

    def fetch(self, entry: Entry[Live], source: Source) -> None:
        """Begin to fetch a request's blocks."""
        live, perf, limits, now_ps = entry.payload, self._spec.perf, self._spec.limits, self._events.now_ps
        blocks, lender = self.blocks(source, live), source.lender
        name = f"{self._worker_id} {live.brief.request_id} {live.brief.epoch}"
        end, start_ps, held, last_key = blocks.end, now_ps, False, b""
        if lender is not None:
            extend_keys(self._engine.batches.state.kv, live, end)
            last_key = live.keys[end - 1]
            if last_key in self._same:
                self._same[last_key].append(entry)
                return
            self._same[last_key] = []
            end = lender.lend(name, live.keys[:end])
            held = end > 0
            start_ps = max(lender.step_end_ps(), lender.free_ps)
        self.coming += 1
        count = max(0, end - blocks.first)
        start_ps = max(now_ps, start_ps, self.free_ps) + to_ps(perf.kv_base_ms)
        block_ps = to_ps(perf.kv_ms_per_mib * limits.kv_token_bytes * limits.block_size / MIB)
        until_ps = now_ps + to_ps(kv_travel.wait_ms(perf, blocks, limits.block_size, live.rank))
        if start_ps + count * block_ps > until_ps:
            count = max(0, until_ps - start_ps) // block_ps if block_ps else 0
            end_ps = until_ps
        else:
            end_ps = start_ps + count * block_ps
        if count:
            self.free_ps = end_ps
            if lender is not None:
                lender.free_ps = end_ps
        lent_by = lender if held else None
        self._events.at(end_ps, MESSAGE, self._ended, entry, blocks.first + count, lent_by, name, last_key)

    def _ended(self, entry: Entry[Live], blocks: int, lender: Travels | None, name: str, last_key: bytes) -> None:
        self.coming -= 1
        if lender is not None:
            lender.give_back(name)
        self._landed([(one, blocks) for one in (entry, *self._same.pop(last_key, ()))])

    # ---- the lender

    def lend(self, name: str, keys: list[bytes]) -> int:
        """Hold the cached blocks with these keys. Returns how many of the first keys have one; 0 while enough are lent."""
        if self.lent >= MOVES or self._engine.dead:
            return 0
        count = self._engine.batches.travelling.hold(name, keys)
        self.lent += count > 0
        if not count:
            self._engine.batches.travelling.drop(name)
        return count

    def step_end_ps(self) -> int:
        """When blocks can be read: after the present step."""
        return self._engine.step_end_ps()

    def give_back(self, name: str) -> None:
        """The blocks have been read."""
        self.lent -= 1
        self._engine.batches.travelling.drop(name)
