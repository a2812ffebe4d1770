"""Promise: our samplers' tables give the trajectories of diffusers' schedulers, whatever samplers share a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.services.worker.image_engine import samplers
from motet.services.worker.image_engine.noise_config import NoiseConfig, read_noise_config
from motet.shared.errors import BadRequest
from motet.shared.hf_config import UnsupportedModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")

_SD = {"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "num_train_timesteps": 1000}
CONFIGS: dict[str, dict[str, Any]] = {
    "sd15": _SD
    | {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.6.0",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    },
    "sd2": _SD
    | {
        "_class_name": "DDIMScheduler",
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "trained_betas": None,
    },
    "sdxl": _SD
    | {
        "_class_name": "EulerDiscreteScheduler",
        "clip_sample": False,
        "interpolation_type": "linear",
        "prediction_type": "epsilon",
        "sample_max_value": 1.0,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "trained_betas": None,
        "use_karras_sigmas": False,
    },
    "trailing": _SD | {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "clip_sample": False},
    "linspace": _SD | {"timestep_spacing": "linspace", "final_sigmas_type": "sigma_min", "clip_sample": False},
    "clipped": {"beta_schedule": "linear", "clip_sample_range": 1.5, "num_train_timesteps": 400},
    "dpm": _SD | {"lower_order_final": False, "euler_at_final": True, "steps_offset": 3, "clip_sample": False},
}
CLASSES = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
}
COUNTS = (1, 2, 3, 7, 14, 15, 20, 30, 50, 99)


def scheduler(sampler: str, config: dict[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, CLASSES[sampler]).from_config(config)


def model(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """A fake UNet whose prediction depends on everything."""
    return torch.tanh(latents.roll(1, -1) * 0.7 - latents * 0.2 + timestep / 1000 - 0.3)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def theirs(sampler: str, config: dict[str, Any], steps: int, start: int = 0, seed: int = 0) -> torch.Tensor:
    """The final latents of diffusers' scheduler, used as its pipelines use it; from `start` on as image-to-image."""
    made, draws = scheduler(sampler, config), torch.Generator().manual_seed(seed)
    made.set_timesteps(steps)
    times = made.timesteps[start:]
    if hasattr(made, "set_begin_index"):
        made.set_begin_index(start)
    noise = torch.randn((1, 4, 4, 4), generator=draws)
    latents = made.add_noise(source(), noise, times[:1]) if start else noise * made.init_noise_sigma
    more = {"generator": draws} if sampler == "euler_a" else {}
    for time in times:
        prediction = model(made.scale_model_input(latents, time), float(time))
        latents = made.step(prediction, time, latents, **more, return_dict=False)[0]
    return latents


def source() -> torch.Tensor:
    return torch.linspace(-2, 2, 64).view(1, 4, 4, 4)


def ours(sampler: str, config: dict[str, Any], steps: int, start: int = 0, seed: int = 0) -> torch.Tensor:
    table, draws = samplers.table(NoiseConfig(config, xl=True), sampler, steps), torch.Generator().manual_seed(seed)
    noise = torch.randn((1, 4, 4, 4), generator=draws)
    latents = source() * float(table.keep[start]) + noise * float(table.add[start]) if start else noise * table.init_scale
    previous = None
    for step in range(start, steps):
        rows = table.row(step, first=step == start)[None]
        prediction = model(samplers.scaled(latents, rows), float(table.timesteps[step]))
        drawn = torch.randn((1, 4, 4, 4), generator=draws) if samplers.draws_noise(sampler) else None
        latents, previous = samplers.advance(latents, prediction, previous, drawn, rows)
    return latents


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampler", CLASSES)
def test_a_trajectory_ends_where_that_of_diffusers_ends(sampler: str, config: str) -> None:
    for steps in COUNTS:
        expected = theirs(sampler, CONFIGS[config], steps)
        assert relative(ours(sampler, CONFIGS[config], steps), expected) < 1e-4, steps


@pytest.mark.parametrize("config", ["sd15", "sd2", "sdxl", "trailing"])
@pytest.mark.parametrize("sampler", CLASSES)
def test_image_to_image_begins_and_ends_as_with_diffusers(sampler: str, config: str) -> None:
    for steps, strength in ((20, 0.8), (30, 0.33), (5, 0.5), (12, 0.99)):
        start = steps - int(steps * strength)
        expected = theirs(sampler, CONFIGS[config], steps, start)
        assert relative(ours(sampler, CONFIGS[config], steps, start), expected) < 1e-4


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampler", CLASSES)
def test_time_steps_are_those_of_diffusers(sampler: str, config: str) -> None:
    for steps in COUNTS:
        made = scheduler(sampler, CONFIGS[config])
        made.set_timesteps(steps)
        found = samplers.table(NoiseConfig(CONFIGS[config], xl=True), sampler, steps)
        assert found.timesteps.tolist() == pytest.approx(made.timesteps.float().tolist()) and found.steps == steps


def test_one_batch_mixes_samplers_and_positions() -> None:
    config = NoiseConfig(CONFIGS["sd2"], xl=True)
    lanes = [("ddim", 5, 0), ("dpmpp_2m", 30, 12), ("euler", 20, 19), ("euler_a", 9, 3), ("dpmpp_2m", 7, 0)]
    rows = torch.stack([samplers.table(config, name, steps).row(step, first=step == 0) for name, steps, step in lanes])
    draws = torch.Generator().manual_seed(4)
    latents, prediction, previous, noise = (torch.randn((5, 4, 2, 2), generator=draws) for _ in range(4))
    together = samplers.advance(latents, prediction, previous, noise, rows)
    for lane in range(len(lanes)):
        one = slice(lane, lane + 1)
        alone = samplers.advance(latents[one], prediction[one], previous[one], noise[one], rows[one])
        for mixed, single in zip(together, alone, strict=True):
            assert torch.equal(mixed[one], single)


def test_stable_diffusion_pipelines_begin_at_time_step_one_and_never_clip() -> None:
    loose = _SD | {"steps_offset": 0}
    read = NoiseConfig(loose, xl=False)
    assert read.steps_offset == 1 and read.clip == float("inf")
    assert NoiseConfig(loose, xl=True).steps_offset == 0 and NoiseConfig(loose, xl=True).clip == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rescale_betas_zero_snr", True),
        ("use_karras_sigmas", True),
        ("prediction_type", "sample"),
        ("beta_schedule", "squaredcos_cap_v2"),
        ("trained_betas", [0.1, 0.2]),
        ("timestep_spacing", "uneven"),
        ("algorithm_type", "sde-dpmsolver++"),
        ("num_train_timesteps", 10**9),
        ("beta_start", "small"),
        ("steps_offset", -1),
        ("a_new_option", 1),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=rf"scheduler_config\.json: {field} is "):
        NoiseConfig(_SD | {field: value}, xl=True)


def test_a_number_of_steps_that_the_schedule_does_not_have_is_refused() -> None:
    config = NoiseConfig(_SD, xl=True)
    for steps in (0, 1000, 10**6):
        with pytest.raises(BadRequest, match="steps is"):
            samplers.table(config, "ddim", steps)
    with pytest.raises(BadRequest, match="sampler is 'heun'"):
        samplers.table(config, "heun", 20)
    with pytest.raises(BadRequest, match="too many"):
        samplers.table(NoiseConfig(_SD | {"steps_offset": 900}, xl=True), "ddim", 20)


def test_the_file_is_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="scheduler_config"):
        read_noise_config(tmp_path, xl=False)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(CONFIGS["sd2"]))
    assert read_noise_config(tmp_path, xl=False) == NoiseConfig(CONFIGS["sd2"], xl=False)
