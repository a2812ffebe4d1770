"""Motet serves many LoRA adapters on one base model. The rooms of the project are linked in here; `cli` is its command."""
