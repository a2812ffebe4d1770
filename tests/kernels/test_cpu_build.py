"""Promise: compiled kernels are built once for all users of a machine, and a broken source file gives a readable error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.kernels.cpu import BuildError, CpuEngine
from motet.kernels.cpu import build as building
from motet.kernels.cpu.build import build, cache_dir

SOURCE = Path(building.__file__)


@pytest.fixture
def private_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def stub_compiler(folder: Path, version: str) -> str:
    """A C++ compiler of that version which compiles nothing."""
    folder.mkdir(exist_ok=True)
    compiler = folder / "g++"
    lines = ("#!/bin/sh", f'[ "$1" = --version ] && echo {version} && exit', "for last; do :; done", 'echo built > "$last"')
    compiler.write_text("\n".join(lines) + "\n")
    compiler.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_build_is_found_again() -> None:
    assert build("portable") == build("portable")


def test_a_library_built_by_root_can_be_read_by_the_user_who_runs_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_umask: None
) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", stub_compiler(tmp_path / "bin", "13"))
    monkeypatch.delenv("CXX", raising=False)
    assert build("portable").stat().st_mode & 0o777 == 0o644


def test_another_compiler_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    built = set()
    for version in ("12", "13"):
        monkeypatch.setenv("PATH", stub_compiler(tmp_path / version, version))
        built.add(build("portable"))
    assert len(built) == 2


def test_an_unchanged_compiler_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", stub_compiler(tmp_path / "bin", "13"))
    built = build("portable")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert build("portable") == built


def test_a_replaced_compiler_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", stub_compiler(tmp_path / "bin", "13"))
    before = build("portable")
    stub_compiler(tmp_path / "bin", "14.1")
    assert build("portable") != before


def test_without_a_compiler_the_library_of_any_compiler_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", stub_compiler(tmp_path / "bin", "13"))
        built = build("portable")
    assert build("portable") == built
    monkeypatch.setenv("MOTET_CPU_CXXFLAGS", "-DANOTHER")
    with pytest.raises(BuildError, match=r"C\+\+ compiler"):
        build("portable")


def test_a_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", stub_compiler(tmp_path / "bin", "13"))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=rf"cannot be loaded: {cache_dir()}/cpu-portable-.*: "):
        CpuEngine(isa="portable")


def test_kernels_are_built_where_no_package_of_motet_is_installed(tmp_path: Path) -> None:
    environment = {"PATH": stub_compiler(tmp_path / "bin", "13"), "MOTET_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-I", str(SOURCE), "--all"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache").iterdir())) == len(building.ISAS)
