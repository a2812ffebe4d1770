"""Shared parts of all HTTP endpoints: request ids, bounded bodies, JSON and error answers, cancellation on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Path
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.policies.tenant_shares import Part, TenantShares
from motet.services.gateway import metrics
from motet.services.gateway.edge.guard import Guard
from motet.services.gateway.edge.turns import Turns
from motet.services.gateway.tenants.limits import RateLimited
from motet.shared.errors import (
    BadRequest,
    Error,
    ErrorAnswer,
    MotetError,
    Overloaded,
    TooLarge,
    UnsupportedMediaType,
    bounded,
)
from motet.shared.telemetry import logger

T = TypeVar("T")
E = TypeVar("E", bound=MotetError)
PathName = Annotated[str, Path(json_schema_extra={"minLength": 1})]
"""What a path names: an adapter, a model or a key."""
log = logger("motet.http")
SERVER_SEND = "motet.server_send"  # in the scope: `send` as the server gave it, without middleware around it
REQUEST_ID = "x-request-id"
BODIES_BYTES_MAX = 128 << 20  # of all bodies that are being read, parsed or tokenized; uploads are not among them
DISCARD_BYTES, DISCARD_S = 64 << 20, 10.0  # of a body that is too large: read after the answer
_SHORT_DIGITS = 4  # a body of fewer than 10,000 bytes comes in one small part
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Entrance:
    """The outermost middleware: gives each request its id, adds the id to each answer, and applies `guard`.

    The id is the client's own X-Request-Id where that is 1 to 128 printable ASCII characters, else a random one.
    """

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard
        self._bodies = TenantShares(BODIES_BYTES_MAX)
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        given = given if _USABLE_ID.fullmatch(given) else ""
        drawn = secrets.token_hex(12)
        request_id = given or drawn
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, given_id=given, drawn_id=drawn, bodies=self._bodies)
        encoded = (REQUEST_ID.encode(), request_id.encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and not any(name == encoded[0] for name, _ in message["headers"]):
                message["headers"] = [*message["headers"], encoded]
            await send(message)

        refused = self._guard.refusal(scope["method"], headers)
        if refused is not None:
            await error_answer(refused)(scope, receive, named)
            return
        scope[SERVER_SEND] = send
        if "transfer-encoding" in headers or len(headers.get("content-length", "")) > _SHORT_DIGITS:
            receive = self._turns.applied_to(receive)
        if scope["method"] == "HEAD":  # every GET; the server leaves out the body of its answer
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, named)
        finally:
            if (held := state.get("body")) is not None:
                held.release()


class _Unread(Response):
    """An answer to a request whose body was not read: it is sent at once, then the rest of the body is read and thrown away.

    Many clients send everything before they read. Closing the connection would reset it, and such a client would never see the
    answer. At most `DISCARD_BYTES` are read, for at most `DISCARD_S`.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left, more = DISCARD_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and left > 0:
                    message = await receive()  # without more: all is read, or the client is gone
                    left, more = left - len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def unread(request: Request, error: E) -> E:
    """`error`, the answer to a request whose body is not read to its end."""
    request.state.unread = True
    return error


def too_large(request: Request, message: str, param: str | None = None) -> TooLarge:
    """The error for a body that is not read to its end because it is too large."""
    return unread(request, TooLarge(message, param=param))


FORM_TYPE = "multipart/form-data"


def is_form(request: Request) -> bool:
    """Whether the body of a request is a form with files."""
    return _content_type(request) == FORM_TYPE


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, max_bytes: int, *, form: bool = False) -> bytes:
    """The whole body of a request whose content type is JSON, or with `form` a form with files.

    It counts as held until `request.state.body.release()`, or until the request ends.
    Raises UnsupportedMediaType, TooLarge as soon as the body is known to be longer than `max_bytes`, or Overloaded when the
    bodies of this tenant have their share of `BODIES_BYTES_MAX`.
    """
    kind = _content_type(request)
    if kind != "application/json" and not (form and kind == FORM_TYPE):
        given = f"not {kind!r}" if kind else "and names none"
        raise UnsupportedMediaType(
            f"the body must be sent as application/json, {given}: add the header `Content-Type: application/json`",
            param="content-type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(request, f"the request body has {declared} bytes, the limit is {max_bytes}")
    state = request.state
    body, held = bytearray(), Part(state.bodies, state.tenant)
    state.body = held
    async for part in request.stream():
        if len(body) + len(part) > max_bytes:
            raise too_large(request, f"the request body is longer than the limit of {max_bytes} bytes")
        if not held.take(len(part)):
            error = Overloaded("the bodies of this tenant's other requests have not been read yet", retry_after_s=1.0)
            raise unread(request, error)
        body += part
    return bytes(body)


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response: a struct, or what is JSON already."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_answer(error: MotetError, *, unread: bool = False) -> Response:
    """An error as OpenAI clients expect it. `unread`: the request's body has not been read to its end."""
    metrics.HTTP_ERRORS.labels(error.code).inc()
    headers = {}
    if error.retry_after_s is not None or error.status == 429:
        headers["retry-after"] = str(math.ceil(error.retry_after_s or 1.0))
        headers["retry-after-ms"] = str(math.ceil(1000.0 * (error.retry_after_s or 1.0)))  # what openai-python looks at first
    if isinstance(error, RateLimited):
        headers |= error.headers
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if unread:
        headers["connection"] = "close"
        return _Unread(msgspec.json.encode(error.openai()), error.status, headers, media_type="application/json")
    return json_answer(error.openai(), error.status, headers)


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, `work` is cancelled and ClientGone raised. Read the body before."""
    loop = asyncio.get_running_loop()
    working, listening = loop.create_task(work), loop.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, listening):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def install_error_handlers(app: FastAPI) -> None:
    """Every failure becomes an OpenAI-shaped answer."""

    async def on_motet_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, MotetError)
        if error.status >= 500:
            named = {"request_id": request.state.request_id}
            log.warning("request failed", extra={"code": error.code, "error": error.message} | named)
        return error_answer(error, unread=getattr(request.state, "unread", False))

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return error_answer(BadRequest(f"{param}: {first['msg']}", param=param))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path}: {error.detail}"
        told = Error(message=bounded(reason), type="invalid_request_error", param=None, code=f"http_{error.status_code}")
        headers = dict(error.headers or {})
        if error.status_code == 405:  # of all routes with this path, not only of the first
            path = request.url.path
            found = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
            meant = max((route.path for route in found), key=len, default="")  # an adapter's pin, not an adapter called .../pin
            methods = {method for route in found if route.path == meant for method in route.methods or ()}
            headers = {"allow": ", ".join(sorted(methods))}
        return json_answer(ErrorAnswer(error=told), error.status_code, headers)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def on_bug(_: Request, error: Exception) -> Response:
        return error_answer(MotetError(f"internal error: {type(error).__name__}"))

    app.add_exception_handler(MotetError, on_motet_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(Exception, on_bug)


def one_line(text: str, param: str) -> str:
    """`text` if it can be a name or path: not empty, and printable. Raises BadRequest naming `param`."""
    if not text or not text.isprintable() or len(text) > 4096:
        raise BadRequest(f"{param}: expected a non-empty printable string", param=param)
    return text
