"""The published calibrations: fits of vLLM 0.8.5 on an H100 that come with the package.

    python -m motet.twin.vllm.published DIR > twin/vllm/published.json

writes them from the calibration tables in a folder (`calibrate`). The file has fitted coefficients only; the KV size of each
S_max is a line, given by its two ends.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from motet.twin.vllm.calibrate import Calibration, calibrate

FILE = Path(__file__).with_name("published.json")
MODELS = {"llama-3.1-8b@h100": "llama-3.1-8b-instruct", "qwen2.5-7b@h100": "qwen-2.5-7b-instruct"}  # as the tables name them


def published(name: str) -> Calibration:
    """A published calibration, "llama-3.1-8b@h100" or "qwen2.5-7b@h100". Raises ValueError for another name."""
    found = _all().get(name)
    if found is None:
        raise ValueError(f"no published calibration is named {name!r}; there are {', '.join(sorted(_all()))}")
    return found


@cache
def _all() -> dict[str, Calibration]:
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Calibration])


def fitted(folder: Path) -> dict[str, Calibration]:
    """The same, fitted to the tables in a folder. Raises what `calibrate` raises, KeyError if a model is missing."""
    models = calibrate(folder)
    return {name: with_linear_memory(models[model]) for name, model in MODELS.items()}


def with_linear_memory(calibration: Calibration) -> Calibration:
    """The calibration with a line of least relative squares in place of the measured KV sizes of each S_max."""
    return replace(calibration, kv_points={s_max: _ends(points) for s_max, points in calibration.kv_points.items()})


def _ends(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    a_max, kv_tokens = np.array(points, float).T
    line = np.polyfit(a_max, kv_tokens, 1, w=1 / kv_tokens)
    return [(a, round(float(np.polyval(line, a)))) for a, _ in (points[0], points[-1])]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(fitted(Path(sys.argv[1]))), indent=1) + b"\n")
