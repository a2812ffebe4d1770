"""`python -m motet.cli.health URL`: exits 0 when the URL answers 200, else 1 with the answer. For container health checks.

It uses the standard library only, so that frequent checks are cheap.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

ANSWER_S = 3.0


def check(url: str) -> str | None:
    """None when `url` answers 200, else the reason in one line."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    reason = check(sys.argv[1])
    if reason:
        sys.exit(f"{sys.argv[1]}: {reason}")
