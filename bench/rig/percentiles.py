"""Quantiles of measured samples, with linear interpolation as numpy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def quantile(samples: Any, share: float) -> float:
    """The quantile at `share` (0.99: the 99th percentile) of a sequence or an array. Raises IndexError without samples."""
    return float(np.quantile(samples, share))


def quantile_ms(samples_s: Iterable[float], share: float) -> float:
    """The same of seconds, in milliseconds."""
    return quantile(list(samples_s), share) * 1000
