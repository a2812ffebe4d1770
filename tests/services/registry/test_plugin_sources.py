"""Promise: a source of adapters is an entry of a table, and nothing else has to know its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.services.registry.files import PeftFiles, Source, quoted
from motet.services.registry.sources import SOURCES
from motet.services.registry.threads import in_thread
from motet.shared.errors import BadRequest, InvalidAdapter
from tests.services.registry.conftest import Client
from tests.support_adapters import write_adapter


class Shelf(Source):
    remote = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def fetch(self, location: str, *, chat: bool) -> PeftFiles:
        return await in_thread(lambda: self._taken(location))

    def _taken(self, name: str) -> PeftFiles:
        path = self._directory / name
        if not path.exists():
            raise InvalidAdapter(f"there is no {quoted(name)} on the shelf", param="location")
        weights = path / "adapter_model.safetensors"
        config_json, size_bytes = (path / "adapter_config.json").read_bytes(), weights.stat().st_size
        return PeftFiles(config_json=config_json, weights=weights.open("rb"), size_bytes=size_bytes, source=f"shelf:{name}")


async def test_adapters_come_from_a_source_that_was_added(
    start_registry, connect, roots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_adapter(tmp_path / "shelf" / "mine")
    monkeypatch.setitem(SOURCES, "shelf", lambda config, store: Shelf(tmp_path / "shelf"))
    await start_registry()
    client = Client(await connect("gateway"), roots)
    info = await client.register("a", "mine", kind="shelf")
    assert (info.entry.source, info.version.rank > 0) == ("shelf:mine", True)
    error = await client.refused("b", "other", kind="shelf")
    assert isinstance(error, InvalidAdapter) and (error.param, "no 'other' on" in error.message) == ("location", True)
    error = await client.refused("b", "other", kind="ftp")
    assert isinstance(error, BadRequest) and "one of path, hub, upload, shelf, any is expected" in error.message
