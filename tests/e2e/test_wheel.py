"""Motet installed from its wheel: one import root, all files included, and the demo runs from any folder, as a user runs it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from motet.cli.client import Client
from motet.cli.stack import read_facts
from motet.shared.clock import now_s
from tests.e2e.asking import answer, long_request
from tests.e2e.live import ROOT, LiveStack, alive
from tests.support import eventually

FIRST_TOKEN_S = 10.0

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


async def test_the_demo_of_the_wheel_answers_soon_and_ctrl_c_lets_a_stream_finish(installed: Path, tmp_path: Path) -> None:
    own = LiveStack(tmp_path)
    own.argv = [str(installed / "bin/motet"), "up", "--demo", "--port", "0", "--data-dir", str(own.data_dir)]
    own.argv += ["--threads", "1"]
    own.env, own.cwd = outside(), tmp_path
    began = now_s()
    own.launch()
    try:
        facts = await asyncio.to_thread(own.wait_ready)
        async with Client(facts.urls[0]) as client:
            assert await answer(client, "upper-case", "from a wheel") == "FROM A WHEEL"
            took_s = now_s() - began
            busy = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # what others do here is not our slowness
            assert took_s < FIRST_TOKEN_S * busy, own.output.read_text()
            finish = await stream_through_ctrl_c(own, client)
    finally:
        status = await asyncio.to_thread(own.stop)
    assert (finish, status) == (["length"], 0)
    assert read_facts(own.data_dir) is None
    said = own.output.read_text()
    assert facts.urls[0] in said and "curl" in said and "draining" in said


async def stream_through_ctrl_c(stack: LiveStack, client: Client) -> list[str]:
    """Interrupt the stack in the middle of a stream; how the stream ends. All processes end, too."""
    pieces: list[str] = []
    finish: list[str] = []

    async def stream() -> None:
        async for event in client.events("/v1/completions", long_request(1)):
            for choice in event["choices"]:
                pieces.append(choice["text"])
                finish.extend([choice["finish_reason"]] if choice["finish_reason"] else [])

    streaming = asyncio.create_task(stream())
    await eventually(lambda: len(pieces) >= 10)
    pids = stack.pids()
    stack.signal(signal.SIGINT)
    await streaming
    assert await asyncio.to_thread(stack.stop) == 0
    assert not [pid for pid in pids if alive(pid)]
    return finish


def test_the_ranges_of_the_metadata_hold_what_the_suite_runs_with() -> None:
    needs = [Requirement(text) for text in distribution("motet").requires or []]
    run_time = [need for need in needs if need.marker is None]
    assert len(run_time) > 15
    assert [str(need) for need in run_time if not need.specifier.contains(version(need.name).split("+")[0])] == []
    assert [str(need) for need in run_time if any(spec.operator == "==" for spec in need.specifier)] == [], "the locks pin"
