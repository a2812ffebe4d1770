"""Reproducible measurements: `python -m bench NAME [--quick]`. A bench measures all systems that it compares in one run."""
