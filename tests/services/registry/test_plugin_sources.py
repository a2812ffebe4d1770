"""Promise: a module adds a source of adapters, and nothing else has to know its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.services.registry import sources
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, InvalidAdapter
from tests.services.registry.conftest import Client
from tests.support_adapters import write_adapter

SHELF = """
from motet.services.registry.files import PeftFiles, Source, quoted
from motet.services.registry.sources import SOURCES
from motet.services.registry.threads import in_thread
from motet.shared.errors import InvalidAdapter
from pathlib import Path

class Shelf(Source):
    remote = True

    async def fetch(self, location, *, chat):
        return await in_thread(lambda: take(Path({shelf!r}) / location))

def take(path):
    if not path.exists():
        raise InvalidAdapter(f"there is no {{quoted(path.name)}} on the shelf")
    weights = path / "adapter_model.safetensors"
    return PeftFiles(
        config_json=(path / "adapter_config.json").read_bytes(),
        weights=weights.open("rb"),
        size_bytes=weights.stat().st_size,
        source=f"shelf:{{path.name}}",
    )

SOURCES["shelf"] = lambda config, store: Shelf()
"""


async def test_adapters_come_from_the_source_that_a_module_adds(
    start_registry, connect, roots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_adapter(tmp_path / "shelf" / "mine")
    (tmp_path / "shelf_source.py").write_text(SHELF.format(shelf=str(tmp_path / "shelf")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "SOURCES", dict(sources.SOURCES))
    await start_registry(source_modules="shelf_source")
    client = Client(await connect("gateway"), roots)
    info = await client.register("a", "mine", kind="shelf")
    assert (info.entry.source, info.version.rank > 0) == ("shelf:mine", True)
    error = await client.refused("b", "other", kind="shelf")
    assert isinstance(error, InvalidAdapter) and (error.param, "no 'other' on" in error.message) == ("location", True)
    error = await client.refused("b", "other", kind="ftp")
    assert isinstance(error, BadRequest) and "one of path, hub, upload, shelf, any is expected" in error.message


async def test_a_module_that_cannot_be_imported_ends_the_start(start_registry):
    with pytest.raises(ConfigError, match="--source-modules: no_such_module: No module named"):
        await start_registry(source_modules="no_such_module")
