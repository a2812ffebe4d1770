"""Adapters in the form that workers hold."""

from __future__ import annotations

from pathlib import Path

from motet.services.registry.peft import Converted, convert
from motet.shared.base_shapes import read_shapes

MAX_BYTES = 1 << 30  # of an adapter, as a registry's limit: pages of 8 ranks can be several times as large as the file


def stored_adapter(model: Path, adapter: Path) -> Converted:
    """The blob that the registry would store for a PEFT directory."""
    weights = adapter / "adapter_model.safetensors"
    with weights.open("rb") as file:
        config = (adapter / "adapter_config.json").read_bytes()
        return convert(config, file, weights.stat().st_size, read_shapes(model), max_rank=1024, max_bytes=MAX_BYTES)
