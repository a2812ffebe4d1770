"""A small base model and seventeen LoRA adapters that were trained for it: `motet up --demo`."""

from pathlib import Path

DEMO = Path(__file__).resolve().parent
BASE = "motet-demo"  # the model's name in requests
TOOL_CALLER = "tool-caller"  # the adapter that calls tools
PARSER = "hermes"  # the format of its calls: a value of --tool-call-parser
