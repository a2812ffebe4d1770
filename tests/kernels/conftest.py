"""The compiled kernels' engine, and interpreted kernels that are quicker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motet.kernels.cpu import CpuEngine
from tests.kernels.support_cpu import ISAS
from tests.support_triton import replace_once_per_launch

replace_once_per_launch()


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    """One for each instruction set, with two threads."""
    yield CpuEngine(threads=2, isa=request.param)
