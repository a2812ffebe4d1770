"""Promise: the fitted step times of an image engine are those by which the steps were made, whatever disturbs a few of them."""

from __future__ import annotations

import numpy as np
import pytest

from motet.policies.times.image_fit import ImageStep, fit_images
from motet.policies.times.image_times import Bucket

SMALL, LARGE = Bucket(32, 32), Bucket(64, 64)
BASE = {SMALL: (10.0, 0.5), LARGE: (12.0, 4.0)}
RANK_MS, ADAPTER_MS = 0.02, 0.3


def made(seed: int = 0, noise: float = 0.0, disturbed: float = 0.0) -> list[ImageStep]:
    """Steps of two sizes, 1 to 32 rows, with and without adapters, each 9 times."""
    rng, steps = np.random.default_rng(seed), []

    def add(ms: float, **facts: object) -> None:
        for _ in range(9):
            took_ms = ms * (1.0 + noise * rng.standard_normal()) * (8.0 if rng.random() < disturbed else 1.0)
            steps.append(ImageStep(took_ms=took_ms, **facts))  # type: ignore[arg-type]

    for bucket, (base_ms, row_ms) in BASE.items():
        area = bucket.area / 4096
        for rows in (1, 2, 4, 8, 16, 32):
            for adapters, rank in ((0, 0), (1, 16), (min(rows, 8), 40)):
                ranks = area * rows * rank
                ms = base_ms + row_ms * rows + RANK_MS * ranks + ADAPTER_MS * adapters
                add(
                    ms,
                    stage="denoise",
                    bucket=bucket,
                    pictures=rows,
                    rows=rows,
                    unit_rows=area * rows,
                    row_ranks=ranks,
                    adapters=adapters,
                )
        for pictures in (1, 2, 4):
            add(3.0 + 1.0 * pictures, stage="encode", bucket=bucket, pictures=pictures, unit_rows=area * pictures)
            add(5.0 + 20.0 * area * pictures, stage="decode", bucket=bucket, pictures=pictures, unit_rows=area * pictures)
    return steps


@pytest.mark.parametrize(("noise", "disturbed", "within"), [(0.0, 0.0, 1e-6), (0.03, 0.1, 0.06)])
def test_the_times_of_every_stage_and_what_adapters_cost_are_found(noise: float, disturbed: float, within: float) -> None:
    steps, perf = fit_images(made(noise=noise, disturbed=disturbed), latent_px=8, rows_max=64, area_max=99)
    assert [(one.height, one.width) for one in steps.sizes] == [(32, 32), (64, 64)]
    for size, bucket in zip(steps.sizes, BASE, strict=True):
        base_ms, row_ms = BASE[bucket]
        assert size.rows[-1] == 32
        assert size.step_ms == pytest.approx([base_ms + row_ms * rows for rows in size.rows], rel=within)
        assert size.decode_ms + size.decode_picture_ms == pytest.approx(5.0 + 20.0 * bucket.area / 4096, rel=2 * within)
    assert (steps.rank_ms, steps.adapter_ms) == pytest.approx((RANK_MS, ADAPTER_MS), rel=max(within, 1e-6) * 8)
    assert steps.encode_ms + steps.encode_request_ms == pytest.approx(4.0, rel=2 * within)
    assert (steps.latent_px, steps.rows_max, steps.area_max) == (8, 64, 99) and steps.r2 > 0.95
    assert 20.0 < perf.finish_ms < 50.0 and perf.decode_base_ms > 0 and perf.decode_row_ms > 0


def test_more_rows_never_take_less() -> None:
    falling = [
        ImageStep(stage="denoise", bucket=SMALL, pictures=rows, took_ms=ms, rows=rows, unit_rows=rows / 4)
        for rows, ms in ((1, 10.0), (2, 9.0), (4, 11.0), (8, 8.0))
    ]
    others = [one for one in made() if one.bucket == SMALL and one.stage != "denoise"]
    (size,) = fit_images([*falling, *others], latent_px=8, rows_max=64, area_max=99).steps.sizes
    assert list(size.step_ms) == sorted(size.step_ms)


@pytest.mark.parametrize("missing", ["encode", "denoise", "decode"])
def test_a_stage_without_steps_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match="too few steps"):
        fit_images([one for one in made() if one.stage != missing], latent_px=8, rows_max=64, area_max=99)
