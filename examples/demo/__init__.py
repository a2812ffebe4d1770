"""A small base model and sixteen LoRA adapters that were trained for it: `motet up --demo`."""

from pathlib import Path

DEMO = Path(__file__).resolve().parent
BASE = "motet-demo"  # the model's name in requests
