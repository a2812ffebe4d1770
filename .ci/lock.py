"""Writes requirements.txt and requirements-dev.txt: pyproject's pins and everything they need, as installed here.

    .venv/bin/python .ci/lock.py

Run it in an environment that was made from a changed pyproject.toml and passes the suite.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def closure(requirements: list[str]) -> dict[str, str]:
    """{canonical name: "Name==version"} of `requirements` and all they need on this platform."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = distribution(name)
        public = installed.version.split("+")[0]  # 2.13.0+cpu and 2.13.0+cu130 are one release
        if not wanted.specifier.contains(public, prereleases=True):
            raise SystemExit(f"{wanted} is wanted, {installed.version} is installed")
        found[name] = f"{name}=={public}"
        for text in installed.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append(needed)
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    head = "# Written by .ci/lock.py from pyproject.toml; do not edit.\n"
    run = closure([*project["project"]["dependencies"], *project["build-system"]["requires"]])
    dev = closure(project["project"]["optional-dependencies"]["dev"])
    (ROOT / "requirements.txt").write_text(head + "".join(f"{run[name]}\n" for name in sorted(run)))
    more = "".join(f"{dev[name]}\n" for name in sorted(dev) if name not in run)
    (ROOT / "requirements-dev.txt").write_text(f"{head}-r requirements.txt\n{more}")


if __name__ == "__main__":
    main()
