"""Opens the image engine. It is built in its thread, where diffusers and torch are imported."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Facts, Opened, Wiring
from motet.services.worker.engines.thread import EngineThread
from motet.shared.config import ConfigError
from motet.shared.malloc import uncollected
from motet.shared.model import Capability

if TYPE_CHECKING:
    from motet.services.worker.image_engine.engine import ImageEngine

DRAWS: frozenset[Capability] = frozenset({"draws"})


def open_images(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """An image engine in a thread of its own. Raises ConfigError for options that it does not support."""
    for name, given, served in (
        ("--quantization", config.engine.quantization, "none"),
        ("--load-format", config.engine.load_format, "auto"),
        ("--assist-processes", config.cold.processes, 0),
    ):
        if given != served:
            raise ConfigError(f"{name}: {given} is not possible with --engine images")
    if config.adapters.merge == "on":
        raise ConfigError("--merge on: an image engine merges no adapters; requests of all adapters share its steps")
    if config.engine.device not in ("auto", "cpu"):
        raise ConfigError(f"--device {config.engine.device}: --engine images runs on a CPU")
    if config.engine.dtype not in ("auto", "float32"):
        raise ConfigError(f"--dtype {config.engine.dtype}: --engine images computes in float32 on a CPU")
    building = _Building(config, model_dir, wiring)
    return Opened(EngineThread(building, wiring.deliver, serves=DRAWS, has_kv=False), lambda: building.facts)


@dataclass(slots=True)
class _Building:
    """Builds the engine when it is called, and then has its facts."""

    config: WorkerConfig
    model_dir: Path
    wiring: Wiring
    facts: Facts = field(init=False)

    def __call__(self) -> ImageEngine:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for the native engine
        with uncollected():
            try:
                from motet.services.worker.image_engine.assemble import assemble
            except ImportError as error:
                raise ConfigError(f"--engine images needs diffusers: pip install 'motet[images]' ({error})") from None
        made = assemble(self.config, self.model_dir, self.wiring.times, loaded=self.wiring.loaded)
        self.facts = made
        return made.engine
