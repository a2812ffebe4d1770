"""Opens Motet's own engine. It is built in its thread, where torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Facts, Opened, Wiring
from motet.services.worker.engines.thread import EngineThread
from motet.shared.malloc import uncollected

if TYPE_CHECKING:
    from motet.services.worker.native.engine import Engine


def open_native(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """An engine in a thread of its own. The start of the thread loads the model."""
    building = _Building(config, model_dir, wiring)
    return Opened(EngineThread(building, wiring.deliver), lambda: building.facts)


@dataclass(slots=True)
class _Building:
    """Builds the engine when it is called, and then has its facts."""

    config: WorkerConfig
    model_dir: Path
    wiring: Wiring
    facts: Facts = field(init=False)

    def __call__(self) -> Engine:
        # OpenMP threads spin at barriers unless told not to before torch is loaded. Beside a gateway, or anything else,
        # on the same cores a spinning thread waits for one that cannot run: steps were six to ten times longer.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with uncollected():
            from motet.services.worker.native.assemble import assemble

        wiring = self.wiring
        made = assemble(
            self.config, self.model_dir, wiring.times, link_bytes_per_s=wiring.link_bytes_per_s, loaded=wiring.loaded
        )
        self.facts = made
        return made.engine
