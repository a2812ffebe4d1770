"""Builds the compiled kernels with the system's C++ compiler, one shared library per instruction set, and caches them.

    python -m motet.kernels.cpu            the best instruction set of this machine
    python -m motet.kernels.cpu --all      every one that this compiler knows
    python -m motet.kernels.cpu --isa avx2 this one

Libraries are in MOTET_CACHE_DIR (default: $XDG_CACHE_HOME/motet or ~/.cache/motet) as `cpu-<isa>-<hash>-<hash>.so`: one hash of
sources and flags, one of the compiler's file (path, size and time, so that the compiler need not be run to check). A library is
rebuilt when a hash changes. A machine without a compiler (a container image) uses the library of any compiler with the same
sources and flags. CXX names another compiler, MOTET_CPU_CXXFLAGS adds flags (`make sanitize` does).

Standard library only: `python kernels/cpu/build.py --all` works where torch is not installed (compose/Dockerfile).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")  # no processor has the first without the second
_ISAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: what /proc/cpuinfo must list, compiler flags; weakest first, the position is MOTET_LEVEL
    "portable": ((), ()),
    "avx2": (("avx2", "fma", "f16c"), _AVX2),
    "avx512": (("avx512f", "avx512bw", "avx512vl", "avx512dq"), _AVX512),
    "avx512bf16": (("avx512_bf16", "avx512_vnni"), _AVX512_BF16),
    "amx": (("amx_tile", "amx_bf16", "amx_int8"), (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
}
ISAS = tuple(_ISAS)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-psabi", "-Wl,-Bsymbolic")
TIMEOUT_S = 600
_MODE = 0o644  # readable by every user, since another user may have installed the engine


class BuildError(Exception):
    """There is no compiler, or it fails. The message is for the operator."""


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine has, weakest first. "portable" is always among them."""
    have = _cpu_flags()
    found = []
    for name, (needed, _) in _ISAS.items():
        if not set(needed) <= have:
            break
        found.append(name)
    return tuple(found)


def choose_isa(isa: str | None = None) -> str:
    """`isa`, or else MOTET_CPU_ISA or the best of this machine. Raises ValueError for one that the machine lacks."""
    here = available_isas()
    chosen = isa or os.environ.get("MOTET_CPU_ISA") or here[-1]
    if chosen not in here:
        raise ValueError(f"instruction set {chosen!r}: this machine has {', '.join(here)}, of {', '.join(ISAS)}")
    return chosen


def build(isa: str) -> Path:
    """The library for `isa`, compiled if the cache does not have it. Raises BuildError."""
    flags = [*_FLAGS, *_ISAS[isa][1], f"-DMOTET_LEVEL={ISAS.index(isa)}", *os.environ.get("MOTET_CPU_CXXFLAGS", "").split()]
    name = f"cpu-{isa}-{_digest(flags)}"
    compiler = _compiler()
    if compiler is None:
        ready = sorted(cache_dir().glob(f"{name}-*.so"))
        if not ready:
            raise BuildError(
                "no C++ compiler is installed: install one (apt install g++, dnf install gcc-c++, apk add g++) and restart\n"
                f"(there is no g++, clang++ or c++, and no {cache_dir()}/{name}-*.so)"
            )
        return ready[0]
    target = cache_dir() / f"{name}-{_identity(compiler)}.so"
    if not target.exists():
        _compile([compiler, *flags, str(SOURCES / "motet_cpu.cpp")], target)
    return target


def _digest(flags: list[str]) -> str:
    """A hash of everything that affects a library, except the compiler."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join([*flags, platform.machine()]).encode())
    return digest.hexdigest()[:20]


def _compile(command: list[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so.part")
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written ({error}); set MOTET_CACHE_DIR") from None
    os.close(handle)
    part = Path(name)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise BuildError(f"{command[0]} failed on the CPU kernels:\n{done.stderr[-2000:]}")
        part.chmod(_MODE)
        part.replace(target)  # at once: other processes may be building the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not compile the CPU kernels: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def cache_dir() -> Path:
    """The directory of built libraries."""
    named = os.environ.get("MOTET_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet"


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _identity(compiler: str) -> str:
    """A hash that changes when the compiler is replaced."""
    path = Path(compiler).resolve()
    stat = path.stat()
    return hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:8]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def main() -> int:
    """Build the libraries before the first start. Exit status 1 when there is no compiler, or it fails."""
    parser = argparse.ArgumentParser(prog="python -m motet.kernels.cpu", description="Builds the compiled CPU kernels.")
    parser.add_argument("--all", action="store_true", help="every instruction set, not only this machine's best")
    parser.add_argument("--isa", choices=ISAS, help="this instruction set alone")
    args = parser.parse_args()
    for isa in ISAS if args.all else [args.isa or available_isas()[-1]]:
        try:
            print(f"{isa}: {build(isa)}")
        except BuildError as error:
            print(f"{isa}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
