"""Opens the image engine. It is built in its thread, where diffusers and torch are imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.opening import Opened, Wiring
from motet.services.worker.engines.thread import Building, EngineThread
from motet.shared.config import ConfigError
from motet.shared.malloc import uncollected

if TYPE_CHECKING:
    from motet.services.worker.image_engine.assemble import Assembly


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

    def build() -> Assembly:
        with uncollected():
            try:
                from motet.services.worker.image_engine.assemble import assemble
            except ImportError as error:
                raise ConfigError(f"--engine images needs diffusers: pip install 'motet[images]' ({error})") from None
        return assemble(config, model_dir, wiring.times, loaded=wiring.loaded)

    building = Building(build)
    return Opened(EngineThread(building, wiring.deliver, has_kv=False), lambda: building.facts)
