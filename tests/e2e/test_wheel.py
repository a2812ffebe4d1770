"""Motet installed from its wheel: one import root, all files included, and the demo runs from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from motet.cli.client import Client
from tests.e2e.asking import answered
from tests.e2e.live import ROOT, LiveStack

BUILD = ("pyproject.toml", "README.md", "LICENSE", "motet", "services", "shared", "policies", "kernels", "twin", "examples")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel. Dependencies are taken from this environment's packages."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILD:
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(out), str(source))
    fresh = tmp_path_factory.mktemp("fresh")
    venv.create(fresh, symlinks=True, with_pip=False)
    run(*pip, "--python", str(fresh / "bin/python"), "install", "-q", "--no-deps", *map(str, out.glob("*.whl")))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(fresh), "platbase": str(fresh)}))
    (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")  # read after `site`; its own .pth files are not
    (fresh / "bin/nats-server").symlink_to(Path(sys.executable).with_name("nats-server"))
    return fresh


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=150, env=outside())
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def outside() -> dict[str, str]:
    """Environment variables that do not lead back to the clone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_installs_one_import_root(installed: Path, tmp_path: Path) -> None:
    code = "import motet, motet.services.gateway, importlib.metadata as m; print(motet.__file__, *m.files('motet'), sep='\\n')"
    root, *files = run(str(installed / "bin/python"), "-c", code, cwd=tmp_path).split()
    assert Path(root).is_relative_to(installed)
    tops = {Path(name).parts[0] for name in files if not name.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"motet"}


async def test_motet_up_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    stack = LiveStack(tmp_path)
    stack.argv = [str(installed / "bin/motet"), "up", "--demo", "--port", "0", "--data-dir", str(stack.data_dir)]
    stack.argv += ["--threads", "1"]
    stack.env, stack.cwd = outside(), tmp_path
    stack.launch()
    try:
        facts = stack.wait_ready()
        async with Client(facts.urls[0]) as client:
            assert await answered(client, "upper-case", "from a wheel") == "FROM A WHEEL"
    finally:
        assert stack.stop() == 0


def test_the_ranges_of_the_metadata_hold_what_the_suite_runs_with() -> None:
    needs = [Requirement(text) for text in distribution("motet").requires or []]
    run_time = [need for need in needs if need.marker is None]
    assert len(run_time) > 15
    assert [str(need) for need in run_time if not need.specifier.contains(version(need.name).split("+")[0])] == []
    assert [str(need) for need in run_time if any(spec.operator == "==" for spec in need.specifier)] == [], "the locks pin"
