"""What the programs of `make chaos` print."""

from __future__ import annotations

import sys

import numpy as np

from motet.shared.clock import now_s

_began_s = now_s()


def say(what: str) -> None:
    """Tell people how far a run is."""
    print(f"{now_s() - _began_s:6.1f} s  {what}", file=sys.stderr, flush=True)


def ms(values_s: list[float], share: float) -> str:
    """A quantile of durations in milliseconds, `-` of none."""
    return f"{np.quantile(values_s, share) * 1000:.0f} ms" if values_s else "-"
