"""What is refused before a request is looked at: pages of other sites, and foreign host names.

Without API keys whoever reaches the port may do everything, and a browser on the same machine reaches it for every page it
shows. Three rules keep pages out; each alone would, against a browser that keeps the standards:

- a request that changes or generates something and names an origin comes from this host or from `--allowed-origins`.
- the host asked for is a loopback name, the address listened on, or one of `--allowed-hosts`: a page whose own name was made
  to point here (DNS rebinding) still names itself. Checked where no key is needed and the address is a loopback one.
- bodies are JSON by their content type (`http.read_body`). A page can send other types to another site without asking; for
  JSON the browser asks first (a preflight), and is told no. That rule holds with API keys too, as in vLLM: one way to send.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from shared.config import is_loopback
from shared.errors import Forbidden, MotetError

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
        """Why this request is not taken; None when it is."""
        host = headers.get("host", "")
        if self._hosts is not None and not self._host_allowed(host):
            return Forbidden(f"host {host!r} is not served here; --allowed-hosts names further hosts", param="host")
        if method in SAFE:
            return None
        origin = headers.get("origin")
        if self._keyless and origin is not None and not self._origin_allowed(origin, host):
            return Forbidden(f"pages of {origin!r} may not ask here; --allowed-origins names those that may", param="origin")
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
