"""Reproducible measurements: `python -m bench NAME [--quick]`. Each names its rival and measures it in the same run."""
