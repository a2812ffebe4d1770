"""Promise: the engines bench names what it needs and does not find; its arrivals are the same for both servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines import arrivals

ROOT = Path(__file__).parents[2]


def test_without_vllm_the_bench_says_how_to_install_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "engines", "--quick"],
        cwd=ROOT,
        env=os.environ | {"MOTET_VLLM_PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "/nowhere/python" in done.stderr and "make vllm" in done.stderr


def test_arrivals_come_at_their_rate_and_popular_adapters_more_often() -> None:
    names = [f"lora-{number}" for number in range(32)]
    trace = arrivals(2000, 50.0, names, seed=1)
    assert trace == arrivals(2000, 50.0, names, seed=1)
    assert trace[-1][0] == pytest.approx(2000 / 50.0, rel=0.1)
    asked = [model for _, model, _ in trace]
    assert asked.count(names[0]) == pytest.approx(2 * asked.count(names[1]), rel=0.3)
    assert set(asked) == set(names)
