"""/openapi.json and /docs: the API's description, generated from the types that parse requests and describe answers.

Request bodies come from `openai.protocol` and `adapters_api`, with the unserved fields of `openai.fields`; answers come from
`openai.schemas`. Swagger UI comes from an installed package, so the page needs no internet access.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, Response

from motet.services.gateway.config import MAX_BODY_BYTES, GatewayConfig
from motet.services.gateway.edge.adapters_api import AdapterRequest, ChangeRequest, LoadRequest, PinRequest, UnloadRequest
from motet.services.gateway.edge.http import json_answer
from motet.services.gateway.edge.keys_api import KeyRequest, RotateRequest
from motet.services.gateway.edge.kinds import KINDS
from motet.services.gateway.openai import fields, protocol, schemas
from motet.services.gateway.openai.prepare import SLO_MAX_MS, SLO_MIN_MS
from motet.shared.audit import PAGE

ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon.png": "image/png"}
_JSON, _TEXT, _EVENTS, _FORM = "application/json", "text/plain", "text/event-stream", "multipart/form-data"
_REQUESTS = (
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
    AdapterRequest,
    ChangeRequest,
    PinRequest,
    LoadRequest,
    UnloadRequest,
    KeyRequest,
    RotateRequest,
)
_ANSWERS = (
    schemas.ErrorAnswer,
    schemas.Model,
    schemas.Models,
    schemas.Adapter,
    schemas.Adapters,
    schemas.Deleted,
    schemas.Key,
    schemas.NewKey,
    schemas.Keys,
    schemas.KeyDeleted,
    schemas.AuditLog,
    schemas.Tokens,
    schemas.Text,
    schemas.Status,
    schemas.Health,
    schemas.Ready,
    schemas.Version,
)
_ERRORS = {
    400: "A field, named in `param`, is wrong; or the prompt is longer than the context.",
    401: "No API key, or an unknown one.",
    403: "The API key's role does not allow this, or the `Host` or `Origin` header is not allowed.",
    404: "The model or adapter does not exist.",
    408: "The request came too slowly.",
    409: "The adapter's name is taken, requests run on it, or there is no room for another pin; or the answer to the"
    " `Idempotency-Key` was streamed.",
    413: "The body is larger than {max_body_bytes} bytes, an upload larger than {max_upload_bytes}.",
    415: "The body is not sent as application/json.",
    422: "The `Idempotency-Key` was used with another body.",
    429: "Overloaded, or at a limit of the tenant: retry after `Retry-After` seconds.",
    431: "More than 128 headers, or more than 64 KiB of them.",
    500: "A bug.",
    503: "No worker serves the model, or the mesh cannot be reached.",
    504: "The request took longer than `--request-timeout-s`.",
}
_TAGS = {
    "generate": ("Chats, completions and embeddings.", ("/v1/chat", "/v1/completions", "/v1/embeddings")),
    "models": ("What `model` may be.", ("/v1/models",)),
    "adapters": ("Add, look at, keep loaded and remove adapters.", ("/v1/adapters", "/v1/load_", "/v1/unload_")),
    "tokens": ("Texts to tokens and back.", ("/tokenize", "/detokenize")),
    "keys": ("API keys, and who changed what.", ("/v1/keys", "/v1/audit")),
    "service": ("This gateway and its workers.", ("/",)),
}
"""Groups of paths on the page: meaning and beginnings of the paths."""
_ALWAYS = (403, 408, 431, 500, 503)
_PARAMETERS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {
        "description": "A request with the same key and body runs once at this gateway; a repetition gets the same answer with"
        " `idempotent-replayed: true`, or 409 if that was streamed. 1 to 255 printable ASCII characters.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    },
    "X-Request-Id": {
        "description": "The request's id, which the answer repeats; without it a random one. 1 to 128 printable ASCII"
        " characters without spaces; anything else is replaced.",
        "schema": {"type": "string"},
    },
    "x-slo-class": {
        "description": "Class of the request: its latency objectives and its urgency.",
        "schema": {"type": "string", "enum": ["interactive", "standard", "batch"], "default": "standard"},
    },
    "x-slo-ttft-ms": {
        "description": "Objective for the time to first token in ms, instead of the class's.",
        "schema": {"type": "number", "minimum": SLO_MIN_MS, "maximum": SLO_MAX_MS},
    },
    "x-slo-tpot-ms": {
        "description": "Objective for the time per output token in ms, instead of the class's.",
        "schema": {"type": "number", "minimum": SLO_MIN_MS, "maximum": SLO_MAX_MS},
    },
}
_UPLOAD = {
    "type": "object",
    "required": ["name", "file"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 128, "description": "The adapter's name"},
        "file": {"type": "string", "format": "binary", "description": "PEFT directory as zip, tar or gzipped tar"},
        "replace": {"type": "string", "enum": ["true", "false"], "default": "false"},
        "tenant": {"type": "string", "maxLength": 64, "description": "Tenant that the adapter belongs to; empty: shared"},
    },
}


def add_routes(app: APIRouter, config: GatewayConfig, version: str, *, keyless: bool) -> None:
    """Add /openapi.json, /docs and the files that this page loads. They need no key."""
    described = document(config, version, keyless=keyless)
    static = resources.files("fastapi_offline") / "static"
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Motet",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    page.headers["content-security-policy"] = "frame-ancestors 'none'"

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return json_answer(described)

    @app.get("/docs")
    async def docs() -> Response:
        return page

    def add_asset(name: str, kind: str) -> None:
        @app.get(f"/docs/{name}")
        async def asset() -> Response:
            return FileResponse(str(static / name), media_type=kind)

    for name, kind in ASSETS.items():
        add_asset(name, kind)


def document(config: GatewayConfig, version: str, *, keyless: bool = True) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a gateway with this configuration."""
    limits = {"max_body_bytes": MAX_BODY_BYTES, "max_upload_bytes": config.requests.max_upload_bytes}
    errors = {
        status: {"description": text.format(**limits)} | _content(_ref("ErrorAnswer")) for status, text in _ERRORS.items()
    }
    errors[429]["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Motet",
            "version": version,
            "description": "LoRA adapters on one base model. Every answer has the header `X-Request-Id`. Fields that are not"
            " listed are refused by name.",
        },
        "paths": {
            path: {
                method: {"tags": [_tag(path)]} | _with_errors(dict(operation), errors, keyless=keyless)
                for method, operation in methods.items()
            }
            for path, methods in _paths().items()
        },
        "tags": [{"name": name, "description": meaning} for name, (meaning, _) in _TAGS.items()],
        "components": {
            "schemas": _schemas(),
            "responses": {f"Error{status}": answer for status, answer in errors.items()},
        },
    }
    if not keyless:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return described


@cache  # the same for every gateway of a process
def _schemas() -> dict[str, Any]:
    described = (*(kind.request for kind in KINDS), *_REQUESTS, *(kind.answer for kind in KINDS), *_ANSWERS)
    _, components = msgspec.json.schema_components(described, ref_template="#/components/schemas/{name}")
    unserved_of = {kind.request.__name__: kind.unserved for kind in KINDS} | {"TokenizeRequest": fields.TOKENIZE}
    for name, unserved in unserved_of.items():
        components[name]["properties"] |= {field: one.schema for field, one in unserved.items()}
    components["UnloadRequest"]["required"] = ["lora_name"]
    components["LoadRequest"]["required"] = ["lora_name", "lora_path"]
    components["TokenizeRequest"]["oneOf"] = [_given("prompt"), _given("messages")]
    components["AdapterRequest"]["oneOf"] = [_given(name) for name in ("path", "hub_id", "source", "alias_of")]
    for component in components.values():
        for field in component.get("properties", {}).values():
            for one in field.get("anyOf", ()):  # `X | None`: what X means is what the field means
                if "description" in one and "description" not in field:
                    field["description"] = one.pop("description")
    return components


def _tag(path: str) -> str:
    return next(name for name, (_, beginnings) in _TAGS.items() if path.startswith(beginnings))


def _given(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: dict[str, Any], kind: str = _JSON) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


def _ok(name: str, description: str = "Done.") -> dict[str, Any]:
    return {"description": description} | _content(_ref(name))


def _operation(
    summary: str,
    answer: dict[str, Any],
    *statuses: int,
    status: int = 200,
    body: dict[str, Any] | None = None,
    body_required: bool = True,
    parameters: tuple[dict[str, Any], ...] = (),
    open_to_all: bool = False,
) -> dict[str, Any]:
    """One operation; `_with_errors` adds the answers for `statuses` and those that every route may give."""
    operation: dict[str, Any] = {"summary": summary, "responses": {str(status): answer}, "parameters": [*parameters]}
    operation["parameters"].append({"name": "X-Request-Id", "in": "header"} | _PARAMETERS["X-Request-Id"])
    if body is not None:
        operation["requestBody"] = {"required": body_required, "content": body}
        statuses = (400, 413, 415, *statuses)
    operation["x-errors"], operation["x-open"] = sorted({*_ALWAYS, *statuses}), open_to_all
    return operation


def _with_errors(operation: dict[str, Any], errors: dict[int, Any], *, keyless: bool) -> dict[str, Any]:
    statuses, open_to_all = operation.pop("x-errors"), operation.pop("x-open")
    if not keyless and not open_to_all:
        operation["security"] = [{"key": []}]
        statuses = sorted({401, *statuses})
    answers = {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses if status in errors}
    rest = {"default": {"description": "Any other error, such as an unknown path or method."} | _content(_ref("ErrorAnswer"))}
    operation["responses"] = answers | operation["responses"] | rest
    return operation


def _body(name: str) -> dict[str, Any]:
    return {_JSON: {"schema": _ref(name)}}


# in one piece: a list of operations
def _paths() -> dict[str, dict[str, dict[str, Any]]]:
    headers = (name for name in _PARAMETERS if name.startswith("x-slo") or name == "Idempotency-Key")
    slo = tuple({"name": name, "in": "header"} | _PARAMETERS[name] for name in headers)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    force, forget = (
        {"name": flag, "in": "query", "schema": {"type": "boolean", "default": False}} for flag in ("force", "forget")
    )
    force["description"] = "Delete the adapter even if requests run on it; they finish."
    tenant = {"name": "tenant", "in": "query", "schema": {"type": "string"}}
    tenant["description"] = "View of this tenant, with an admin key only. `*` in a list: all tenants."
    key_id = {"name": "key_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": PAGE, "default": 100}}
    plan = {"name": "plan", "in": "query", "schema": {"type": "boolean", "default": False}}
    text = {"description": "Done."} | _content({"type": "string"}, _TEXT)
    html = {"description": "A page."} | _content({"type": "string"}, "text/html")

    def generated(schema: str) -> dict[str, Any]:
        both = {_JSON: {"schema": _ref(schema)}, _EVENTS: {"schema": {"description": "With `stream`."}}}
        return {"description": "The answer; with `stream` as server-sent events.", "content": both}

    return {
        **{
            kind.path: {
                "post": _operation(
                    kind.summary,
                    _ok(kind.answer.__name__) if kind.stream is None else generated(kind.answer.__name__),
                    *(404, 409, 422, 429, 504),
                    body=_body(kind.request.__name__),
                    parameters=slo,
                )
            }
            for kind in KINDS
        },
        "/v1/models": {"get": _operation("The base model and all adapters.", _ok("Models"))},
        "/v1/models/{name}": {"get": _operation("One model.", _ok("Model"), 404, parameters=(name,))},
        "/v1/adapters": {
            "get": _operation("The adapters of the key's tenant and the shared ones.", _ok("Adapters"), parameters=(tenant,)),
            "post": _operation(
                "Add an adapter: from a path, a hub id, an alias, or an upload.",
                _ok("Adapter"),
                *(404, 409, 429, 504),
                status=201,
                body=_body("AdapterRequest") | {_FORM: {"schema": _UPLOAD}},
            ),
        },
        "/v1/adapters/{name}": {
            "get": _operation("One adapter.", _ok("Adapter"), 404, parameters=(name, tenant)),
            "patch": _operation(
                "Make an earlier version current again.",
                _ok("Adapter"),
                *(404, 409, 504),
                body=_body("ChangeRequest"),
                parameters=(name, tenant),
            ),
            "delete": _operation(
                "Remove an adapter.", _ok("Deleted"), 400, 404, 409, 504, parameters=(name, force, forget, tenant)
            ),
        },
        "/v1/adapters/{name}/pin": {
            "post": _operation(
                "Keep an adapter loaded on workers.",
                _ok("Adapter"),
                *(404, 409, 504),
                body=_body("PinRequest"),
                body_required=False,
                parameters=(name, tenant),
            ),
            "delete": _operation("Unpin an adapter.", _ok("Adapter"), 400, 404, 409, 504, parameters=(name, tenant)),
        },
        "/v1/load_lora_adapter": {
            "post": _operation("vLLM's way to add an adapter.", text, 404, 429, 504, body=_body("LoadRequest"))
        },
        "/v1/unload_lora_adapter": {
            "post": _operation("vLLM's way to remove an adapter.", text, 404, 409, 504, body=_body("UnloadRequest"))
        },
        "/tokenize": {"post": _operation("Tokens of a text.", _ok("Tokens"), 404, 429, body=_body("TokenizeRequest"))},
        "/detokenize": {"post": _operation("Text of tokens.", _ok("Text"), 404, 429, body=_body("DetokenizeRequest"))},
        "/v1/keys": {
            "get": _operation("The API keys, without their texts.", _ok("Keys")),
            "post": _operation(
                "Make an API key; its text is shown this once.", _ok("NewKey"), 409, status=201, body=_body("KeyRequest")
            ),
        },
        "/v1/keys/{key_id}": {
            "delete": _operation("Revoke an API key.", _ok("KeyDeleted"), 400, 404, parameters=(key_id,)),
        },
        "/v1/keys/{key_id}/rotate": {
            "post": _operation(
                "Make a key in place of another one, which expires after the overlap.",
                _ok("NewKey"),
                *(404, 409),
                status=201,
                body=_body("RotateRequest"),
                parameters=(key_id,),
            )
        },
        "/v1/audit": {
            "get": _operation("Who changed which adapter or key, newest first.", _ok("AuditLog"), 400, parameters=(limit,))
        },
        "/v1/status": {
            "get": _operation(
                "This gateway, and workers as a scheduler sees them. With `plan=true` also which requests would move.",
                _ok("Status"),
                400,
                parameters=(plan,),
            )
        },
        "/": {"get": _operation("What this address is, as a page for people.", html, open_to_all=True)},
        "/health": {"get": _operation("Whether the process lives.", _ok("Health"), open_to_all=True)},
        "/ready": {
            "get": _operation("Whether it can serve now.", _ok("Ready"), open_to_all=True)
            | {"responses": {"200": _ok("Ready"), "503": _ok("Ready", "It cannot. An admin key is told why.")}}
        },
        "/metrics": {"get": _operation("Metrics for Prometheus, for an admin key.", text)},
        "/version": {"get": _operation("The version.", _ok("Version"), open_to_all=True)},
    }
