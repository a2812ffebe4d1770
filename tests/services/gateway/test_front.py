"""Promise: who opens the address in a browser learns what it is, without a secret; HEAD is answered wherever GET is."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import aiohttp

from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway


async def test_the_page_names_the_model_and_its_links_lead_somewhere(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/") as answer:
        page = await answer.text()
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<strong>demo</strong>, 1 adapter." in page
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert {"docs", "openapi.json", "v1/models", "v1/status", "metrics"} <= set(links)
    assert "http" not in page.replace("http-equiv", "")
    for link in links:
        async with http.get(urljoin(f"{mesh.url}/", link)) as answer:
            assert answer.status == 200, link


async def test_with_keys_the_page_names_neither_model_nor_adapters(
    nats_url: str, tmp_path: Path, http: aiohttp.ClientSession, mesh: Mesh
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-secret acme admin\n")
    keys.chmod(0o600)
    async with (
        running_gateway(nats_url, tmp_path, api_keys_file=str(keys), instance_id="g2") as gateway,
        http.get(f"http://127.0.0.1:{gateway.port}/") as answer,
    ):
        page = await answer.text()
        assert answer.status == 200 and "API key" in page
    for secret in ("demo", "upper", "acme", "the-secret"):
        assert secret not in page


async def test_head_is_answered_like_get_without_the_body(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    paths = ("/", "/docs", "/docs/swagger-ui.css", "/openapi.json", "/health", "/ready", "/metrics", "/version")
    for path in (*paths, "/v1/models", "/v1/models/upper", "/v1/adapters", "/v1/status", "/v1/audit", "/v1/models/nobody"):
        async with http.get(mesh.url + path) as whole, http.head(mesh.url + path) as head:
            assert head.status == whole.status, path
            assert head.content_type == whole.content_type, path
            assert int(head.headers["content-length"]) > 0
            assert await head.read() == b""
    async with http.head(f"{mesh.url}/v1/completions") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
