"""GET /: a page that says what this address is, for people who open it in a browser. It loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from motet.services.gateway.edge.openapi import Description

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Motet</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}
code {{ background: #8882; padding: 0.1em 0.3em }}
:root {{ color-scheme: light dark }}
</style>
</head>
<body>
<h1>Motet {version}</h1>
<p>This address serves LoRA adapters on one base model, with OpenAI's API. Clients use it with the path <code>/v1</code>.</p>
<p>{serves}</p>
<ul>
<li><a href="docs">API description</a> (<a href="openapi.json">OpenAPI</a>)</li>
<li><a href="v1/models">Models</a>{key}</li>
<li><a href="ready">Ready?</a> and <a href="health">alive?</a></li>
<li><a href="v1/status">Status</a> and <a href="metrics">metrics</a>{admin}</li>
</ul>
</body>
</html>
"""


def add_routes(app: APIRouter, gateway: Any, version: str, description: Description) -> None:
    """Add the page. It needs no key, and with keys in use it names neither the model nor the adapters."""

    @app.get("/", **description.of("What this address is, as a page for people.", HTMLResponse, open_to_all=True))
    async def front() -> Response:
        page = _PAGE.format(version=escape(version), **_facts(gateway))
        return HTMLResponse(page, headers={"content-security-policy": _POLICY, "cache-control": "no-cache"})


def _facts(gateway: Any) -> dict[str, str]:
    if gateway.keys.required:
        return {
            "serves": "Requests need an API key: <code>Authorization: Bearer KEY</code>.",
            "key": ", with an API key",
            "admin": ", with an admin's API key",
        }
    count = gateway.adapters.names()
    adapters = f"{count} adapter{'' if count == 1 else 's'}"
    return {"serves": f"Base model: <strong>{escape(gateway.config.base.name)}</strong>, {adapters}.", "key": "", "admin": ""}
