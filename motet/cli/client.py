"""A small HTTP client of the gateway for the command line: JSON calls, server-sent events, the server's error messages."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import aiohttp
import orjson

CONNECT_S = 5.0


class ApiError(Exception):
    """The gateway refused a request or cannot be reached. `status` is the HTTP status, 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Talks to one gateway. Use as an async context manager; every method raises ApiError.

    Without an argument, the API key comes from the variable MOTET_API_KEY. MOTET_CA_FILE names the certificate authority of
    an https gateway that the system does not know.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        key = os.environ.get("MOTET_API_KEY", "") if api_key is None else api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, ssl=_trust(os.environ.get("MOTET_CA_FILE", "")))
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[dict[str, Any]]:
        """Model cards: the base model and every adapter (those have a `parent`)."""
        return list((await self.call("GET", "/v1/models"))["data"])

    async def call(
        self, method: str, path: str, *, json: Any = None, data: Any = None, params: dict[str, str] | None = None
    ) -> Any:
        """One request; the decoded JSON answer, or its text when it is not JSON."""
        async with self._send(method, path, json=json, data=data, params=params) as answer:
            body = await answer.read()
            return _decoded(body) if body else None

    async def events(self, path: str, json: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streaming completion, as they arrive. An error event raises."""
        async with self._send("POST", path, json=json | {"stream": True}) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ApiError(str(event["error"].get("message", event["error"])), int(event["error"].get("status") or 500))
                yield event

    def _send(self, method: str, path: str, **body: Any) -> _Answer:
        if self._session is None:
            raise RuntimeError("Client is an async context manager")
        return _Answer(self.url, self._session.request(method, self.url + path, **body))


class _Answer:
    """An HTTP exchange whose failures are ApiErrors."""

    def __init__(self, url: str, request: Any) -> None:
        self._url, self._request = url, request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            answer: aiohttp.ClientResponse = await self._request.__aenter__()
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise ApiError(
                f"no gateway answers at {self._url} ({error}). Is it up? Start one with `motet up`, or pass --url"
            ) from None
        if answer.status >= 400:
            body = _decoded(await answer.read())
            await self._request.__aexit__(None, None, None)
            hint = "; motet takes the key from MOTET_API_KEY" if answer.status == 401 else ""
            raise ApiError((_reason(body) or f"HTTP {answer.status}") + hint, answer.status)
        return answer

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._request.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise ApiError(f"the connection to {self._url} broke: {error or kind.__name__}") from None


def _trust(ca_file: str) -> ssl.SSLContext | bool:
    """The TLS context with the system's certificate authorities, or those of a file."""
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ApiError(f"MOTET_CA_FILE: {ca_file} cannot be read as certificates: {error}") from None


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def _reason(body: Any) -> str:
    """The server's error message, from OpenAI's error object or a plain text body."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(body)
