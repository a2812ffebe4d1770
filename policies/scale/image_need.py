"""How many workers that draw pictures a load needs, from the times of their denoising steps.

    knee K       rows of a step up to which a larger batch pays (`ImageTimes`)
    a picture    takes `steps` positions (its denoising steps and the decoding), each of T(K) in a full batch
    a worker     draws K / (steps T(K)) pictures/s
    n workers    are enough where they are busy for at most BUSY of the time, and most requests wait no longer for one of the
                 n K places than the objective of the time to the first step allows (Halfin and Whitt, as for seats of text)

A picture of the usual size is a row. Adapters are copied beside the steps and are left out, as is the objective of a step's
time: that of text does not suit it.
"""

from __future__ import annotations

import numpy as np

from motet.policies.plan.latencies import wait_ms
from motet.policies.times.image_times import Bucket, ImageTimes
from motet.policies.times.perf_model import decode_ms
from motet.shared.model import PerfModel

BUSY = 0.95
USUAL = Bucket(64, 64)


def image_times(perf: PerfModel, rows_most: int) -> ImageTimes:
    """The step times that a worker reports, at 1, 2, 4, ... rows up to `rows_most`, of pictures without adapters."""
    times, rows = ImageTimes(), 1
    while rows < rows_most:
        times.observe(USUAL, rows, float(decode_ms(perf, rows, 0)))
        rows *= 2
    times.observe(USUAL, rows_most, float(decode_ms(perf, rows_most, 0)))
    return times


def pictures_s(times: ImageTimes, steps: float, rows_most: int) -> float:
    """Pictures/s of one worker, of `steps` positions each."""
    knee = times.knee(USUAL, rows_most)
    return knee / (steps * times.step_ms(USUAL, knee)) * 1e3


def image_workers(times: ImageTimes, rate: float, steps: float, rows_most: int, *, ttft_slo_ms: float, share: float) -> int:
    """Workers for `rate` pictures/s, of which a `share` waits no longer than `ttft_slo_ms`; at least 1."""
    knee = times.knee(USUAL, rows_most)
    stay_ms = steps * times.step_ms(USUAL, knee)
    mean = np.array([rate * stay_ms / 1e3])  # pictures that are being drawn
    workers = max(1, int(np.ceil(mean[0] / knee / BUSY)))
    while (
        wait_ms(mean, np.sqrt(mean), np.array([float(workers * knee)]), np.array([stay_ms]), np.array([share]))[0] > ttft_slo_ms
    ):
        workers += 1
    return workers
