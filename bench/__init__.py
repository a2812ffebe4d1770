"""Reproducible measurements: `python -m bench NAME [--quick]`. Each bench names its peer and measures it in the same run."""
