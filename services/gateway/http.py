"""What all HTTP endpoints share: bounded bodies, JSON and error answers, and work that ends when its client is gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.gateway import metrics
from shared.errors import BadRequest, MotetError, TooLarge
from shared.telemetry import logger

T = TypeVar("T")
log = logger("motet.http")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to be longer than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise TooLarge(f"the request body has {declared} bytes, the limit is {max_bytes}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise TooLarge(f"the request body is longer than the limit of {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def error_answer(error: MotetError) -> Response:
    """An error as OpenAI clients expect it."""
    metrics.HTTP_ERRORS.labels(error.code).inc()
    headers = {}
    if error.retry_after_s is not None or error.status == 429:
        headers["retry-after"] = str(math.ceil(error.retry_after_s or 1.0))
    if isinstance(error, TooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_answer(error.openai(), error.status, headers)


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client goes away (ClientGone). The body was read before."""
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

    async def on_motet_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, MotetError)
        if error.status >= 500:
            log.warning("request failed", extra={"code": error.code, "error": error.message})
        return error_answer(error)

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return error_answer(BadRequest(f"{param}: {first['msg']}", param=param))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path}: {error.detail}"
        shaped = {"message": reason, "type": "invalid_request_error", "param": None, "code": f"http_{error.status_code}"}
        return json_answer({"error": shaped}, error.status_code, dict(error.headers or {}))

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def on_bug(_: Request, error: Exception) -> Response:
        return error_answer(MotetError(f"internal error: {type(error).__name__}"))

    app.add_exception_handler(MotetError, on_motet_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(Exception, on_bug)


def one_line(text: str, param: str) -> str:
    """`text` when it is usable as a name or path: not empty, printable. Raises BadRequest naming `param`."""
    if not text or not text.isprintable() or len(text) > 4096:
        raise BadRequest(f"{param}: expected a non-empty printable string", param=param)
    return text
