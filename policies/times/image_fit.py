"""Fits the step times of an image engine to measured steps, for `motet profile` and the twin.

    encode     a + b * requests
    denoise    of each size linear between `ROWS` and not falling, + rank * (rows of 512 x 512 pixels times ranks)
               + adapter * adapters
    decode     of each size: a + b * pictures

All are non-negative and fitted with relative errors (`least_squares`). Equal steps are replaced by their median, which has the
weight of their number, so short disturbances of the machine do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from motet.policies.times.image_times import Bucket
from motet.policies.times.least_squares import r_squared, relative_fit
from motet.policies.times.perf_model import Floats
from motet.policies.times.step_fit import SLIVER
from motet.shared.model import ImageSizeSteps, ImageSteps, PerfModel

STAGES = ("encode", "denoise", "decode")
ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStep:
    """A measured step. `unit_rows`: its rows in those of 512 x 512 pixels; `row_ranks`: times the ranks of their adapters."""

    stage: Literal["encode", "denoise", "decode"]
    bucket: Bucket
    pictures: int
    took_ms: float
    rows: int = 0
    unit_rows: float = 0.0
    row_ranks: float = 0.0
    adapters: int = 0
    count: int = 1  # steps of which it is the median


class Measured(NamedTuple):
    """Step times as the twin has them, and the linear model of them that schedulers use."""

    steps: ImageSteps
    perf: PerfModel


def fit_images(steps: Sequence[ImageStep], *, latent_px: int, rows_max: int, area_max: int) -> Measured:
    """The step times of `steps`, whose latents have a position for `latent_px` pixels in each direction.

    `rows_max`, `area_max`: what the engine's memory allows. Raises ValueError where a stage, or the decoding of a size, has no
    steps.
    """
    encodes, denoises, decodes = (typical([one for one in steps if one.stage == stage]) for stage in STAGES)
    sizes = sorted({one.bucket for one in denoises})
    if not encodes or not denoises or not {one.bucket for one in decodes} >= set(sizes):
        raise ValueError("too few steps: every size must have been encoded, denoised and decoded")
    encode_ms, encode_request_ms = _line(encodes)
    knots = {bucket: _knots(max(one.rows for one in denoises if one.bucket == bucket)) for bucket in sizes}
    features = np.array([_features(one, knots) for one in denoises])
    times, counts = _times(denoises)
    weights = relative_fit(features, times, counts)
    found = []
    for bucket in sizes:
        rows = knots[bucket]
        plain = ImageStep(stage="denoise", bucket=bucket, pictures=0, took_ms=0.0)
        step_ms = tuple([float(np.dot(_features(replace(plain, rows=row), knots), weights)) for row in rows])
        if min(step_ms) <= 0.0:
            raise ValueError("the fitted time of a denoising step is not positive: the measured steps differ too much")
        decode_ms, decode_picture_ms = _line([one for one in decodes if one.bucket == bucket])
        found.append(
            ImageSizeSteps(
                height=bucket.height,
                width=bucket.width,
                text_tokens=bucket.text_tokens,
                rows=rows,
                step_ms=step_ms,
                decode_ms=decode_ms,
                decode_picture_ms=decode_picture_ms,
            )
        )
    measured = ImageSteps(
        sizes=tuple(found),
        encode_ms=encode_ms,
        encode_request_ms=encode_request_ms,
        rank_ms=float(weights[-2]),
        adapter_ms=float(weights[-1]),
        latent_px=latent_px,
        rows_max=rows_max,
        area_max=area_max,
        r2=r_squared(times, features @ weights, counts),
    )
    return Measured(measured, _linear(encodes, denoises, decodes))


def typical(steps: Sequence[ImageStep]) -> list[ImageStep]:
    """One step for each kind, with the median time and the number of them."""
    alike: dict[ImageStep, list[float]] = defaultdict(list)
    for one in steps:
        alike[replace(one, took_ms=0.0)].append(one.took_ms)
    return [replace(one, took_ms=float(np.median(times)), count=len(times)) for one, times in alike.items()]


def _knots(most: int) -> tuple[int, ...]:
    """The numbers of rows between which the time is linear."""
    return tuple([rows for rows in ROWS if rows < SLIVER * most] + [most])


def _features(step: ImageStep, knots: Mapping[Bucket, tuple[int, ...]]) -> list[float]:
    """Of each size whether it is this one, and the rows between its knots; then what adapters cost."""
    found: list[float] = []
    for bucket, rows in knots.items():
        here = bucket == step.bucket
        found.append(float(here))
        found += [float(here) * min(max(step.rows - low, 0), high - low) for low, high in pairwise(rows)]
    return [*found, step.row_ranks, float(step.adapters)]


def _linear(encodes: Sequence[ImageStep], denoises: Sequence[ImageStep], decodes: Sequence[ImageStep]) -> PerfModel:
    """As for text: a token of the prompt, a row of a step, the LoRA load; and the decoding of 512 x 512 pixels."""
    features = np.array([[1.0, one.unit_rows, one.row_ranks] for one in denoises])
    base_ms, row_ms, lora_ms = relative_fit(features, *_times(denoises)).tolist()
    tokens = np.array([[1.0, one.pictures * one.bucket.text_tokens] for one in encodes], dtype=np.float64)
    encode_ms, token_ms = relative_fit(tokens, *_times(encodes)).tolist()
    return PerfModel(
        prefill_base_ms=encode_ms,
        prefill_token_ms=max(token_ms, 1e-6),
        prefill_lora_ms=0.0,
        decode_base_ms=base_ms,
        decode_row_ms=row_ms,
        decode_lora_ms=lora_ms,
        load_base_ms=0.0,
        load_ms_per_mib=0.0,
        finish_ms=float(np.median([one.took_ms / one.unit_rows for one in decodes])),
    )


def _line(steps: Sequence[ImageStep]) -> tuple[float, float]:
    """(time of a step, and of each picture in it)."""
    features = np.array([[1.0, one.pictures] for one in steps], dtype=np.float64)
    base_ms, each_ms = relative_fit(features, *_times(steps)).tolist()
    return base_ms, each_ms


def _times(steps: Sequence[ImageStep]) -> tuple[Floats, Floats]:
    """Milliseconds, and how many steps each stands for; both [steps]."""
    return np.array([one.took_ms for one in steps], np.float64), np.array([one.count for one in steps], np.float64)
