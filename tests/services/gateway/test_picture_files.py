"""Promise: a picture behind a URL is for its tenant alone, and an id that is none is a 404."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motet.services.gateway.owner.picture_files import PictureFiles
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import NotFound
from motet.shared.provision import DAY_S, provision
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned
from tests.services.gateway.support_pictures import drawing_mesh, paint

LARGE = bytes(range(256)) * 4096  # 1 MiB: eight chunks
KEYS = {"acme": "sk-acme-0123456789abcdef", "other": "sk-other-0123456789abcdef"}


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    async with drawing_mesh(connect, bus, nats_url, tmp_path, api_keys_file=str(keys)) as mesh:
        yield mesh


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


async def test_a_url_serves_the_picture_to_its_tenant_only(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    body: dict[str, Any] = {"prompt": "a red circle on sky", "response_format": "url", "output_format": "webp"}
    headers = bearer("acme")
    asking = asyncio.ensure_future(http.post(f"{mesh.url}/v1/images/generations", json=body, headers=headers))
    await paint(mesh.first, await assigned(mesh.first), data=LARGE)
    async with await asking as answer:
        [told] = (await answer.json())["data"]
    assert told["url"].startswith(f"{mesh.url}/v1/images/files/url-") and "b64_json" not in told
    async with http.get(told["url"], headers=headers) as got:
        assert (got.status, got.headers["content-type"], await got.read()) == (200, "image/webp", LARGE)
        assert got.headers["x-content-type-options"] == "nosniff"
    async with http.get(told["url"]) as got:
        assert got.status == 401
    async with http.get(told["url"], headers=bearer("other")) as got:
        assert (got.status, (await got.json())["error"]["param"]) == (404, "id")


@pytest.mark.parametrize("picture_id", ["url-" + "0" * 32 + ".png", "url-1.png", "..%2f..%2fetc%2fpasswd", "res-x", "x" * 5000])
async def test_an_id_that_is_none_is_a_404(mesh: Mesh, http: aiohttp.ClientSession, picture_id: str) -> None:
    async with http.get(f"{mesh.url}/v1/images/files/{picture_id}", headers=bearer("acme")) as got:
        assert got.status == 404


async def test_what_was_kept_is_read_back_until_it_is_gone(bus: Bus) -> None:
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    files = PictureFiles(bus)
    picture_id = await files.keep("acme", "res", LARGE, "png")
    found = await files.read("acme", picture_id)
    assert (hashlib.sha256(found.data).digest(), found.media_type) == (hashlib.sha256(LARGE).digest(), "image/png")
    store = await bus.object_store(files.bucket("res"))
    await store.delete(files.object_name("acme", picture_id))
    with pytest.raises(NotFound):
        await files.read("acme", picture_id)


async def test_buckets_for_pictures_exist_for_image_bases_only_and_follow_the_option(bus: Bus) -> None:
    names = {f"OBJ_{bucket}" for bucket in (subjects.PICTURE_FILES, subjects.RESULT_PICTURES)}

    async def ages() -> dict[str, float | None]:
        return {info.config.name or "": info.config.max_age for info in await bus.js.streams_info()}

    assert not names & (await ages()).keys()
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    first = await ages()
    assert {name: first[name] for name in sorted(names)} == {
        f"OBJ_{subjects.PICTURE_FILES}": 3600.0,
        f"OBJ_{subjects.RESULT_PICTURES}": 7 * DAY_S,
    }
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=120.0)
    assert (await ages())[f"OBJ_{subjects.PICTURE_FILES}"] == 120.0
