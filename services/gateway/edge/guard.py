"""Refuses requests of foreign web pages and requests with foreign host names.

Without API keys every client that reaches the port may do everything, and a browser on the same machine reaches it on behalf of
any web page. Three rules keep pages out; each alone suffices against a browser that follows the standards:

- Origin: a request that changes or generates something and has an `Origin` must come from this host or `--allowed-origins`.
- Host: the `Host` header must be a loopback name, the address listened on, or one of `--allowed-hosts`. A page whose name was
  made to resolve to this address (DNS rebinding) still sends its own name. Checked when no key is needed on a loopback
  address.
- Content type: bodies must be sent as JSON (`http.read_body`). A page can send other types to another site without
  permission; for JSON the browser first sends a preflight, which is refused. This rule also applies with API keys. Uploads of
  adapters and edits of pictures may also be forms, which the other two rules keep from foreign pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from motet.shared.config import is_loopback
from motet.shared.errors import Forbidden, MotetError

SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """The rules for one gateway. `hosts` and `origins` may hold "*" for any."""

    def __init__(self, *, keyless: bool, bound_host: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._keyless = keyless
        named = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._hosts: frozenset[str] | None = None  # None: any
        if "*" not in named and (named or (keyless and is_loopback(bound_host))):
            self._hosts = named | {bound_host.lower()}

    def refusal(self, method: str, headers: Headers) -> MotetError | None:
        """Why this request is refused; None when it is accepted."""
        host = headers.get("host", "")
        if self._hosts is not None and not self._host_allowed(host):
            return Forbidden(f"host {host!r} is not allowed; allow it with --allowed-hosts", param="host")
        if method in SAFE:
            return None
        origin = headers.get("origin")
        if self._keyless and origin is not None and not self._origin_allowed(origin, host):
            return Forbidden(f"pages of {origin!r} are not allowed; allow them with --allowed-origins", param="origin")
        return None

    def _host_allowed(self, host: str) -> bool:
        assert self._hosts is not None
        name = _host_name(host)
        return name in self._hosts or is_loopback(name)

    def _origin_allowed(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == host.lower() != ""


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; "" when it is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
