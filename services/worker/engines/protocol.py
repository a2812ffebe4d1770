"""The interface of an engine: commands in, one report per step out. `docs/engines.md` says what each engine can do.

    commands    start, add, cancel, load_adapter, pin_adapters, unload_adapter, abort_all, stop      none waits for a step
    check       whether the engine's ledgers add up, asked while it is idle
    reports     `engines.request.StepReport`, in the order of steps: items for gateways, requests in a new phase, adapters that
                came to the device or left it, free memory

An engine that probes adapters reports each copy that begins (`StepOutput.loading`), and one reading for each copy that ended.
Until then the worker holds back what its requests answer.

An engine keeps its own queue, batches and memory; `policies.worker.worker_core` decides what enters it. Every request that was
added ends with exactly one item that has `finish`, also after errors. `tests/engines` checks this for every engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from motet.services.worker.engines.request import EngineRequest
from motet.shared.errors import MotetError
from motet.shared.model import Capability

if TYPE_CHECKING:
    from motet.services.worker.engines.adapter_weights import HostAdapter


NATIVE: frozenset[Capability] = frozenset({"structured", "resumes_structured"})
"""The optional capabilities of Motet's own engine, for a model with a tokenizer that grammars can be compiled for."""
DRAWS: frozenset[Capability] = frozenset({"draws"})
"""Those of the image engine."""


class KvAccess(Protocol):
    """The KV blocks of an engine, for copies between workers (`policies.memory.kv_travel`). `name` identifies a copy.

    Each call takes effect between two steps, in the order of calls and commands. Held blocks are neither evicted nor changed.
    """

    def hold(self, name: str, request_id: str, epoch: int) -> asyncio.Future[list[bytes]]:
        """Hold the full blocks of a request under a new name.

        Returns their keys; none if the engine does not have the request.
        """

    def find(self, name: str, keys: Sequence[bytes]) -> asyncio.Future[int]:
        """Hold the cached blocks with these keys under a new name. Returns how many of the first keys have a block."""

    def read(self, name: str, first: int, count: int) -> asyncio.Future[np.ndarray | None]:
        """A copy of held blocks, uint8; None when they are no longer held."""

    def land(self, name: str, keys: Sequence[bytes], content: bytearray) -> asyncio.Future[bool]:
        """Write the next blocks of a move, after those of `find` and earlier calls. They are held until `drop`.

        Returns False, and writes nothing, if there are no free blocks.
        """

    def drop(self, name: str) -> None:
        """Release the blocks of a move."""


class EngineProtocol(Protocol):
    """An engine, called from the event loop."""

    @property
    def kv(self) -> KvAccess | None:
        """The engine's KV blocks; None where they cannot be read and written between steps."""

    @property
    def serves(self) -> frozenset[Capability]:
        """Optional capabilities. The worker announces them; requests that need others go to other workers."""

    async def start(self) -> None:
        """Start the engine. Returns when it takes commands; raises an error if it cannot start."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request that `admission.check` has accepted. An earlier request of this id was told to end before.

        What the engine cannot do comes as the request's only item. Raises Overloaded when the engine does not take commands.
        """

    def cancel(self, request_id: str, epoch: int) -> None:
        """End a request of this epoch or an older one; its last item says "cancelled". Unknown requests are ignored."""

    def load_adapter(self, adapter: HostAdapter, over: Collection[str] | None = None) -> None:
        """Copy an adapter to the device if there is room without evicting. A report tells when it is there.

        For a pinned adapter idle ones are evicted. With `over` it is copied only if no other copy is under way and no request
        waits; idle adapters of `over` are evicted for it.
        """

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Pin these adapters, and no others: they are evicted after all other adapters."""

    def unload_adapter(self, digest: str) -> None:
        """Take an adapter off the device as soon as no request uses it. A report tells when it is gone."""

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        """An adapter is not what it should be: end its requests with `error`, take it off the device, and forget KV blocks that
        were computed with it."""

    def abort_all(self, error: MotetError) -> None:
        """End all running and waiting requests with `error`."""

    def busy_s(self) -> float:
        """How long the present step has been running; 0 between steps."""

    async def check(self) -> None:
        """Check that the engine's own ledgers add up; an engine with something to do skips it.

        Raises AssertionError, which says what does not add up.
        """

    async def stop(self) -> None:
        """End the engine after its present step."""
