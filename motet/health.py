"""`python -m motet.health URL`: exit 0 when the URL answers 200, 1 otherwise with what it said. For container health checks.

Standard library only, so that a check every few seconds costs next to nothing.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def check(url: str, *, timeout_s: float = 3.0) -> str | None:
    """None when `url` answers 200, else the reason in one line."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    reason = check(sys.argv[1])
    if reason:
        sys.exit(f"{sys.argv[1]}: {reason}")
