"""Known vulnerabilities of what the lock files pin; left out, and said so, where the database cannot be reached.

.venv/bin/python .ci/audit.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.txt", "requirements-images.txt", "requirements-dev.txt")
DATABASE = "https://pypi.org/pypi"  # what pip-audit asks, once per package
PROBES = 5  # a mirror may have some packages' entries and not others'
REACHED_WITHIN_S = 5.0


def main() -> int:
    for name, version in pins()[:PROBES]:
        where = f"{DATABASE}/{name}/{version}/json"
        try:
            urllib.request.urlopen(where, timeout=REACHED_WITHIN_S).close()
        except (urllib.error.URLError, TimeoutError) as error:
            print(f"audit left out: {where} cannot be reached ({error})")
            return 0
    locks = [part for name in LOCKS for part in ("-r", str(ROOT / name))]
    return subprocess.call([sys.executable, "-m", "pip_audit", "--strict", "--disable-pip", "--require-hashes", *locks])


def pins() -> list[tuple[str, str]]:
    """The packages of the lock files, in their order."""
    return [pin for name in LOCKS for pin in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / name).read_text(), re.M)]


if __name__ == "__main__":
    sys.exit(main())
