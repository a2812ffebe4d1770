"""Workloads of pictures for `motet simulate` with the profile of an image worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import numpy as np
from numpy.random import Generator

from motet.cli.workload_options import POSITIVE, adapter_bytes, generated
from motet.shared.model import PICTURE_STEPS_MAX, SLO_MAX_MS, ImageParams, Slo
from motet.twin.image_traces import USUAL_STEPS, draw_prompts, read_prompts, workload_of
from motet.twin.workload import Workload, rank_mix, zipf

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType):
    """`512x512` as (512, 512): width and height in pixels."""

    name = "widthxheight"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        width, _, height = str(value).partition("x")
        if not (width.isdecimal() and height.isdecimal() and 8 <= int(width) <= 8192 and 8 <= int(height) <= 8192):
            self.fail(f"{value!r} is not WIDTHxHEIGHT of 8 to 8192 pixels", param, ctx)
        return int(width), int(height)


_OPTIONS = (
    click.option(
        "--picture-size", type=Size(), default="512x512", show_default=True, help="Of an image worker: pictures' size."
    ),
    click.option(
        "--picture-steps",
        type=click.IntRange(1, PICTURE_STEPS_MAX),
        default=USUAL_STEPS,
        show_default=True,
        help="Of an image worker: denoising steps where the trace does not say.",
    ),
    click.option("--slo-e2e-ms", type=POSITIVE, help="Objective for the whole answer.  [default: none]"),
)


def picture_options(command: F) -> F:
    """The options of requests for pictures."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def build_pictures(rng: Generator, options: dict[str, Any]) -> Workload:
    """The workload of pictures that the options describe. Raises FileError for a trace, ValueError for one without times."""
    slo = Slo(ttft_slo_ms=SLO_MAX_MS, tpot_slo_ms=SLO_MAX_MS, e2e_slo_ms=options["slo_e2e_ms"] or 0.0)
    if options["trace"]:
        prompts = [one for one in read_prompts(options["trace"]) if one.time_s is not None]
        prompts.sort(key=lambda one: one.time_s or 0.0)
        if not prompts:
            raise ValueError(f"{options['trace']}: no request has a time")
        times_s = np.array([one.time_s for one in prompts], np.float64)
        arrival_s = times_s - times_s[0]
        if options["rate"] and arrival_s[-1]:
            arrival_s *= len(prompts) / options["rate"] / arrival_s[-1]
        adapters = 1 + max((at for one in prompts for at in one.adapters), default=-1)
    else:
        arrival_s, adapters = generated(rng, options), options["adapters"]
        shares = zipf(adapters + 1, options["exponent"])[:-1] if adapters else np.ones(1)
        prompts = draw_prompts(rng, len(arrival_s), shares / shares.sum(), repeats=0.0, steps=options["picture_steps"])
        if not adapters:
            prompts = [one.without_adapters() for one in prompts]
    if options["trace"] and options["duration_s"]:
        count = int(np.searchsorted(arrival_s, options["duration_s"]))
        prompts, arrival_s = prompts[:count], arrival_s[:count]
    if not prompts:
        raise ValueError("the workload has no requests")
    ranks = rank_mix(rng, adapters, options["ranks"]) if adapters else np.zeros(0, np.int64)
    workload, _ = workload_of(
        prompts, arrival_s, ranks=ranks, adapter_bytes=adapter_bytes(ranks, options), size=options["picture_size"], slo=slo
    )
    return workload


def fits(workload: Workload, latent_px: int) -> None:
    """Raises ValueError for pictures that have no latents."""
    for image in workload.images:
        if image.width % latent_px or image.height % latent_px:
            raise ValueError(f"--picture-size {_named(image)}: both sides must be multiples of {latent_px}")


def _named(image: ImageParams) -> str:
    return f"{image.width}x{image.height}"
