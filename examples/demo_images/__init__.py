"""A small Stable Diffusion model and sixteen LoRA adapters of styles that were trained for it."""

from pathlib import Path

DEMO_IMAGES = Path(__file__).resolve().parent
BASE = "motet-images"  # the model's name in requests
