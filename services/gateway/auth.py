"""Who is asking: API keys to tenants. Without a key file everybody is the tenant "default"."""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from shared.errors import Unauthorized

DEFAULT_TENANT = "default"


class Keys:
    """Looks keys up by digest, so that a comparison tells nothing about how much of a key was right."""

    def __init__(self, tenants: dict[str, str] | None) -> None:
        self.required = tenants is not None
        self._tenants = None if tenants is None else {_digest(key): tenant for key, tenant in tenants.items()}

    async def admit(self, request: Request) -> None:
        """Set `request.state.tenant`. Raises Unauthorized when keys are in use and the request has none of them."""
        if self._tenants is None:
            request.state.tenant = DEFAULT_TENANT
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send the header `Authorization: Bearer <key>`")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthorized("this API key is not known")
        request.state.tenant = tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
