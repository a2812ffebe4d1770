"""A digest that tells checkpoints apart without reading all of their weights.

It covers config.json and, of each safetensors file, its name, its size and samples spread over it, the header among them. Of an
image checkpoint it covers model_index.json and the configurations and weights of all parts. Two checkpoints of the same shapes
differ in almost every weight, so the samples tell a fine-tuned model from its base. It proves nothing about bytes between the
samples. Blocks; a few milliseconds per file.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from motet.shared.image_shapes import INDEX, is_image_base

SAMPLES, SAMPLE_BYTES = 64, 4096
DIGEST_BYTES = 16


def checkpoint_digest(directory: Path) -> str:
    """32 hex digits of the checkpoint in `directory`. Raises OSError when a file cannot be read."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for path in _files(directory):
        size_bytes = path.stat().st_size
        digest.update(f"{path.relative_to(directory)} {size_bytes}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                at = sample * max(size_bytes - SAMPLE_BYTES, 0) // (SAMPLES - 1)
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    if is_image_base(directory):
        return [directory / INDEX, *sorted(directory.glob("*/*config.json")), *sorted(directory.glob("*/*.safetensors"))]
    return [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
