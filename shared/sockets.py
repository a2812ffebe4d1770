"""Sockets for servers, bound but not yet listening."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` (IPv4 or IPv6) and `port`, 0 for any free one; not listening yet. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
