"""Interpreted kernels are quicker."""

from __future__ import annotations

from tests.support_triton import replace_once_per_launch

replace_once_per_launch()
