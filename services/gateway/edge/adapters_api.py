"""Adapters over HTTP: the resource /v1/adapters, and vLLM's two run-time endpoints with vLLM's answers.

A caller sees its tenant's own adapters and the shared ones. With the role `adapters` it changes its tenant's own. An
administrator changes shared ones, and any tenant's by naming the tenant. An adapter that a caller may not see is a 404.

The registry makes all decisions; this file translates. A change is answered only when this gateway's own view shows it (after
at most `SETTLE_S`), so that the client's next request through the same gateway sees the change.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from msgspec import Meta
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from motet.policies.tenant_shares import TenantShares
from motet.services.gateway.config import ADMIN_BODY_BYTES
from motet.services.gateway.edge import uploads
from motet.services.gateway.edge.adapters import Adapter, Adapters, Deleted, chat_of, resource
from motet.services.gateway.edge.http import PathName, json_answer, one_line, read_body, unread
from motet.services.gateway.edge.openapi import Description, exactly_one
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai.decoding import decode
from motet.services.gateway.openai.unknown_model import refusal
from motet.services.gateway.tenants.auth import Caller, caller_of
from motet.shared import subjects
from motet.shared.errors import (
    AdapterExists,
    AdapterNotFound,
    BadRequest,
    Error,
    ErrorAnswer,
    MotetError,
    NotFound,
    Overloaded,
    bounded,
    from_info,
)
from motet.shared.model import ADAPTER_NAME_CHARS, ADAPTER_NAME_RULE, EVERY_WORKER, is_adapter_name
from motet.shared.tenancy import SHARED, check_tenant
from motet.shared.wire.refusal import Refused
from motet.shared.wire.registry import (
    AdapterInfo,
    AliasAdapter,
    DeleteAdapter,
    PinAdapter,
    RegisterAdapter,
    RegistryOk,
    RegistryReply,
    ReleaseAdapter,
    RollbackAdapter,
)

REGISTER_TIMEOUT_S = 600.0  # a download from a hub is part of it
CHANGE_TIMEOUT_S = 30.0
SETTLE_S = 5.0
EVERYBODY = "*"  # an administrator's view of all tenants
CHUNK_BYTES = 1 << 17
SOURCE = "^[a-z][a-z0-9_+.-]*:."  # the registry's kinds are its own
ViewOf = Annotated[str | None, Query(description="View of this tenant, with an admin key only. `*` in a list: all tenants.")]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _AdapterPath(Convertor[str]):
    """An adapter's name in a path. `/v1/adapters/<name>/pin` is the pin of an adapter, with methods of its own, and so is
    its quarantine."""

    regex = r"(?!.*/(?:pin|quarantine)$).*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("adapter", _AdapterPath())


class AdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/adapters. Exactly one of `path`, `hub_id`, `source` and `alias_of` names the source of the adapter."""

    name: Annotated[str, Meta(min_length=1, max_length=ADAPTER_NAME_CHARS, description=f"its name: {ADAPTER_NAME_RULE}")]
    path: Annotated[str, Meta(description="a directory or file on the server, below one of its `--adapter-roots`")] | None = (
        None
    )
    hub_id: Annotated[str, Meta(description="a Hugging Face id, `owner/name` or `owner/name@revision`")] | None = None
    source: (
        Annotated[str, Meta(pattern=SOURCE, description="a place of any kind that the registry knows, `kind:location`")] | None
    ) = None
    alias_of: (
        Annotated[str, Meta(description="another adapter's name: both then mean the same version, also after it is replaced")]
        | None
    ) = None
    pin_version: Annotated[bool, Meta(description="with alias_of: keep the version that the other name means now")] = False
    replace: Annotated[bool, Meta(description="take over a name in use; running requests finish on the old version")] = False
    chat: Annotated[
        bool, Meta(description="also take the chat template, special tokens and generation defaults that it brings")
    ] = True
    tenant: (
        Annotated[str, Meta(description="whose it becomes, empty for all; by default the key's tenant, for an admin key all")]
        | None
    ) = None


class PinRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/adapters/{name}/pin."""

    workers: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=128)]],
            Meta(min_length=1, max_length=1000, description="ids of the workers; by default all, also those that come later"),
        ]
        | None
    ) = None


class ChangeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PATCH /v1/adapters/{name}."""

    version: Annotated[
        int,
        Meta(ge=0, le=1 << 31, description="the kept version to make current again; 0: the one before the present version"),
    ]


class LoadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(description=f"its name: {ADAPTER_NAME_RULE}", extra_json_schema={"minLength": 1})] = ""
    lora_path: Annotated[
        str, Meta(description="a path on the server, or a Hugging Face id", extra_json_schema={"minLength": 1})
    ] = ""
    load_inplace: Annotated[bool, Meta(description="replace the adapter of this name")] = False
    base_model_name: Annotated[str, Meta(description="must be the base model's name")] | None = None
    is_3d_lora_weight: Annotated[bool, Meta(description="refused when true", extra_json_schema={"enum": [False]})] = False


class UnloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(description="the adapter to remove", extra_json_schema={"minLength": 1})] = ""
    lora_int_id: Annotated[int, Meta(description="taken and not needed: the name decides")] | None = None


_adapter = msgspec.json.Decoder(AdapterRequest)
_pin = msgspec.json.Decoder(PinRequest)
_change = msgspec.json.Decoder(ChangeRequest)
_load = msgspec.json.Decoder(LoadRequest)
_unload = msgspec.json.Decoder(UnloadRequest)


# in one piece: a list of routes
def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """All adapter routes, on a router that authenticates."""
    registry = _Registry(gateway)
    under_way = TenantShares(gateway.config.requests.max_uploads)
    max_body, of = ADMIN_BODY_BYTES, description.of

    @api.get("/v1/adapters", **of("The adapters of the key's tenant and the shared ones.", Adapters))
    async def adapters(request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        whose = _seen_as(caller, tenant)
        found = gateway.adapters.all() if whose == EVERYBODY else gateway.adapters.visible(whose)
        shown = [resource(gateway, info) for info in found]
        return json_answer(Adapters(data=shown, refused=gateway.adapters.refused))

    @api.get("/v1/adapters/{name:adapter}", **of("One adapter.", Adapter, 404))
    async def adapter(name: PathName, request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        info = gateway.adapters.resolve(name, _seen_as(caller, tenant))
        if info is None:
            raise AdapterNotFound(f"there is no adapter {name!r}.{refusal(name, gateway.adapters)}", param="name")
        return json_answer(resource(gateway, info, chat=chat_of(gateway, info)))

    added = of(
        "Add an adapter: from a path, a hub id, an alias, or an upload.",
        Adapter,
        *(404, 409, 429, 504),
        status=201,
        body=AdapterRequest,
        body_schema=exactly_one("path", "hub_id", "source", "alias_of"),
        form=uploads.FORM,
    )

    @api.post("/v1/adapters", **added)
    async def add_adapter(request: Request) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "adding an adapter")
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            if not under_way.take(caller.tenant, 1):
                held = f"{under_way.used} uploads are under way already, {under_way.held(caller.tenant)} of this tenant"
                raise unread(request, Overloaded(held, retry_after_s=5.0))
            try:
                info = await registry.upload(request, caller)
            finally:
                under_way.give_back(caller.tenant, 1)
        else:
            asked: AdapterRequest = decode(await read_body(request, max_body), _adapter)
            info = await registry.add(asked, caller)
        return json_answer(resource(gateway, info), 201)

    kept = of("Keep an adapter loaded on workers.", Adapter, 404, 409, 504, body=PinRequest, body_required=False)

    @api.post("/v1/adapters/{name:path}/pin", **kept)
    async def pin_adapter(name: PathName, request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "pinning an adapter")
        given = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
        asked: PinRequest = decode(await read_body(request, max_body), _pin) if given else PinRequest()
        workers = (EVERY_WORKER,) if asked.workers is None else tuple(asked.workers)
        return json_answer(resource(gateway, await registry.pin(name, workers, caller, tenant)))

    @api.delete("/v1/adapters/{name:path}/pin", **of("Unpin an adapter.", Adapter, 400, 404, 409, 504))
    async def unpin_adapter(name: PathName, request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "unpinning an adapter")
        return json_answer(resource(gateway, await registry.pin(name, (), caller, tenant)))

    @api.delete("/v1/adapters/{name:path}/quarantine", **of("Let an adapter answer again.", Adapter, 400, 404, 409, 504))
    async def release_adapter(name: PathName, request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        caller.check("admin", "ending an adapter's quarantine")
        return json_answer(resource(gateway, await registry.release(name, caller, tenant)))

    earlier = of("Make an earlier version current again.", Adapter, 404, 409, 504, body=ChangeRequest)

    @api.patch("/v1/adapters/{name:adapter}", **earlier)
    async def change_adapter(name: PathName, request: Request, tenant: ViewOf = None) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "changing an adapter's version")
        asked: ChangeRequest = decode(await read_body(request, max_body), _change)
        return json_answer(resource(gateway, await registry.rollback(name, asked.version, caller, tenant)))

    @api.delete("/v1/adapters/{name:adapter}", **of("Remove an adapter.", Deleted, 400, 404, 409, 504))
    async def delete_adapter(
        name: PathName,
        request: Request,
        force: Annotated[bool, Query(description="Delete the adapter even if requests run on it; they finish.")] = False,
        forget: bool = False,
        tenant: ViewOf = None,
    ) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "deleting an adapter")
        returns = await registry.delete(name, caller, tenant, force=force, forget=forget)
        return json_answer(Deleted(name=name, returns_at_start=returns))

    named = {"required": ["lora_name", "lora_path"]}
    loaded = of("vLLM's way to add an adapter.", PlainTextResponse, 404, 429, 504, body=LoadRequest, body_schema=named)

    @api.post("/v1/load_lora_adapter", **loaded)
    async def load_lora_adapter(request: Request) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "loading an adapter")
        asked: LoadRequest = decode(await read_body(request, max_body), _load)
        if not asked.lora_name or not asked.lora_path:
            return _vllm_error(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if asked.is_3d_lora_weight:
            return _vllm_error(400, "BadRequestError", "is_3d_lora_weight is not supported")
        if asked.base_model_name not in (None, "", gateway.config.base.name):
            return _vllm_error(400, "BadRequestError", f"base_model_name: {asked.base_model_name!r} is not served here")
        try:
            is_path = asked.lora_path.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(asked.lora_path)
            kind = "path" if is_path else "any" if caller.may("admin") else "hub"
            source = _Source(kind, asked.lora_path, "lora_path")
            await registry.register(asked.lora_name, source, caller, replace=asked.load_inplace)
        except AdapterExists:
            return _vllm_error(
                400,
                "InvalidUserInput",
                f"The lora adapter '{asked.lora_name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
            )
        except NotFound as error:
            return _vllm_error(404, "NotFoundError", error.message)
        except MotetError as error:
            if error.status >= 500 or error.status in (403, 429):
                raise
            return _vllm_error(error.status, "BadRequestError", error.message)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' added successfully.", media_type="text/plain")

    named = {"required": ["lora_name"]}
    unloaded = of("vLLM's way to remove an adapter.", PlainTextResponse, 404, 409, 504, body=UnloadRequest, body_schema=named)

    @api.post("/v1/unload_lora_adapter", **unloaded)
    async def unload_lora_adapter(request: Request) -> Response:
        caller = caller_of(request)
        caller.check("adapters", "unloading an adapter")
        asked: UnloadRequest = decode(await read_body(request, max_body), _unload)
        if not asked.lora_name:
            return _vllm_error(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        try:
            await registry.delete(
                asked.lora_name, caller, None, force=True
            )  # like vLLM: running requests do not stand in the way
        except NotFound:
            return _vllm_error(404, "NotFoundError", f"The lora adapter '{asked.lora_name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.", media_type="text/plain")


class _Registry:
    """Sends requests to the registry and waits until this gateway sees each change."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def add(self, asked: AdapterRequest, caller: Caller) -> AdapterInfo:
        sources = {"path": asked.path, "hub": asked.hub_id, "source": asked.source, "alias": asked.alias_of}
        given = [(kind, location) for kind, location in sources.items() if location is not None]
        if len(given) != 1:
            raise BadRequest("expected exactly one of `path`, `hub_id`, `source` and `alias_of`", param="path")
        kind, location = given[0]
        if asked.pin_version and kind != "alias":
            raise BadRequest("pin_version: only an alias follows another name's versions", param="pin_version")
        if kind != "alias":
            source = _named(location) if kind == "source" else _Source(kind, location, "path" if kind == "path" else "hub_id")
            return await self.register(asked.name, source, caller, replace=asked.replace, tenant=asked.tenant, chat=asked.chat)
        self.check_name(asked.name, "name")
        if not is_adapter_name(location):
            raise AdapterNotFound(f"there is no adapter {location!r}", param="alias_of")
        owner = _new_owner(caller, asked.tenant)
        message = AliasAdapter(
            name=asked.name, target=location, tenant=owner, actor=caller.key_id, follows=not asked.pin_version
        )
        return await self._put("alias", message, CHANGE_TIMEOUT_S)

    async def register(
        self, name: str, source: _Source, caller: Caller, *, replace: bool, tenant: str | None = None, chat: bool = True
    ) -> AdapterInfo:
        """Register an adapter. An error about its location names the field that the client used."""
        if source.kind not in ("hub", "upload"):  # the server's directories may contain adapters of several tenants
            place = "the server's directories" if source.kind in ("path", "any") else f"a source of kind {source.kind}"
            caller.check("admin", f"registering an adapter from {place} (rather than an upload or a hub id)")
        owner = _new_owner(caller, tenant)
        self.check_name(name, "name")
        one_line(source.location, source.param)
        message = RegisterAdapter(
            name=name,
            kind=source.kind,
            location=source.location,
            replace=replace,
            tenant=owner,
            actor=caller.key_id,
            chat=chat,
        )
        try:
            return await self._put("register", message, REGISTER_TIMEOUT_S)
        except MotetError as error:
            if error.param in ("kind", "location"):
                error.param = source.param
            raise

    async def upload(self, request: Request, caller: Caller) -> AdapterInfo:
        """Register an adapter from a multipart form (`uploads.Form`)."""
        gateway = self._gateway
        async with uploads.read(request, gateway.config.requests.max_upload_bytes) as form:
            self.check_name(form.name, "name")
            async with uploads.stored(gateway.bus, form.file) as key:
                source = _Source("upload", key, "file")
                return await self.register(form.name, source, caller, replace=form.replace, tenant=form.tenant, chat=form.chat)

    async def delete(self, name: str, caller: Caller, tenant: str | None, *, force: bool, forget: bool = False) -> bool:
        """Delete the adapter that `name` refers to for `caller`; an administrator may name the tenant.

        Returns whether it comes back at the next start, because it lies in --adapters-dir.
        """
        if not is_adapter_name(name):
            raise AdapterNotFound(f"there is no adapter {name!r}", param="name")
        adapters = self._gateway.adapters
        owner = self._owner(name, caller, tenant)
        message = DeleteAdapter(name=name, force=force, forget=forget, tenant=owner, actor=caller.key_id)
        reply = await self._ask("delete", message, CHANGE_TIMEOUT_S)
        await self._gateway.settled(lambda: adapters.exactly(name, owner) is None, SETTLE_S)
        return reply.returns

    async def rollback(self, name: str, version: int, caller: Caller, tenant: str | None) -> AdapterInfo:
        """Make a kept version of `name` current again; an administrator may name the tenant."""
        if not is_adapter_name(name):
            raise AdapterNotFound(f"there is no adapter {name!r}", param="name")
        owner = self._owner(name, caller, tenant, "changing")
        message = RollbackAdapter(name=name, version=version, tenant=owner, actor=caller.key_id)
        return await self._put("rollback", message, CHANGE_TIMEOUT_S)

    async def pin(self, name: str, workers: tuple[str, ...], caller: Caller, tenant: str | None) -> AdapterInfo:
        """Pin the adapter that `name` refers to for `caller` to these workers; without workers, unpin it.

        An administrator may name the tenant.
        """
        if not is_adapter_name(name):
            raise AdapterNotFound(f"there is no adapter {name!r}", param="name")
        adapters = self._gateway.adapters
        owner = self._owner(name, caller, tenant, "pinning")
        message = PinAdapter(name=name, workers=workers, tenant=owner, actor=caller.key_id)
        (info,) = (await self._ask("pin", message, CHANGE_TIMEOUT_S)).adapters

        def visible() -> bool:
            seen = adapters.exactly(name, owner)
            return seen is not None and seen.entry.pin == info.entry.pin

        await self._gateway.settled(visible, SETTLE_S)
        return info

    async def release(self, name: str, caller: Caller, tenant: str | None) -> AdapterInfo:
        """End the quarantine of the version that `name` refers to."""
        if not is_adapter_name(name):
            raise AdapterNotFound(f"there is no adapter {name!r}", param="name")
        adapters = self._gateway.adapters
        owner = self._owner(name, caller, tenant, "releasing")
        message = ReleaseAdapter(name=name, tenant=owner, actor=caller.key_id)
        (info,) = (await self._ask("release", message, CHANGE_TIMEOUT_S)).adapters
        await self._gateway.settled(lambda: info.entry.digest not in adapters.quarantined, SETTLE_S)
        return info

    def _owner(self, name: str, caller: Caller, tenant: str | None, doing: str = "deleting") -> str:
        """The tenant whose adapter is changed. Raises Forbidden for a shared adapter unless an administrator asks."""
        if tenant is not None:
            return _new_owner(caller, tenant)
        adapters = self._gateway.adapters
        if adapters.exactly(name, caller.tenant) is not None:
            return caller.tenant
        if adapters.exactly(name, SHARED) is not None:
            caller.check("admin", f"{doing} an adapter that all tenants share")
        return SHARED if caller.may("admin") else caller.tenant

    async def _put(self, verb: str, message: RegisterAdapter | AliasAdapter | RollbackAdapter, timeout_s: float) -> AdapterInfo:
        name = message.name
        reply = await self._ask(verb, message, timeout_s)
        info = next((info for info in reply.adapters if info.entry.name == name), None)
        if info is None:
            raise MotetError(f"the registry confirmed {name!r} without describing it")
        entry = info.entry

        def visible() -> bool:
            seen = self._gateway.adapters.exactly(name, message.tenant)
            return seen is not None and (seen.entry.digest, seen.entry.version) == (entry.digest, entry.version)

        await self._gateway.settled(visible, SETTLE_S)
        return info

    async def _ask(self, verb: str, message: msgspec.Struct, timeout_s: float) -> RegistryOk:
        reply: RegistryOk | Refused = await self._gateway.bus.request(
            subjects.registry(verb), message, RegistryReply, timeout_s=timeout_s
        )
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        return reply

    def check_name(self, name: str, param: str) -> None:
        """Raises BadRequest for an invalid adapter name."""
        if not is_adapter_name(name):
            raise BadRequest(f"{param}: {name!r} is not a valid adapter name: {ADAPTER_NAME_RULE}", param=param)
        if name == self._gateway.config.base.name:
            raise BadRequest(f"{name!r} is the base model's name", param=param)


class _Source(msgspec.Struct, frozen=True):
    """Where an adapter comes from, and the field in which the client said so."""

    kind: str  # of the registry's sources (path, hub, upload, a plug-in's), or any: a path where there is one, else a hub id
    location: str
    param: str


def _named(source: str) -> _Source:
    """The source `kind:location` or `kind://location`. Raises BadRequest for an upload, which others may have sent."""
    kind, _, location = source.partition(":")
    if kind == "upload":
        raise BadRequest("source: an archive is uploaded as multipart/form-data", param="source")
    return _Source(kind, location.removeprefix("//"), "source")


def _new_owner(caller: Caller, tenant: str | None) -> str:
    """The tenant of a new adapter. Raises Forbidden when the caller may not choose it."""
    if tenant is None:
        return SHARED if caller.may("admin") else caller.tenant
    if tenant != caller.tenant:
        caller.check("admin", "an adapter of another tenant or of all")
    return check_tenant(tenant) if tenant else SHARED


def _seen_as(caller: Caller, tenant: str | None) -> str:
    """The tenant whose view the caller gets. Raises Forbidden when the caller may not have it."""
    if tenant is None or tenant == caller.tenant:
        return caller.tenant
    caller.check("admin", "looking at the adapters of another tenant")
    return tenant


def _vllm_error(status: int, kind: str, message: str) -> Response:
    error = Error(message=bounded(message), type=kind, param=None, code=status)
    return json_answer(ErrorAnswer(error=error), status)
