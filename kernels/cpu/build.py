"""Builds the compiled kernels with the system's C++ compiler, one shared library per instruction set, and caches them.

    python -m kernels.cpu            the best instruction set of this machine
    python -m kernels.cpu --all      every one that this compiler knows

A library lies in MOTET_CACHE_DIR (default: $XDG_CACHE_HOME/motet or ~/.cache/motet) under a name that contains the hash of
sources, flags and compiler: what changes is built anew, what does not is found again. CXX names another compiler,
MOTET_CPU_CXXFLAGS adds flags (`make sanitize` does).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_ISAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: what /proc/cpuinfo must list, compiler flags; weakest first, the position is MOTET_LEVEL
    "portable": ((), ()),
    "avx2": (("avx2", "fma", "f16c"), _AVX2),
    "avx512": (("avx512f", "avx512bw", "avx512vl", "avx512dq"), _AVX512),
    "avx512bf16": (("avx512_bf16",), (*_AVX512, "-mavx512bf16")),
    "amx": (("amx_tile", "amx_bf16"), (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
}
ISAS = tuple(_ISAS)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-psabi", "-Wl,-Bsymbolic")
TIMEOUT_S = 600


class BuildError(Exception):
    """No compiler, or one that fails; the message is for the operator."""


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine has, weakest first. "portable" is always among them."""
    have = _cpu_flags()
    found = []
    for name, (needed, _) in _ISAS.items():
        if not set(needed) <= have:
            break
        found.append(name)
    return tuple(found)


def build(isa: str) -> Path:
    """The library for `isa`, compiled if the cache does not have it. Raises BuildError."""
    compiler = _compiler()
    more = os.environ.get("MOTET_CPU_CXXFLAGS", "").split()
    flags = [*_FLAGS, *_ISAS[isa][1], f"-DMOTET_LEVEL={ISAS.index(isa)}", *more]
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join([*flags, _version(compiler), platform.machine()]).encode())
    target = cache_dir() / f"cpu-{isa}-{digest.hexdigest()[:20]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so.part")
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written ({error}); set MOTET_CACHE_DIR") from None
    os.close(handle)
    part = Path(name)
    try:
        command = [compiler, *flags, str(SOURCES / "motet_cpu.cpp"), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise BuildError(f"{compiler} failed on the CPU kernels:\n{done.stderr[-2000:]}")
        part.replace(target)  # at once: other processes may be building the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not compile the CPU kernels: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def cache_dir() -> Path:
    """Where libraries are kept."""
    named = os.environ.get("MOTET_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler (g++ or clang++) is installed")


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stdout


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())
