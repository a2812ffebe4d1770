"""A worker's live copy of the registry's adapter records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from motet.shared.adapter_watch import AdapterWatch, ref_of
from motet.shared.base_layers import missing
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import AdapterNotFound, AdapterQuarantined, BadRequest, MotetError
from motet.shared.model import AdapterRef, AdapterVersion
from motet.shared.placement import PlacementWatch

GRACE_S = 0.25  # a gateway may know a new adapter a moment before this worker does


@dataclass(slots=True, eq=False)
class _Refusal:
    """Why a version does not answer here. `known`: the registry has said so."""

    error: MotetError
    known: bool


class Catalog:
    """Follows the registry's adapters, and those that this worker should keep loaded.

    `on_change(versions)` gets every version by digest, at the start and after each change. `on_pinned(pinned,
    homes)` gets the adapters pinned to this worker, the oldest pin first, and those at home here, whenever they change. Of
    adapters kept as PEFT's files, only those whose layers it `takes` (`WorkerLimits.lora_targets`). Versions that must not
    answer are left out.
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
        self._refused: dict[str, _Refusal] = {}
        self.on_released: Callable[[str], object] = lambda _: None
        """Gets the digest of a version that may answer again."""
        self._watch = AdapterWatch(bus, self._changed)
        self._placed = PlacementWatch(bus, worker_id, self._changed)

    async def start(self) -> None:
        """Follow the registry."""
        await self._watch.start()
        self._changed()
        await self._placed.start()

    def refuse(self, digest: str, error: MotetError, *, retry_s: float = 0.0) -> None:
        """Requests for this version get the error until its quarantine ends, or with `retry_s` for so long."""
        self._refused[digest] = refusal = _Refusal(error, known=digest in self._watch.quarantined)
        if retry_s:
            asyncio.get_running_loop().call_later(retry_s, self._forgive, digest, refusal)
        self._changed()

    @property
    def registered(self) -> Mapping[str, AdapterVersion]:
        """Every version, also those that must not answer."""
        return self._watch.digests

    def _forgive(self, digest: str, refusal: _Refusal) -> None:
        if self._refused.get(digest) is refusal:
            del self._refused[digest]
            self.on_released(digest)
            self._changed()

    def _look_at_quarantines(self) -> None:
        """Follow the registry's quarantines: those of other workers count here, and one that has ended is forgotten."""
        told = self._watch.quarantined
        for digest, refusal in list(self._refused.items()):
            refusal.known = refusal.known or digest in told
            if digest not in self._watch.digests or (refusal.known and digest not in told):
                del self._refused[digest]
                self.on_released(digest)
        for digest, why in told.items():
            if digest not in self._refused:
                self._refused[digest] = _Refusal(AdapterQuarantined.of(digest[:12], why.reason), known=True)

    def _changed(self) -> None:
        self._look_at_quarantines()
        digests, refused = self._watch.digests, self._refused
        self._on_change({one: version for one, version in digests.items() if one not in refused} if refused else digests)
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
        or with layers that the engine cannot change, and the reason when it must not answer here.

        `family`: of the base model, "" for a language model's.
        """
        deadline = now_s() + GRACE_S
        while (version := self._watch.by_digest(ref.digest)) is None:
            if now_s() > deadline:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not registered", param="model")
            await asyncio.sleep(0.01)
        if self._refused and (refusal := self._refused.get(ref.digest)) is not None:
            raise refusal.error
        if version.family != family:
            kinds = version.family or "language models", family or "language models"
            raise BadRequest(f"adapter {ref.name!r} is for {kinds[0]}; this worker's base is of {kinds[1]}", param="model")
        if lacking := missing(version.targets, self._takes):
            raise BadRequest(
                f"adapter {ref.name!r} changes {lacking[0]}, which this worker's engine cannot change", param="model"
            )
