"""Samplers as tables of coefficients, so that one batch mixes samplers, step counts and positions.

Every sampler here is a linear map per step. With latents x, the model's prediction m and the estimate of the picture x0:

    model input    input_scale * x
    x0           = clip(x0_latents * x + x0_prediction * m)
    next x       = latents * x + prediction * m + estimate * x0 + previous * (x0 of the step before) + noise * n

A row of the nine numbers belongs to one sampler, step count and step (`Table`). The tables equal those of diffusers' schedulers
of the same `scheduler_config.json` (`noise_config.py`). n is drawn by the caller from the request's generator, for samplers
that `draws_noise`, in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from motet.services.worker.image_engine.noise_config import NoiseConfig
from motet.shared.errors import BadRequest

COLUMNS = ("input_scale", "x0_latents", "x0_prediction", "clip", "latents", "prediction", "estimate", "previous", "noise")
_INPUT, _X0_X, _X0_M, _CLIP, _X, _M, _X0, _PREVIOUS, _NOISE = range(len(COLUMNS))
FEW_STEPS = 15
"""DPM-Solver++ ends with a step of first order when there are fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What one sampler does in each of `steps` steps."""

    timesteps: np.ndarray  # float32 [steps], what the model is told
    rows: torch.Tensor  # float32 [steps, len(COLUMNS)]
    keep: np.ndarray  # float64 [steps]: a picture at the noise of a step is keep * picture + add * noise
    add: np.ndarray
    init_scale: float  # of the noise that a picture begins with
    restart: torch.Tensor  # float32 [steps, len(COLUMNS)]: `rows` where the step before is not known

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def row(self, step: int, *, first: bool) -> torch.Tensor:
        """The coefficients of a step, [len(COLUMNS)]. `first`: the request has no step before it."""
        return (self.restart if first else self.rows)[step]


def draws_noise(sampler: str) -> bool:
    """Whether every step of the sampler adds noise."""
    return sampler == "euler_a"


def keeps_estimate(sampler: str) -> bool:
    """Whether a step of the sampler needs the x0 of the step before."""
    return sampler == "dpmpp_2m"


@lru_cache(maxsize=256)
def table(config: NoiseConfig, sampler: str, steps: int) -> Table:
    """The table of a sampler. Raises BadRequest for an unknown sampler or a number of steps that the base cannot have."""
    if sampler not in SAMPLERS:
        raise BadRequest(f"sampler is {sampler!r}: {', '.join(SAMPLERS)} are served", param="sampler")
    if not 1 <= steps < config.train_steps:
        raise BadRequest(f"steps is {steps}: 1 to {config.train_steps - 1} are possible with this base", param="steps")
    return SAMPLERS[sampler](config, steps)


def scaled(latents: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The model's input [n, channels, height, width] of latents of that shape. `rows`: [n, len(COLUMNS)]."""
    return latents * _column(rows, _INPUT)


def advance(
    latents: torch.Tensor,
    prediction: torch.Tensor,
    previous: torch.Tensor | None,
    noise: torch.Tensor | None,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: (next latents, x0). All [n, channels, height, width], `rows` [n, len(COLUMNS)].

    `previous`: the x0 of the step before, and `noise`; None where no row has a coefficient for it.
    """
    x0 = latents * _column(rows, _X0_X) + prediction * _column(rows, _X0_M)
    clip = rows[:, _CLIP]
    if bool((clip < math.inf).any()):
        limit = _column(rows, _CLIP)
        x0 = torch.minimum(torch.maximum(x0, -limit), limit)
    new = latents * _column(rows, _X) + prediction * _column(rows, _M) + x0 * _column(rows, _X0)
    if previous is not None:
        new += previous * _column(rows, _PREVIOUS)
    if noise is not None:
        new += noise * _column(rows, _NOISE)
    return new, x0


def _column(rows: torch.Tensor, column: int) -> torch.Tensor:
    return rows[:, column, None, None, None]


def _rows(steps: int, **columns: np.ndarray | float) -> torch.Tensor:
    found = np.zeros((steps, len(COLUMNS)))
    found[:, _INPUT], found[:, _CLIP] = 1.0, math.inf
    for name, value in columns.items():
        found[:, COLUMNS.index(name)] = value
    return torch.from_numpy(found.astype(np.float32))


def _spaced(config: NoiseConfig, steps: int, default: str) -> np.ndarray:
    """Time steps from the noisiest on, float64 [steps], as DDIM and Euler space them."""
    total, spacing = config.train_steps, config.spacing or default
    if spacing == "linspace":
        return np.linspace(0, total - 1, steps)[::-1].copy()
    if spacing == "leading":
        return (np.arange(steps) * (total // steps))[::-1] + float(config.steps_offset)
    return np.arange(total, 0, -total / steps).round()[:steps] - 1


def _ddim(config: NoiseConfig, steps: int) -> Table:
    total, alphas = config.train_steps, config.alphas
    times = _whole(config, _spaced(config, steps, "leading").round())
    before = times - total // steps
    final = 1.0 if config.last_alpha_one else float(alphas[0])
    now, then = alphas[times], np.where(before >= 0, alphas[np.maximum(before, 0)], final)
    signal, sigma, left = np.sqrt(now), np.sqrt(1 - now), np.sqrt(1 - then)
    if config.velocity:  # noise = signal * m + sigma * x
        columns = {"x0_latents": signal, "x0_prediction": -sigma, "latents": left * sigma, "prediction": left * signal}
    else:
        columns = {"x0_latents": 1 / signal, "x0_prediction": -sigma / signal, "prediction": left}
    rows = _rows(steps, estimate=np.sqrt(then), clip=config.clip, **columns)
    return Table(times.astype(np.float32), rows, signal, sigma, 1.0, rows)


def _euler(config: NoiseConfig, steps: int) -> Table:
    times, sigmas = _noise_levels(config, _spaced(config, steps, "linspace"), final=config.final_sigma_zero)
    return _euler_table(config, times, sigmas, target=sigmas[1:], noise=0.0)


def _euler_ancestral(config: NoiseConfig, steps: int) -> Table:
    times, sigmas = _noise_levels(config, _spaced(config, steps, "linspace"), final=True)
    now, then = sigmas[:-1], sigmas[1:]
    up = np.sqrt(then**2 * (now**2 - then**2) / now**2)
    return _euler_table(config, times, sigmas, target=np.sqrt(then**2 - up**2), noise=up)


def _euler_table(
    config: NoiseConfig, times: np.ndarray, sigmas: np.ndarray, *, target: np.ndarray, noise: np.ndarray | float
) -> Table:
    """Euler's steps from each noise level to `target`, with latents that grow with the noise."""
    now = sigmas[:-1]
    change, squared = target - now, now**2 + 1
    if config.velocity:
        columns = {"x0_latents": 1 / squared, "x0_prediction": -now / np.sqrt(squared)}
        columns |= {"latents": 1 + change / now, "estimate": -change / now}
    else:
        columns = {"x0_latents": np.ones_like(now), "x0_prediction": -now, "latents": np.ones_like(now), "prediction": change}
    rows = _rows(len(now), input_scale=1 / np.sqrt(squared), noise=noise, **columns)
    most = float(sigmas.max())
    init_scale = most if (config.spacing or "linspace") != "leading" else math.sqrt(most**2 + 1)
    return Table(times.astype(np.float32), rows, np.ones_like(now), now, init_scale, rows)


def _dpmpp_2m(config: NoiseConfig, steps: int) -> Table:
    total, spacing = config.train_steps, config.spacing or "linspace"
    wanted: np.ndarray
    if spacing == "linspace":
        wanted = np.linspace(0, total - 1, steps + 1).round()[::-1][:-1]
    elif spacing == "leading":
        wanted = (np.arange(steps + 1) * (total // (steps + 1)))[::-1][:-1] + float(config.steps_offset)
    else:
        wanted = np.arange(total, 0, -total / steps).round()[:steps] - 1
    times, sigmas = _noise_levels(config, _whole(config, wanted).astype(float), final=config.final_sigma_zero)
    signal = 1 / np.sqrt(sigmas**2 + 1)
    noise = sigmas * signal
    shrink = sigmas[1:] / sigmas[:-1]  # exp(-h) of a step of the half log signal-to-noise ratio, h
    gain = signal[1:] * (1 - shrink)
    columns: dict[str, np.ndarray]
    if config.velocity:
        columns = {"x0_latents": signal[:-1], "x0_prediction": -noise[:-1]}
    else:
        columns = {"x0_latents": 1 / signal[:-1], "x0_prediction": -sigmas[:-1]}
    columns |= {"latents": noise[1:] / noise[:-1]}
    second = np.zeros(steps)
    with np.errstate(divide="ignore"):
        h = -np.log(shrink)
    second[1:] = 0.5 * h[1:] / h[:-1]
    if config.final_sigma_zero or config.euler_at_final or (config.lower_order_final and steps < FEW_STEPS):
        second[-1] = 0.0
    second *= gain
    rows = _rows(steps, estimate=gain + second, previous=-second, **columns)
    first = _rows(steps, estimate=gain, **columns)
    return Table(times.astype(np.float32), rows, signal[:-1], noise[:-1], 1.0, first)


def _noise_levels(config: NoiseConfig, times: np.ndarray, *, final: bool) -> tuple[np.ndarray, np.ndarray]:
    """(time steps [steps], noise levels sigma [steps + 1]). `final`: the last is 0, not the least of the training."""
    levels = np.sqrt((1 - config.alphas) / config.alphas)
    sigmas = np.interp(times, np.arange(len(levels)), levels)
    return times, np.append(sigmas, 0.0 if final else levels[0])


def _whole(config: NoiseConfig, times: np.ndarray) -> np.ndarray:
    """Time steps as indices. Raises BadRequest for numbers of steps with which they leave the schedule."""
    whole = times.astype(np.int64)
    if whole.max() >= config.train_steps:
        raise BadRequest(f"steps is {len(times)}: too many for {config.train_steps} time steps of the base", param="steps")
    return whole


SAMPLERS: dict[str, Callable[[NoiseConfig, int], Table]] = {
    "ddim": _ddim,
    "euler": _euler,
    "euler_a": _euler_ancestral,
    "dpmpp_2m": _dpmpp_2m,
}
