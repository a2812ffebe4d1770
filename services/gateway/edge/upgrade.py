"""Serves a request that asks for another protocol (`Upgrade: h2c`, `Upgrade: websocket`) as the HTTP/1.1 request that it is.

RFC 9110, section 7.8: a server may ignore the field. llhttp does not: it passes on the request without its body, and stops.
Java's HttpClient and `curl --http2` send the field over plain HTTP. So such a head is parsed again without the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httptools

_HOP = frozenset((b"upgrade", b"http2-settings"))


class PlainParser:
    """httptools' parser of requests, which ignores upgrades. While `ignoring`, the callbacks of `protocol` do nothing."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.ignoring = False  # the head has an upgrade, and comes again without it
        self._open()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def _open(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def should_upgrade(self) -> bool:
        """Whether uvicorn should switch protocols: never."""
        return False

    def begins_again(self) -> bool:
        """To be called when a head is complete: whether to ignore it, because it comes again without its upgrade."""
        self.ignoring = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        return self.ignoring

    def feed_data(self, data: bytes) -> None:
        """Parse `data`. Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT only."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                if not self.ignoring:
                    raise
                protocol, method, version = self._protocol, self._parser.get_method(), self._parser.get_http_version()
                head = b"%s %s HTTP/%s\r\n" % (method, protocol.url, version.encode())
                lines = [b"%s: %s\r\n" % header for header in _without_upgrade(protocol.headers)]
                data = b"".join((head, *lines, b"\r\n", data[stopped.args[0] :]))
                self.ignoring = False
                self._open()


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for one in value.split(b",") if (token := one.strip()).lower() not in _HOP)
        if name not in _HOP and (value or name != b"connection"):
            yield name, value
