"""Aliases that follow their target: they point at its present version, whenever that changes.

An alias is an entry of its own, so readers need no second look-up and its claim keeps the version that it points at. The
registry that changes a name re-points the aliases that follow it. The sweep does it for a registry that crashed in between.
"""

from __future__ import annotations

from motet.services.registry.store import AdapterStore
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.errors import MotetError
from motet.shared.model import AdapterEntry
from motet.shared.telemetry import logger

log = logger("motet.registry.followers")


class Followers:
    """Re-points aliases."""

    def __init__(self, store: AdapterStore, adapters: AdapterWatch) -> None:
        self._store, self._adapters = store, adapters

    async def after(self, name: str) -> None:
        """Re-point the aliases that follow `name`, and the aliases of those aliases. A failure is left to the sweep."""
        following = self._adapters.following()
        changed, met = [name], {name}
        while changed:
            target = changed.pop()
            for alias in following:
                if alias.alias_of == target:
                    await self._point(alias)
                    if alias.name not in met:
                        met.add(alias.name)
                        changed.append(alias.name)

    async def sweep(self) -> None:
        """Re-point every alias that is behind its target."""
        for alias in self._adapters.following():
            target = self._adapters.resolve(alias.alias_of or "", alias.tenant)
            if target is not None and target.entry.digest != alias.digest:
                await self._point(alias)

    async def _point(self, alias: AdapterEntry) -> None:
        try:
            await self._store.alias(alias.name, alias.alias_of or "", alias.tenant, follows=True)
        except (MotetError, TimeoutError) as error:
            facts = {"alias": alias.name, "target": alias.alias_of, "error": str(error)}
            log.warning("alias not moved to its target's version yet", extra=facts)
