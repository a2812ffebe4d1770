"""Reproducible measurements: `python -m bench NAME [--quick]`. A bench measures all systems that it compares in one run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, in which `python -m bench` and `python -m motet` find their packages."""
