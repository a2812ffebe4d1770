"""Opens Motet's own engine. It is built in its thread, where torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Opened, Wiring
from motet.services.worker.engines.thread import Building, EngineThread
from motet.shared.malloc import uncollected

if TYPE_CHECKING:
    from motet.services.worker.native.assemble import Assembly


def open_native(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """An engine in a thread of its own. The start of the thread loads the model."""

    def build() -> Assembly:
        with uncollected():
            from motet.services.worker.native.assemble import assemble

        return assemble(config, model_dir, wiring.times, link_bytes_per_s=wiring.link_bytes_per_s, loaded=wiring.loaded)

    building = Building(build)
    return Opened(EngineThread(building, wiring.deliver), lambda: building.facts)
