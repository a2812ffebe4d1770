"""A worker's live copy of the registry's adapter records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from motet.shared.adapter_watch import AdapterWatch, ref_of
from motet.shared.base_layers import missing
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import AdapterNotFound, BadRequest
from motet.shared.model import AdapterRef, AdapterVersion
from motet.shared.placement import PlacementWatch

GRACE_S = 0.25  # a gateway may know a new adapter a moment before this worker does


class Catalog:
    """Follows the registry's adapters, and those that this worker should keep loaded.

    `on_change(versions)` gets every version by digest, at the start and after each change. `on_pinned(pinned,
    homes)` gets the adapters pinned to this worker, the oldest pin first, and those at home here, whenever they change. Of
    adapters kept as PEFT's files, only those whose layers it `takes` (`WorkerLimits.lora_targets`).
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        on_change: Callable[[Mapping[str, AdapterVersion]], object],
        on_pinned: Callable[[Sequence[AdapterRef], Sequence[AdapterRef]], object],
        takes: Collection[str] = (),
    ) -> None:
        self._takes = frozenset(takes)
        self._worker_id, self._on_change, self._on_pinned = worker_id, on_change, on_pinned
        self._pinned: tuple[list[AdapterRef], list[AdapterRef]] = [], []
        self._watch = AdapterWatch(bus, self._changed)
        self._placed = PlacementWatch(bus, worker_id, self._changed)

    async def start(self) -> None:
        """Follow the registry."""
        await self._watch.start()
        self._changed()
        await self._placed.start()

    def _changed(self) -> None:
        self._on_change(self._watch.digests)
        pins = [one for one in self._watch.pinned() if one.entry.pin and one.entry.pin.covers(self._worker_id)]
        pinned = [ref_of(one) for one in pins if self._takes.issuperset(one.version.targets)]
        homes = [
            AdapterRef(name=digest, digest=digest, rank=version.rank, size_bytes=version.size_bytes)
            for digest in self._placed.digests(self._worker_id)
            if (version := self._watch.by_digest(digest)) is not None and self._takes.issuperset(version.targets)
        ]
        if (pinned, homes) != self._pinned:
            self._pinned = pinned, homes
            self._on_pinned(pinned, homes)

    async def check(self, ref: AdapterRef, family: str = "") -> None:
        """Raises AdapterNotFound when the registry does not have this version, BadRequest for one of another family of models
        or with layers that the engine cannot change.

        `family`: of the base model, "" for a language model's.
        """
        deadline = now_s() + GRACE_S
        while (version := self._watch.by_digest(ref.digest)) is None:
            if now_s() > deadline:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not registered", param="model")
            await asyncio.sleep(0.01)
        if version.family != family:
            kinds = version.family or "language models", family or "language models"
            raise BadRequest(f"adapter {ref.name!r} is for {kinds[0]}; this worker's base is of {kinds[1]}", param="model")
        if lacking := missing(version.targets, self._takes):
            raise BadRequest(
                f"adapter {ref.name!r} changes {lacking[0]}, which this worker's engine cannot change", param="model"
            )
