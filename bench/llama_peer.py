"""Finds llama.cpp, in an environment of its own that `make bench-peers` makes, and makes its model files.

MOTET_LLAMA_PYTHON names another environment's interpreter. llama-cpp-python is compiled there for the machine that it runs on.

    files(model_dir)               {"bf16": ..., "q8_0": ..., "q4_0": ...}, beside the model's directory, made once
    adapter(model_dir, adapter)    a PEFT adapter's file beside it, made once

The first file is written with the `gguf` package from the same safetensors that Motet reads, the others by llama.cpp's own
quantizer (`bench.llama_files`, which runs in that environment).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench import ROOT
from bench.vllm_peer import PeerMissing

WIDTHS = ("bf16", "q8_0", "q4_0")


def python() -> str:
    """The interpreter of llama.cpp's environment. Raises PeerMissing."""
    path = Path(os.environ.get("MOTET_LLAMA_PYTHON") or ROOT / ".venv-llama" / "bin" / "python")
    if not path.exists():
        raise PeerMissing(f"{path} is not there: `make bench-peers` makes llama.cpp's environment")
    return str(path)


def environment() -> dict[str, str]:
    """The environment variables of llama.cpp's processes."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MOTET_"))}
    return inherited | {"PYTHONPATH": str(ROOT)}


def files(model_dir: Path) -> dict[str, Path]:
    """The model's files for llama.cpp, by width. Missing ones are made."""
    found = {width: model_dir.parent / f"llama-{width}.gguf" for width in WIDTHS}
    if not all(path.exists() for path in found.values()):
        _make("model", model_dir, *found.values())
    return found


def adapter(model_dir: Path, adapter_dir: Path) -> Path:
    """An adapter's file for llama.cpp. It is made if it is missing."""
    path = adapter_dir / "llama-bf16.gguf"
    if not path.exists():
        _make("adapter", model_dir, adapter_dir, path)
    return path


def _make(*words: object) -> None:
    command = [python(), "-m", "bench.llama_files", *map(str, words)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
