"""A tiny model and its adapters, for comparing live engines with simulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from tests.support_models import make_adapters, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[HostAdapter]]:
    return write_checkpoint(tmp_path_factory.mktemp("parity"))


def write_checkpoint(directory: Path) -> tuple[Path, list[HostAdapter]]:
    """A tiny model and its adapters, in `directory`."""
    model_dir = make_checkpoint("llama2", directory)
    config = read_model_config(model_dir)
    return model_dir, [HostAdapter.from_blob(one.blob, config) for one in make_adapters(model_dir, directory)]
