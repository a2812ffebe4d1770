"""What an image engine can draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of an image engine and its base model; lengths in pixels."""

    family: str
    """Of the base, as `AdapterVersion.family` names it."""
    step_px: int
    """Width and height are multiples of it: what VAE and UNet together divide by."""
    pixels_max: int
    """The largest picture, width x height."""
    steps_max: int
    rows_max: int
    """The most rows of a denoising step."""
    area_max: int
    """The most positions of the latents of a step together: with `rows_max` what memory holds."""
    state_bytes_max: int = 64 << 20
    """The largest checkpoint of a picture."""
