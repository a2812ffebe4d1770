"""Writes the lock files: pyproject's pins and everything they need, as installed here.

    requirements-mesh.txt   every service but the worker: no torch
    requirements.txt        that and torch
    requirements-dev.txt    that and the tools for tests and checks

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
    needed = project["project"]["dependencies"]
    mesh = closure([text for text in needed if Requirement(text).name != "torch"])
    run = closure([*needed, *project["build-system"]["requires"]])
    dev = closure(project["project"]["optional-dependencies"]["dev"])
    write("requirements-mesh.txt", mesh)
    write("requirements.txt", {name: pin for name, pin in run.items() if name not in mesh}, "requirements-mesh.txt")
    write("requirements-dev.txt", {name: pin for name, pin in dev.items() if name not in run}, "requirements.txt")


def write(name: str, pins: dict[str, str], base: str = "") -> None:
    """A lock file of `pins` on top of the lock file `base`."""
    head = "# Written by .ci/lock.py from pyproject.toml; do not edit.\n" + (f"-r {base}\n" if base else "")
    (ROOT / name).write_text(head + "".join(f"{pins[key]}\n" for key in sorted(pins)))


if __name__ == "__main__":
    main()
