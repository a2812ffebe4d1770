"""Reads `scheduler_config.json`: the noise that the base was trained with, and how its schedulers space their steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.shared.hf_config import UnsupportedModel, read_json, shorten

FILE = "scheduler/scheduler_config.json"
TRAIN_STEPS_MAX = 10_000
_FIXED: dict[str, tuple[Any, ...]] = {
    "trained_betas": (None,),
    "rescale_betas_zero_snr": (False,),  # zero terminal signal-to-noise ratio
    "use_karras_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "use_beta_sigmas": (False, None),
    "use_lu_lambdas": (False, None),
    "use_flow_sigmas": (False, None),
    "use_dynamic_shifting": (False, None),
    "interpolation_type": ("linear",),
    "timestep_type": ("discrete",),
    "sigma_min": (None,),
    "sigma_max": (None,),
    "thresholding": (False,),
    "variance_type": (None, "fixed_small", "fixed_large"),
    "algorithm_type": ("dpmsolver++",),
    "solver_order": (2,),
    "solver_type": ("midpoint", "bh1", "bh2", "logrho"),  # the last three mean the first in DPM-Solver++
}
_READ = frozenset(
    {
        "num_train_timesteps",
        "beta_start",
        "beta_end",
        "beta_schedule",
        "prediction_type",
        "timestep_spacing",
        "steps_offset",
        "set_alpha_to_one",
        "clip_sample",
        "clip_sample_range",
        "final_sigmas_type",
        "lower_order_final",
        "euler_at_final",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "_class_name",
        "_diffusers_version",
        "_use_default_values",
        "skip_prk_steps",
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "lambda_min_clipped",
        "flow_shift",
        "time_shift_type",
        "predict_x0",
        "solver_p",
        "disable_corrector",
    }
)
"""Fields of other schedulers, and those that matter only with a field that is refused."""


class NoiseConfig:
    """The noise of a base, and its schedulers' options. Compares and hashes by what the file says."""

    def __init__(self, fields: Mapping[str, Any], *, xl: bool) -> None:
        """Read decoded fields. Raises UnsupportedModel naming the field and the reason.

        `xl`: SDXL's pipelines take the file as it is. Those of Stable Diffusion 1 and 2 never clip, and begin with time step 1.
        """
        told = _Fields(fields)
        told.check()
        self.train_steps = told.whole("num_train_timesteps", 1000, 2, TRAIN_STEPS_MAX)
        self.spacing = told.choice("timestep_spacing", ("leading", "trailing", "linspace", ""), "")
        """Empty: each sampler has its own default."""
        self.steps_offset = told.whole("steps_offset", 0, 0, self.train_steps) if xl else 1
        self.velocity = told.choice("prediction_type", ("epsilon", "v_prediction"), "epsilon") == "v_prediction"
        self.last_alpha_one = told.flag("set_alpha_to_one", True)
        clips = told.flag("clip_sample", True) and xl
        self.clip = told.number("clip_sample_range", 1.0, 1e-3, 1e6) if clips else math.inf
        self.final_sigma_zero = told.choice("final_sigmas_type", ("zero", "sigma_min"), "zero") == "zero"
        self.lower_order_final = told.flag("lower_order_final", True)
        self.euler_at_final = told.flag("euler_at_final", False)
        start, end = told.number("beta_start", 0.0001, 1e-9, 0.5), told.number("beta_end", 0.02, 1e-9, 0.5)
        root = 0.5 if told.choice("beta_schedule", ("linear", "scaled_linear"), "linear") == "scaled_linear" else 1.0
        self._key = (start, end, root, *(value for name, value in sorted(vars(self).items())))
        betas = torch.linspace(start**root, end**root, self.train_steps, dtype=torch.float32) ** (1 / root)
        self.alphas: np.ndarray = torch.cumprod(1.0 - betas, dim=0).double().numpy()
        """float64 [train_steps]: the share of the picture in the variance at each time step."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseConfig) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def read_noise_config(model_dir: Path, *, xl: bool) -> NoiseConfig:
    """The scheduler's file of a checkpoint. Raises UnsupportedModel."""
    fields = read_json(model_dir / FILE)
    if fields is None:
        raise UnsupportedModel(f"{model_dir} has no {FILE}")
    return NoiseConfig(fields, xl=xl)


class _Fields:
    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def check(self) -> None:
        """Refuse fields that are not known or whose values are not served."""
        for name, value in self._raw.items():
            if name in _FIXED:
                if not any(type(value) is type(one) and value == one for one in _FIXED[name]):
                    raise self._refused(name, " or ".join(map(repr, _FIXED[name])) + " is served")
            elif name not in _READ and name not in _WITHOUT_EFFECT:
                raise self._refused(name, "it is not known here and may change the picture")
        if self._raw.get("lambda_min_clipped", -math.inf) not in (-math.inf, "-Infinity", "-inf"):
            raise self._refused("lambda_min_clipped", "no limit is served")

    def choice(self, name: str, among: tuple[str, ...], default: str) -> str:
        value = self._raw.get(name, default)
        if value not in among:
            raise self._refused(name, " or ".join(repr(one) for one in among if one) + " is served")
        return str(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._raw.get(name, default)
        if not isinstance(value, bool):
            raise self._refused(name, "true or false is expected")
        return value

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refused(name, f"a whole number from {least} to {most} is expected")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._refused(name, f"a number from {least:g} to {most:g} is expected")
        return float(value)

    def _refused(self, name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{FILE}: {name} is {shorten(repr(self._raw.get(name)))}: {why}")
