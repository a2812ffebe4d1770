"""/openapi.json and /docs: the API's description, made from the routes and from the structs that they read and answer with.

A route says what it does with `Description.of`. FastAPI adds its path and its parameters, and msgspec the schemas of the
structs. Swagger UI comes from an installed package, so the page needs no internet access.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.responses import FileResponse, Response

from motet.services.gateway.config import MAX_BODY_BYTES, GatewayConfig
from motet.services.gateway.edge.http import json_answer
from motet.services.gateway.openai.fields import Unserved
from motet.services.gateway.openai.prepare import SLO_MIN_MS
from motet.shared.errors import ErrorAnswer
from motet.shared.model import SLO_MAX_MS

ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon.png": "image/png"}
_ABOUT = (
    "LoRA adapters on one base model. Every answer has the header `X-Request-Id`. Fields that are not listed are refused by"
    " name."
)
_REF = "#/components/schemas/{name}"
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
    "images": ("Pictures.", ("/v1/images",)),
    "models": ("What `model` may be.", ("/v1/models",)),
    "adapters": ("Add, look at, keep loaded and remove adapters.", ("/v1/adapters", "/v1/load_", "/v1/unload_")),
    "tokens": ("Texts to tokens and back.", ("/tokenize", "/detokenize")),
    "keys": ("API keys, and who changed what.", ("/v1/keys", "/v1/audit")),
    "service": ("This gateway and its workers.", ("/",)),
}
"""Groups of paths on the page: meaning and beginnings of the paths."""
_ALWAYS = (403, 408, 431, 500, 503)
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The request's id, which the answer repeats; without it a random one. 1 to 128 printable ASCII"
    " characters without spaces; anything else is replaced.",
    "schema": {"type": "string"},
}
_GENERATING: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {
        "description": "A request with the same key and body runs once at this gateway; a repetition gets the same answer with"
        " `idempotent-replayed: true`, or 409 if that was streamed. 1 to 255 printable ASCII characters.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
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
    "x-slo-e2e-ms": {
        "description": "Objective for the time of the whole answer in ms; without it there is none.",
        "schema": {"type": "number", "minimum": SLO_MIN_MS, "maximum": SLO_MAX_MS},
    },
}
"""Headers of requests that generate something."""


class Description:
    """What the routes of an app say of themselves."""

    def __init__(self) -> None:
        self._requests: dict[type, dict[str, Any]] = {}
        self._answers: list[type] = [ErrorAnswer]

    def of(
        self,
        summary: str,
        answer: type,
        *errors: int,
        status: int = 200,
        body: type | None = None,
        body_schema: dict[str, Any] | None = None,
        body_required: bool = True,
        form: dict[str, Any] | None = None,
        chunk: type | None = None,
        unavailable: type | None = None,
        generates: bool = False,
        open_to_all: bool = False,
    ) -> dict[str, Any]:
        """Arguments for the decorator of a route.

        `answer`: a struct, or the class of a response that is no JSON. `errors`: statuses of errors beside those of every
        route. `body_schema`: what the schema of `body` says beside its struct. `form`: schema of a form that may be sent
        instead. `chunk`: the event of a streamed answer. `unavailable`: the answer with status 503. `open_to_all`: no key is
        needed.
        """
        if body is not None:
            self._requests[body] = body_schema or {}
            errors = (400, 413, 415, *errors)
        self._answers += [one for one in (answer, chunk, unavailable) if one is not None and issubclass(one, msgspec.Struct)]
        responses: dict[str, Any] = {str(code): _error(code) for code in sorted({*_ALWAYS, *errors})}
        responses[str(status)] = _response("Done.", answer)
        if chunk is not None:
            events = {"description": f"With `stream`: each event's data is a {chunk.__name__}, that of the last one `[DONE]`."}
            responses[str(status)]["content"]["text/event-stream"] = {"schema": events}
        if unavailable is not None:
            responses["503"] = _response("It cannot. An admin key is told why.", unavailable)
        headers = [{"name": name, "in": "header"} | header for name, header in _GENERATING.items()] if generates else []
        operation: dict[str, Any] = {"responses": responses, "parameters": [*headers, _REQUEST_ID]}
        if body is not None:
            forms = {"multipart/form-data": {"schema": form}} if form is not None else {}
            operation["requestBody"] = {"required": body_required, "content": _content(body) | forms}
        if open_to_all:
            operation["security"] = []
        others = {"default": _response("Any other error, such as an unknown path or method.", ErrorAnswer)}
        kind = {"response_class": answer} if issubclass(answer, Response) else {}
        return {"summary": summary, "status_code": status, "responses": others, "openapi_extra": operation} | kind

    def document(self, app: FastAPI, config: GatewayConfig, *, keyless: bool) -> dict[str, Any]:
        """The OpenAPI 3.1 document of an app whose routes have described themselves."""
        tags = [{"name": name, "description": meaning} for name, (meaning, _) in _TAGS.items()]
        described = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes, tags=tags)
        for path, methods in described["paths"].items():
            for operation in methods.values():
                operation["tags"] = [next(name for name, (_, beginnings) in _TAGS.items() if path.startswith(beginnings))]
                open_to_all = operation.pop("security", None) is not None
                if not keyless and not open_to_all:
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = _error(401)
        limits = {"max_body_bytes": MAX_BODY_BYTES, "max_upload_bytes": config.requests.max_upload_bytes}
        errors = {f"Error{status}": _response(text.format(**limits), ErrorAnswer) for status, text in _ERRORS.items()}
        errors["Error429"]["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
        described["components"] = {"schemas": schemas(self._requests, self._answers), "responses": errors}
        if not keyless:
            described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return described

    def add_routes(self, app: FastAPI, config: GatewayConfig, *, keyless: bool) -> None:
        """Add /openapi.json, /docs and the files that this page loads. They need no key."""

        @cache
        def described() -> dict[str, Any]:
            return self.document(app, config, keyless=keyless)

        static = resources.files("fastapi_offline") / "static"
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Motet",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )
        page.headers["content-security-policy"] = "frame-ancestors 'none'"

        @app.get("/openapi.json", include_in_schema=False)
        async def openapi() -> Response:
            return json_answer(described())

        @app.get("/docs", include_in_schema=False)
        async def docs() -> Response:
            return page

        def add_asset(name: str, kind: str) -> None:
            @app.get(f"/docs/{name}", include_in_schema=False)
            async def asset() -> Response:
                return FileResponse(str(static / name), media_type=kind)

        for name, kind in ASSETS.items():
            add_asset(name, kind)


def schemas(requests: Mapping[type, dict[str, Any]], answers: Iterable[type]) -> dict[str, Any]:
    """JSON schemas by name: those of `requests`, each with what its schema says beside the struct, of `answers`, and of all
    their parts."""
    asked, shown = (
        msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")[1]
        for structs in (requests, answers)
    )
    for request, more in requests.items():
        component = asked[request.__name__]
        component |= more | {"properties": component["properties"] | more.get("properties", {})}
    for component in shown.values():  # it has all of its fields, those with defaults too, except the unset ones
        needed, fields = component.get("required", ()), component["properties"]
        component["required"] = [name for name, field in fields.items() if name in needed or "default" in field]
        component["additionalProperties"] = False
        for field in fields.values():
            field.pop("default", None)
    components = asked | shown
    for component in components.values():
        for field in component.get("properties", {}).values():
            for one in field.get("anyOf", ()):  # `X | None`: what X means is what the field means
                if "description" in one and "description" not in field:
                    field["description"] = one.pop("description")
    return components


def exactly_one(*names: str) -> dict[str, Any]:
    """The schema of a body that has one of these fields."""
    return {"oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]}


def with_unserved(unserved: Mapping[str, Unserved]) -> dict[str, Any]:
    """The schema of a body that may have these fields, with values that ask for nothing."""
    return {"properties": {field: one.schema for field, one in unserved.items()}}


def _error(status: int) -> dict[str, str]:
    return {"$ref": f"#/components/responses/Error{status}"}


def _content(struct: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}


def _response(description: str, answer: type) -> dict[str, Any]:
    """The response with this struct; the content of another kind of answer is FastAPI's to say."""
    content = {"content": _content(answer)} if issubclass(answer, msgspec.Struct) else {}
    return {"description": description} | content
