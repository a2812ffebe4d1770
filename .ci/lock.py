"""Writes the lock files: pyproject's pins and everything they need, as installed here, with the hashes PyPI has for them.

    requirements-mesh.txt   every service but the worker: no torch
    requirements.txt        that and what torch needs
    requirements-torch.txt  torch alone, without hashes: its CPU builds come from an index of their own
    requirements-images.txt that of requirements.txt and what the extra `images` needs: a worker with --engine images
    requirements-dev.txt    all but torch, what the extras need, and the tools for tests and checks

    .venv/bin/python .ci/lock.py

Run it in an environment that was made from a changed pyproject.toml and passes the suite. pip refuses a file whose hash is not
in the lock. Hashes are those of all files that a supported Python on Linux or macOS may take.
"""

from __future__ import annotations

import json
import re
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
INDEX = "https://pypi.org/simple"
TORCH = "torch"
WORKER = {TORCH}


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
    mesh = closure([text for text in needed if Requirement(text).name not in WORKER])
    run = closure([*needed, *project["build-system"]["requires"]])
    extras = project["project"]["optional-dependencies"]
    images = closure(extras["images"])
    dev = closure([*extras["dev"], *extras["plots"]])
    write("requirements-mesh.txt", hashed(mesh))
    write("requirements.txt", hashed(without(run, {*mesh, TORCH})), "requirements-mesh.txt")
    write("requirements-torch.txt", [run[TORCH]])
    write("requirements-images.txt", hashed(without(images, {*run})), "requirements.txt")
    write("requirements-dev.txt", hashed(without(dev, {*run, *images})), "requirements-images.txt")


def without(pins: dict[str, str], names: set[str]) -> dict[str, str]:
    return {name: pin for name, pin in pins.items() if name not in names}


def hashed(pins: dict[str, str]) -> list[str]:
    """One requirement per pin, with the hashes of its files."""
    names = sorted(pins)
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(lambda name: files(name, Version(pins[name].partition("==")[2])), names)
    return [
        " \\\n".join([pins[name], *(f"    --hash=sha256:{one}" for one in found)])
        for name, found in zip(names, hashes, strict=True)
    ]


def files(name: str, version: Version) -> list[str]:
    """The SHA-256 of each file of a release that may be installed here or on a Mac."""
    request = urllib.request.Request(f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = sorted(one["hashes"]["sha256"] for one in json.load(answer)["files"] if fits(one["filename"], version))
    if not found:
        raise SystemExit(f"{INDEX} has no file of {name} {version}")
    return found


def fits(filename: str, version: Version) -> bool:
    try:
        if not filename.endswith(".whl"):
            return parse_sdist_filename(filename)[1] == version
        _, found, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidWheelFilename):  # of old releases
        return False
    return found == version and any(
        re.fullmatch(r"py[23]|cp31[1-9]t?", tag.interpreter) or tag.abi == "abi3"
        for tag in tags
        if not tag.platform.startswith(("win", "ios", "android"))
    )


def write(name: str, pins: list[str], base: str = "") -> None:
    """A lock file of `pins` on top of the lock file `base`."""
    head = ["# Written by .ci/lock.py from pyproject.toml; do not edit.", *([f"-r {base}"] if base else [])]
    (ROOT / name).write_text("\n".join([*head, *pins]) + "\n")


if __name__ == "__main__":
    main()
