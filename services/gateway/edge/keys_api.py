"""API keys and the audit log over HTTP, for administrators. `motet keys` and `motet audit` use it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from motet.services.gateway.config import ADMIN_BODY_BYTES
from motet.services.gateway.edge.http import PathName, json_answer, read_body
from motet.services.gateway.edge.openapi import Description
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai.decoding import decode
from motet.services.gateway.tenants.auth import caller_of
from motet.shared.audit import PAGE, Audit, AuditEvent
from motet.shared.errors import BadRequest
from motet.shared.keys import NAME, ApiKey, Role
from motet.shared.tenancy import DEFAULT_TENANT, TENANT

TEN_YEARS_S = 10 * 365 * 24 * 3600.0
Seconds = Annotated[float, Meta(ge=0, le=TEN_YEARS_S)]


class KeyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/keys."""

    tenant: Annotated[str, Meta(pattern=f"^{TENANT.pattern}$", description="whose key it is")] = DEFAULT_TENANT
    role: Annotated[Role, Meta(description="what it may do; each role includes those before it")] = "use"
    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$", description="what it is for")] = ""
    expires_in_s: Annotated[Seconds, Meta(description="seconds until it ends; 0: it does not end")] = 0.0


class RotateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/keys/{id}/rotate."""

    overlap_s: Annotated[Seconds, Meta(description="how long the old key goes on working, in seconds")] = 86_400.0


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without its text."""

    id: str
    object: Literal["api_key"] = "api_key"
    tenant: str
    role: Role
    name: str
    created: int | None
    expires: int | None
    expired: bool


class NewKey(Key, frozen=True, kw_only=True):
    """A key that was just made."""

    key: Annotated[str, Meta(description="Text of the key, shown only this once.")]


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """All API keys."""

    object: Literal["list"] = "list"
    data: list[Key]


class KeyDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is revoked."""

    id: str
    object: Literal["api_key"] = "api_key"
    deleted: Literal[True] = True


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an adapter or a key."""

    at: int
    action: str
    actor: Annotated[str, Meta(description="Id of the key that was used.")]
    object: Annotated[str, Meta(description="The adapter's name or the key's id.")]
    tenant: Annotated[str, Meta(description="Tenant that the object belongs to; empty: shared.")]
    detail: str


class AuditLog(msgspec.Struct, frozen=True, kw_only=True):
    """Changes, newest first."""

    object: Literal["list"] = "list"
    data: list[AuditEntry]


_create = msgspec.json.Decoder(KeyRequest)
_rotate = msgspec.json.Decoder(RotateRequest)


def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """The routes of keys and the audit log, on a router that authenticates."""
    max_body, of = ADMIN_BODY_BYTES, description.of

    async def note(action: str, request: Request, key: ApiKey, detail: str = "") -> None:
        actor = caller_of(request).key_id
        await Audit(gateway.bus).record(
            AuditEvent(action=action, actor=actor, tenant=key.tenant, object=key.id, detail=detail or f"role {key.role}")
        )

    @api.get("/v1/keys", **of("The API keys, without their texts.", Keys))
    async def keys(request: Request) -> Response:
        caller_of(request).check("admin", "listing keys")
        return json_answer(Keys(data=[Key(**_facts(key)) for key in gateway.keys.all()]))

    @api.post("/v1/keys", **of("Make an API key; its text is shown this once.", NewKey, 409, status=201, body=KeyRequest))
    async def create_key(request: Request) -> Response:
        caller_of(request).check("admin", "making a key")
        asked: KeyRequest = decode(await read_body(request, max_body), _create)
        key, text = await gateway.keys.store.create(
            tenant=asked.tenant, role=asked.role, name=asked.name, expires_in_s=asked.expires_in_s
        )
        await note("key.created", request, key)
        return json_answer(NewKey(**_facts(key), key=text), 201)

    @api.delete("/v1/keys/{key_id}", **of("Revoke an API key.", KeyDeleted, 400, 404))
    async def revoke_key(key_id: PathName, request: Request) -> Response:
        caller_of(request).check("admin", "revoking a key")
        key = await gateway.keys.store.revoke(_stored(key_id))
        await note("key.revoked", request, key)
        return json_answer(KeyDeleted(id=key_id))

    rotates = "Make a key in place of another one, which expires after the overlap."

    @api.post("/v1/keys/{key_id}/rotate", **of(rotates, NewKey, 404, 409, status=201, body=RotateRequest))
    async def rotate_key(key_id: PathName, request: Request) -> Response:
        caller_of(request).check("admin", "rotating a key")
        asked: RotateRequest = decode(await read_body(request, max_body), _rotate)
        key, text = await gateway.keys.store.rotate(_stored(key_id), overlap_s=asked.overlap_s)
        await note("key.rotated", request, key, f"role {key.role}, replaces {key_id} after {asked.overlap_s:g} s")
        return json_answer(NewKey(**_facts(key), key=text), 201)

    @api.get("/v1/audit", **of("Who changed which adapter or key, newest first.", AuditLog, 400))
    async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=PAGE)] = 100) -> Response:
        caller_of(request).check("admin", "reading the audit log")
        events = await Audit(gateway.bus).latest(limit)
        return json_answer(AuditLog(data=[_entry(event) for event in events]))


def _stored(key_id: str) -> str:
    if key_id.startswith("file:"):
        raise BadRequest("this key is in the gateway's --api-keys-file: change it there and restart the gateway", param="id")
    return key_id


def _facts(key: ApiKey) -> dict[str, Any]:
    """The fields of a `Key`."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "role": key.role,
        "name": key.name,
        "created": key.created_unix_ms // 1000 or None,
        "expires": key.expires_unix_ms // 1000 or None,
        "expired": key.expired,
    }


def _entry(event: AuditEvent) -> AuditEntry:
    facts = {name: getattr(event, name) for name in ("action", "actor", "object", "tenant", "detail")}
    return AuditEntry(at=event.at_unix_ms // 1000, **facts)
