"""The command line's client of the gateway: JSON calls, streamed answers, and a one-line text for every error.

httpx2 speaks HTTP, multipart forms and server-sent events. This file adds the API key, the certificate authority and the texts.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import httpx2
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
        """`timeout_s` is the longest silence of the gateway."""
        self.url = url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are given it
        key = os.environ.get("MOTET_API_KEY", "") if api_key is None else api_key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self._http: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Client:
        self._http = httpx2.AsyncClient(
            headers=self.headers,
            timeout=self._timeout,
            verify=_trust(os.environ.get("MOTET_CA_FILE", "")),
            limits=httpx2.Limits(),
            follow_redirects=True,
            trust_env=False,  # neither proxies nor passwords of the user's environment
        )
        return self

    async def __aexit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Model cards: the base model and every adapter (those have a `parent`)."""
        return list((await self.call("GET", "/v1/models"))["data"])

    async def call(self, method: str, path: str, **body: Any) -> Any:
        """One request; the decoded JSON answer, or its text when it is not JSON.

        `body` holds `json`, `params`, or `data` and `files` of a multipart form, as httpx takes them.
        """
        async with self._answer(method, path, **body) as answer:
            data = await answer.aread()
            return _decoded(data) if data else None

    async def events(self, path: str, json: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streaming completion, as they arrive. An error event raises."""
        async with self._answer("POST", path, json=json | {"stream": True}) as answer:
            async for sent in httpx2.EventSource(answer):
                if sent.data == "[DONE]":
                    continue
                event = orjson.loads(sent.data)
                if "error" in event:
                    raise ApiError(str(event["error"].get("message", event["error"])), int(event["error"].get("status") or 500))
                yield event

    async def news(self, path: str, *, headers: dict[str, str], **body: Any) -> AsyncIterator[str | dict[str, Any]]:
        """The comments (texts) and the events of a streamed answer, as they arrive. Errors raise."""
        async with self._answer("POST", path, headers=headers, **body) as answer:
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "" and value:
                    yield value
                elif name == "data" and value != "[DONE]":
                    event = orjson.loads(value)
                    if "error" in event:
                        raise ApiError(str(event["error"].get("message", event["error"])), 500)
                    yield event

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, **body: Any) -> AsyncIterator[httpx2.Response]:
        """An exchange whose status is below 400; its failures are ApiErrors."""
        if self._http is None:
            raise RuntimeError("Client is an async context manager")
        begun = False
        try:
            async with self._http.stream(method, self.url + path, **body) as answer:
                begun = True
                if answer.status_code >= 400:
                    said = _decoded(await answer.aread())
                    hint = "; motet takes the key from MOTET_API_KEY" if answer.status_code == 401 else ""
                    raise ApiError((_reason(said) or f"HTTP {answer.status_code}") + hint, answer.status_code)
                yield answer
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            if begun:
                raise ApiError(f"the connection to {self.url} broke: {why}") from None
            raise ApiError(
                f"no gateway answers at {self.url} ({why}). Is it up? Start one with `motet up`, or pass --url"
            ) from None


def _trust(ca_file: str) -> ssl.SSLContext:
    """The TLS context with the system's certificate authorities, or those of a file."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
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
